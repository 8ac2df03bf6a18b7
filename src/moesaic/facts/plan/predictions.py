"""Predicted time and memory of a step, and the same figures measured in a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from moesaic.base.config import Section
from moesaic.facts.cluster import Calibration

WARMUP_STEPS = 3
"""First steps of a run, which medians leave out."""
MEDIAN_WINDOW = 1000
"""Most steps that medians are taken over: the last ones."""
ALL_BLOCKS = "all"
"""Block name of a span over all blocks."""


class RankSpan(Section):
    """A span of a rank's step: compute, then waiting for other ranks, then collectives."""

    phase: str
    """Phase of the step."""
    block: str
    """Block of the model; `A to B`: a range of blocks; `all`: every block; `step`: none."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches that the span adds up."""
    computing_s: float = Field(default=0.0, ge=0)
    """Seconds of compute."""
    collectives_s: float = Field(default=0.0, ge=0)
    """Seconds of collectives."""
    waiting_s: float = Field(default=0.0, ge=0)
    """Seconds of waiting for other ranks or for overlapped traffic."""

    @property
    def seconds(self) -> float:
        """Seconds of the span."""
        return self.computing_s + self.collectives_s + self.waiting_s

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values: there are many spans, and people read them."""
        own = type(self).model_fields
        return {name: value for name, value in dump(self).items() if value != own[name].default}


class RankTimeline(Section):
    """The step of one rank as consecutive spans without gaps."""

    rank: int = Field(ge=0)
    """Global rank."""
    spans: list[RankSpan] = Field(min_length=1)
    """Spans of the step: the first micro-batch block by block, the rest phase by phase."""

    @property
    def seconds(self) -> float:
        """Seconds until the rank is done."""
        return sum(span.seconds for span in self.spans)


class Predictions(Section):
    """Predicted time and memory of a step."""

    cluster: str
    """Name of the cluster that the prediction is for."""
    digest: str | None = None
    """Digest of the job's work and the plan's decisions that the prediction is for; unset: those of
    this plan."""
    loads: str | None = None
    """Run whose recorded expert loads were used; unset: even loads."""
    calibration: Calibration | None = None
    """Calibration of the cluster that was applied; unset: none."""
    step_s: float = Field(gt=0)
    """Seconds of a step."""
    phases_s: dict[str, float]
    """Seconds by phase on the bottleneck rank, or on rank 0 of a pipeline; waiting counts in the
    phase where it happens."""
    blocks_s: dict[str, float]
    """Seconds by block of the model on the bottleneck rank, or on a pipeline's slowest rank for
    each block; `step` is outside all blocks."""
    tokens_per_s: float = Field(gt=0)
    """Tokens a second over all ranks."""
    used_bytes_by_kind: dict[str, int]
    """Bytes of memory on the rank by purpose; `peak` is the most at one time."""
    timeline: list[RankTimeline] = Field(default_factory=list)
    """Timelines of the bottleneck rank and, if it is another one, of rank 0."""

    @model_validator(mode="after")
    def _check_non_negative(self) -> Predictions:
        for key in ("phases_s", "blocks_s", "used_bytes_by_kind"):
            for name, value in getattr(self, key).items():
                if value < 0:
                    raise ValueError(
                        f"predictions.{key}.{name} = {value} is below 0: plan anew, or remove "
                        "predictions"
                    )
        return self


class Measurements(Section):
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


def measure(
    tokens: float,
    step_s: Sequence[float],
    phases_s: Mapping[str, Sequence[float]],
    peak_bytes: float | None,
    memory: Literal["allocated", "resident"],
) -> Measurements | None:
    """Return medians over steps of `tokens` each, or None without steps.

    The first steps are left out if there are later ones.
    """
    steady = _steady_steps(step_s)
    if not steady:
        return None
    median_s = statistics.median(steady)
    phases = {name: _steady_steps(seconds) for name, seconds in phases_s.items()}
    return Measurements(
        steps=len(steady),
        step_s=median_s,
        phases_s={name: statistics.median(found) for name, found in phases.items() if found},
        tokens_per_s=tokens / max(median_s, 1e-9),
        peak_bytes=peak_bytes,
        memory=memory,
    )


def round_digits(value: float) -> float:
    """Return `value` with five significant digits, for files that people read."""
    return float(f"{value:.5g}")


def _steady_steps(seconds: Sequence[float]) -> list[float]:
    late = list(seconds)[min(WARMUP_STEPS, max(len(seconds) - 1, 0)) :]
    return [value for value in late[-MEDIAN_WINDOW:] if math.isfinite(value)]
