"""Accesses that a block cache expects: segments in a known order, of which a window counts.

A position is an integer: the number of the segment, and the index in it. Positions of one block
order correctly, and stay when another segment changes its length. Distances are numbers of
accesses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

_INDEX_BITS = 32


class ExpectedAccesses:
    """Expected accesses, from the start of one segment on.

    `advance` gives the same state as new expectations from that segment on would."""

    def __init__(self, segments: Sequence[Sequence[int]], window: int) -> None:
        """Expect all accesses of `segments`; those within `window` accesses count."""
        self._segments, self._window = list(segments), window
        self._positions = dict[int, list[int]]()
        """Positions of all accesses of each block, ascending."""
        for number, segment in enumerate(self._segments):
            for position, block in enumerate(segment, number << _INDEX_BITS):
                self._positions.setdefault(block, []).append(position)
        self._next = dict.fromkeys(self._positions, 0)
        """Index of the next access in the positions of each block."""
        self._consumed_blocks = set[int]()
        """Blocks that were accessed since the start."""
        self.coming = dict[int, int]()
        """Position of the next access of each block that has one in the window."""
        self.end = 0
        """Position of the end of the window."""
        self._start = 0
        """Number of the first segment that is not over."""
        self._consumed = 0
        """Accesses of all segments up to the last one that has happened."""
        self._count()
        self._move_end()

    @property
    def start(self) -> int:
        """Position of the first access."""
        return self._start << _INDEX_BITS

    def advance(self, start: int, changes: Mapping[int, Sequence[int]] | None = None) -> set[int]:
        """Drop the segments before number `start`; return the blocks whose next access differs.

        Args:
            start: number of the segment that begins.
            changes: new accesses of some segments from there on, by number.
        """
        blocks = self._consumed_blocks.union(*self._segments[self._start : start])
        for number, segment in (changes or {}).items():
            blocks.update(self._segments[number], segment)
            self._replace(number, segment)
        self._consumed_blocks = set()
        self._start = start
        self._count()
        changed = set[int]()
        for block in blocks:
            self._next[block] = bisect_left(self._positions[block], self.start)
            if self._update(block):
                changed.add(block)
        return changed | self._move_end()

    def consume(self, block: int) -> None:
        """Drop the next expected access of a block, if there is one."""
        position = self.coming.get(block)
        if position is None:
            return
        self._consumed = max(self._consumed, self._num_before(position) + 1)
        self._consumed_blocks.add(block)
        self._next[block] += 1
        self._update(block)

    def ahead(self, distance: int) -> int:
        """Return the position `distance` accesses behind the last one that has happened, or the end
        of the window."""
        return min(self._position(self._consumed + distance), self.end)

    def block(self, position: int) -> int | None:
        """Return the block that is accessed at a position, or None behind a segment's end."""
        number, index = divmod(position, 1 << _INDEX_BITS)
        segment = self._segments[number]
        return segment[index] if index < len(segment) else None

    def following(self, position: int) -> int:
        """Return the position behind another one."""
        number, index = divmod(position, 1 << _INDEX_BITS)
        is_last = index + 1 >= len(self._segments[number])
        return (number + 1) << _INDEX_BITS if is_last else position + 1

    def _count(self) -> None:
        """Count the accesses before each segment, and begin with the first one that is not over."""
        self._totals = list(accumulate(map(len, self._segments), initial=0))
        self._consumed = self._totals[self._start]

    def _num_before(self, position: int) -> int:
        number, index = divmod(position, 1 << _INDEX_BITS)
        return self._totals[number] + index

    def _position(self, num_before: int) -> int:
        """Return the position before which there are so many accesses, or the end of all."""
        if num_before >= self._totals[-1]:
            return len(self._segments) << _INDEX_BITS
        number = bisect_right(self._totals, num_before) - 1
        return (number << _INDEX_BITS) + num_before - self._totals[number]

    def _replace(self, number: int, segment: Sequence[int]) -> None:
        """Exchange the accesses of one segment."""
        first, end = number << _INDEX_BITS, (number + 1) << _INDEX_BITS
        for block in set(self._segments[number]):
            positions = self._positions[block]
            del positions[bisect_left(positions, first) : bisect_left(positions, end)]
        added = dict[int, list[int]]()
        for position, block in enumerate(segment, first):
            added.setdefault(block, []).append(position)
        for block, own in added.items():
            positions = self._positions.setdefault(block, [])
            at = bisect_left(positions, first)
            positions[at:at] = own
        self._segments[number] = segment

    def _move_end(self) -> set[int]:
        """Move the end of the window; return the blocks whose next access enters or leaves it."""
        old, self.end = self.end, self._position(self._totals[self._start] + self._window)
        blocks = set[int]()
        low, high = sorted((old, self.end))
        for number in range(low >> _INDEX_BITS, len(self._segments)):
            first = number << _INDEX_BITS
            blocks.update(self._segments[number][max(low - first, 0) : max(high - first, 0)])
        return {block for block in blocks if self._update(block)}

    def _update(self, block: int) -> bool:
        """Find the next access of a block in the window; return True if it differs."""
        positions, index = self._positions[block], self._next[block]
        before = self.coming.pop(block, None)
        if index < len(positions) and positions[index] < self.end:
            self.coming[block] = positions[index]
        return self.coming.get(block) != before
