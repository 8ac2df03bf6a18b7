"""Predicted time and memory of a step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moesaic.base.config import Section
from moesaic.facts.cluster import Calibration


class PhaseSeconds(Section):
    """Seconds of a rank in one phase of a step."""

    phase: str
    """Phase of the step."""
    computing_s: float = Field(default=0.0, ge=0)
    """Seconds of compute."""
    collectives_s: float = Field(default=0.0, ge=0)
    """Seconds of collectives."""
    waiting_s: float = Field(default=0.0, ge=0)
    """Seconds of waiting for other ranks or for overlapped traffic."""

    @property
    def seconds(self) -> float:
        """Seconds of the phase."""
        return self.computing_s + self.collectives_s + self.waiting_s


class RankTimeline(Section):
    """The step of one rank by phase."""

    rank: int = Field(ge=0)
    """Global rank."""
    phases: list[PhaseSeconds] = Field(min_length=1)
    """Seconds by phase, in the order in which phases begin."""

    @property
    def seconds(self) -> float:
        """Seconds until the rank is done."""
        return sum(phase.seconds for phase in self.phases)


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
    phases_s: dict[str, Annotated[float, Field(ge=0)]]
    """Seconds by phase on the bottleneck rank, or on rank 0 of a pipeline; waiting counts in the
    phase where it happens."""
    blocks_s: dict[str, Annotated[float, Field(ge=0)]]
    """Seconds by block of the model on the bottleneck rank, or on a pipeline's slowest rank for
    each block; `step` is outside all blocks."""
    tokens_per_s: float = Field(gt=0)
    """Tokens a second over all ranks."""
    reference_s: float | None = Field(default=None, gt=0)
    """Seconds of the devices' reference work when they were measured, in the median over ranks. The
    run times it again. Unset: unknown."""
    used_bytes_by_kind: dict[str, Annotated[int, Field(ge=0)]]
    """Bytes of memory on the rank by purpose; `peak` is the most at one time."""
    timeline: list[RankTimeline] = Field(default_factory=list)
    """Timelines of the bottleneck rank and, if it is another one, of rank 0."""


def round_digits(value: float) -> float:
    """Return `value` with five significant digits, for files that people read."""
    return float(f"{value:.5g}")
