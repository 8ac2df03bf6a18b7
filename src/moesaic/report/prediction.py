"""Predicted step of a plan beside the measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.plan import Measurements, Predictions, measure
from moesaic.report.log import Launch, RankStats, Steps


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
    peaks = [rank.peak_bytes for rank in ranks]
    if np.isfinite(launch.peak_bytes):
        peaks = [launch.peak_bytes]
    measured = measure(
        launch.tokens_per_step,
        steps.step_s[last].tolist(),
        {
            name: np.nan_to_num(seconds[last]).tolist()
            for name, seconds in steps.phases.items()
            if np.isfinite(seconds[last]).any()
        },
        max(peaks, default=None),
        "resident" if launch.device.startswith("cpu") else "allocated",
    )
    return None if measured is None else Prediction(predicted, measured)
