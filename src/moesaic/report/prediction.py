"""Predicted step of a plan beside the measured one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.plan import Predictions
from moesaic.report.log import Launch, RankStats, Steps

WARMUP_STEPS = 3
"""First steps of a launch, which medians leave out."""
_MEDIAN_WINDOW = 1000
"""Most steps that medians are taken over: the last ones."""


@dataclass(frozen=True)
class Measurements:
    """Measured figures of a run: medians over its steps."""

    steps: int
    """Steps that the medians are taken over."""
    step_s: float
    """Seconds of a step."""
    phases_s: dict[str, float]
    """Seconds by phase on rank 0; waiting counts in the phase where it happens."""
    tokens_per_s: float
    """Tokens a second over all ranks."""
    peak_bytes: float | None
    """Largest memory of a rank, in bytes."""
    memory: Literal["allocated", "resident"]
    """Type of that memory. allocated: tensors on a device. resident: the whole process on a CPU,
    with its libraries."""


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured step of a run."""

    predicted: Predictions
    """Prediction of the plan."""
    measured: Measurements
    """Medians of the steps since the last launch."""

    @property
    def ratio(self) -> float:
        """Measured time of a step over the predicted one."""
        return self.measured.step_s / self.predicted.step_s

    def phases(self) -> list[str]:
        """Return the phases of both, in the order of the run."""
        return list(dict.fromkeys([*self.measured.phases_s, *self.predicted.phases_s]))


def read_prediction(
    plan: Mapping[str, Any], launches: Sequence[Launch], steps: Steps, ranks: Sequence[RankStats]
) -> Prediction | None:
    """Return the prediction; None if nothing was predicted or no step was taken."""
    if not isinstance(plan.get("predictions"), dict) or not launches:
        return None
    try:
        predicted = parse(Predictions, plan["predictions"], "plan.json")
    except ConfigError:  # Someone edited it: report the rest of the run.
        return None
    launch = launches[-1]
    last = steps.step > launch.step
    step_s = _steady_steps(steps.step_s[last].tolist())
    if not step_s:
        return None
    phases = {
        name: _steady_steps(np.nan_to_num(seconds[last]).tolist())
        for name, seconds in steps.phases.items()
        if np.isfinite(seconds[last]).any()
    }
    peaks = [rank.peak_bytes for rank in ranks]
    if np.isfinite(launch.peak_bytes):
        peaks = [launch.peak_bytes]
    median_s = statistics.median(step_s)
    measured = Measurements(
        steps=len(step_s),
        step_s=median_s,
        phases_s={name: statistics.median(found) for name, found in phases.items()},
        tokens_per_s=launch.tokens_per_step / max(median_s, 1e-9),
        peak_bytes=max(peaks, default=None),
        memory="resident" if launch.device.startswith("cpu") else "allocated",
    )
    return Prediction(predicted, measured)


def _steady_steps(seconds: list[float]) -> list[float]:
    """Return the last seconds; the first ones are left out if there are later ones."""
    late = seconds[min(WARMUP_STEPS, max(len(seconds) - 1, 0)) :]
    return [value for value in late[-_MEDIAN_WINDOW:] if math.isfinite(value)]
