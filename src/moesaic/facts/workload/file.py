"""A foreign model's workload as a file: what was seen of it when it was traced, block by block.

The house's own models have formulas. Any other is run once where torch is (`models.trace`), and
what was seen of it is this fact: it can be written, read back and costed without the model and
without torch. It knows one way of laying a model over ranks: every rank has all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from moesaic.base.config import Section, parse, read_json
from moesaic.base.errors import ConfigError
from moesaic.facts.workload.blocks import STEP, Block, Work, with_sums
from moesaic.facts.workload.memory import Memory
from moesaic.facts.workload.ops import Op, Product, update
from moesaic.facts.workload.sizes import Type
from moesaic.facts.workload.sums import Gradient, Sums

VERSION = 1
"""Of the form of a file; another one is refused."""


MOST = 1 << 63
"""Beyond every size that there is."""


class TracedProduct(Section):
    """Equal matrix products of [rows, inner] and [inner, columns]."""

    rows: int = Field(ge=0, lt=MOST)
    """Rows of the result."""
    columns: int = Field(ge=0, lt=MOST)
    """Columns of the result."""
    inner: int = Field(ge=0, lt=MOST)
    """What is added up for each element of the result."""
    count: int = Field(ge=1, lt=MOST)
    """How many there are."""
    type: Type
    """Of the factors."""

    @property
    def product(self) -> Product:
        """As policies take it."""
        return Product(self.rows, self.columns, self.inner, self.count)


class TracedAttention(Section):
    """Equal heads of attention, each of one sequence."""

    queries: int = Field(ge=0, lt=MOST)
    """Rows of the scores."""
    keys: int = Field(ge=0, lt=MOST)
    """Columns of the scores."""
    width: int = Field(ge=0, lt=MOST)
    """Of a query and of a key."""
    values: int = Field(ge=0, lt=MOST)
    """Width of a value."""
    count: int = Field(ge=1, lt=MOST)
    """How many there are: heads times sequences."""
    type: Type
    """Of the factors."""
    share: float = Field(default=1.0, gt=0, le=1)
    """What is left to a kernel that skips what causality hides."""
    back: bool = False
    """Whether this is the backward pass, which makes the scores again."""

    @property
    def products(self) -> tuple[Product, ...]:
        """Scores and values mixed; backward scores, their gradient, and those of all inputs."""
        rows, keys, width, values = self.queries, self.keys, self.width, self.values
        scores, mixed = (rows, keys, width), (rows, values, keys)
        sizes = [scores, mixed]
        if self.back:
            sizes = [
                scores, (rows, keys, values), (keys, values, rows), (rows, width, keys),
                (keys, width, rows),
            ]  # fmt: skip
        return tuple(Product(*size, self.count) for size in sizes)

    def op(self) -> Op:
        """As policies take it."""
        # What is measured of attention is that of a sequence to itself.
        kind = ("attention backward" if self.back else "attention") * (self.queries == self.keys)
        specials = round(self.count * self.queries * self.keys * self.share)
        return Op(
            "attend", self.products, type=self.type, specials=specials, kind=kind,
            causal_share=self.share,
        )  # fmt: skip


class TracedWork(Section):
    """What a block does, one way."""

    products: list[TracedProduct] = Field(default_factory=list)
    """Matrix products, equal ones together."""
    attention: list[TracedAttention] = Field(default_factory=list)
    """Heads of attention, equal ones together."""
    moved_bytes: int = Field(ge=0, lt=MOST)
    """What kernels other than products read and write."""
    calls: int = Field(ge=0, lt=MOST)
    """Kernels started, products and attention among them."""
    specials: int = Field(default=0, ge=0)
    """Numbers of which an exponential, or the like, is taken, attention left out."""

    @model_validator(mode="after")
    def _kernels_move_bytes(self) -> TracedWork:
        if self.moved_bytes and not self.calls:
            raise ValueError(
                f"moved_bytes = {self.moved_bytes} with calls = 0, and no kernel moves them: trace "
                "the model again"
            )
        return self

    @property
    def flops(self) -> int:
        """Of all products, in full."""
        heads = [product for one in self.attention for product in one.products]
        return sum(one.flops for one in (*heads, *(one.product for one in self.products)))

    def ops(self) -> tuple[Op, ...]:
        """Products of one type together, attention, and the passes in one."""
        types: dict[Type, list[Product]] = {}
        for one in self.products:
            types.setdefault(one.type, []).append(one.product)
        products = [Op("products", tuple(same), type=kind) for kind, same in types.items()]
        passes = Op("passes", (), self.moved_bytes, self.calls, specials=self.specials)
        return (*products, *(one.op() for one in self.attention), passes)


class TracedBlock(Section):
    """One part of the model."""

    name: str
    """Its dotted name in the model, `step (module)` where that is `step`; (outside): what is in no
    block, the loss too."""
    parameters: int = Field(ge=0, lt=MOST)
    """Elements of its parameters; a tensor of two blocks is the first one's."""
    parameter_bytes: int = Field(ge=0, lt=MOST)
    """Bytes of them."""
    gradients: list[int] = Field(default_factory=list)
    """Bytes of each parameter that is trained."""
    forward: TracedWork
    """Once a micro-batch."""
    backward: TracedWork
    """Once a micro-batch; what is computed again is in it."""
    saved_bytes: int = Field(ge=0, lt=MOST)
    """What autograd keeps for backward and no block before it kept; no parameters, no buffers."""
    output_bytes: int = Field(ge=0, lt=MOST)
    """What it hands on."""

    @model_validator(mode="after")
    def _gradients_are_sizes(self) -> TracedBlock:
        if any(size < 0 for size in self.gradients):
            raise ValueError(f"gradients of {self.name} has a negative size: trace the model again")
        if sum(self.gradients) > self.parameter_bytes:
            raise ValueError(
                f"gradients of {self.name} are {sum(self.gradients)} bytes and parameter_bytes is "
                f"{self.parameter_bytes}: trace the model again"
            )
        return self


