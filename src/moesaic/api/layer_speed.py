"""Speed of one expert layer on this machine, and its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from moesaic.api.start import exit_on_interrupt
from moesaic.facts.job.bench import BenchConfig

if TYPE_CHECKING:
    from moesaic.models.expert_benchmark import DeviceLimit, MeasuredSpeed, SkippedBatch

_LIMITS_FRACTION = 0.2
"""Fraction of the time for the limits."""


class LayerSpeeds(NamedTuple):
    """Measured speeds of an expert layer."""

    device: str
    backends: dict[str, str]
    """Matmul backend of the experts by dtype."""
    limits: list[DeviceLimit]
    speeds: list[MeasuredSpeed]
    skipped: list[SkippedBatch]
    free_bytes: int
    """Memory in addition to the experts."""


def measure_layer(config: BenchConfig, on_start: Callable[[str], object]) -> LayerSpeeds:
    """Measure the layer of `config` within about `config.seconds`; `on_start` gets the name of each
    measurement."""
    with exit_on_interrupt():
        from moesaic.kernels import device as devices
        from moesaic.kernels.grouped_mm import check_backend
        from moesaic.models.expert_benchmark import (
            ExpertLayerBenchmark,
            MeasuredSpeed,
            measure_speeds,
        )
    device = devices.resolve(config.device, key="device")
    check_backend(config.grouped_mm, device, key="grouped_mm")
    devices.activate(device)
    layer = ExpertLayerBenchmark(config.model, device, config.grouped_mm)
    speeds: list[MeasuredSpeed] = []
    skipped: list[SkippedBatch] = []
    num_dtypes, limits_s = len(config.dtypes), _LIMITS_FRACTION * config.seconds
    dtype_budget_s = (config.seconds - limits_s) / num_dtypes
    on_start("the limit")
    limits = layer.measure_limits(config.dtypes, limits_s / (num_dtypes + 1))
    for limit in limits:

        def start_batch(tokens: int, dtype: str = limit.dtype) -> None:
            on_start(f"{dtype}, {tokens:,} tokens")

        for batch in measure_speeds(layer, limit, config.tokens, dtype_budget_s, start_batch):
            if isinstance(batch, MeasuredSpeed):
                speeds.append(batch)
            else:
                skipped.append(batch)
    backends = layer.grouped_mm_backends(config.dtypes)
    return LayerSpeeds(
        devices.describe(device), backends, limits, speeds, skipped, layer.free_bytes
    )
