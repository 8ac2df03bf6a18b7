"""Residency policies: hand-worked cases, traces of training, and Belady's minimum."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import pytest
from slow_residency import SLOW

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError
from moesaic.facts.job.memory import MemoryConfig, ResidencyName
from moesaic.policy.residency import (
    RESIDENCIES,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NextUse,
    Residency,
    ResidencyDecision,
    ResidencyFacts,
    SeMoe,
    make_residency,
)
from moesaic.testing.residency import belady_misses

EXPERTS = 8
ARRAYS = 4
"""Blocks of an expert: parameters, two moments, gradient."""


def used(residency: Residency, accesses: str) -> Residency:
    """Return `residency` after uses of blocks, each a digit."""
    for block in accesses:
        residency.access(int(block))
    return residency


def evict(
    residency: Residency,
    candidates: Sequence[int],
    coming: Mapping[int, int] | None = None,
) -> int | None:
    """Return the victim among `candidates`, which may leave from now on."""
    for block in candidates:
        residency.release(block, (coming or {}).get(block))
    return residency.evict()


def facts(accesses: int) -> ResidencyFacts:
    return ResidencyFacts("a policy", 3, accesses, accesses)


def count_misses(
    steps: Sequence[Sequence[int]], num_slots: int, residency: Residency, expected_steps: int = 0
) -> int:
    """Return the misses of a cache without read-ahead.

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
                    victim = evict(residency, list(in_memory), coming)
                    assert victim is not None
                    residency.removed(victim)
                    in_memory.remove(victim)
                in_memory.add(block)
            residency.access(block)
        residency.end_step(ResidencyFacts("", num_slots, len(step), num_misses - before))
    return num_misses


# Hand-worked cases.


def test_lru_evicts_the_least_recent() -> None:
    lru = used(LeastRecentlyUsed(), "123123312")
    assert evict(lru, [1, 2, 3]) == 3
    lru.removed(3)
    assert evict(used(lru, "31"), [1, 2, 3]) == 2
    assert evict(lru, [1, 7]) == 7, "a block that was read ahead and not used"


def test_lfu_evicts_the_fewest_uses_and_counts_removed_blocks() -> None:
    lfu = used(LeastFrequentlyUsed(), "1112233")
    assert evict(lfu, [1, 2, 3]) == 2, "2 and 3 have two uses, 3 is more recent"
    lfu.removed(2)
    assert evict(used(lfu, "2"), [1, 2, 3]) == 3, "2 now has three"


def test_se_moe_evicts_the_fewest_hits_that_reach_the_threshold() -> None:
    """Hits are 5, 3 and 1: the newcomer 3 is protected, which plain LFU would evict (gap e)."""
    se_moe = used(SeMoe(threshold=2), "111112223")
    assert evict(se_moe, [1, 2, 3]) == 2
    assert evict(used(LeastFrequentlyUsed(), "111112223"), [1, 2, 3]) == 3


def test_se_moe_evicts_below_the_threshold_if_it_must() -> None:
    """Gap a: no block has nine hits."""
    assert evict(used(SeMoe(threshold=9), "111222233"), [1, 2, 3]) == 3


def test_se_moe_admits_with_one_hit_and_breaks_ties_by_admission() -> None:
    """Gap b: 3 had two hits, left, and returns with one."""
    se_moe = used(SeMoe(threshold=1), "33112")
    se_moe.removed(3)
    assert evict(used(se_moe, "3"), [1, 2, 3]) == 2, "2 and 3 have one hit, 2 came first"


def test_se_moe_uses_all_slots() -> None:
    """Gap c: three blocks in three slots miss three times only."""
    assert count_misses([[1, 2, 3]] * 4, 3, SeMoe()) == 3


def test_se_moe_gives_a_block_that_was_read_ahead_one_hit() -> None:
    """Gap d: 7 was read ahead and never used; the cache may evict it like any newcomer."""
    se_moe = used(SeMoe(threshold=1), "1122")
    assert evict(se_moe, [1, 2, 7]) == 7
    assert evict(used(SeMoe(threshold=2), "1122"), [1, 2, 7]) == 1, "a newcomer is protected"


def test_se_moe_decays_hits() -> None:
    """After eight uses 1 has 8 hits; with K = 8 and beta = 1/4 it has 2, and 2 gets 3 later."""
    assert evict(used(SeMoe(1, 0.25, 8), "11111111222"), [1, 2]) == 1
    assert evict(used(SeMoe(1, 0.25, 100), "11111111222"), [1, 2]) == 2


def test_se_moe_decays_at_the_end_of_a_step_by_default() -> None:
    se_moe = used(SeMoe(1, 0.25), "11111111")
    se_moe.end_step(facts(8))
    assert evict(used(se_moe, "222"), [1, 2]) == 1