class TracedInput(Section):
    """One tensor that the model was traced with."""

    name: str
    """Its place among the arguments."""
    shape: list[int]
    """Its dimensions."""
    dtype: str
    """As torch calls it."""


class Traced(Section):
    """What one micro-batch of a model asks of a rank that has all of it."""

    version: int
    """Of the form of this file."""
    name: str
    """What the model is called."""
    torch: str
    """The version of torch that it was traced with."""
    batch: int = Field(ge=1, lt=MOST)
    """Samples of the micro-batch: the first dimension of the first input."""
    inputs: list[TracedInput]
    """What it was traced with."""
    buffer_bytes: int = Field(ge=0, lt=MOST)
    """What the model holds besides its parameters."""
    blocks: list[TracedBlock] = Field(min_length=1)
    """Its blocks, in the order in which they run."""

    @model_validator(mode="after")
    def _blocks_differ(self) -> Traced:
        names = [block.name for block in self.blocks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"blocks has '{name}' more than once: give each a name of its own")
        if STEP in names:
            raise ValueError(
                f"blocks has '{STEP}', which stands for what is in no block: give it another name"
            )
        return self

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops(self) -> int:
        """Of all products of a micro-batch, both ways."""
        return sum(block.forward.flops + block.backward.flops for block in self.blocks)


def load_traced(path: Path) -> Traced:
    """The workload that the file at `path` holds."""
    raw = read_json(path, f"'{path}'", "give a file that `moesaic trace` wrote")
    return read_traced(raw, str(path))


def read_traced(raw: Mapping[str, Any], origin: str) -> Traced:
    """The workload that `raw` says; `origin` opens the message of an error."""
    version = raw.get("version")
    if version is not None and (type(version) is not int or version != VERSION):
        raise ConfigError(
            f"{origin}: version = {json.dumps(version)} is not known: this moesaic reads version "
            f"{VERSION}; trace the model again"
        )
    return parse(Traced, raw, origin)


def traced_blocks(traced: Traced, ranks: int = 1) -> list[Block]:
    """What each of `ranks` ranks does: all of the model on samples of its own.

    Gradients are summed over the ranks in the buckets of the house's own models, under backward,
    and every rank updates everything, by AdamW with a clipped norm.
    """
    blocks = [
        Block(
            one.name,
            Work(one.forward.ops()),
            Work(one.backward.ops()),
            Work(update(sum(one.gradients), len(one.gradients))),
        )
        for one in traced.blocks
    ]
    gradients = [Gradient(one.name, size) for one in traced.blocks for size in one.gradients]
    return with_sums(blocks, [Sums("dense", tuple(range(ranks)), gradients[::-1])], Work())


def traced_memory(traced: Traced) -> Memory:
    """What a rank holds: buffers count as parameters, moments have the gradients' types."""
    gradients = sum(sum(block.gradients) for block in traced.blocks)
    activations = sum(block.saved_bytes for block in traced.blocks)
    return Memory(
        parameters_bytes=sum(block.parameter_bytes for block in traced.blocks)
        + traced.buffer_bytes,
        gradients_bytes=gradients,
        moments_bytes=2 * gradients,
        staging_bytes=0,
        gathered_bytes=0,
        activations_bytes=activations,
        head_bytes=0,
        working_bytes=max(_handed_on(traced.blocks)),
        forward_bytes=activations,
        backward_bytes=_backward(traced.blocks),
    )


def _handed_on(blocks: Sequence[TracedBlock]) -> list[int]:
    """Gradients of each block's output and of its input."""
    outputs = [block.output_bytes for block in blocks]
    return [own + before for before, own in zip([0, *outputs], outputs, strict=False)]


def _backward(blocks: Sequence[TracedBlock]) -> int:
    """The most that the backward pass of a block finds: its own activations and those before it,
    gradients of the parameters from it on, and of its output and its input."""
    kept = sum(block.saved_bytes for block in blocks)
    made = most = 0
    for handed_on, block in zip(_handed_on(blocks)[::-1], reversed(blocks), strict=True):
        made += sum(block.gradients)
        most = max(most, kept + made + handed_on)
        kept -= block.saved_bytes
    return most
