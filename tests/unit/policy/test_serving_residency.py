"""Residency of experts in inference, beside LRU and LFU, on routing with favourites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moesaic.policy.residency import LeastFrequentlyUsed, LeastRecentlyUsed, Residency
from moesaic.policy.serving.residency import ExpectedUse

EXPERTS, LAYERS, TOP_K = 12, 4, 3


def route(num_passes: int, tokens: int, topic_passes: int) -> list[list[list[int]]]:
    """Return the blocks of each layer and pass. A topic has favourites, and lasts some passes."""
    draws, passes = np.random.default_rng(0), []
    for number in range(num_passes):
        if number % topic_passes == 0:
            popularity = draws.dirichlet(np.full(EXPERTS, 0.3), LAYERS)
            popularity = 0.9 * popularity + 0.1 / EXPERTS
        layers = []
        for layer in range(LAYERS):
            chosen = {
                int(expert)
                for _ in range(tokens)
                for expert in draws.choice(EXPERTS, TOP_K, replace=False, p=popularity[layer])
            }
            layers.append([layer * EXPERTS + expert for expert in sorted(chosen)])
        passes.append(layers)
    return passes


def count_misses(
    passes: Sequence[Sequence[Sequence[int]]], num_slots: int, residency: Residency
) -> int:
    """Return the misses of a cache that holds the blocks of a layer at once."""
    in_memory, num_misses = set[int](), 0
    for blocks in (blocks for layers in passes for blocks in layers):
        for block in blocks:
            residency.access(block)
        for block in blocks:
            if block not in in_memory:
                num_misses += 1
                if len(in_memory) == num_slots:
                    victim = residency.evict()
                    assert victim is not None
                    residency.removed(victim)
                    in_memory.remove(victim)
                in_memory.add(block)
        for block in blocks:
            residency.release(block, None)
    return num_misses


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("topic_passes", "bound"), [(1000, 1.02), (50, 1.1)])
@pytest.mark.parametrize("num_slots", [16, 24, 36])
def test_it_misses_hardly_more_than_lru_and_lfu(
    tokens: int, topic_passes: int, bound: float, num_slots: int
) -> None:
    """A new topic costs a little, because passes of the last one still count."""
    passes = route(150, tokens, topic_passes)
    found = count_misses(passes, num_slots, ExpectedUse(EXPERTS, LAYERS))
    others = LeastRecentlyUsed(), LeastFrequentlyUsed()
    best = min(count_misses(passes, num_slots, other) for other in others)
    assert found <= bound * best


def test_the_next_layers_stay() -> None:
    """Where all experts are always used, those of the layer before leave; LRU would lose all."""
    passes = [[list(range(4)), list(range(4, 8)), list(range(8, 12))]] * 20
    assert count_misses(passes, 8, LeastRecentlyUsed()) == 240
    assert count_misses(passes, 8, ExpectedUse(4, 3)) < 140


def first_of(residency: Residency, blocks: dict[int, int | None]) -> int | None:
    """Return the block that leaves first if only these may, with their next accesses."""
    for block, next_access in blocks.items():
        residency.release(block, next_access)
    return residency.evict()


def test_experts_that_the_layer_still_needs_stay() -> None:
    def used() -> Residency:
        residency = ExpectedUse(4, 2)
        for block in (0, 1, 2, 0, 1):
            residency.access(block)
        return residency

    assert first_of(used(), {0: None, 1: 5, 2: 7}) == 0
    assert first_of(used(), {1: 5, 2: 7}) == 2
    assert first_of(used(), {0: None, 1: None, 2: None}) == 2
    assert first_of(used(), {0: None, 3: None}) == 3  # It was read ahead for nothing.