def test_next_use_evicts_the_furthest_expected_access() -> None:
    ours = used(NextUse(), "123")
    assert evict(ours, [1, 2, 3], {1: 5, 2: 9, 3: 7}) == 2
    assert evict(ours, [1, 2, 3], {1: 5, 2: 9}) == 3, "3 is not expected"
    assert evict(ours, [1, 2, 7]) == 7, "7 was never used"


def test_next_use_knows_the_order_of_layers() -> None:
    """After forward 1 2 3 and backward 3 2 1, the last layer is needed last in the next step."""
    ours = used(NextUse(), "123321")
    ours.end_step(facts(6))
    assert evict(used(ours, "123321"), [1, 2, 3]) == 3


def test_next_use_weighs_frequency_by_steps() -> None:
    """1 is first in a step, but only in every third one; 2 and 3 are in each."""
    ours = NextUse()
    for accesses in ("123", "23", "23", "123"):
        used(ours, accesses)
        ours.end_step(facts(len(accesses)))
    assert evict(ours, [1, 2, 3]) == 1


def test_next_use_breaks_ties_by_the_lower_block() -> None:
    assert evict(NextUse(), [9, 4, 6]) == 4
    assert evict(SeMoe(), [9, 4, 6]) == 9, "the first that the cache names"


# Decisions.


@pytest.mark.parametrize("name", RESIDENCIES)
def test_a_step_is_one_decision(name: str) -> None:
    residency, log = used(make_residency(name), "1122"), list[Decision[ResidencyFacts, object]]()
    first = evict(residency, [1, 2], {1: 3, 2: 4})
    assert first is not None
    residency.removed(first)
    evict(residency, [3 - first])
    outcome = decide(residency.end_step, facts(4), log)
    assert outcome == ResidencyDecision((first, 3 - first), 1)
    assert log[0].facts.num_accesses == 4
    assert residency.end_step(facts(0)) == ResidencyDecision((), 0), "a step begins empty"


def test_names_are_those_of_the_job() -> None:
    assert set(RESIDENCIES) == set(get_args(ResidencyName))
    assert isinstance(make_residency(MemoryConfig(ssd="x").residency), NextUse)
    with pytest.raises(ConfigError, match=r'residency = "lrv" is not known: did you mean "lru"'):
        make_residency("lrv")


class Simulation:
    """A policy and its slow twin in one cache, with random uses, read-ahead and expectations."""

    num_slots, num_blocks = 12, 30

    def __init__(self, name: str, seed: int) -> None:
        self.fast, self.slow, self.random = make_residency(name), SLOW[name](), random.Random(seed)
        self.in_memory, self.held = dict[int, None](), set[int]()
        self.coming = dict[int, int]()
        self.num_accesses = self.num_evictions = self.num_stops = 0

    def evict(self, after: int) -> bool:
        """Return False if all blocks must stay."""
        victim = self.fast.evict(after)
        assert victim == self.slow.evict(after)
        if victim is None:
            self.num_stops += 1
            return False
        self.num_evictions += 1
        self.remove(victim)
        return True

    def remove(self, block: int) -> None:
        self.fast.removed(block)
        self.slow.removed(block)
        del self.in_memory[block]

    def release(self, block: int) -> None:
        if block in self.in_memory and block not in self.held:
            self.fast.release(block, self.coming.get(block))
            self.slow.release(block, self.coming.get(block))

    def use(self) -> None:
        """Use some blocks, while others that were not used before may still be held."""
        blocks = self.random.sample(range(self.num_blocks), self.random.randint(1, 4))
        for block in blocks:
            self.held.add(block)
            self.fast.access(block)
            self.slow.access(block)
            self.num_accesses += 1
            self.coming.pop(block, None)
        for block in sorted(set(blocks) - self.in_memory.keys()):
            assert len(self.in_memory) < self.num_slots or self.evict(-1)
            self.in_memory[block] = None
        for block in blocks:
            self.held.discard(block)
            self.release(block)

    def expect(self) -> None:
        blocks = self.random.sample(range(self.num_blocks), self.random.randint(0, 20))
        self.coming = {block: at for at, block in enumerate(blocks)}
        for block in self.in_memory:
            self.release(block)

    def read_ahead(self) -> None:
        for block, at in self.coming.items():
            if block not in self.in_memory:
                if len(self.in_memory) == self.num_slots and not self.evict(at):
                    return
                self.in_memory[block] = None
                self.release(block)

    def discard(self) -> None:
        if self.in_memory:
            self.remove(self.random.choice(list(self.in_memory)))

    def end_step(self) -> None:
        self.fast.end_step(facts(self.num_accesses))
        self.slow.end_step(self.num_accesses)
        self.num_accesses = 0


@pytest.mark.parametrize("name", RESIDENCIES)
@pytest.mark.parametrize("seed", range(5))
def test_victims_are_those_of_the_definition(name: str, seed: int) -> None:
    simulation = Simulation(name, seed)
    operations = {"use": 20, "read_ahead": 6, "expect": 4, "discard": 1, "end_step": 1}
    for _ in range(600):
        (choice,) = simulation.random.choices(list(operations), list(operations.values()))
        getattr(simulation, choice)()
    assert simulation.num_evictions > 500
    assert simulation.num_stops > 10


