"""Predicted steps of a plan beside the measured ones.

A run logs both at its end. For a run that was cut off, its steps are measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.plan import Measurements, Predictions, measure
from moesaic.report.log import Log


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured step of a run."""

    predicted: Predictions
    """Prediction of the plan."""
    measured: Measurements
    """Medians of the run."""

    @property
    def ratio(self) -> float:
        """Measured time of a step over the predicted one."""
        return self.measured.step_s / self.predicted.step_s

    def phases(self) -> list[str]:
        """Return the phases of both, in the order of the run."""
        return list(dict.fromkeys([*self.measured.phases_s, *self.predicted.phases_s]))


def read_prediction(
    plan: Mapping[str, Any], log: Log, peaks: npt.NDArray[np.float64]
) -> Prediction | None:
    """Return the prediction; None if nothing was predicted or no step was taken.

    `peaks` are the peak bytes that ranks logged.
    """
    logged = log.prediction
    try:
        if logged is not None:
            return Prediction(
                parse(Predictions, logged["predicted"], "predicted"),
                parse(Measurements, logged["measured"], "measured"),
            )
        if not isinstance(plan.get("predictions"), dict) or not log.parts:
            return None
        predicted = parse(Predictions, plan["predictions"], "plan.json")
    except (ConfigError, KeyError, TypeError, ValueError):
        # Someone edited it: report the rest of the run.
        return None
    tokens = log.parts[-1].tokens_per_step
    if not np.isfinite(tokens):
        return None
    last = log.steps.step > log.parts[-1].step
    known = peaks[np.isfinite(peaks)]
    measured = measure(
        tokens,
        log.steps.step_s[last].tolist(),
        {name: seconds[last].tolist() for name, seconds in log.steps.phases.items()},
        float(known.max()) if len(known) else None,
        "resident" if log.parts[-1].device.startswith("cpu") else "allocated",
    )
    return None if measured is None else Prediction(predicted, measured)
