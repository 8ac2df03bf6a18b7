"""Layout-independent training state: logical name -> shape, dtype, shards and owners.

A rank's state is a list of `TensorShard`s of its parameters and moments. A shard knows its shape
and dtype without memory, and lends its live tensor. A `Source` fills shards: initialization, a
checkpoint, Hugging Face files or other ranks. Writers read the same list. Both borrow one shard at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PARAMETER = "parameter"
FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
FIRST_CODES, FIRST_SCALES = "first_moment_codes", "first_moment_scales"
ROOT_CODES, ROOT_SCALES = "second_moment_root_codes", "second_moment_root_scales"
"""8-bit moments: a code per element and a scale per block of a row; the root of the second moment.
"""

EXPERT_TOKENS = "expert_tokens"
"""Tokens per expert of a layer since the last placement decision; not a model tensor."""
OPTIONAL_KINDS = frozenset({EXPERT_TOKENS})
"""Kinds that start as zeros if the source lacks them."""

PRECISIONS = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
"""torch dtypes by their names in settings."""


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor, without importing torch's slow DTensor modules."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter or gradient, detached, sharing memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    # With gradients each call makes a DTensor whose version counter misses writes.
    with torch.no_grad():
        return tensor.to_local().detach()


@dataclass(frozen=True)
class TensorShard:
    """Box of a logical tensor, held on this rank."""

    kind: str
    """PARAMETER, FIRST_MOMENT or another constant of this module."""
    name: str
    """Logical name, as in `facts.workload`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Start of the box in each dimension."""
    size: tuple[int, ...]
    """Shape of the box."""
    dtype: torch.dtype
    owners: tuple[int, ...]
    """Ranks that hold this box, the same list on each."""
    lender: torch.Tensor | Callable[[bool], AbstractContextManager[torch.Tensor]]
    """Live view of the values, or the function that lends it to read (False) or to write (True)."""

    @classmethod
    def of_tensor(
        cls,
        kind: str,
        name: str,
        shape: tuple[int, ...],
        offset: tuple[int, ...],
        tensor: torch.Tensor,
        owners: tuple[int, ...],
    ) -> TensorShard:
        """Return a shard whose values are always in memory: `tensor`, which may be strided."""
        size = tuple(tensor.shape)
        return cls(kind, name, tuple(shape), offset, size, tensor.dtype, owners, tensor)

    def with_tensor(self, tensor: torch.Tensor) -> TensorShard:
        """Return this shard with other values."""
        return replace(self, size=tuple(tensor.shape), dtype=tensor.dtype, lender=tensor)

    def borrow(self, *, writes: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Lend the live values, to read or to write, until the context ends.

        Values that are not always in memory keep what is written only with `writes`."""
        if isinstance(self.lender, torch.Tensor):
            return nullcontext(self.lender)
        return self.lender(writes)

    @property
    def version(self) -> int | None:
        """Counter of the writes to the values; None if they are not always in memory."""
        return self.lender._version if isinstance(self.lender, torch.Tensor) else None

    @property
    def key(self) -> str:
        """Key of the tensor in the state: kind/name."""
        return f"{self.kind}/{self.name}"

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.num_elements * self.dtype.itemsize


class ExternalSnapshot(Protocol):
    """Snapshot of state that its owner writes by itself, such as the tables of a server."""

    def begin(self, step: int) -> Callable[[], dict[str, Any]]:
        """Start a snapshot after `step` finished steps; every rank of the part calls this when a
        save starts.

        Return a function that waits until the snapshot is durable and returns facts to find it by,
        as JSON. It runs in the writer thread of the save, which fails if it raises.
        """


@dataclass
class State:
    """All that a run needs to continue."""

    shards: list[TensorShard]
    counters: dict[str, int] = field(default_factory=dict)
    """Steps, samples and tokens: position in the run and in the data."""
    snapshots: Mapping[str, ExternalSnapshot] = field(default_factory=dict)
    """External snapshots by the prefix of their part."""
    expect_reads: Callable[[Sequence[TensorShard]], None] | None = None
    """Function to call with the shards that are read next, in order, if some are not in memory."""


class Source(Protocol):
    """Provider of values for state."""

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write values into every shard. Raise StoreError for missing tensors, except
        `OPTIONAL_KINDS`."""


@dataclass(frozen=True)
class SplitSource:
    """Source that fills some shards from `main` and the others from `rest`."""

    main: Source
    rest: Source
    is_rest: Callable[[TensorShard], bool]
    """Return whether `rest` fills a shard."""

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Fill every shard from its source."""
        self.rest.fill([shard for shard in shards if self.is_rest(shard)])
        self.main.fill([shard for shard in shards if not self.is_rest(shard)])


def overlap(
    offset: Sequence[int],
    size: Sequence[int],
    other_offset: Sequence[int],
    other_size: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two boxes of a tensor, as slices into each; None if disjoint."""
    slices, other_slices = [], []
    for a, n, b, m in zip(offset, size, other_offset, other_size, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        slices.append(slice(low - a, high - a))
        other_slices.append(slice(low - b, high - b))
    return tuple(slices), tuple(other_slices)
