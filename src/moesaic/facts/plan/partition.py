"""Partition of the ranks into equal groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class Partition(Sequence[list[int]]):
    """Groups of equally many ranks, which are equally far apart.

    Each block of `size * stride` consecutive ranks has `stride` groups.
    """

    def __init__(self, ranks: int, size: int, stride: int = 1) -> None:
        self._ranks, self._size, self._stride = ranks, size, stride

    def __repr__(self) -> str:
        """Return the sizes: ranks compare this text when they make a subset of the world."""
        return f"Partition({self._ranks}, {self._size}, {self._stride})"

    def __len__(self) -> int:
        """Return the number of groups."""
        return self._ranks // self._size

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        """Return a group, or several."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        block, offset = divmod(range(len(self))[index], self._stride)
        return list(self._group(block, offset))

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the group of `rank`."""
        return tuple(self._group(rank // (self._size * self._stride), rank % self._stride))

    def _group(self, block: int, offset: int) -> range:
        start = block * self._size * self._stride
        return range(start + offset, start + self._size * self._stride, self._stride)
