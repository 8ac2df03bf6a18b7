"""Forecast of an inference engine: tokens per second of some streams, and what bounds them.

A pass has one token of each stream. It multiplies all dense matrices and those of the experts that
its tokens choose, reads keys and values, and launches small kernels. Experts that are not in
memory come from the drive. Routing is taken as even, so a text with favourite experts is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from moesaic.facts.cluster import Device
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import MatmulShape, parameters
from moesaic.policy.cost.compute import ITEM_BYTES, matmul_s
from moesaic.policy.serving.regime import PassFacts, RegimeDecision, choose_regime, touched_share

_KERNELS_PER_LAYER = 60
"""Small kernels of a layer: norms, rotation, routing, order of rows, sums."""


class ForecastFacts(NamedTuple):
    """A model on a machine."""

    model: ModelConfig
    dtype: str
    """Dtype of weights and computation: fp32, bf16, fp16 or fp64."""
    device: Device
    read_bytes_per_s: float
    """Bandwidth of the model's drive."""
    num_slots: int
    """Experts in memory, of all layers."""
    context: int
    """Tokens of each stream before the new one."""


class Forecast(NamedTuple):
    """Speed of a number of streams."""

    streams: int
    tokens_per_s: float
    """Tokens of all streams together."""
    compute_s: float
    """Seconds of a pass without waiting for the drive."""
    pass_s: float
    bottleneck: Literal["compute", "drive"]


def forecast(facts: ForecastFacts, streams: Sequence[int]) -> list[Forecast]:
    """Return the speed of each number of streams."""
    return [_forecast(facts, number) for number in streams]


def _forecast(facts: ForecastFacts, streams: int) -> Forecast:
    compute_s = _dense_s(facts, streams)
    pass_s = compute_s
    if facts.model.experts:
        compute_s += _experts_s(facts, streams)
        decision = _reading(facts, streams, compute_s)
        pass_s = decision.fetch_s
        if decision.stream_s is not None:
            pass_s = min(pass_s, decision.stream_s)
    bottleneck: Literal["compute", "drive"] = "drive" if pass_s > 2 * compute_s else "compute"
    return Forecast(streams, streams / pass_s, compute_s, pass_s, bottleneck)


def _dense_s(facts: ForecastFacts, streams: int) -> float:
    """Return the seconds of dense matrices, of attention over the context, and of small kernels."""
    model, device = facts.model, facts.device
    matrices = [
        p for p in parameters(model, lambda _: ()) if len(p.shape) == 2 and p.name != "embed.weight"
    ]
    shapes = [p.shape for p in matrices]
    if model.tied:
        shapes.append((model.vocab, model.hidden))
    seconds = sum(
        matmul_s(device, facts.dtype, MatmulShape(streams, outputs, inputs))
        for outputs, inputs in shapes
    )
    numbers = model.layers * model.cache_width * streams * facts.context
    cache_bytes = numbers * ITEM_BYTES[facts.dtype]
    launches = model.layers * _KERNELS_PER_LAYER * device.launch_s
    return seconds + cache_bytes / device.memory_bandwidth + launches


def _experts_s(facts: ForecastFacts, streams: int) -> float:
    """Return the seconds of the experts that the tokens of a pass choose."""
    model = facts.model
    used = max(round(model.experts * touched_share(_pass_facts(facts, streams))), 1)
    rows = max(round(streams * model.top_k / used), 1)
    shapes = [(2 * model.ffn, model.hidden), (model.hidden, model.ffn)]
    layer_s = sum(
        matmul_s(
            facts.device, facts.dtype, MatmulShape(rows, outputs, inputs, used), is_grouped=True
        )
        for outputs, inputs in shapes
    )
    return layer_s * len(model.expert_layers)


def _reading(facts: ForecastFacts, streams: int, compute_s: float) -> RegimeDecision:
    return choose_regime(_pass_facts(facts, streams)._replace(compute_s=compute_s))


def _pass_facts(facts: ForecastFacts, streams: int) -> PassFacts:
    model, layers = facts.model, len(facts.model.expert_layers)
    return PassFacts(
        num_tokens=streams, layers=layers, experts=model.experts, top_k=model.top_k,
        num_slots=facts.num_slots,
        expert_bytes=3 * model.hidden * model.ffn * ITEM_BYTES[facts.dtype],
        read_bytes_per_s=facts.read_bytes_per_s, compute_s=0.0,
        miss_share=1.0 - facts.num_slots / (layers * model.experts),
    )  # fmt: skip
