"""One micro-batch of a real model, block by block: what kernels did, what autograd kept."""

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

from moesaic.dist.shared import Arriving, ByMemory
from moesaic.dist.state import local
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.models.initial import InitialSource
from moesaic.models.kernels import Passes, Seen
from moesaic.nn.context import LayerFacts
from moesaic.testing.flops import UNCOUNTED, flops
from moesaic.testing.jobs import RandomSamples
from moesaic.train.assemble import assemble
from moesaic.train.objectives import lm


@dataclass
class Watched:
    """What one rank did, by the model's own blocks: layers in one piece."""

    forward: dict[str, Seen] = field(default_factory=dict)
    backward: dict[str, Seen] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """Bytes that autograd kept."""
    loads: list[list[list[int]]] = field(default_factory=list)
    """Assignments by rank and expert, of each expert layer."""


def watch(job: Job, plan: Plan, world: World) -> Watched:
    """Run every block on its own, forward and backward, on the first micro-batch of the job.

    The plan has no shards of dense parameters, and no pipeline.
    """
    run = assemble(job, plan, world, InitialSource(0, 0.1))
    run.buckets.close()  # What goes to them belongs to the step.
    rows = plan.rows(world.rank, job.train.batch // job.train.micro_batches)
    batch = RandomSamples(job.model.vocab, job.data.sequence).batch(rows)
    if job.data.packing == "stream":
        batch.documents.zero_()
    context = lm.make_context(run.model, batch, job, 0)
    context.training, context.targets, context.loss_scale = True, batch.targets, 1.0
    lasting = (*map(local, run.model.parameters()), context.rotary.cosine, context.rotary.sine)
    known = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    watched, x = Watched(), batch.inputs.clone()
    for name, block in run.model.blocks():
        found: dict[int, int] = {}
        x = x.detach().requires_grad_(x.requires_grad)
        with _keeping(found, known), run.precision():
            watched.forward[name], out = observe(partial(block, x, context))
        index = int(name.partition(".")[2]) if name.startswith("layers") else -1
        facts = [context.layers[index]] if index in context.layers else []
        watched.loads += [load_of(one) for one in facts]
        roots = [out, *(part for one in facts for part in (one.balance, one.z))]
        roots = [root for root in roots if root.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        watched.kept[name] = sum(found.values())
        watched.backward[name], _ = observe(partial(torch.autograd.backward, roots, seeds))
        for parameter in run.model.parameters():
            parameter.grad = None
        x = out
    run.close()
    return watched


def load_of(facts: LayerFacts) -> list[list[int]]:
    """Assignments by rank and expert, and visits behind them, as `expert_counts` takes them."""
    known = [facts.counts] if facts.visits is None else [facts.counts, facts.visits]
    found: list[list[int]] = torch.cat(known, dim=1).tolist()
    return found


def _keeping(found: dict[int, int], known: set[int]) -> AbstractContextManager[None]:
    """While this holds, storages that autograd keeps are `found`, but for those that are `known`.

    A storage is known by its address, and found with its bytes.
    """

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(keep, lambda tensor: tensor)


class _Messages:
    """Knows while ranks send to each other: what torch does then, copies too, is no kernel."""

    NAMES = (
        "all_gather", "all_reduce", "all_to_all_single", "reduce_scatter_single",
        "reduce_scatter_tensor",
    )  # fmt: skip

    def __init__(self) -> None:
        self.on_their_way = False

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """While this holds."""
        with ExitStack() as patches:
            for place, name in (
                *((dist, name) for name in self.NAMES if hasattr(dist, name)),
                (ByMemory, "start"),
                (Arriving, "wait"),
            ):
                call = self._around(getattr(place, name))
                patches.enter_context(mock.patch.object(place, name, call))
            yield

    def _around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.on_their_way = True
            try:
                return real(*args, **kwargs)
            finally:
                self.on_their_way = False

        return call


def observe(work: Callable[[], Any]) -> tuple[Seen, Any]:
    """What `work` did, and what it returns; our count of its flops and torch's are one."""
    seen, aside, messages = Seen(), Seen(), _Messages()
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with messages.noticed(), counter, Passes(lambda: aside if messages.on_their_way else seen):
        result = work()
    assert flops(seen) == counter.get_total_flops()
    return seen, result
