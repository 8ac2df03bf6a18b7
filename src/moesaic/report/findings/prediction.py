"""What stands out between a plan and its run: a step that took another time than predicted."""

from __future__ import annotations

from moesaic.report.findings.finding import Finding
from moesaic.report.prediction import Prediction
from moesaic.report.wording import three, timing

OFF = 0.2
"""A step that is off by more than this share of the prediction is worth a word."""


def off(found: Prediction | None) -> Finding | None:
    """A step far from what the plan predicted, and the phase that makes most of it."""
    if found is None or abs(found.ratio - 1) <= OFF:
        return None
    predicted, measured = found.predicted, found.measured
    apart = {
        name: measured.phases_s.get(name, 0.0) - predicted.phases_s.get(name, 0.0)
        for name in found.phases()
    }
    slower = found.ratio > 1
    text = (
        f"{timing(measured.step_s)} where {timing(predicted.step_s)} were predicted for cluster "
        f"'{predicted.cluster}'."
    )
    if apart:
        name = (max if slower else min)(apart, key=lambda phase: apart[phase])
        at = timing(predicted.phases_s.get(name, 0.0))
        text += f" Most of it is in '{name}': {timing(measured.phases_s.get(name, 0.0))} for {at}."
    text += (
        " Probe again while the machines are idle, plan anew, and see whether something else ran "
        "beside this training."
    )
    title = f"A step took {three(found.ratio)}x the predicted time"
    return Finding("prediction", "note", title, text)
