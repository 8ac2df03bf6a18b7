"""Expert counts: gathered inside the EP group, and summed over ranks once a micro-batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run

LAYERS, MICRO_BATCHES, EXPERTS = 3, 2, 8


def events_of_step(world: World, job: Job) -> list[Any]:
    """Return gathers and sums of counts, their waits, and backward passes of one step, in order."""
    run = start_run(job, world)
    run.part.buckets.close()  # Reductions of gradients are not recorded.
    events: list[Any] = []
    all_gather, all_reduce, backward = dist.all_gather, dist.all_reduce, Tensor.backward

    def record_gather(tensors: list[Tensor], tensor: Tensor, group: Any) -> Any:
        events.append(("gather", group.size(), tensor.numel()))
        return all_gather(tensors, tensor, group=group)

    def record_sum(tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        work = all_reduce(tensor, group=group, async_op=async_op)
        if not async_op:
            return work
        events.append(("sum", group.size(), tensor.numel()))
        waiting = mock.Mock()
        waiting.wait.side_effect = lambda: (events.append("wait"), work.wait())
        return waiting

    def record_backward(tensor: Tensor) -> None:
        events.append("backward")
        backward(tensor)
        events.append("backward ends")

    with (
        mock.patch.object(dist, "all_gather", record_gather),
        mock.patch.object(dist, "all_reduce", record_sum),
        mock.patch.object(torch.Tensor, "backward", record_backward),
    ):
        run.compute_gradients(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()
    return events


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_counts_stay_inside_the_ep_group(ranks: RankPool, capacity: float | None) -> None:
    job = tiny_job(
        model={"layers": LAYERS, "experts": EXPERTS, "top_k": 2},
        train={"micro_batches": MICRO_BATCHES}, layout={"ep": 2},
        routing={"balance_loss": 0.01, "capacity_factor": capacity},
    )  # fmt: skip
    tables = 1 if capacity is None else 2  # Before and after drops.
    layer: list[Any] = [("gather", 4, 2 * EXPERTS + 1)] if capacity else []
    layer += [("gather", 2, EXPERTS)]
    micro_batch = [
        *LAYERS * layer, ("sum", 4, tables * LAYERS * EXPERTS + 1),
        "backward", "wait", "backward ends",
    ]  # fmt: skip
    for events in ranks.run(4, events_of_step, job):
        assert events == MICRO_BATCHES * micro_batch
