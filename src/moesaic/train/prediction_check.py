"""Measurement of the figures that a run's plan predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from moesaic.dist.collectives import all_gather
from moesaic.dist.world import World
from moesaic.facts.plan import MEDIAN_WINDOW, WARMUP_STEPS, Plan, measure
from moesaic.kernels import device as devices


class PredictionCheck:
    """Collector of this rank's step times; does nothing if the plan has no predictions."""

    def __init__(self, plan: Plan, units_per_step: int, world: World) -> None:
        """Compare with the predictions of `plan`; rates count units, such as tokens."""
        self._predicted, self._device = plan.predictions, world.device
        self._units_per_step = units_per_step
        self._steps: deque[tuple[float, Mapping[str, float]]] = deque(
            maxlen=WARMUP_STEPS + MEDIAN_WINDOW
        )

    def add_step(self, step_s: float, phases_s: Mapping[str, float]) -> None:
        """Add the times of one step, in total and by phase."""
        if self._predicted is not None:
            self._steps.append((step_s, phases_s))

    def compare(self, peak_bytes: int) -> dict[str, Any] | None:
        """Return predicted and measured figures as plain data; None without either."""
        if self._predicted is None:
            return None
        names = dict.fromkeys(name for _, phases in self._steps for name in phases)
        measured = measure(
            self._units_per_step,
            [step_s for step_s, _ in self._steps],
            {name: [phases.get(name, 0.0) for _, phases in self._steps] for name in names},
            peak_bytes,
            devices.memory_kind(self._device),
        )
        if measured is None:
            return None
        return {"predicted": self._predicted.model_dump(), "measured": measured.model_dump()}


def max_peak_bytes(world: World) -> int:
    """Return the peak memory of the rank that used most so far; every rank must call this."""
    peak = torch.tensor([devices.peak_bytes(world.device)], device=world.device)
    return int(all_gather(peak, world.group).max())
