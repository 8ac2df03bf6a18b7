"""Workload of a foreign model, traced block by block and stored as a file.

Our own models have formulas. Any other model is run once where torch is available (`models.trace`).
The file can be written, read and costed without the model or torch. The only supported layout is
data parallelism: every rank has the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section, parse, read_json
from moesaic.base.errors import ConfigError
from moesaic.facts.workload.blocks import STEP, Block, BlockWork, with_gradient_reductions
from moesaic.facts.workload.gradient_reduction import Gradient, GradientReduction
from moesaic.facts.workload.memory import Memory
from moesaic.facts.workload.operation import MatmulShape, Op
from moesaic.facts.workload.ops import optimizer_update
from moesaic.facts.workload.sizes import FloatType
from moesaic.facts.workload.spec import BlockSpec

VERSION = 4
"""Version of the file format; other versions are refused."""

MAX_SIZE = 1 << 63
"""Exclusive upper limit of all sizes."""


class TracedMatmul(Section):
    """`count` matmuls of [rows, inner] and [inner, columns]."""

    rows: int = Field(ge=0, lt=MAX_SIZE)
    """Rows of the result."""
    columns: int = Field(ge=0, lt=MAX_SIZE)
    """Columns of the result."""
    inner: int = Field(ge=0, lt=MAX_SIZE)
    """Length of the inner dimension."""
    count: int = Field(ge=1, lt=MAX_SIZE)
    """Number of such matmuls."""


class TracedOp(Section):
    """Equal matmuls, equal attention, or all elementwise kernels of a block."""

    name: str
    """Name of the operation: matmul, attend or elementwise."""
    matmuls: list[TracedMatmul] = Field(default_factory=list)
    """Matmuls in full."""
    moved_bytes: int = Field(default=0, ge=0, lt=MAX_SIZE)
    """Bytes read and written by elementwise kernels."""
    num_kernels: int = Field(default=0, ge=0, lt=MAX_SIZE)
    """Kernel launches; those of the whole block for `elementwise`."""
    dtype: FloatType = "fp32"
    """Data type of the operands of matmuls."""
    num_transcendentals: int = Field(default=0, ge=0, lt=MAX_SIZE)
    """Elements of exponentials and the like."""
    kind: Literal["", "attention", "attention backward"] = ""
    """Kind of attention; empty for matmuls, and for attention that is not self-attention."""
    causal_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the scores that remains if a kernel skips causally masked ones."""

    @model_validator(mode="after")
    def _check_kernels(self) -> TracedOp:
        if self.moved_bytes and not self.num_kernels:
            raise ValueError(
                f"moved_bytes = {self.moved_bytes} with num_kernels = 0, and no kernel moves them: "
                "trace the model again"
            )
        return self

    def op(self) -> Op:
        """Return the op for the cost model."""
        matmuls = tuple(MatmulShape(**one.model_dump()) for one in self.matmuls)
        return Op(**{**self.model_dump(), "matmuls": matmuls})


class TracedBlock(Section):
    """One block of the model."""

    name: str
    """Dotted name in the model; `(outside)` for work outside all blocks, such as the loss."""
    parameters: int = Field(ge=0, lt=MAX_SIZE)
    """Elements of its parameters; a tensor of two blocks counts for the first."""
    parameter_bytes: int = Field(ge=0, lt=MAX_SIZE)
    """Bytes of its parameters."""
    gradients: list[int] = Field(default_factory=list)
    """Bytes of the gradient of each trainable parameter."""
    forward: list[TracedOp]
    """Work once per micro-batch."""
    backward: list[TracedOp]
    """Work once per micro-batch, with recomputation."""
    saved_bytes: int = Field(ge=0, lt=MAX_SIZE)
    """Bytes that autograd saves and no earlier block saved, without parameters and buffers."""
    output_bytes: int = Field(ge=0, lt=MAX_SIZE)
    """Bytes of its output."""

    @model_validator(mode="after")
    def _check_gradients(self) -> TracedBlock:
        if any(size < 0 for size in self.gradients):
            raise ValueError(f"gradients of {self.name} has a negative size: trace the model again")
        if sum(self.gradients) > self.parameter_bytes:
            raise ValueError(
                f"gradients of {self.name} are {sum(self.gradients)} bytes and parameter_bytes is "
                f"{self.parameter_bytes}: trace the model again"
            )
        return self

    def block(self) -> Block:
        """Return the work of the block, which AdamW with a clipped norm updates."""
        return Block(
            BlockSpec(self.name, "other"),
            BlockWork(tuple(one.op() for one in self.forward)),
            BlockWork(tuple(one.op() for one in self.backward)),
            BlockWork(optimizer_update(sum(self.gradients), len(self.gradients))),
        )


