"""Residency of expert state: which block leaves memory when another one needs its slot.

A block is an array of one expert: parameters, a moment, or the gradient. All blocks have the same
size. A cache calls `access` at each use, `release` at its end, and `evict` and `removed` when it
needs a slot.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from moesaic.base import keys

_STEP_DECAY = 0.95
"""Factor, for each later step, on the weight of a step in the frequency of use."""
_STALE_ENTRIES = 64
"""Outdated entries that a queue keeps, beyond as many as it has blocks."""


class ResidencyFacts(NamedTuple):
    """Cache use in one step."""

    residency: str
    """Name of the policy."""
    num_slots: int
    """Blocks that fit in memory."""
    num_accesses: int
    """Uses of blocks."""
    num_misses: int
    """Uses of blocks that were not in memory, and first uses."""


class ResidencyDecision(NamedTuple):
    """Blocks that a policy evicted in one step."""

    evicted: tuple[int, ...]
    """Blocks in the order of their eviction."""
    num_expected: int
    """Evicted blocks with an expected access; many of them mean that memory is small."""


class _Queue:
    """Blocks in the order in which they leave; a change or a look-up takes logarithmic time."""

    def __init__(self) -> None:
        self._entries = dict[int, tuple[float, ...]]()
        """Key of each block, with the block as its last number."""
        self._heap = list[tuple[float, ...]]()
        """Entries; outdated ones, which `_entries` no longer has, are skipped."""
        self._passed_over = list[tuple[float, ...]]()
        """Entries that had to stay in the last call of `first`, taken from the heap."""
        self._after = -1
        """Position of the last call of `first`."""

    def put(self, block: int, key: tuple[float, ...]) -> None:
        """Add a block, or change its key; the smallest key leaves first, then the lower block."""
        entry = self._entries[block] = (*key, block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) + len(self._passed_over) > 2 * len(self._entries) + _STALE_ENTRIES:
            self._heap, self._passed_over = list(self._entries.values()), []
            heapq.heapify(self._heap)

    def drop(self, block: int) -> None:
        """Remove a block if it is in the queue."""
        self._entries.pop(block, None)

    def first(self, after: int, may_leave: Callable[[int, int], bool]) -> int | None:
        """Return the first block for which `may_leave(block, after)` is true, or None.

        A block that must stay for one position stays for later ones, until it is put again."""
        if after < self._after:
            for entry in self._passed_over:
                heapq.heappush(self._heap, entry)
            self._passed_over = []
        self._after = after
        while self._heap:
            entry = self._heap[0]
            block = int(entry[-1])
            if self._entries.get(block) is entry:
                if may_leave(block, after):
                    return block
                self._passed_over.append(entry)
            heapq.heappop(self._heap)
        return None


class Residency(ABC):
    """Policy of one cache, with its state between steps.

    `release` adds a block to those that may leave; `access` and `removed` take it away.
    """

    def __init__(self) -> None:
        self._next_access = dict[int, int | None]()
        """Position of the next expected access of each block that may leave."""
        self._queue = _Queue()
        self._evicted = list[int]()
        self._num_expected = 0

    def access(self, block: int) -> None:
        """Record a use of `block`, in memory or not; it stays until its `release`."""
        self._keep(block)

    def release(self, block: int, next_access: int | None) -> None:
        """Record that `block` is in memory and may leave, or that its next access has changed.

        Args:
            block: the block.
            next_access: position of its next expected access, if there is one.
        """
        self._next_access[block] = next_access
        self._queue.put(block, self._key(block))

    def removed(self, block: int) -> None:
        """Record that `block` was evicted or discarded."""
        self._keep(block)

    def evict(self, after: int = -1) -> int | None:
        """Return the block that leaves memory, and record it; None if all must stay.

        Blocks whose next access is expected at or before position `after` must stay.
        """
        block = self._choose(after)
        if block is not None:
            self._evicted.append(block)
            self._num_expected += self._next_access[block] is not None
        return block

    def begin_step(self) -> None:
        """Forget the evictions since the last step: those of checkpoints and validation."""
        self._evicted, self._num_expected = [], 0

    def end_step(self, facts: ResidencyFacts) -> ResidencyDecision:
        """Return the evictions of the step that ends; an engine calls it through `decide`."""
        del facts
        decision = ResidencyDecision(tuple(self._evicted), self._num_expected)
        self._evicted, self._num_expected = [], 0
        return decision

    @abstractmethod
    def _key(self, block: int) -> tuple[float, ...]:
        """Return the rank of a block among those that may leave; the smallest leaves first."""

    def _choose(self, after: int) -> int | None:
        return self._queue.first(after, self._may_leave)

    def _may_leave(self, block: int, after: int) -> bool:
        next_access = self._next_access[block]
        return next_access is None or next_access > after

    def _keep(self, block: int) -> None:
        self._next_access.pop(block, None)
        self._queue.drop(block)


class LeastRecentlyUsed(Residency):
    """LRU: evict the block whose last use is longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._last_use, self._now = dict[int, int](), 0

    def access(self, block: int) -> None:
        """Record the time of the use."""
        super().access(block)
        self._now += 1
        self._last_use[block] = self._now

    def removed(self, block: int) -> None:
        """Forget the block's last use."""
        super().removed(block)
        self._last_use.pop(block, None)

    def _key(self, block: int) -> tuple[float, ...]:
        return (self._last_use.get(block, 0),)


