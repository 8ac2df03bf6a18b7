"""Traces of one micro-batch, block by block: kernels and tensors saved by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
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
from moesaic.models.init import InitialSource
from moesaic.models.kernel_counter import KernelCounter, KernelCounts
from moesaic.nn.context import LayerFacts
from moesaic.testing.flops import CUSTOM_FLOPS, flops
from moesaic.testing.jobs import RandomSamples
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
    run.buckets.close()  # Gradient reduction belongs to the step.
    rows = plan.sample_range(world.rank, job.train.batch // job.train.micro_batches)
    batch = RandomSamples(job.model.vocab, job.data.sequence).batch(rows)
    batch.documents.zero_()
    context = lm.make_context(run.model, batch, job, 0)
    context.training, context.targets, context.loss_scale = True, batch.targets, 1.0
    lasting = (
        *map(local_tensor, run.model.parameters()),
        context.rotary.cosine,
        context.rotary.sine,
    )
    lasting_addresses = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    trace, x = BlockTrace(), batch.inputs.clone()
    for name, block in run.model.blocks():
        saved: dict[int, int] = {}
        x = x.detach().requires_grad_(x.requires_grad)
        with _track_saved(saved, lasting_addresses), run.autocast():
            trace.forward[name], out = trace_call(partial(block, x, context))
        index = int(name.partition(".")[2]) if name.startswith("layers") else -1
        facts = [context.layer_facts[index]] if index in context.layer_facts else []
        trace.loads += [expert_load(one) for one in facts]
        roots = [out, *(part for one in facts for part in (one.balance_loss, one.z_loss))]
        roots = [root for root in roots if root.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        trace.saved_bytes[name] = sum(saved.values())
        trace.backward[name], _ = trace_call(partial(torch.autograd.backward, roots, seeds))
        for parameter in run.model.parameters():
            parameter.grad = None
        x = out
    run.close()
    return trace


def expert_load(facts: LayerFacts) -> list[list[int]]:
    """Return assignments by rank and expert, then deduplicated tokens, as `expert_counts` takes
    them."""
    tables = [facts.counts] if facts.dedup_counts is None else [facts.counts, facts.dedup_counts]
    load: list[list[int]] = torch.cat(tables, dim=1).tolist()
    return load


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
        KernelCounter(lambda: ignored if collectives.in_flight else counts),
    ):
        result = work()
    assert flops(counts) == counter.get_total_flops()
    return counts, result