class TracedInput(Section):
    """One input tensor of the trace."""

    name: str
    """Position among the arguments."""
    shape: list[int]
    """Dimensions of the tensor."""
    dtype: str
    """Data type, as torch names it."""


class TracedModel(Section):
    """Work of one micro-batch on a rank that has the whole model."""

    version: int
    """Version of the file format."""
    name: str
    """Name of the model."""
    torch: str
    """Version of torch during the trace."""
    batch: int = Field(ge=1, lt=MAX_SIZE)
    """Samples of the micro-batch, the first dimension of the first input."""
    inputs: list[TracedInput]
    """Input tensors of the trace."""
    buffer_bytes: int = Field(ge=0, lt=MAX_SIZE)
    """Bytes of the model's buffers."""
    blocks: list[TracedBlock] = Field(min_length=1)
    """Blocks in the order in which they run."""

    @model_validator(mode="after")
    def _check_block_names(self) -> TracedModel:
        names = [block.name for block in self.blocks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"blocks has '{name}' more than once: give each a name of its own")
        if STEP in names:
            raise ValueError(
                f"blocks has '{STEP}', which is the name for work outside all blocks: "
                "give it another name"
            )
        return self

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls of a micro-batch, forward and backward."""
        blocks = [one.block() for one in self.blocks]
        return sum(block.forward.flops + block.backward.flops for block in blocks)


def load_traced(path: Path) -> TracedModel:
    """Return the workload in the file at `path`."""
    raw = read_json(path, f"'{path}'", "give a file that `moesaic trace` wrote")
    return parse_traced(raw, str(path))


def parse_traced(raw: Mapping[str, Any], origin: str) -> TracedModel:
    """Return the workload in `raw`; error messages start with `origin`."""
    version = raw.get("version")
    if version is not None and (type(version) is not int or version != VERSION):
        raise ConfigError(
            f"{origin}: version = {json.dumps(version)} is not known: moesaic reads version "
            f"{VERSION}; trace the model again"
        )
    return parse(TracedModel, raw, origin)


def traced_blocks(traced: TracedModel, ranks: int = 1) -> list[Block]:
    """Return the work of each of `ranks` data-parallel ranks.

    Gradients are all-reduced in buckets during backward, as for our own models. Every rank updates
    all parameters.
    """
    gradients = [Gradient(one.name, size) for one in traced.blocks for size in one.gradients]
    reduction = GradientReduction("dense gradients", tuple(range(ranks)), gradients[::-1])
    blocks = [one.block() for one in traced.blocks]
    return with_gradient_reductions(blocks, [reduction], BlockWork())


def traced_memory(traced: TracedModel) -> Memory:
    """Return the memory of a rank, with buffers as parameters and moments in gradient types.

    A block's backward needs saved activations up to it, parameter gradients from it on, and
    gradients of its output and input.
    """
    kept = sum(block.saved_bytes for block in traced.blocks)
    gradients = sum(sum(block.gradients) for block in traced.blocks)
    parameters = sum(block.parameter_bytes for block in traced.blocks)
    made, peak = 0, Memory(parameters + traced.buffer_bytes, 2 * gradients, 0, 0, kept)
    outputs = [0, *(block.output_bytes for block in traced.blocks)]
    for at, block in reversed(list(enumerate(traced.blocks))):
        made += sum(block.gradients)
        found = replace(
            peak, gradients_bytes=made, activations_bytes=kept,
            working_bytes=outputs[at] + outputs[at + 1],
        )  # fmt: skip
        peak = max(peak, found, key=lambda one: one.peak_bytes)
        kept -= block.saved_bytes
    return peak