class LeastFrequentlyUsed(Residency):
    """LFU: evict the block with the fewest uses in the whole run, of those the least recent.

    The count stays when a block leaves: it may return.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses, self._last_use, self._now = Counter[int](), dict[int, int](), 0

    def access(self, block: int) -> None:
        """Count the use."""
        super().access(block)
        self._now += 1
        self._uses[block] += 1
        self._last_use[block] = self._now

    def _key(self, block: int) -> tuple[float, ...]:
        return self._uses[block], self._last_use.get(block, 0)


class SeMoe(Residency):
    """Policy of SE-MoE (Shen et al. 2022, algorithm 2): hit counts with a threshold and decay.

    A hit is a use of a block in memory. All counts are multiplied by `decay` after each period.
    A full cache evicts one block for each block that it admits. The paper leaves five points open:

    - (a) The block with the fewest hits leaves, of those that reach the threshold. If none reaches
      it, the block with the fewest hits leaves all the same; the computation needs the new block.
    - (b) An admitted block has one hit. The first admitted leaves where several have the fewest.
    - (c) The cache uses all of its slots; the paper's comparison leaves one empty.
    - (d) Prefetched blocks are guesses: a block that was read ahead and not used yet has one hit.
      Reads that were not guessed block the computation, so that results do not depend on guesses.
    - (e) Blocks below the threshold are protected, so that newcomers can collect hits.
      Decay lets old favourites leave.
    """

    def __init__(
        self, threshold: float = 8.0, decay: float = 0.5, period: int | None = None
    ) -> None:
        """Create the policy. The paper names no values; the defaults did best on simulated steps.

        Args:
            threshold: hits with which a block may leave.
            decay: factor on all counts after each period, the paper's beta.
            period: uses between decays, the paper's K; None: those of one step.
        """
        super().__init__()
        self._threshold, self._decay, self._period = threshold, decay, period
        self._hits, self._num_uses = dict[int, float](), 0
        self._admission, self._num_admitted = dict[int, int](), 0
        """Number of each block's admission."""
        self._guesses = dict[int, None]()
        """Blocks that were read ahead and have no hit yet, in the order of reading."""

    def access(self, block: int) -> None:
        """Count the hit, or admit the block."""
        super().access(block)
        self._guesses.pop(block, None)
        if block in self._hits:
            self._hits[block] += 1
        else:
            self._admit(block)
        self._num_uses += 1
        if self._num_uses == self._period:
            self._decay_hits()

    def release(self, block: int, next_access: int | None) -> None:
        """Add the block to those that may leave."""
        if block in self._hits:
            super().release(block, next_access)
        else:
            self._next_access[block] = next_access
            self._guesses.setdefault(block)

    def removed(self, block: int) -> None:
        """Forget the block's hits."""
        super().removed(block)
        self._guesses.pop(block, None)
        self._hits.pop(block, None)

    def end_step(self, facts: ResidencyFacts) -> ResidencyDecision:
        """Return the evictions of the step; its end may end a period."""
        if self._period is None:
            self._decay_hits()
        return super().end_step(facts)

    def _admit(self, block: int) -> None:
        self._hits[block], self._admission[block] = 1.0, self._num_admitted
        self._num_admitted += 1

    def _decay_hits(self) -> None:
        self._hits = {block: hits * self._decay for block, hits in self._hits.items()}
        self._num_uses = 0
        for block in self._next_access.keys() - self._guesses.keys():
            self._queue.put(block, self._key(block))

    def _key(self, block: int) -> tuple[float, ...]:
        hits = self._hits[block]
        return hits < self._threshold, hits, self._admission[block]

    def _choose(self, after: int) -> int | None:
        for block in [one for one in self._guesses if self._may_leave(one, after)]:
            del self._guesses[block]
            self._admit(block)
            self._queue.put(block, self._key(block))
        return super()._choose(after)


