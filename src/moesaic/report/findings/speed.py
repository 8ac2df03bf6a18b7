"""Findings on speed: slow steps and the slowest phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moesaic.report.findings.finding import Finding, Severity
from moesaic.report.log import Checkpoint, Part, Steps, Validation
from moesaic.report.series import middle
from moesaic.report.wording import count, duration, listing, percent, plural

SLOW = 2.0
"""Multiple of the median above which a step is slow."""
_LOST = 0.01
"""Share of the run above which slow steps are reported."""

_ADVICE: dict[str, tuple[Severity, str]] = {
    "data": (
        "warning",
        "The ranks wait for data: put data.cache on a local disk, or shorten the documents.",
    ),
    "forward": ("note", "That is computation, not waiting."),
    "backward": ("note", "That is computation, not waiting."),
    "pipeline": (
        "note",
        "It covers forward and backward of all micro-batches and the pipeline bubble. Raise "
        "train.micro_batches to shrink the bubble.",
    ),
    "reduce": (
        "warning",
        "The ranks wait for gradients. Raise train.batch and train.micro_batches to reduce them "
        "less often, and look for a slow rank under 'Phases by rank'.",
    ),
    "clip": ("warning", "It waits for every rank: look for a slow rank under 'Phases by rank'."),
    "optimizer": ("note", 'Set layout.dp_shard = "all" to shard the update over the ranks.'),
    "log": ("warning", "Raise log.loads_every, or turn off loggers you do not read."),
}  # fmt: skip
_ELSE = "See 'Time by phase' for when it grew."


def slow_steps(
    steps: Steps, parts: list[Part], checkpoints: list[Checkpoint], validations: list[Validation]
) -> Finding | None:
    """Report steps far above the median, and what they coincide with."""
    starts = {part.step + 1 for part in parts}
    warm = ~np.isin(steps.step, list(starts)) & np.isfinite(steps.step_s)
    if warm.sum() < 8:
        return None
    median = float(np.median(steps.step_s[warm]))
    rows = np.flatnonzero(warm & (steps.step_s > SLOW * median))
    lost = float((steps.step_s[rows] - median).sum())
    if not len(rows) or lost < _LOST * float(steps.step_s[warm].sum()):
        return None
    worst = int(rows[steps.step_s[rows].argmax()])
    text = (
        f"They cost {duration(lost)} in total. The longest, step {int(steps.step[worst]):,}, took "
        f"{duration(float(steps.step_s[worst]))}; the median is {duration(median)}."
    )
    phase = _grown_phase(steps, rows)
    text += f" Most of the excess is in '{phase}'." if phase else ""
    text += _coincidence(steps, rows, checkpoints, validations)
    title = f"{plural(len(rows), 'step')} took over {SLOW:g}x the median"
    return Finding("slow_steps", "warning", title, text)


def slowest_phase(
    steps: Steps, device: str = "", setting: Callable[[str], Any] = lambda _: None
) -> Finding | None:
    """Report the longest phase on rank 0; the first step is warmup and does not count."""
    later = slice(min(1, len(steps) - 1), None)
    totals = {name: float(np.nansum(seconds[later])) for name, seconds in steps.phases.items()}
    whole = sum(totals.values())
    if whole <= 0:
        return None
    name = max(totals, key=lambda phase: totals[phase])
    severity, advice = _ADVICE.get(name, ("note", _ELSE))
    if name in ("forward", "backward"):
        advice = " ".join([advice, *_tips(device, setting)])
    text = (
        f"It takes {duration(totals[name] / len(steps.step[later]))} of a step on rank 0, at "
        f"{count(middle(steps.tokens_per_s))} tokens a second. {advice}"
    )
    title = f"'{name}' is the slowest phase: {percent(totals[name] / whole)} of a step"
    return Finding("slowest_phase", severity, title, text)


def _tips(device: str, setting: Callable[[str], Any]) -> list[str]:
    """Return settings that could make computation faster."""
    precision = setting("train.precision")
    cpu, narrow = device.startswith("cpu"), precision in ("bf16", "fp16")
    tips = []
    if (setting("train.micro_batches") or 1) > 1:
        tips.append("Lower train.micro_batches: larger micro-batches use the device better.")
    if setting("train.recompute"):
        tips.append(
            "If memory allows, turn off train.recompute: a step is about a quarter shorter."
        )
    if narrow and cpu:
        tips.append(f'Few CPUs are fast at {precision}: try train.precision = "fp32".')
    if not narrow and not cpu:
        tips.append('Try train.precision = "bf16" if the device supports it.')
    return tips


def _grown_phase(steps: Steps, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    excess = {
        name: float(np.nansum(seconds[rows] - np.nanmedian(seconds)))
        for name, seconds in steps.phases.items()
        if np.isfinite(seconds).any()
    }
    name = max(excess, key=lambda phase: excess[phase], default="")
    return (
        name
        if name and excess[name] > 0.5 * sum(max(value, 0) for value in excess.values())
        else ""
    )


def _coincidence(
    steps: Steps,
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    checkpoints: list[Checkpoint],
    validations: list[Validation],
) -> str:
    slow = {int(step) for step in steps.step[rows]}
    for noun, remedy, at in (
        ("checkpoint", "raise checkpoint.every to save less often",
         {checkpoint.step for checkpoint in checkpoints}),
        ("validation pass", "raise train.validate_every to validate less often",
         {validation.step for validation in validations}),
    ):  # fmt: skip
        near = {step for step in slow if step in at or step - 1 in at}
        if len(near) > len(slow) / 2:
            return f" {len(near)} of {len(slow)} come at or just after a {noun}: {remedy}."
    where = listing([f"{step:,}" for step in sorted(slow)], 5)
    return f" These are steps {where}: look for other work on the machine at those times."
