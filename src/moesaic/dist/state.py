"""Layout-independent training state: logical name -> shape, dtype, shards and owners.

A rank's state is a list of `TensorShard`s, live views of its parameters and moments. A `Source`
fills shards: initialization, a checkpoint, Hugging Face files or other ranks. Writers read the same
list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeGuard

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
    tensor: torch.Tensor
    """Live view of the values, with the shape of the box; may be strided."""
    owners: tuple[int, ...]
    """Ranks that hold this box, the same list on each."""

    @property
    def key(self) -> str:
        """Key of the tensor in the state: kind/name."""
        return f"{self.kind}/{self.name}"


@dataclass
class State:
    """All that a run needs to continue."""

    shards: list[TensorShard]
    counters: dict[str, int] = field(default_factory=dict)
    """Steps, samples and tokens: position in the run and in the data."""


class Source(Protocol):
    """Provider of values for state."""

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write values into every shard's tensor. Raise StoreError for missing tensors, except
        `OPTIONAL_KINDS`."""


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