class _Usage(NamedTuple):
    """Use of one block over steps."""

    weight: float
    """Sum of the weights of the steps that used the block, as of its last step."""
    step: int
    """Last step that used it."""
    position: int
    """Accesses of that step before the first use."""


class NextUse(Residency):
    """Evict the block that training needs last.

    Blocks without an expected access leave first: by the last steps, the one whose next use is
    furthest. A block returns at the position of its last use, as steps pass through the layers in
    the same order. The frequency of its use says how many steps later. Then the block with the
    furthest expected access leaves. Ties go to the lower block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._usage = dict[int, _Usage]()
        self._step = self._position = self._length = 0
        self._weight = 1.0
        """Sum of the weights of all steps, with the present one."""

    def access(self, block: int) -> None:
        """Record the first use in this step."""
        super().access(block)
        used = self._usage.get(block)
        if used is None or used.step < self._step:
            weight = 1.0 if used is None else 1.0 + self._decayed(used)
            self._usage[block] = _Usage(weight, self._step, self._position)
        self._position += 1

    def end_step(self, facts: ResidencyFacts) -> ResidencyDecision:
        """Return the evictions of the step, and begin the next one."""
        self._length, self._position = facts.num_accesses, 0
        self._step += 1
        self._weight = 1.0 + self._weight * _STEP_DECAY
        for block, next_access in self._next_access.items():
            if next_access is None:
                self._queue.put(block, self._key(block))
        return super().end_step(facts)

    def _key(self, block: int) -> tuple[float, ...]:
        next_access = self._next_access[block]
        if next_access is None:
            return False, -self._next_use(block)
        return True, -next_access

    def _next_use(self, block: int) -> float:
        """Return the likely position of the next use, in accesses from the start of this step."""
        used = self._usage.get(block)
        if used is None:
            return float("inf")
        steps = self._weight / self._decayed(used)
        return steps * self._length + used.position

    def _decayed(self, used: _Usage) -> float:
        return used.weight * _STEP_DECAY ** (self._step - used.step)

    def _choose(self, after: int) -> int | None:
        block = self._queue.first(-1, self._may_leave)
        return block if block is not None and self._may_leave(block, after) else None


RESIDENCIES: dict[str, type[Residency]] = {
    "next-use": NextUse, "lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "se-moe": SeMoe,
}  # fmt: skip
"""Policies by name, as `memory.residency` has it."""


def make_residency(name: str) -> Residency:
    """Return a new policy; raise ConfigError for an unknown name."""
    return RESIDENCIES[keys.check_choice("memory.residency", name, list(RESIDENCIES))]()
