"""Division of a process's memory between experts and the key-value cache."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.policy.serving.budget import (
    MIN_SLOTS,
    ServingFacts,
    check_memory,
    divide_memory,
    serving_facts,
    smallest_memory,
)

MIB = 1 << 20


def facts_of(preset: str, memory_bytes: int, **changes: Any) -> ServingFacts:
    given: dict[str, Any] = {
        "memory_bytes": memory_bytes, "interpreter_bytes": 300 * MIB, "read_bytes": 60 * MIB,
        "tokens_per_pass": 256, "max_running": 8,
    }  # fmt: skip
    return serving_facts(ModelConfig(**PRESETS[preset]), 2, **{**given, **changes})


def taken(facts: ServingFacts) -> int:
    """Return the bytes that the decision takes."""
    budget = divide_memory(facts)
    reads = facts.read_bytes * (budget.num_slots < facts.num_experts)
    return (
        facts.fixed_bytes + reads + budget.num_slots * facts.expert_bytes
        + budget.cache_tokens * facts.position_bytes
    )  # fmt: skip


@pytest.mark.parametrize("preset", ["olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v3", "tiny-mixtral"])
@pytest.mark.parametrize("cache_tokens", [None, 1000])
def test_every_budget_is_kept(preset: str, cache_tokens: int | None) -> None:
    smallest = smallest_memory(facts_of(preset, 0, cache_tokens=cache_tokens))
    last = 0
    for factor in (1.0, 1.01, 1.2, 1.5, 2, 4, 16, 500):
        facts = facts_of(preset, int(factor * smallest), cache_tokens=cache_tokens)
        check_memory(facts)
        budget = divide_memory(facts)
        assert taken(facts) <= facts.memory_bytes
        assert min(MIN_SLOTS, facts.num_experts) <= budget.num_slots <= facts.num_experts
        assert budget.num_slots >= last
        assert budget.cache_tokens % 16 == 0
        assert budget.cache_tokens >= (512 if cache_tokens is None else 1000)
        assert cache_tokens is None or budget.cache_tokens == 1008
        last = budget.num_slots
    assert last == facts.num_experts


def test_memory_is_used() -> None:
    """Less than an expert and a page of positions is left over."""
    for memory_mib in (2500, 4000, 8000):
        facts = facts_of("olmoe-1b-7b", memory_mib * MIB)
        left = facts.memory_bytes - taken(facts)
        assert left < facts.expert_bytes + 16 * facts.position_bytes


@pytest.mark.parametrize("preset", ["olmoe-1b-7b", "tiny-dense"])
def test_the_smallest_budget_is_named_with_its_parts(preset: str) -> None:
    smallest = smallest_memory(facts_of(preset, 0))
    check_memory(facts_of(preset, smallest))
    with pytest.raises(ConfigError) as caught:
        check_memory(facts_of(preset, smallest - 1))
    text = str(caught.value)
    assert "368.0 MiB for the interpreter" in text
    assert "512 key-value positions" in text
    assert ("2 experts" in text) == (preset != "tiny-dense")
    assert ("for reading" in text) == (preset != "tiny-dense")
    assert f'set memory to "{-(-(smallest + 16 * MIB) // MIB)}MiB" or more' in text


def test_sizes_of_a_known_model() -> None:
    facts = facts_of("olmoe-1b-7b", 0)
    assert facts.expert_bytes == 3 * 2048 * 1024 * 2
    assert facts.num_experts == 16 * 64
    assert facts.position_bytes == 16 * 2 * 2048 * 2 + 2048 * 2 + 32
    assert 0.9e9 < facts.dense_bytes < 1.1e9
    deepseek = facts_of("deepseek-v3", 0)
    assert deepseek.position_bytes == 61 * 576 * 2 + 256 * 6
    long_passes = facts_of("deepseek-v3", 0, tokens_per_pass=2048)
    assert long_passes.position_bytes == 61 * 576 * 2 + 2048 * 2 + 256 * 4
