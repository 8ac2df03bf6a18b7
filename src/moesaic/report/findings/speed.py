"""Findings on speed: slow steps, the slowest phase, and steps that were predicted differently."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.report.findings.finding import Finding, Severity
from moesaic.report.log import Steps
from moesaic.report.prediction import Prediction
from moesaic.report.run_stats import RunStats
from moesaic.report.series import median
from moesaic.report.wording import count, digits, duration, listing, percent, plural

SLOW = 2.0
"""Multiple of the median above which a step is slow."""
_LOST = 0.01
"""Share of the run above which slow steps are reported."""
_OFF = 0.2
"""Relative error of the prediction above which it is reported."""

_COMPUTING: tuple[Severity, str] = ("note", "That is computation, not waiting.")
_ADVICE: dict[str, tuple[Severity, str]] = {
    "data": (
        "warning",
        "The ranks wait for data: put data.cache on a local disk, or shorten the documents.",
    ),
    "forward": _COMPUTING,
    "backward": _COMPUTING,
    "pipeline": ("note", "Raise train.micro_batches to shrink the pipeline bubble."),
    "reduce": (
        "warning",
        "The ranks wait for gradients. Raise train.batch and train.micro_batches to reduce them "
        "less often, and look for a slow rank under 'Phases by rank'.",
    ),
    "clip": ("warning", "It waits for every rank: look for a slow rank under 'Phases by rank'."),
    "optimizer": ("note", 'Set layout.dp_shard = "all" to shard the update over the ranks.'),
    "log": ("warning", "Raise log.loads_every, or turn off loggers you do not read."),
}
_OTHER_PHASE: tuple[Severity, str] = ("note", "See 'Time by phase' for when it grew.")


def slow_steps(run: RunStats) -> Finding | None:
    """Report steps far above the median, and what they coincide with."""
    steps = run.steps
    starts = [launch.step + 1 for launch in run.launches]
    warm = ~np.isin(steps.step, starts) & np.isfinite(steps.step_s)
    if warm.sum() < 8:
        return None
    usual_s = float(np.median(steps.step_s[warm]))
    rows = np.flatnonzero(warm & (steps.step_s > SLOW * usual_s))
    lost_s = float((steps.step_s[rows] - usual_s).sum())
    if not len(rows) or lost_s < _LOST * float(steps.step_s[warm].sum()):
        return None
    worst = int(rows[steps.step_s[rows].argmax()])
    text = (
        f"They cost {duration(lost_s)} in total. The longest, step {int(steps.step[worst]):,}, "
        f"took {duration(float(steps.step_s[worst]))}; the median is {duration(usual_s)}."
        f"{_grown_phase(steps, rows)}{_coincidence(run, steps.step[rows])}"
    )
    title = f"{plural(len(rows), 'step')} took over {SLOW:g}x the median"
    return Finding("slow_steps", "warning", title, text)


def slowest_phase(run: RunStats) -> Finding | None:
    """Report the longest phase on rank 0; the first step is warmup and does not count."""
    steps = run.steps
    later = slice(min(1, len(steps) - 1), None)
    totals = {name: float(np.nansum(seconds[later])) for name, seconds in steps.phases.items()}
    whole = sum(totals.values())
    if whole <= 0:
        return None
    name = max(totals, key=lambda phase: totals[phase])
    severity, advice = _ADVICE.get(name, _OTHER_PHASE)
    if name in ("forward", "backward"):
        advice = " ".join([advice, *_tips(run)])
    text = (
        f"It takes {duration(totals[name] / len(steps.step[later]))} of a step on rank 0, at "
        f"{count(median(steps.tokens_per_s))} tokens a second. {advice}"
    )
    title = f"'{name}' is the slowest phase: {percent(totals[name] / whole)} of a step"
    return Finding("slowest_phase", severity, title, text)


def prediction(compared: Prediction | None) -> Finding | None:
    """Report a wrong prediction, and the phase with the largest error."""
    if compared is None or abs(compared.ratio - 1) <= _OFF:
        return None
    predicted, measured = compared.predicted, compared.measured
    errors = {
        name: measured.phases_s.get(name, 0.0) - predicted.phases_s.get(name, 0.0)
        for name in compared.phases()
    }
    phase = max(errors, key=lambda name: errors[name] * (compared.ratio - 1), default="")
    text = (
        f"Measured {duration(measured.step_s)}, predicted {duration(predicted.step_s)} for cluster "
        f"'{predicted.cluster}'. The largest error is in '{phase}': measured "
        f"{duration(measured.phases_s.get(phase, 0.0))}, predicted "
        f"{duration(predicted.phases_s.get(phase, 0.0))}. Run `moesaic probe` while the machines "
        "are idle and plan again. Check that nothing else ran on them."
    )
    title = f"A step took {digits(compared.ratio)}x the predicted time"
    return Finding("prediction", "note", title, text)


def _tips(run: RunStats) -> list[str]:
    """Return settings that could make computation faster."""
    tips = []
    if (run.setting("train.micro_batches") or 1) > 1:
        tips.append("Lower train.micro_batches: larger micro-batches use the device better.")
    if run.setting("train.recompute"):
        tips.append(
            "If memory allows, turn off train.recompute: a step is about a quarter shorter."
        )
    on_cpu = not run.launches or run.launches[-1].device.startswith("cpu")
    if not on_cpu and run.setting("train.precision") not in ("bf16", "fp16"):
        tips.append('Try train.precision = "bf16" if the device supports it.')
    return tips


def _grown_phase(steps: Steps, rows: npt.NDArray[np.int64]) -> str:
    """Return a sentence on the phase with most of the excess of `rows`, if there is one."""
    excess = {
        name: float(np.nansum(seconds[rows] - np.nanmedian(seconds)))
        for name, seconds in steps.phases.items()
    }
    name = max(excess, key=lambda phase: excess[phase], default="")
    if not name or excess[name] <= 0.5 * sum(max(value, 0) for value in excess.values()):
        return ""
    return f" Most of the excess is in '{name}'."


def _coincidence(run: RunStats, steps: npt.NDArray[np.float64]) -> str:
    """Return a sentence on the event at most of the slow `steps`, or on the steps themselves."""
    for noun, remedy, events in (
        ("checkpoint", "raise checkpoint.every to save less often", run.checkpoints),
        ("validation pass", "raise train.validate_every to validate less often", run.validations),
    ):
        at = [event.step for event in events]
        near = int((np.isin(steps, at) | np.isin(steps - 1, at)).sum())
        if near > len(steps) / 2:
            return f" {near} of {len(steps)} come at or just after a {noun}: {remedy}."
    where = listing([f"{int(step):,}" for step in steps], 5)
    return f" These are steps {where}: look for other work on the machine at those times."
