"""What the plan of a run predicted beside what the run measured.

A run that came to its end has said so itself; of one that was cut off it is worked out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.plan import Measured, Predictions, measure
from moesaic.report.log import Log


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured figures of a run's steps."""

    predicted: Predictions
    measured: Measured

    @property
    def ratio(self) -> float:
        """The measured time of a step over the predicted one."""
        return self.measured.step_s / self.predicted.step_s

    def phases(self) -> list[str]:
        """The phases of either, in the order of the run's."""
        return list(dict.fromkeys([*self.measured.phases_s, *self.predicted.phases_s]))


def read_prediction(
    plan: Mapping[str, Any], log: Log, peaks: npt.NDArray[np.float64]
) -> Prediction | None:
    """What is known; None where nothing was predicted, or no step taken.

    `peaks` are what ranks say of the most memory that they held.
    """
    said = log.prediction
    try:
        if said is not None:
            return Prediction(
                parse(Predictions, said["predicted"], "predicted"),
                parse(Measured, said["measured"], "measured"),
            )
        if not isinstance(plan.get("predictions"), dict) or not log.parts:
            return None
        predicted = parse(Predictions, plan["predictions"], "plan.json")
    except (ConfigError, KeyError, TypeError, ValueError):
        # A hand was at it: the rest of the run still shows.
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
