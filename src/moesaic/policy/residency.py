"""Residency of expert state: which block leaves memory when another one needs its slot.

A block is an array of one expert: parameters, a moment, or the gradient. All blocks have the same
size. A cache calls `access` at each use, and `evict` and `removed` when it needs a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moesaic.base import keys

_STEP_DECAY = 0.95
"""Factor, for each later step, on the weight of a step in the frequency of use."""


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


class Residency(ABC):
    """Policy of one cache, with its state between steps."""

    def __init__(self) -> None:
        self._evicted = list[int]()
        self._num_expected = 0

    @abstractmethod
    def access(self, block: int) -> None:
        """Record a use of `block`, in memory or not."""

    def evict(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        """Return the block that leaves memory, and record it.

        Args:
            candidates: blocks that may leave, at least one.
            coming: index of the next expected access of each block that has one.
        """
        block = self._choose(candidates, coming)
        self._evicted.append(block)
        self._num_expected += block in coming
        return block

    def begin_step(self) -> None:
        """Forget the evictions since the last step: those of checkpoints and validation."""
        self._evicted, self._num_expected = [], 0

    @abstractmethod
    def _choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        """Return the block of `candidates` to evict."""

    @abstractmethod
    def removed(self, block: int) -> None:
        """Record that `block` was evicted or discarded."""

    def end_step(self, facts: ResidencyFacts) -> ResidencyDecision:
        """Return the evictions of the step that ends; an engine calls it through `decide`."""
        del facts
        decision = ResidencyDecision(tuple(self._evicted), self._num_expected)
        self._evicted, self._num_expected = [], 0
        return decision


class LeastRecentlyUsed(Residency):
    """LRU: evict the block whose last use is longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._last_use, self._now = dict[int, int](), 0

    def access(self, block: int) -> None:
        """Record the time of the use."""
        self._now += 1
        self._last_use[block] = self._now

    def _choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        return min(candidates, key=lambda block: (self._last_use.get(block, 0), block))

    def removed(self, block: int) -> None:
        """Forget the block's last use."""
        self._last_use.pop(block, None)


class LeastFrequentlyUsed(Residency):
    """LFU: evict the block with the fewest uses in the whole run, of those the least recent."""

    def __init__(self) -> None:
        super().__init__()
        self._uses, self._last_use, self._now = Counter[int](), dict[int, int](), 0

    def access(self, block: int) -> None:
        """Count the use."""
        self._now += 1
        self._uses[block] += 1
        self._last_use[block] = self._now

    def _choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        return min(
            candidates,
            key=lambda block: (self._uses[block], self._last_use.get(block, 0), block),
        )

    def removed(self, block: int) -> None:
        """Keep the count: the block may return."""


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

    def access(self, block: int) -> None:
        """Count the hit, or admit the block."""
        self._hits[block] = self._hits.get(block, 0.0) + 1
        self._num_uses += 1
        if self._num_uses == self._period:
            self._decay_hits()

    def _decay_hits(self) -> None:
        self._hits = {block: hits * self._decay for block, hits in self._hits.items()}
        self._num_uses = 0

    def _choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        for block in candidates:
            self._hits.setdefault(block, 1.0)
        allowed = set(candidates)
        blocks = [block for block in self._hits if block in allowed]
        proven = [block for block in blocks if self._hits[block] >= self._threshold]
        return min(proven or blocks, key=lambda block: self._hits[block])

    def removed(self, block: int) -> None:
        """Forget the block's hits."""
        self._hits.pop(block, None)

    def end_step(self, facts: ResidencyFacts) -> ResidencyDecision:
        """Return the evictions of the step; its end may end a period."""
        if self._period is None:
            self._decay_hits()
        return super().end_step(facts)


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
        self._order = dict[int, tuple[float, int]]()
        """Order in which blocks leave, the largest first: cached until their use or a new step."""

    def access(self, block: int) -> None:
        """Record the first use in this step."""
        used = self._usage.get(block)
        if used is None or used.step < self._step:
            weight = 1.0 if used is None else 1.0 + self._decayed(used)
            self._usage[block] = _Usage(weight, self._step, self._position)
            self._order.pop(block, None)
        self._position += 1

    def _decayed(self, used: _Usage) -> float:
        return used.weight * _STEP_DECAY ** (self._step - used.step)

    def _choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        unexpected = [block for block in candidates if block not in coming]
        if not unexpected:
            return max(candidates, key=coming.__getitem__)
        for block in unexpected:
            if block not in self._order:
                self._order[block] = (self._next_use(block), -block)
        return max(unexpected, key=self._order.__getitem__)

    def _next_use(self, block: int) -> float:
        """Return the likely position of the next use, in accesses from the start of this step."""
        used = self._usage.get(block)
        if used is None:
            return float("inf")
        steps = self._weight / self._decayed(used)
        return steps * self._length + used.position

    def removed(self, block: int) -> None:
        """Keep the block's usage: it may return."""

    def end_step(self, facts: ResidencyFacts) -> ResidencyDecision:
        """Return the evictions of the step, and begin the next one."""
        self._length, self._position = facts.num_accesses, 0
        self._order.clear()
        self._step += 1
        self._weight = 1.0 + self._weight * _STEP_DECAY
        return super().end_step(facts)


RESIDENCIES: dict[str, type[Residency]] = {
    "next-use": NextUse, "lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "se-moe": SeMoe,
}  # fmt: skip
"""Policies by name, as `memory.residency` has it."""


def make_residency(name: str) -> Residency:
    """Return a new policy; raise ConfigError for an unknown name."""
    return RESIDENCIES[keys.check_choice("memory.residency", name, list(RESIDENCIES))]()


def count_misses(
    steps: Sequence[Sequence[int]], num_slots: int, residency: Residency, expected_steps: int = 0
) -> int:
    """Return the misses of a cache without read-ahead; slow, for comparisons.

    Args:
        steps: blocks that each step uses, in order.
        num_slots: blocks that fit in memory.
        residency: policy of the cache, new.
        expected_steps: steps whose accesses are expected exactly, with the present one; 0: none.
    """
    trace = [block for step in steps for block in step]
    in_memory, num_misses, position = set[int](), 0, 0
    for number, step in enumerate(steps):
        before = num_misses
        horizon = sum(len(one) for one in steps[: number + expected_steps])
        for block in step:
            position += 1
            if block not in in_memory:
                num_misses += 1
                if len(in_memory) == num_slots:
                    coming = {trace[at]: at for at in range(horizon - 1, position - 1, -1)}
                    victim = residency.evict(sorted(in_memory), coming)
                    residency.removed(victim)
                    in_memory.remove(victim)
                in_memory.add(block)
            residency.access(block)
        residency.end_step(ResidencyFacts("", num_slots, len(step), num_misses - before))
    return num_misses


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
