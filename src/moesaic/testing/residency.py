"""Residency policies for tests: slow and obvious ones, and the fewest misses that are possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random


class SlowResidency(ABC):
    """Policy that chooses from a list of all blocks that may leave."""

    def __init__(self) -> None:
        self._next_access = dict[int, int | None]()
        """Next expected access of each block that may leave, in the order of loading."""

    def access(self, block: int) -> None:
        """Note a use, during which the block stays."""
        self._next_access.pop(block, None)

    def release(self, block: int, next_access: int | None) -> None:
        """Note that the block may leave."""
        self._next_access[block] = next_access

    def removed(self, block: int) -> None:
        """Note that the block left memory."""
        self._next_access.pop(block, None)

    def evict(self, after: int = -1) -> int | None:
        """Return the block that leaves memory."""
        coming = {block: at for block, at in self._next_access.items() if at is not None}
        candidates = [block for block in self._next_access if coming.get(block, after + 1) > after]
        return self.choose(candidates, coming) if candidates else None

    @abstractmethod
    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        """Return the candidate that leaves memory.

        `coming` maps a block to the position of its next expected access, if there is one."""


class RandomResidency(SlowResidency):
    """Policy that evicts random blocks, the same ones in each test."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(0)

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        """Return a random candidate."""
        del coming
        return self._random.choice(candidates)


def belady_misses(trace: Sequence[int], num_slots: int) -> int:
    """Return the fewest misses of any policy that knows the whole `trace` (Belady 1966)."""
    next_uses, later = [0] * len(trace), dict[int, int]()
    for position in reversed(range(len(trace))):
        next_uses[position] = later.get(trace[position], len(trace))
        later[trace[position]] = position
    in_memory, num_misses = dict[int, int](), 0
    for block, next_use in zip(trace, next_uses, strict=True):
        if block not in in_memory:
            num_misses += 1
            if len(in_memory) == num_slots:
                del in_memory[max(in_memory, key=lambda one: in_memory[one])]
        in_memory[block] = next_use
    return num_misses
