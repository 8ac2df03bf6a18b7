"""What a plan expects of a step, and what a run measured of the same figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from moesaic.base.config import Section
from moesaic.facts.cluster import Calibration

FIRST = 3
"""Steps that pay for warming up, and do not count."""
WINDOW = 1000
"""Steps that the medians are of, at most: the last ones."""
ALL = "all"
"""What a span of all blocks has for its block."""


class RankSpan(Section):
    """A stretch of a rank's step: first it computes, then it waits for others and speaks."""

    phase: str
    """Phase of the step."""
    block: str
    """Block of the model; `A to B`: those from A to B; `all`: every one; `step`: none of them."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches that are added up in it."""
    computing_s: float = Field(default=0.0, ge=0)
    """Seconds of computing."""
    messages_s: float = Field(default=0.0, ge=0)
    """Seconds of messages."""
    waiting_s: float = Field(default=0.0, ge=0)
    """Seconds of waiting until the others come, or what travels beside."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.computing_s + self.messages_s + self.waiting_s

    @model_serializer(mode="wrap")
    def _brief(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is as by default: there are many spans, and people read them."""
        own = type(self).model_fields
        return {name: value for name, value in dump(self).items() if value != own[name].default}


class RankTimeline(Section):
    """The step of one rank, in order and without gaps: a span begins where the last one ends."""

    rank: int = Field(ge=0)
    """The rank."""
    spans: list[RankSpan] = Field(min_length=1)
    """What it does: its first micro-batch block by block, the rest of the step phase by phase."""

    @property
    def seconds(self) -> float:
        """When the rank is done."""
        return sum(span.seconds for span in self.spans)


class Predictions(Section):
    """What a step is expected to take."""

    cluster: str
    """Name of the cluster that it was worked out for."""
    basis: str | None = None
    """Digest of the job's work and the plan's decisions that it was worked out for; unset: whatever
    it stands beside."""
    loads: str | None = None
    """The run that recorded the loads of experts that it rests on; unset: even ones."""
    calibration: Calibration | None = None
    """What runs had shown of the cluster's figures, as it was applied; unset: nothing."""
    step_s: float = Field(gt=0)
    """Seconds of a step."""
    phases_s: dict[str, float]
    """Seconds by phase, on the rank that others wait for, of a pipeline on rank 0; waiting counts
    where it happens."""
    blocks_s: dict[str, float]
    """Seconds by block of the model, likewise, of a pipeline on the rank that takes longest over
    it; `step` is what belongs to none."""
    tokens_per_s: float = Field(gt=0)
    """Tokens of all ranks in a second."""
    memory_bytes: dict[str, int]
    """Bytes that the rank holds, by what they are for; `peak`: most of them at one time."""
    timeline: list[RankTimeline] = Field(default_factory=list)
    """The step on a clock: of the rank that others wait for, and of rank 0 where that differs."""

    @model_validator(mode="after")
    def _nothing_below_zero(self) -> Predictions:
        for key in ("phases_s", "blocks_s", "memory_bytes"):
            for name, value in getattr(self, key).items():
                if value < 0:
                    raise ValueError(
                        f"predictions.{key}.{name} = {value} is below 0: plan anew, or remove "
                        "predictions"
                    )
        return self


class Measured(Section):
    """The same figures of a run: medians over its steps."""

    steps: int
    """Steps that the medians are of."""
    step_s: float
    """Seconds of a step."""
    phases_s: dict[str, float]
    """Seconds by phase on rank 0; waiting counts where it happens."""
    tokens_per_s: float
    """Tokens of all ranks in a second."""
    peak_bytes: float | None
    """Most memory that a rank held."""
    memory: Literal["allocated", "resident"]
    """What that is of: tensors on a device, or all of a process on a CPU, its libraries too."""


def measure(
    tokens: float,
    step_s: Sequence[float],
    phases_s: Mapping[str, Sequence[float]],
    peak_bytes: float | None,
    memory: Literal["allocated", "resident"],
) -> Measured | None:
    """What was measured, from the seconds of each step of `tokens`; None while there is none.

    The first steps do not count where there are others.
    """
    usual = _usual(step_s)
    if not usual:
        return None
    middle = statistics.median(usual)
    phases = {name: _usual(seconds) for name, seconds in phases_s.items()}
    return Measured(
        steps=len(usual),
        step_s=middle,
        phases_s={name: statistics.median(found) for name, found in phases.items() if found},
        tokens_per_s=tokens / max(middle, 1e-9),
        peak_bytes=peak_bytes,
        memory=memory,
    )


def short(value: float) -> float:
    """As many digits as a file that people read needs."""
    return float(f"{value:.5g}")


def _usual(seconds: Sequence[float]) -> list[float]:
    late = list(seconds)[min(FIRST, max(len(seconds) - 1, 0)) :]
    return [value for value in late[-WINDOW:] if math.isfinite(value)]
