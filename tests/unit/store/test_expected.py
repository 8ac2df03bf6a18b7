"""Expected accesses: the state that new expectations from each segment on would have."""

from __future__ import annotations

import random
from collections import deque

import pytest

from moesaic.store.expected import ExpectedAccesses

NUM_BLOCKS = 12


class Slow:
    """Expected accesses as one list, made again for each segment."""

    def __init__(self, segments: list[list[int]], window: int) -> None:
        self.blocks = [block for segment in segments for block in segment][:window]
        self.positions: dict[int, deque[int]] = {}
        for index, block in enumerate(self.blocks):
            self.positions.setdefault(block, deque()).append(index)
        self.consumed = 0

    def consume(self, block: int) -> None:
        if self.positions.get(block):
            self.consumed = max(self.consumed, self.positions[block].popleft() + 1)

    def coming(self) -> dict[int, int]:
        return {block: indices[0] for block, indices in self.positions.items() if indices}

    def ahead(self, distance: int) -> list[int]:
        return self.blocks[: self.consumed + distance]


def ahead(fast: ExpectedAccesses, distance: int) -> dict[int, int]:
    """Return the blocks of the accesses from the start on, by position."""
    found, position, end = dict[int, int](), fast.start, fast.ahead(distance)
    while position < end:
        block = fast.block(position)
        if block is not None:
            found[position] = block
        position = fast.following(position)
    return found


def compare(fast: ExpectedAccesses, slow: Slow, distance: int) -> None:
    assert list(ahead(fast, distance).values()) == slow.ahead(distance)
    index_of = {position: index for index, position in enumerate(ahead(fast, 1 << 20))}
    assert {block: index_of[at] for block, at in fast.coming.items()} == slow.coming()


@pytest.mark.parametrize("seed", range(30))
def test_a_segment_begins_like_new_expectations(seed: int) -> None:
    rng = random.Random(seed)

    def segment() -> list[int]:
        return rng.choices(range(NUM_BLOCKS), k=rng.randrange(9))

    segments, window = [segment() for _ in range(8)], rng.choice([3, 12, 100])
    fast, known = ExpectedAccesses(segments, window), dict[int, int]()
    for start in range(8):
        if start:
            changed = {number: segment() for number in (start, 7) if rng.random() < 0.5}
            for block in fast.advance(start, changed):
                known.pop(block, None)
                if block in fast.coming:
                    known[block] = fast.coming[block]
            for number, new in changed.items():
                segments[number] = new
        else:
            known = dict(fast.coming)
        assert fast.coming == known, "a block that changed is not named"
        slow = Slow(segments[start:], window)
        compare(fast, slow, 5)
        for _ in range(rng.randrange(6)):
            block = rng.randrange(NUM_BLOCKS)
            fast.consume(block)
            slow.consume(block)
            compare(fast, slow, 5)
        known = dict(fast.coming)


def test_without_accesses_nothing_is_expected() -> None:
    fast = ExpectedAccesses((), 10)
    fast.consume(3)
    assert (fast.coming, fast.ahead(5), fast.end) == ({}, 0, 0)
