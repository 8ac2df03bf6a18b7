"""The order of a pipeline rank's passes is that of PyTorch's schedules."""

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

from moesaic.facts.job.train import PipelineSchedule
from moesaic.facts.plan import Action, pipeline_actions, plan_from_layout
from moesaic.facts.plan.checks import pipeline_error
from moesaic.testing.jobs import tiny_job

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip


class RecordingStage:
    """A stage that computes nothing and records the calls of a schedule."""

    submod = None
    has_backward = True

    def __init__(self, index: int, pp: int, stages: int, log: list[Action]) -> None:
        self.stage_index, self.group_size, self.num_stages = index, pp, stages
        self.group_rank = index % pp
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.log = log

    def none(self, *_: object) -> list[Any]:
        """Return no operations."""
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = none

    def perform_reduce_grad(self, scale: int) -> None:
        """Do nothing."""

    def forward_one_chunk(self, batch: int, *_: object, **__: object) -> torch.Tensor:
        """Record a forward."""
        self.log.append(Action("forward", self.stage_index, batch))
        return torch.zeros(())

    def backward_one_chunk(self, batch: int, *, full_backward: bool = True, **_: object) -> None:
        """Record a backward, or its first half."""
        kind = "backward" if full_backward else "input"
        self.log.append(Action(kind, self.stage_index, batch))

    def backward_weight_one_chunk(self, batch: int, **_: object) -> None:
        """Record the second half of a backward."""
        self.log.append(Action("weight", self.stage_index, batch))


def torch_order(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, pp_rank: int
) -> list[Action]:
    """Return the calls of PyTorch's schedule to the stages of `pp_rank`, in order."""
    log: list[Action] = []
    count = pp * stages_per_rank
    mine = [RecordingStage(index, pp, count, log) for index in range(pp_rank, count, pp)]
    single = schedule in ("gpipe", "1f1b")
    kind = _SCHEDULES[schedule]
    made = kind(
        mine[0] if single else mine, micro_batches, loss_fn=lambda total, _: total,
        scale_grads=False,
    )  # fmt: skip
    name = "stage" if single else "stages"
    for direction in ("forward", "backward"):  # There are no tensor shapes to exchange.
        setattr(made, f"_{name}_{direction}_initialized", True)
    made._step_microbatches(target_mbs=[torch.zeros(())] * micro_batches)
    return log


def allowed(schedule: PipelineSchedule, pp: int, micro_batches: int) -> bool:
    """Return True if a plan may have this pipeline."""
    job = tiny_job(
        model={"layers": 16}, layout={"pp": pp, "schedule": schedule},
        train={"batch": micro_batches * 2, "micro_batches": micro_batches},
    )  # fmt: skip
    plan = plan_from_layout(job.layout, job.model, pp)
    return pipeline_error(plan, job) is None


_GRID = [
    (schedule, pp, micro_batches)
    for schedule, pp, micro_batches in itertools.product(
        get_args(PipelineSchedule), (2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
    )
    if allowed(schedule, pp, micro_batches)
]


@pytest.mark.parametrize(("schedule", "pp", "micro_batches"), _GRID)
def test_order_matches_pytorch(schedule: PipelineSchedule, pp: int, micro_batches: int) -> None:
    each = (1, 2, 3) if schedule in ("interleaved", "zero-bubble") else (1,)
    for stages, pp_rank in itertools.product(each, range(pp)):
        wanted = torch_order(schedule, pp, stages, micro_batches, pp_rank)
        assert pipeline_actions(schedule, pp, stages, micro_batches, pp_rank) == wanted, (
            stages,
            pp_rank,
        )


@pytest.mark.parametrize(("schedule", "pp", "micro_batches"), _GRID)
def test_every_stage_has_every_pass_once(
    schedule: PipelineSchedule, pp: int, micro_batches: int
) -> None:
    stages = 2 if schedule == "interleaved" else 1
    backwards = ("input", "weight") if schedule == "zero-bubble" else ("backward",)
    actions = [
        action
        for pp_rank in range(pp)
        for action in pipeline_actions(schedule, pp, stages, micro_batches, pp_rank)
    ]
    wanted = {
        Action(kind, stage, batch)
        for kind in ("forward", *backwards)
        for stage in range(pp * stages)
        for batch in range(micro_batches)
    }
    assert len(actions) == len(wanted)
    assert set(actions) == wanted


def test_grid_covers_every_schedule_and_odd_rounds() -> None:
    assert {schedule for schedule, *_ in _GRID} == set(get_args(PipelineSchedule))
    assert ("interleaved", 4, 6) in _GRID
    assert ("zero-bubble", 8, 3) in _GRID
    assert ("1f1b", 4, 3) not in _GRID
