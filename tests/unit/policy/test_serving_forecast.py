"""Forecast of an inference engine, against sums by hand."""

from __future__ import annotations

import pytest

from moesaic.base.config import parse
from moesaic.facts.cluster import Device
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.policy.serving.forecast import ForecastFacts, forecast

MODEL = parse(
    ModelConfig,
    {
        **PRESETS["tiny-mixtral"], "hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4,
        "head_dim": 64, "ffn": 896, "experts": 32, "top_k": 2, "vocab": 4096,
    },
    "test",
)  # fmt: skip
EXPERT_BYTES = 3 * 1024 * 896 * 2
DENSE_BYTES = 2 * (12 * 1024 * (2 * 1024 + 2 * 256 + 32) + 4096 * 1024)
BANDWIDTH = 20e9


def facts(num_slots: int, read: float = 2e9, context: int = 0) -> ForecastFacts:
    device = parse(
        Device,
        {
            "kind": "cpu", "model": "test", "memory_bytes": 1e10, "memory_bandwidth": BANDWIDTH,
            "launch_s": 0.0, "matmul": [{"dtype": "bf16", "flops": 1e15}],
        },
        "test",
    )  # fmt: skip
    return ForecastFacts(MODEL, "bf16", device, read, num_slots, context)


def test_one_stream_in_memory_reads_its_weights_once() -> None:
    (found,) = forecast(facts(384), [1])
    expected = (DENSE_BYTES + 12 * 2 * EXPERT_BYTES) / BANDWIDTH
    assert found.pass_s == pytest.approx(expected, rel=0.02)
    assert found.tokens_per_s == pytest.approx(1 / found.pass_s)
    assert found.bottleneck == "compute"


def test_context_adds_keys_and_values() -> None:
    (short,), (long,) = (forecast(facts(384, context=length), [1]) for length in (0, 1000))
    cached = 12 * 2 * 4 * 64 * 2 * 1000
    assert long.pass_s - short.pass_s == pytest.approx(cached / BANDWIDTH)


def test_missing_experts_come_from_the_drive() -> None:
    (resident,), (found,) = forecast(facts(384), [1]), forecast(facts(96), [1])
    reads = 12 * 2 * 0.75 * EXPERT_BYTES / 2e9
    assert found.pass_s == pytest.approx(resident.pass_s + reads)
    assert found.bottleneck == "drive"


def test_more_streams_are_faster_together() -> None:
    speeds = [one.tokens_per_s for one in forecast(facts(96), [1, 8, 64])]
    assert speeds == sorted(speeds)