# Traces of training.


def training_steps(
    kind: str, seed: int, *, clip: bool, layers: int = 3, num_steps: int = 16
) -> list[list[int]]:
    """Return the blocks that each step uses.

    Forward takes the layers in order, backward in reverse. Without clipping, an expert is updated
    right behind its backward; with it, in a pass over the layers at the end.
    """
    rng = random.Random(seed)
    ranking = [rng.sample(range(EXPERTS), EXPERTS) for _ in range(layers)]
    steps = []
    for _ in range(num_steps):
        chosen = [sorted(_experts(kind, ranking[layer], rng)) for layer in range(layers)]
        steps.append(list(_step(chosen, clip)))
    return steps


def _experts(kind: str, ranking: list[int], rng: random.Random) -> set[int]:
    """Return the experts of a layer that get tokens; busy experts come first in `ranking`."""
    if kind == "cyclic":
        return set(ranking)
    if kind == "drifting" and rng.random() < 0.5:
        a, b = rng.sample(range(EXPERTS), 2)
        ranking[a], ranking[b] = ranking[b], ranking[a]
    weights = [1 / (1 + place) ** 1.2 for place in range(EXPERTS)]
    return set(rng.choices(ranking, weights, k=4))


def _step(chosen: Sequence[Sequence[int]], clip: bool) -> Iterator[int]:
    def blocks(layer: int, arrays: Sequence[int]) -> Iterator[int]:
        for expert in chosen[layer]:
            yield from ((layer * EXPERTS + expert) * ARRAYS + array for array in arrays)

    layers = range(len(chosen))
    for layer in layers:
        yield from blocks(layer, [0])
    for layer in reversed(layers):
        yield from blocks(layer, [0, 3])
        if not clip:
            yield from blocks(layer, [0, 3, 1, 2])
    for layer in layers if clip else ():
        yield from blocks(layer, [0, 3, 1, 2])


TRACES = [
    pytest.param(kind, clip, seed, marks=[pytest.mark.soak] * seed)
    for kind in ("zipf", "drifting", "cyclic")
    for clip in (False, True)
    for seed in (0, 1)
]


@pytest.mark.parametrize(("kind", "clip", "seed"), TRACES)
@pytest.mark.parametrize("num_slots", [6, 20, 45])
def test_next_use_misses_least(kind: str, clip: bool, seed: int, num_slots: int) -> None:
    steps = training_steps(kind, seed, clip=clip)
    others = [LeastRecentlyUsed(), LeastFrequentlyUsed(), SeMoe()]
    best = min(count_misses(steps, num_slots, one) for one in others)
    assert count_misses(steps, num_slots, NextUse(), expected_steps=1) <= best
    fewest = belady_misses([block for step in steps for block in step], num_slots)
    assert count_misses(steps, num_slots, NextUse(), expected_steps=len(steps)) == fewest
    if kind == "cyclic":
        assert count_misses(steps, num_slots, NextUse(), expected_steps=1) <= 1.02 * fewest


def test_an_ample_cache_misses_first_uses_only() -> None:
    steps = training_steps("zipf", 0, clip=True)
    num_blocks = len({block for step in steps for block in step})
    for name in RESIDENCIES:
        assert count_misses(steps, num_blocks, make_residency(name), 1) == num_blocks


# Belady.


def fewest_misses(trace: Sequence[int], num_slots: int) -> int:
    """Return the fewest misses over all choices of evicted blocks."""
    reached = {frozenset[int](): 0}
    for block in trace:
        found = dict[frozenset[int], int]()
        for in_memory, misses in reached.items():
            if block in in_memory:
                options, cost = [in_memory], misses
            elif len(in_memory) < num_slots:
                options, cost = [in_memory | {block}], misses + 1
            else:
                options, cost = [in_memory - {out} | {block} for out in in_memory], misses + 1
            for option in options:
                found[option] = min(cost, found.get(option, cost))
        reached = found
    return min(reached.values())


def test_belady_by_hand() -> None:
    """The textbook's trace: seven misses in three slots, six in four; LRU has ten in three."""
    trace = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]
    assert belady_misses(trace, 3) == 7
    assert belady_misses(trace, 4) == 6
    assert count_misses([trace], 3, LeastRecentlyUsed()) == 10
    assert belady_misses([], 3) == 0


@pytest.mark.parametrize("seed", range(40))
def test_belady_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    num_slots, trace = rng.randint(1, 4), rng.choices(range(6), k=rng.randint(1, 14))
    fewest = fewest_misses(trace, num_slots)
    assert belady_misses(trace, num_slots) == fewest
    assert count_misses([trace], num_slots, NextUse(), expected_steps=1) == fewest
