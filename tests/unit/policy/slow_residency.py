"""The policies of `moesaic.policy.residency` as their definitions read: slow and obvious."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from moesaic.testing.residency import SlowResidency


class SlowLRU(SlowResidency):
    def __init__(self) -> None:
        super().__init__()
        self.last_use, self.now = dict[int, int](), 0

    def access(self, block: int) -> None:
        super().access(block)
        self.now += 1
        self.last_use[block] = self.now

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        return min(candidates, key=lambda block: (self.last_use.get(block, 0), block))

    def removed(self, block: int) -> None:
        super().removed(block)
        self.last_use.pop(block, None)

    def end_step(self, num_accesses: int) -> None:
        """Begin the next step."""


class SlowLFU(SlowLRU):
    def __init__(self) -> None:
        super().__init__()
        self.uses = Counter[int]()

    def access(self, block: int) -> None:
        super().access(block)
        self.uses[block] += 1

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        return min(
            candidates, key=lambda block: (self.uses[block], self.last_use.get(block, 0), block)
        )

    def removed(self, block: int) -> None:
        SlowResidency.removed(self, block)


class SlowSeMoe(SlowLRU):
    threshold, decay = 8.0, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.hits = dict[int, float]()

    def access(self, block: int) -> None:
        super().access(block)
        self.hits[block] = self.hits.get(block, 0.0) + 1

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        for block in candidates:
            self.hits.setdefault(block, 1.0)
        allowed = set(candidates)
        blocks = [block for block in self.hits if block in allowed]
        proven = [block for block in blocks if self.hits[block] >= self.threshold]
        return min(proven or blocks, key=lambda block: self.hits[block])

    def removed(self, block: int) -> None:
        super().removed(block)
        self.hits.pop(block, None)

    def end_step(self, num_accesses: int) -> None:
        self.hits = {block: hits * self.decay for block, hits in self.hits.items()}


class SlowNextUse(SlowLRU):
    decay = 0.95

    def __init__(self) -> None:
        super().__init__()
        self.usage = dict[int, tuple[float, int, int]]()
        """Weight of use, last step and position of its first use in that step, by block."""
        self.step = self.position = self.length = 0
        self.weight = 1.0

    def access(self, block: int) -> None:
        super().access(block)
        weight, step, _ = self.usage.get(block, (0.0, -1, 0))
        if step < self.step:
            weight = 1.0 + weight * self.decay ** (self.step - step)
            self.usage[block] = weight, self.step, self.position
        self.position += 1

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        unexpected = [block for block in candidates if block not in coming]
        if not unexpected:
            return max(candidates, key=coming.__getitem__)
        return max(unexpected, key=lambda block: (self.next_use(block), -block))

    def next_use(self, block: int) -> float:
        """Return the likely position of the next use, from the start of this step."""
        if block not in self.usage:
            return float("inf")
        weight, step, position = self.usage[block]
        return self.weight / (weight * self.decay ** (self.step - step)) * self.length + position

    def end_step(self, num_accesses: int) -> None:
        self.length, self.position = num_accesses, 0
        self.step += 1
        self.weight = 1.0 + self.weight * self.decay


SLOW: dict[str, type[SlowLRU]] = {
    "next-use": SlowNextUse, "lru": SlowLRU, "lfu": SlowLFU, "se-moe": SlowSeMoe,
}  # fmt: skip
