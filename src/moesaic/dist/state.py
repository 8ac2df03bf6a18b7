"""State, independent of layout: logical name -> shape, dtype, pieces and owners.

A rank's state is a list of *pieces*, live views of its parameters and moments. Whatever brings
values in (initial values, a checkpoint, Hugging Face files, other ranks) is a *source* that fills
pieces; whatever takes them out reads the same list. Nobody else knows where a tensor lives.
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
"""Moments of eight bits: a code an element, a scale a block of a row; of the second, its root."""

ROWS = "rows"
"""Not of a tensor, but what came to each expert of a layer since homes were last decided on."""
MAY_BEGIN = frozenset({ROWS})
"""What a run begins with, as zeros, if what it goes on from has none of it."""

PRECISIONS = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
"""torch's types by the names that users write."""


def is_shared_out(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether ranks have parts of it; who has none such never imports torch's slow modules."""
    return hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or gradient, detached, sharing memory."""
    if not is_shared_out(tensor):
        return tensor.detach()
    with torch.no_grad():  # Or each makes a DTensor first, whose writes nobody counts.
        return tensor.to_local().detach()


@dataclass(frozen=True)
class Piece:
    """A box cut out of one logical tensor, held on this rank."""

    kind: str
    """PARAMETER, FIRST_MOMENT or another of the constants above."""
    name: str
    """Logical name, as in `facts.workload`."""
    shape: tuple[int, ...]
    """Shape of the whole logical tensor."""
    offset: tuple[int, ...]
    """Where the box starts."""
    tensor: torch.Tensor
    """A live view of the values; its shape is the box's. It may be strided."""
    owners: tuple[int, ...]
    """Ranks that hold this very box, the same on each of them."""

    @property
    def key(self) -> str:
        """kind/name: one tensor of the state."""
        return f"{self.kind}/{self.name}"


@dataclass
class State:
    """Everything that training goes on from."""

    pieces: list[Piece]
    counters: dict[str, int] = field(default_factory=dict)
    """step, samples, tokens: position in the run and in the data."""


class Source(Protocol):
    """Something that knows the values of state."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write values into every piece's tensor; an error names what is missing, unless it
        `MAY_BEGIN`."""


def overlap(
    offset: Sequence[int],
    size: Sequence[int],
    other_offset: Sequence[int],
    other_size: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The common part of two boxes of one tensor, as slices into each; None if they are apart."""
    mine, theirs = [], []
    for a, n, b, m in zip(offset, size, other_offset, other_size, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        mine.append(slice(low - a, high - a))
        theirs.append(slice(low - b, high - b))
    return tuple(mine), tuple(theirs)
