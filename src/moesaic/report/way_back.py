"""Cause of a divergence, and the command that goes back to before it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from moesaic.report.divergence import Divergence
from moesaic.report.log import Checkpoint
from moesaic.report.run_stats import RunStats

_EARLY = 0.05
"""Share of a run in which a missing warm-up is the likely cause of a divergence ..."""
_FIRST_STEPS = 9
"""... or so many steps."""


class _Rate(NamedTuple):
    """Learning rate of what diverged."""

    key: str
    value: float | None
    """Peak value; None if unknown."""
    usual: tuple[float, float] = (1e-4, 1e-3)
    """Lowest and highest value that is usual."""

    @property
    def is_high(self) -> bool:
        """True if it is the likely cause."""
        return self.value is not None and self.value > 10 * self.usual[1]


def likely_cause(run: RunStats, found: Divergence) -> str:
    """Return the likely cause of a divergence, as a clause."""
    rates, warmup = _rates(run, found.student), run.setting("schedule.warmup")
    for rate in rates:
        if rate.is_high:
            low, high = (f"{one:.0e}".replace("e-0", "e-") for one in rate.usual)
            return f"{rate.key} = {rate.value:g} is far above the usual {low} to {high}"
    if run.setting("train.clip") == 0:
        return "train.clip = 0, so a single batch can move the weights far"
    keys = " or ".join(
        rate.key + ("" if rate.value is None else f" (now {rate.value:g})") for rate in rates
    )
    if not warmup and found.step <= max(_EARLY * (run.planned_steps or 0), _FIRST_STEPS):
        return f"schedule.warmup = 0, so training begins with the full {keys}"
    narrow = run.setting("train.precision")
    also = f', or train.precision = "{narrow}" is too narrow' if narrow in ("bf16", "fp16") else ""
    return f"{keys} is too high for this model and batch{also}"


def way_back(run: RunStats, found: Divergence) -> str:
    """Return what to do about a divergence."""
    sets = [word for item in _lower_rates(run, found) for word in ("--set", item)]
    earlier = [one for one in run.kept_checkpoints if one.step <= found.good_step]
    if earlier:
        step, words = earlier[-1].step, ["--resume", str(run.path_of(earlier[-1]))]
    elif (origin := _origin(run)) is not None and origin.step <= found.good_step:
        step, words = origin.step, ["--out", "NEW", "--resume", origin.path]
    else:
        return (
            "No checkpoint from before is left: start anew with --out NEW "
            f"{shlex.join(sets)} or a longer schedule.warmup."
        )
    last = run.launches[-1] if run.launches else None
    if last is not None and step <= last.step:  # Its own job may end there, on fewer ranks.
        saved_by = [one for one in run.launches if one.step < step]
        if not saved_by or saved_by[-1].ranks != last.ranks:
            words += ["--nproc", str(last.ranks)]
        if run.planned_steps is not None:
            sets += ["--set", f"train.steps={run.planned_steps}"]
    command = shlex.join(["moesaic", "train", *words, "--change", *sets])
    return f"Go back to step {step:,}: {command}"  # No full stop: it would be copied.


def _rates(run: RunStats, student: str) -> list[_Rate]:
    """Return the learning rates of a student, or of the job's own model and its table."""
    for one in run.setting("student") or ():
        if one["name"] == student and one.get("lr") is not None:
            return [_Rate(f"student.{student}.lr", one["lr"])]
    rates = [_Rate("optimizer.lr", run.setting("optimizer.lr"))]
    if run.setting("kind") == "ctr":
        rates.append(_Rate("table.lr", run.setting("table.lr"), (1e-2, 1e-1)))
    return rates


def _lower_rates(run: RunStats, found: Divergence) -> list[str]:
    """Return `--set` items that lower what is too high, or every rate if none clearly is."""
    rates = _rates(run, found.student)
    rates = [rate for rate in rates if rate.is_high] or rates
    items = list[str]()
    for rate in rates:
        worked = _earlier_rate(run, found) if rate.key == "optimizer.lr" else None
        lower = "LOWER"
        if rate.value is not None:
            lower = f"{min(rate.value / 10, worked or rate.usual[1]):.3g}"
        items.append(f"{rate.key}={lower}")
    return items


def _earlier_rate(run: RunStats, found: Divergence) -> float | None:
    """Return the highest learning rate of the job's own model before the launch that diverged; None
    if it took no step after its warm-up."""
    begin = run.setting("schedule.warmup") or 0
    end = min(run.launches[-1].step if run.launches else 0, found.good_step)
    rates = run.steps.lr[(run.steps.step <= end) & (run.steps.lr > 0)]
    return None if found.student or end <= begin or not len(rates) else float(rates.max())


def _origin(run: RunStats) -> Checkpoint | None:
    """Return the checkpoint that the last launch resumed from, if it still exists; it may be in
    another run's directory."""
    last = run.launches[-1] if run.launches else None
    if last is None or last.resumed_from is None:
        return None
    exists = (Path(last.resumed_from) / "COMMIT").is_file()
    return Checkpoint(last.step, last.resumed_from, "done") if exists else None
