"""A foreign model's workload as a file: what was seen of it when it was traced, block by block.

The house's own models have formulas. Any other is run once where torch is (`models.trace`), and
what was seen of it is this fact: it can be written, read back and costed without the model and
without torch. It knows one way of laying a model over ranks: every rank has all of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from moesaic.base.config import Section, parse
from moesaic.base.errors import ConfigError, unwritable
from moesaic.facts.workload.blocks import ADAMW_PASSES, Block, Work, summed
from moesaic.facts.workload.memory import Memory
from moesaic.facts.workload.ops import Op, Product
from moesaic.facts.workload.sizes import Type

VERSION = 1
"""Of the form of a file; another one is refused."""


class TracedProduct(Section):
    """Equal matrix products of [rows, inner] and [inner, columns]."""

    rows: int = Field(ge=0)
    """Rows of the result."""
    columns: int = Field(ge=0)
    """Columns of the result."""
    inner: int = Field(ge=0)
    """What is added up for each element of the result."""
    count: int = Field(ge=1)
    """How many there are."""
    type: Type
    """Of the factors."""

    @property
    def product(self) -> Product:
        """As policies take it."""
        return Product(self.rows, self.columns, self.inner, self.count)


class TracedAttention(Section):
    """Equal heads of attention, each of one sequence."""

    queries: int = Field(ge=0)
    """Rows of the scores."""
    keys: int = Field(ge=0)
    """Columns of the scores."""
    width: int = Field(ge=0)
    """Of a query and of a key."""
    values: int = Field(ge=0)
    """Width of a value."""
    count: int = Field(ge=1)
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
    moved_bytes: int = Field(ge=0)
    """What kernels other than products read and write."""
    calls: int = Field(ge=0)
    """Kernels started, products and attention among them."""
    specials: int = Field(default=0, ge=0)
    """Numbers of which an exponential, or the like, is taken, attention left out."""

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
    """Its dotted name in the model; (outside): what is in no block, the loss too."""
    parameters: int = Field(ge=0)
    """Elements of its parameters; a tensor of two blocks is the first one's."""
    parameter_bytes: int = Field(ge=0)
    """Bytes of them."""
    gradients: list[int] = Field(default_factory=list)
    """Bytes of each parameter that is trained."""
    forward: TracedWork
    """Once a micro-batch."""
    backward: TracedWork
    """Once a micro-batch; what is computed again is in it."""
    saved_bytes: int = Field(ge=0)
    """What autograd keeps for backward and no block before it kept; no parameters, no buffers."""
    output_bytes: int = Field(ge=0)
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
    batch: int = Field(ge=1)
    """Samples of the micro-batch: the first dimension of the first input."""
    inputs: list[TracedInput]
    """What it was traced with."""
    buffer_bytes: int = Field(ge=0)
    """What the model holds besides its parameters."""
    blocks: list[TracedBlock] = Field(min_length=1)
    """Its blocks, in the order in which they run."""

    @model_validator(mode="after")
    def _blocks_differ(self) -> Traced:
        names = [block.name for block in self.blocks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"blocks has '{name}' more than once: give each a name of its own")
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
    remedy = "give a file that `moesaic trace` wrote"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file '{path}': {remedy}") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror}): {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not JSON ({error}): {remedy}") from None
    return read_traced(raw, str(path))


def read_traced(raw: Any, origin: str) -> Traced:
    """The workload that `raw` says; `origin` opens the message of an error."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: not a table of keys: give a file that `moesaic trace` wrote")
    version = raw.get("version")
    if version is not None and (type(version) is not int or version != VERSION):
        raise ConfigError(
            f"{origin}: version = {json.dumps(version)} is not known: this moesaic reads version "
            f"{VERSION}; trace the model again"
        )
    return parse(Traced, raw, origin)


def save_traced(traced: Traced, path: Path) -> None:
    """Write `traced` to `path`, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(traced.to_json(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise unwritable(f"'{path}'", error) from None


def traced_blocks(traced: Traced, ranks: int = 1) -> list[Block]:
    """What each of `ranks` ranks does: all of the model on samples of its own.

    Gradients are summed over the ranks in the buckets of the house's own models, and every rank
    updates everything, by AdamW with a clipped norm.
    """
    blocks = [
        Block(one.name, Work(one.forward.ops()), Work(one.backward.ops()), Work(_update(one)))
        for one in traced.blocks
    ]
    sizes = [size for one in traced.blocks for size in one.gradients]
    reduced = summed([("dense", tuple(range(ranks)), sizes)])
    return [*blocks, Block("step", Work(), Work(), reduced)]


def _update(block: TracedBlock) -> tuple[Op, ...]:
    """The gradient's norm, clipping and AdamW."""
    num_bytes, tensors = sum(block.gradients), len(block.gradients)
    return (
        Op("norm", (), num_bytes, tensors, kind="norm"),
        Op("clip", (), 2 * num_bytes, tensors, kind="scale"),
        Op("adamw", (), ADAMW_PASSES * num_bytes, tensors, kind="adamw"),
    )


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
        working_bytes=0,
        forward_bytes=activations,
        backward_bytes=gradients,
    )
