"""The order in which a part of a pipeline computes is the one that torch's schedules keep."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from moesaic.facts.job.train import Schedule
from moesaic.facts.plan import Action, lay_out, order
from moesaic.facts.plan.layout import pipeline_fault
from moesaic.testing.jobs import tiny_job

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip


class Recorded:
    """A stage that computes nothing, and writes down what a schedule asks of it."""

    submod = None
    has_backward = True

    def __init__(self, index: int, parts: int, stages: int, log: list[Action]) -> None:
        self.stage_index, self.group_size, self.num_stages = index, parts, stages
        self.group_rank = index % parts
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.log = log

    def none(self, *_: object) -> list[Any]:
        """Nothing to send, and nothing to receive."""
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = none

    def perform_reduce_grad(self, scale: int) -> None:
        """Nothing to reduce."""

    def forward_one_chunk(self, batch: int, *_: object, **__: object) -> torch.Tensor:
        """Write down a forward."""
        self.log.append(Action("forward", self.stage_index, batch))
        return torch.zeros(())

    def backward_one_chunk(self, batch: int, *, full_backward: bool = True, **_: object) -> None:
        """Write down a backward, or its first half."""
        kind = "backward" if full_backward else "input"
        self.log.append(Action(kind, self.stage_index, batch))

    def backward_weight_one_chunk(self, batch: int, **_: object) -> None:
        """Write down the second half of a backward."""
        self.log.append(Action("weight", self.stage_index, batch))


def torch_order(
    schedule: str, parts: int, stages_per_part: int, micro_batches: int, part: int
) -> list[Action]:
    """What torch's schedule asks of the stages of `part`, in order."""
    log: list[Action] = []
    count = parts * stages_per_part
    mine = [Recorded(index, parts, count, log) for index in range(part, count, parts)]
    single = schedule in ("gpipe", "1f1b")
    kind = _SCHEDULES[schedule]
    made = kind(
        mine[0] if single else mine, micro_batches, loss_fn=lambda total, _: total,
        scale_grads=False,
    )  # fmt: skip
    of = "stage" if single else "stages"
    for way in ("forward", "backward"):  # There are no tensors to agree on.
        setattr(made, f"_{of}_{way}_initialized", True)
    made._step_microbatches(target_mbs=[torch.zeros(())] * micro_batches)
    return log


def allowed(schedule: Schedule, parts: int, micro_batches: int) -> bool:
    """Whether a plan may ask for it."""
    job = tiny_job(
        model={"layers": 16}, layout={"pp": parts, "schedule": schedule},
        train={"batch": micro_batches * 2, "micro_batches": micro_batches},
    )  # fmt: skip
    plan = lay_out(job.layout, job.model, parts)
    return pipeline_fault(plan, job) is None


_GRID = [
    (schedule, parts, micro_batches)
    for schedule, parts, micro_batches in itertools.product(
        get_args(Schedule), (2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
    )
    if allowed(schedule, parts, micro_batches)
]


@pytest.mark.parametrize(("schedule", "parts", "micro_batches"), _GRID)
def test_the_order_is_that_of_torch(schedule: Schedule, parts: int, micro_batches: int) -> None:
    each = (1, 2, 3) if schedule in ("interleaved", "zero-bubble") else (1,)
    for stages, part in itertools.product(each, range(parts)):
        wanted = torch_order(schedule, parts, stages, micro_batches, part)
        assert order(schedule, parts, stages, micro_batches, part) == wanted, (stages, part)


@pytest.mark.parametrize(("schedule", "parts", "micro_batches"), _GRID)
def test_every_stage_has_every_micro_batch_once_each_way(
    schedule: Schedule, parts: int, micro_batches: int
) -> None:
    stages = 2 if schedule == "interleaved" else 1
    backs = ("input", "weight") if schedule == "zero-bubble" else ("backward",)
    found = [
        action
        for part in range(parts)
        for action in order(schedule, parts, stages, micro_batches, part)
    ]
    wanted = {
        Action(kind, stage, batch)
        for kind in ("forward", *backs)
        for stage in range(parts * stages)
        for batch in range(micro_batches)
    }
    assert len(found) == len(wanted)
    assert set(found) == wanted


def test_the_grid_has_every_schedule_and_odd_rounds() -> None:
    assert {schedule for schedule, *_ in _GRID} == set(get_args(Schedule))
    assert ("interleaved", 4, 6) in _GRID
    assert ("zero-bubble", 8, 3) in _GRID
    assert ("1f1b", 4, 3) not in _GRID
