"""Traces of one micro-batch, block by block: kernels and tensors saved by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from moesaic.dist.shm_all_to_all import PendingCopies, SharedMemoryAllToAll
from moesaic.dist.state import local_tensor
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import Block
from moesaic.models.init import InitialSource
from moesaic.models.kernel_counter import KernelCounts
from moesaic.nn.inputs import autocast_to
from moesaic.nn.reports import MoEReport
from moesaic.testing.flops import CUSTOM_FLOPS
from moesaic.testing.jobs import RandomSamples
from moesaic.testing.kernel_counter import MoesaicKernelCounter
from moesaic.train.assemble import assemble
from moesaic.train.objectives import lm


@dataclass
class BlockTrace:
    """Trace of one rank by model block."""

    forward: dict[str, KernelCounts] = field(default_factory=dict)
    backward: dict[str, KernelCounts] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes saved by autograd, by block."""
    loads: list[list[list[int]]] = field(default_factory=list)
    """Assignments by rank and expert of each expert layer, [layers][ranks][experts]."""


def trace_blocks(job: Job, plan: Plan, world: World) -> BlockTrace:
    """Run every block by itself, forward and backward, on the job's first micro-batch.

    Each sample is one document, as the workload assumes.
    The plan must not shard dense parameters or use a pipeline.
    """
    run = assemble(job, plan, world, InitialSource(0, 0.1))
    run.part.buckets.close()  # Gradient reduction belongs to the step.
    rows = plan.sample_range(world.rank, job.train.batch // job.train.micro_batches)
    batch = RandomSamples(job.model.vocab, job.data.sequence).batch(rows)
    batch.documents.zero_()
    inputs = lm.make_inputs(run.part.model, batch, job, 0)
    inputs = replace(inputs, training=True, targets=batch.targets)
    lasting = (
        *map(local_tensor, run.part.model.parameters()),
        inputs.rotary.cosine,
        inputs.rotary.sine,
    )
    lasting_addresses = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    trace, x = BlockTrace(), batch.inputs.clone()
    for name, block in run.part.model.blocks():
        saved: dict[int, int] = {}
        x = x.detach().requires_grad_(x.requires_grad)
        with _track_saved(saved, lasting_addresses), autocast_to(job.train.precision, world.device):
            trace.forward[name], (out, report) = trace_call(partial(block, x, inputs))
        roots = [out]
        if report.moe is not None:
            trace.loads.append(expert_load(report.moe, plan, world.rank))
            roots += [report.moe.probability_sum, report.moe.z_sum]
        roots = [root for root in roots if root.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        trace.saved_bytes[name] = sum(saved.values())
        trace.backward[name], _ = trace_call(partial(torch.autograd.backward, roots, seeds))
        for parameter in run.part.model.parameters():
            parameter.grad = None
        x = out
    run.close()
    return trace


def expert_load(report: MoEReport, plan: Plan, rank: int) -> list[list[int]]:
    """Return assignments by rank and expert, as `expert_counts` takes them; zeros for ranks outside
    the EP group of `rank`."""
    counts = report.counts
    load = counts.new_zeros((plan.ranks_per_stage // plan.etp, counts.shape[1]))
    load.view(-1, *counts.shape)[rank % plan.ranks_per_stage // (plan.ep * plan.etp)] = counts
    result: list[list[int]] = load.tolist()
    return result


def _track_saved(saved: dict[int, int], known: set[int]) -> AbstractContextManager[None]:
    """Return a context that adds storages saved by autograd to `saved`, except those in `known`.

    Keys are addresses, values bytes.
    """

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(keep, lambda tensor: tensor)


class _CollectiveSpy:
    """Detector of collectives in flight, during which torch's operations, copies too, do not
    count."""

    NAMES = (
        "all_gather", "all_reduce", "all_to_all_single", "reduce_scatter_single",
        "reduce_scatter_tensor",
    )  # fmt: skip

    def __init__(self) -> None:
        self.in_flight = False

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Track collectives while the context is active."""
        with ExitStack() as patches:
            for place, name in (
                *((dist, name) for name in self.NAMES if hasattr(dist, name)),
                (SharedMemoryAllToAll, "start"),
                (PendingCopies, "wait"),
            ):
                call = self._wrap(getattr(place, name))
                patches.enter_context(mock.patch.object(place, name, call))
            yield

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.in_flight = True
            try:
                return real(*args, **kwargs)
            finally:
                self.in_flight = False

        return call


def trace_call(work: Callable[[], Any]) -> tuple[KernelCounts, Any]:
    """Return the kernels of `work` and its result, after checking our flop count against
    torch's."""
    counts, ignored, collectives = KernelCounts(), KernelCounts(), _CollectiveSpy()
    counter = FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS)
    with (
        collectives.patched(),
        counter,
        MoesaicKernelCounter(lambda: ignored if collectives.in_flight else counts),
    ):
        result = work()
    assert counts.flops == counter.get_total_flops()
    return counts, result


def check_work(
    trace: BlockTrace, blocks: Sequence[Block], *, saved_error: float | None = 0.02
) -> None:
    """Compare a trace with the predicted blocks, by block of the model.

    FLOPs are equal, elementwise bytes within 5%, and bytes saved by autograd within `saved_error`,
    unless it is None.
    """
    for direction, found in (("forward", trace.forward), ("backward", trace.backward)):
        for name, counts in found.items():
            works = [getattr(one, direction) for one in blocks if one.spec.model_block == name]
            assert sum(work.flops for work in works) == counts.flops, (direction, name)
            moved = sum(work.moved_bytes for work in works)
            assert abs(moved - counts.moved_bytes) <= 0.05 * counts.moved_bytes, (
                direction, name, moved, counts.moved_bytes,
            )  # fmt: skip
    if saved_error is not None:
        for name, num_bytes in trace.saved_bytes.items():
            predicted = sum(one.saved_bytes for one in blocks if one.spec.model_block == name)
            error = abs(predicted - num_bytes)
            assert error <= saved_error * num_bytes, (name, predicted, num_bytes)
