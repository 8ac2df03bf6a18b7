"""Experts that are read ahead, layer by layer, or as they are missed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.api.serve import _log_decisions
from moesaic.base.config import parse
from moesaic.base.decisions import Decision
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import parameters
from moesaic.models.hf.origin import open_origin
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import write_model
from moesaic.policy.serving.budget import ServingBudget
from moesaic.policy.serving.regime import PassFacts, Regime, RegimeDecision, choose_regime
from moesaic.serve import loading
from moesaic.serve.engine import EngineLimits, InferenceEngine
from moesaic.serve.loading import ServedModel, load_model
from moesaic.serve.requests import GenerationRequest, SamplingParams, TokenEvent
from moesaic.testing.states import whole_shard

LAYERS, EXPERTS = 5, 4
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8, 2, 8], [1]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden": 32, "layers": LAYERS, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48,
        "vocab": 41, "max_positions": 64, "experts": EXPERTS, "top_k": 2,
    }  # fmt: skip
    config = parse(ModelConfig, {**PRESETS["tiny-mixtral"], **sizes}, "test")
    draws = torch.Generator().manual_seed(3)
    shards = [
        whole_shard(p.name, torch.randn(p.shape, generator=draws) * 0.4) for p in parameters(config)
    ]
    path = tmp_path_factory.mktemp("model")
    write_model(path, config, InMemoryTensors(shards))
    return path


def load(
    directory: Path, monkeypatch: pytest.MonkeyPatch, num_slots: int | None, regime: Regime | None
) -> ServedModel:
    if num_slots is None:
        return load_model(open_origin(directory), torch.device("cpu"))
    monkeypatch.setattr(loading, "divide_memory", lambda facts: ServingBudget(num_slots, 64))
    served = load_model(open_origin(directory), torch.device("cpu"), memory=3 << 30)
    assert served.reads is not None
    if regime is not None:
        served.reads.policy = lambda facts: RegimeDecision(regime, 0.0, 0.0)
    return served


def texts(served: ServedModel) -> list[list[int]]:
    """Return the greedy continuations of all prompts, in two rounds."""
    limits = EngineLimits(cache_tokens=256, max_running=4, tokens_per_pass=8)
    engine = InferenceEngine(served.model, limits, served.reads)
    results: list[list[int]] = []
    for prompt in PROMPTS * 2:
        tokens: list[int] = []
        results.append(tokens)

        def take(event: Any, tokens: list[int] = tokens) -> None:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)

        greedy = SamplingParams(temperature=0.0)
        engine.submit(GenerationRequest(tuple(prompt), 12, greedy), take)
    while engine.step():
        pass
    return results


@pytest.mark.parametrize("regime", ["stream", "fetch", None])
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_any_regime_and_ring_size_gives_the_same_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch, layers: int, regime: Regime | None
) -> None:
    with load(directory, monkeypatch, None, None) as resident:
        expected = texts(resident)
        all_bytes = sum(
            bank.arena.numel() * bank.arena.element_size()
            for _, bank in resident.model.expert_banks()
        )
    with load(directory, monkeypatch, layers * EXPERTS, regime) as served:
        places = served.model.layers[0].moe.bank.places
        assert places.memory.numel() * 4 * LAYERS == all_bytes * layers
        assert texts(served) == expected
        stats = served.expert_stats
        assert stats.misses > 0
        assert served.reads is not None
        if regime is not None:
            assert served.reads.num_passes[regime] == sum(served.reads.num_passes.values()) > 0


def test_streaming_keeps_what_it_need_not_read_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots but those of two layers, one that computes and one that is read, keep experts."""
    with load(directory, monkeypatch, 3 * EXPERTS, "stream") as served:
        model, reads = served.model, served.reads
        assert reads is not None
        engine = InferenceEngine(
            model, EngineLimits(cache_tokens=256, max_running=1, tokens_per_pass=64), reads
        )
        counts = []
        for seed in range(4):
            draws = torch.Generator().manual_seed(seed)
            prompt = tuple(torch.randint(0, 41, (50,), generator=draws).tolist())
            before = served.expert_stats
            engine.submit(GenerationRequest(prompt, 1), lambda event: None)
            engine.step()
            counts.append(served.expert_stats.misses - before.misses)
        assert counts[0] == LAYERS * EXPERTS
        assert max(counts[1:]) <= (LAYERS - 3 + 2) * EXPERTS


def test_hits_are_uses_without_a_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streaming pass reads experts that it does not use, which takes no hit back."""
    with load(directory, monkeypatch, 3 * EXPERTS, "stream") as served:
        engine = InferenceEngine(
            served.model, EngineLimits(cache_tokens=256, max_running=1, tokens_per_pass=64),
            served.reads,
        )  # fmt: skip
        engine.submit(GenerationRequest((3,), 12), lambda event: None)
        hits = [0]
        while engine.step():
            hits.append(served.expert_stats.hits)
        assert hits == sorted(hits)
        assert 0 < hits[-1] < 12 * LAYERS * served.model.config.top_k


def facts(**values: Any) -> PassFacts:
    default = PassFacts(
        num_tokens=1, layers=12, experts=32, top_k=2, num_slots=96, expert_bytes=5_000_000,
        read_bytes_per_s=2e9, compute_s=0.1, miss_share=0.7,
    )  # fmt: skip
    return default._replace(**values)


def test_regimes() -> None:
    assert choose_regime(facts(num_slots=384)).regime == "resident"
    assert choose_regime(facts()).regime == "fetch"
    assert choose_regime(facts(num_tokens=512, compute_s=1.0)).regime == "stream"
    assert choose_regime(facts(num_tokens=512, compute_s=1.0, num_slots=63)).regime == "fetch"
    assert choose_regime(facts(num_tokens=512, read_bytes_per_s=0.0)).regime == "fetch"


def test_expected_seconds_are_those_of_the_drive_or_of_computing() -> None:
    found = choose_regime(facts(num_tokens=10_000, compute_s=0.0))
    assert found.fetch_s == pytest.approx(384 * 0.7 * 5e6 / 2e9)
    assert found.stream_s == pytest.approx(384 * (1 - 96 / 384 + 2 / 12) * 5e6 / 2e9)
    slow = choose_regime(facts(num_tokens=10_000, compute_s=50.0))
    assert slow.stream_s == pytest.approx(50.0, rel=0.01)
    assert slow.fetch_s == pytest.approx(50.0 + found.fetch_s)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no drive that is always full")
def test_a_log_that_cannot_be_written_ends_alone() -> None:
    reads, warnings = SimpleNamespace(on_change=None), list[str]()
    served: Any = SimpleNamespace(decision=None, reads=reads)
    log = _log_decisions(served, Path("/dev/full"), warnings.append)
    record = reads.on_change
    assert record is not None
    record(Decision(facts(), choose_regime(facts()), 0.0))
    assert reads.on_change is None
    (warning,) = warnings
    assert "events end here: '/dev/full' cannot be written" in warning
    log.close()
