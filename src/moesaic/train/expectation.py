"""What a run measures of the figures that its plan predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from moesaic.dist import device as devices
from moesaic.dist.collectives import gather
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import FIRST, WINDOW, Plan, measure


class Expectation:
    """Collects this rank's steps; does nothing where the plan predicted nothing."""

    def __init__(self, plan: Plan, job: Job, world: World) -> None:
        self._predicted, self._device = plan.predictions, world.device
        self._tokens = job.train.batch * job.data.sequence
        self._steps: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=FIRST + WINDOW)

    def add(self, step_s: float, phases_s: Mapping[str, float]) -> None:
        """One more step."""
        if self._predicted is not None:
            self._steps.append((step_s, phases_s))

    def compare(self, peak_bytes: int) -> dict[str, Any] | None:
        """Predicted and measured figures as plain data, at the end."""
        if self._predicted is None:
            return None
        names = dict.fromkeys(name for _, phases in self._steps for name in phases)
        measured = measure(
            self._tokens,
            [step_s for step_s, _ in self._steps],
            {name: [phases.get(name, 0.0) for _, phases in self._steps] for name in names},
            peak_bytes,
            devices.memory_kind(self._device),
        )
        if measured is None:
            return None
        return {"predicted": self._predicted.model_dump(), "measured": measured.model_dump()}


def most_bytes(world: World) -> int:
    """The most memory that a rank has held so far; every rank must call this."""
    peak = torch.tensor([devices.peak_bytes(world.device)], device=world.device)
    return int(gather(peak, world.everyone).max())
