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
from moesaic.base.units import about_seconds
from moesaic.facts.plan import Predictions
from moesaic.report.log import Launch, RankStats, Steps

WARMUP_STEPS = 3
"""First steps of a launch, which medians leave out."""
_MIN_SPEED_CHANGE = 0.02
"""Relative change of a machine's speed that counts as none."""
_MIN_WAIT_SHARE, _MAX_WAIT_SHARE = 0.05, 0.95
"""Shares of waits for a processor. Fewer count as none: a rank's own threads cause some. More are
taken for this, since ranks measure waits and rank 0 the step."""
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
    reference_s: float | None
    """Seconds of the reference work between these steps: means over steps, and their median over
    ranks; None: not done."""
    cpu_wait_share: float | None
    """Share of a step that the main thread, ready to run, waited for a processor, on the rank that
    waited longest; None: unknown."""
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

    @property
    def machine_ratio(self) -> float | None:
        """Time of the reference work during the run over that in the probe; None if unknown."""
        if self.measured.reference_s is None or self.predicted.reference_s is None:
            return None
        return self.measured.reference_s / self.predicted.reference_s

    @property
    def wait_ratio(self) -> float:
        """Measured time of a step over that without its waits for a processor, as far as known."""
        share = self.measured.cpu_wait_share or 0.0
        return 1.0 / (1.0 - share) if share >= _MIN_WAIT_SHARE else 1.0

    @property
    def model_ratio(self) -> float | None:
        """Measured time of a step over the predicted one at the machine's speed in the run, without
        waits for a processor."""
        if self.machine_ratio is None:
            return None
        return self.ratio / (self.machine_ratio * self.wait_ratio)

    def describe(self) -> str:
        """Return as a clause how far the prediction was off, and why."""
        both = about_seconds(self.predicted.step_s), about_seconds(self.measured.step_s, 3)
        text = f"predicted {both[0]} a step, measured {both[1]} ({self.ratio:.2f}x)"
        machine, model = self.machine_ratio, self.model_ratio
        phase, is_waiting = self._most_wrong_phase(), self.wait_ratio > 1.0
        if is_waiting:
            waits = f"{self.measured.cpu_wait_share or 0.0:.0%} of a step"
            text += f": ranks waited {waits} for a busy processor ({self.wait_ratio:.2f}x)"
        if machine is None or model is None:
            why = (
                "the plan has no reference_s: probe the cluster (moesaic probe) and plan again"
                if self.predicted.reference_s is None
                else "the run was too short to time the reference work"
            )
            most = (
                f"{', the rest mostly' if is_waiting else ', mostly'} in {phase}" if phase else ""
            )
            return f"{text}{most}; how fast the machine was is unknown, because {why}"
        if abs(math.log(machine)) < _MIN_SPEED_CHANGE:
            speed = "as fast during the run as"
        elif machine > 1.0:
            speed = f"{machine:.2f}x slower during the run than"
        else:
            speed = f"{1.0 / machine:.2f}x faster during the run than"
        most = f", mostly in {phase}" if phase else ""
        error = f"the rest, {model:.2f}x, is the error of the model{most}"
        return f"{text}{',' if is_waiting else ':'} the machine was {speed} in the probe; {error}"

    def _most_wrong_phase(self) -> str:
        """Return the phase with the largest error in the direction of the step's, with predicted
        times at the machine's speed and with its waits."""
        machine = (self.machine_ratio or 1.0) * self.wait_ratio
        sign = math.copysign(1.0, self.measured.step_s - machine * self.predicted.step_s)
        errors = {
            name: sign * (seconds - machine * self.predicted.phases_s.get(name, 0.0))
            for name, seconds in self.measured.phases_s.items()
        }
        return max(errors, key=errors.__getitem__, default="")

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
        reference_s=_reference_s(ranks, launch.step),
        cpu_wait_share=_cpu_wait_share(
            ranks, steps.step[last].tolist(), steps.step_s[last].tolist()
        ),
        memory="resident" if launch.device.startswith("cpu") else "allocated",
    )
    return Prediction(predicted, measured)


def _reference_s(ranks: Sequence[RankStats], first_done: int) -> float | None:
    """Return the seconds of the reference work since a launch after `first_done` steps.

    They are means over steps, as in the probe: an interruption rarely hits a short sample, but
    every step pays for some.
    """
    by_rank = [
        {step: one for step, one in rank.reference_s.items() if step > first_done} for rank in ranks
    ]
    late = [
        [one for step, one in samples.items() if step > first_done + WARMUP_STEPS]
        or list(samples.values())
        for samples in by_rank
        if samples
    ]
    return statistics.median(map(statistics.fmean, late)) if late else None


def _cpu_wait_share(
    ranks: Sequence[RankStats], steps: Sequence[float], step_s: Sequence[float]
) -> float | None:
    """Return the share of a step that the rank which waited most waited for a processor: medians
    over steps."""
    shares = [
        _steady_steps(
            [
                rank.cpu_wait_s.get(int(step), math.nan) / max(seconds, 1e-9)
                for step, seconds in zip(steps, step_s, strict=True)
            ]
        )
        for rank in ranks
    ]
    most = max((statistics.median(known) for known in shares if known), default=None)
    return None if most is None else min(most, _MAX_WAIT_SHARE)


def _steady_steps(seconds: list[float]) -> list[float]:
    """Return the last seconds; the first ones are left out if there are later ones."""
    late = seconds[min(WARMUP_STEPS, max(len(seconds) - 1, 0)) :]
    return [value for value in late[-_MEDIAN_WINDOW:] if math.isfinite(value)]
