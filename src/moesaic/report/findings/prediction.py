"""Finding on predictions: steps that took another time than predicted."""

from __future__ import annotations

from moesaic.report.findings.finding import Finding
from moesaic.report.prediction import Prediction
from moesaic.report.wording import three, timing

OFF = 0.2
"""Relative error of the prediction above which it is reported."""


def off(found: Prediction | None) -> Finding | None:
    """Report a wrong prediction, and the phase with the largest error."""
    if found is None or abs(found.ratio - 1) <= OFF:
        return None
    predicted, measured = found.predicted, found.measured
    apart = {
        name: measured.phases_s.get(name, 0.0) - predicted.phases_s.get(name, 0.0)
        for name in found.phases()
    }
    slower = found.ratio > 1
    text = (
        f"Measured {timing(measured.step_s)}, predicted {timing(predicted.step_s)} for cluster "
        f"'{predicted.cluster}'."
    )
    if apart:
        name = (max if slower else min)(apart, key=lambda phase: apart[phase])
        at = timing(predicted.phases_s.get(name, 0.0))
        text += (
            f" The largest error is in '{name}': measured "
            f"{timing(measured.phases_s.get(name, 0.0))}, predicted {at}."
        )
    text += (
        " Run `moesaic probe` while the machines are idle and plan again. Check that nothing else "
        "ran on them."
    )
    title = f"A step took {three(found.ratio)}x the predicted time"
    return Finding("prediction", "note", title, text)
