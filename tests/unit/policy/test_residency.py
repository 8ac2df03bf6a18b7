"""Residency policies: hand-worked cases, traces of training, and Belady's minimum."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest

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
    belady_misses,
    count_misses,
    make_residency,
)

EXPERTS = 8
ARRAYS = 4
"""Blocks of an expert: parameters, two moments, gradient."""


def used(residency: Residency, accesses: str) -> Residency:
    """Return `residency` after uses of blocks, each a digit."""
    for block in accesses:
        residency.access(int(block))
    return residency


def facts(accesses: int) -> ResidencyFacts:
    return ResidencyFacts("a policy", 3, accesses, accesses)


# Hand-worked cases.


def test_lru_evicts_the_least_recent() -> None:
    lru = used(LeastRecentlyUsed(), "123123312")
    assert lru.evict([1, 2, 3], {}) == 3
    lru.removed(3)
    assert used(lru, "31").evict([1, 2, 3], {}) == 2
    assert lru.evict([1, 7], {}) == 7, "a block that was read ahead and not used"


def test_lfu_evicts_the_fewest_uses_and_counts_removed_blocks() -> None:
    lfu = used(LeastFrequentlyUsed(), "1112233")
    assert lfu.evict([1, 2, 3], {}) == 2, "2 and 3 have two uses, 3 is more recent"
    lfu.removed(2)
    assert used(lfu, "2").evict([1, 2, 3], {}) == 3, "2 now has three"


def test_se_moe_evicts_the_fewest_hits_that_reach_the_threshold() -> None:
    """Hits are 5, 3 and 1: the newcomer 3 is protected, which plain LFU would evict (gap e)."""
    se_moe = used(SeMoe(threshold=2), "111112223")
    assert se_moe.evict([1, 2, 3], {}) == 2
    assert used(LeastFrequentlyUsed(), "111112223").evict([1, 2, 3], {}) == 3


def test_se_moe_evicts_below_the_threshold_if_it_must() -> None:
    """Gap a: no block has nine hits."""
    assert used(SeMoe(threshold=9), "111222233").evict([1, 2, 3], {}) == 3


def test_se_moe_admits_with_one_hit_and_breaks_ties_by_admission() -> None:
    """Gap b: 3 had two hits, left, and returns with one."""
    se_moe = used(SeMoe(threshold=1), "33112")
    se_moe.removed(3)
    assert used(se_moe, "3").evict([1, 2, 3], {}) == 2, "2 and 3 have one hit, 2 came first"


def test_se_moe_uses_all_slots() -> None:
    """Gap c: three blocks in three slots miss three times only."""
    assert count_misses([[1, 2, 3]] * 4, 3, SeMoe()) == 3


def test_se_moe_gives_a_block_that_was_read_ahead_one_hit() -> None:
    """Gap d: 7 was read ahead and never used; the cache may evict it like any newcomer."""
    se_moe = used(SeMoe(threshold=1), "1122")
    assert se_moe.evict([1, 2, 7], {}) == 7
    assert used(SeMoe(threshold=2), "1122").evict([1, 2, 7], {}) == 1, "a newcomer is protected"


def test_se_moe_decays_hits() -> None:
    """After eight uses 1 has 8 hits; with K = 8 and beta = 1/4 it has 2, and 2 gets 3 later."""
    assert used(SeMoe(1, 0.25, 8), "11111111222").evict([1, 2], {}) == 1
    assert used(SeMoe(1, 0.25, 100), "11111111222").evict([1, 2], {}) == 2


def test_se_moe_decays_at_the_end_of_a_step_by_default() -> None:
    se_moe = used(SeMoe(1, 0.25), "11111111")
    se_moe.end_step(facts(8))
    assert used(se_moe, "222").evict([1, 2], {}) == 1


def test_next_use_evicts_the_furthest_expected_access() -> None:
    ours = used(NextUse(), "123")
    assert ours.evict([1, 2, 3], {1: 5, 2: 9, 3: 7}) == 2
    assert ours.evict([1, 2, 3], {1: 5, 2: 9}) == 3, "3 is not expected"
    assert ours.evict([1, 2, 7], {}) == 7, "7 was never used"


def test_next_use_knows_the_order_of_layers() -> None:
    """After forward 1 2 3 and backward 3 2 1, the last layer is needed last in the next step."""
    ours = used(NextUse(), "123321")
    ours.end_step(facts(6))
    assert used(ours, "123321").evict([1, 2, 3], {}) == 3


def test_next_use_weighs_frequency_by_steps() -> None:
    """1 is first in a step, but only in every third one; 2 and 3 are in each."""
    ours = NextUse()
    for accesses in ("123", "23", "23", "123"):
        used(ours, accesses)
        ours.end_step(facts(len(accesses)))
    assert ours.evict([1, 2, 3], {}) == 1


def test_next_use_breaks_ties_by_the_lower_block() -> None:
    assert NextUse().evict([9, 4, 6], {}) == 4
    assert SeMoe().evict([9, 4, 6], {}) == 9, "the first that the cache names"


# Decisions.


@pytest.mark.parametrize("name", RESIDENCIES)
def test_a_step_is_one_decision(name: str) -> None:
    residency, log = used(make_residency(name), "1122"), list[Decision[ResidencyFacts, object]]()
    first = residency.evict([1, 2], {1: 3, 2: 4})
    residency.removed(first)
    residency.evict([3 - first], {})
    outcome = decide(residency.end_step, facts(4), log)
    assert outcome == ResidencyDecision((first, 3 - first), 1)
    assert log[0].facts.num_accesses == 4
    assert residency.end_step(facts(0)) == ResidencyDecision((), 0), "a step begins empty"


def test_names_are_those_of_the_job() -> None:
    assert set(RESIDENCIES) == set(get_args(ResidencyName))
    assert isinstance(make_residency(MemoryConfig(ssd="x").residency), NextUse)
    with pytest.raises(ConfigError, match=r'residency = "lrv" is not known: did you mean "lru"'):
        make_residency("lrv")


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


TRACES = list(itertools.product(["zipf", "drifting", "cyclic"], [False, True], [0, 1]))


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
