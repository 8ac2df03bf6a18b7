"""Pipelines of theme `families`: what a pipeline loses to waiting, by schedule.

Two ranks of one thread each, stages of equal work, eight micro-batches. In every round each
schedule takes a step, and both ranks, at once, take the same forwards and backwards with nothing
between them. families.md says what bounds the figures.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.pipelining import PipelineStage

from benchmarks import measure
from benchmarks.facts import PROBE_S, probed
from benchmarks.training import UniformSamples, olmoe
from moesaic.dist.collectives import sum_
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.job.train import Schedule
from moesaic.facts.plan import Plan, lay_out
from moesaic.models.initial import InitialSource
from moesaic.nn.context import Context
from moesaic.policy.cost.step import Costs
from moesaic.sim.bubble import bubble, closed_form
from moesaic.sim.timeline import run as simulate
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.data import Batch
from moesaic.train.objectives import lm
from moesaic.train.pipeline import Flow
from moesaic.train.run import Run

PARTS, MICRO_BATCHES, SEQUENCE = 2, 8, 128
WARM_UP = 2
PATIENCE_S = 600.0
# The vocabulary is small, so that embedding and head leave the stages equal.
DENSE = {
    "family": "llama", "vocab": 512, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 8,
    "head_dim": 64, "ffn": 1408,
}  # fmt: skip
FORMS: dict[Schedule, str] = {
    "gpipe": "(p-1) / (m+p-1)",
    "1f1b": "(p-1) / (m+p-1)",
    "interleaved": "(p-1) / (vm+p-1) with v = 2 stages a rank",
    "zero-bubble": "(p-1) / (3m+p-1), forward and both halves of backward equally long",
}
"""By schedule, the share of a pipeline's time that ranks wait where messages are free."""
COMPUTING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
"""All that a stage of torch's computes with; messages and waiting for them are elsewhere."""


def job_of(schedule: Schedule, **sizes: Any) -> Job:
    """A dense model in a pipeline."""
    return olmoe(
        MICRO_BATCHES, SEQUENCE, model={**DENSE, **sizes},
        train={
            "steps": 1_000_000, "batch": MICRO_BATCHES, "micro_batches": MICRO_BATCHES,
            "clip": 1.0, "device": "cpu",
        },
        layout={"pp": PARTS, "schedule": schedule},
    )  # fmt: skip


def predicted(job: Job, plan: Plan, cluster: Cluster) -> float:
    """The share of the pipeline's time that ranks are predicted to wait, mean over ranks."""
    return bubble(simulate(Costs.of(job, plan, cluster).events(), plan.ranks))


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measured bubbles, over theory, predicted over measured, and what a pipeline costs."""
    jobs = {schedule: job_of(schedule) for schedule in FORMS}
    plans = {name: lay_out(job.layout, job.model, PARTS) for name, job in jobs.items()}
    cluster = probed(PROBE_S)
    foretold = {name: predicted(jobs[name], plan, cluster) for name, plan in plans.items()}
    pool = Ranks()
    try:
        taken = pool.run(PARTS, take_rounds, jobs, rounds, timeout_s=7200.0)
    finally:
        pool.close()
    for name, plan in plans.items():
        shares, costs = bubbles([one[name] for one in taken])
        yield from _rows(plan, shares, costs, foretold[name])


def _rows(
    plan: Plan, shares: Sequence[float], costs: Sequence[float], foretold: float
) -> Iterator[measure.Row]:
    name, each = plan.schedule, plan.num_stages // plan.pp
    theory = closed_form(name, plan.pp, each, MICRO_BATCHES)
    for what, unit, values, against in (
        ("measured", "share", shares, "all of the pipeline's time; one thread a rank"),
        (
            "measured over closed form", "ratio", [one / theory for one in shares],
            f"{FORMS[name]} = {theory:.3f}, {plan.pp} parts and {MICRO_BATCHES} micro-batches",
        ),
        (
            "predicted over measured", "ratio", [foretold / one for one in shares],
            f"the pipeline itself; predicted is {foretold:.3f} of a probe taken before",
        ),
        (
            "time over that of the stages alone", "ratio", costs,
            "the same forwards and backwards on both ranks at once, without messages; the closed "
            f"form means {1 / (1 - theory):.3f}",
        ),
    ):  # fmt: skip
        yield measure.row(
            f"bubble, {name}: {what}", float(np.median(values)), unit, bar="",
            against=against, interval=measure.bootstrap(values), repeats=len(values),
        )  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """A round of one schedule on one rank, in seconds."""

    phase_s: float
    """All of the step's phase `pipeline`."""
    computing_s: float
    """Of it, in forward and backward of stages."""
    alone_s: float
    """The same forwards and backwards by themselves."""


def bubbles(ranks: Sequence[Sequence[Taken]]) -> tuple[list[float], list[float]]:
    """By round, the share of waiting, mean over `ranks`, and the pipeline's time over computing's.

    Ranks begin together; who is done early waits for the last one, which is in no phase of theirs.
    """
    shares, costs = [], []
    for taken in zip(*ranks, strict=True):
        longest = max(one.phase_s for one in taken)
        shares.append(float(np.mean([1.0 - one.computing_s / longest for one in taken])))
        costs.append(longest / float(np.mean([one.alone_s for one in taken])))
    return shares, costs


def take_rounds(
    world: World,
    jobs: Mapping[str, Job],
    rounds: int,
    warm_up: int = WARM_UP,
    patience_s: float = PATIENCE_S,
) -> dict[str, list[Taken]]:
    """On each rank: `rounds` steps of every job after some of `warm_up`, in turning order.

    A round that other programs disturb is taken again, with patience.
    """
    torch.set_num_threads(1)
    contenders = {name: Contender(job, world) for name, job in jobs.items()}
    taken: dict[str, list[Taken]] = {name: [] for name in jobs}
    until, kept = time.perf_counter() + patience_s, -warm_up
    for number in itertools.count():
        if kept == rounds:
            break
        watch, turned = measure.Watch(os.getppid()), number % 2 == 1
        names = list(jobs)[:: -1 if turned else 1]
        one = {name: contenders[name].take(alone_first=turned) for name in names}
        disturbed = watch.foreign_share() > measure.FOREIGN_SHARE and time.perf_counter() < until
        if kept >= 0 and int(sum_(torch.tensor([int(disturbed)]), world.everyone)):
            continue
        kept += 1
        if kept > 0:
            for name, spent in one.items():
                taken[name].append(spent)
    for contender in contenders.values():
        contender.run.close()
    return taken


class Contender:
    """A job's run in a pipeline, and this rank's stages by themselves."""

    def __init__(self, job: Job, world: World) -> None:
        plan = lay_out(job.layout, job.model, world.size)
        source = InitialSource(job.seed, job.model.init_std)
        self.run: Run = assemble(job, plan, world, source)
        self._samples, self._world = UniformSamples(job), world
        self._micro = [self._samples.batch([n]) for n in range(job.train.micro_batches)]
        stream = (1, job.data.sequence, job.model.hidden)
        self._arriving, self._returning = torch.randn(stream), 1e-3 * torch.randn(stream)

    def take(self, alone_first: bool) -> Taken:
        """A step in the pipeline and one without, both ranks at once."""
        alone_s = self._alone_s() if alone_first else 0.0
        self._world.barrier()
        with computing() as spent:
            phase_s = self.run.step(self._samples).phases["pipeline"]
        return Taken(phase_s, sum(spent), alone_s or self._alone_s())

    def _alone_s(self) -> float:
        pipeline = self.run.pipeline
        assert pipeline is not None
        flow = Flow(self._micro, self._begin, nullcontext, 1.0)
        self._world.barrier()
        began = time.perf_counter()
        for stage in pipeline.stages.values():
            stage.flow = flow
            for number in torch.arange(len(self._micro)):
                x = number if stage.first else self._arriving.detach().requires_grad_()
                result = stage(x, number)
                result.backward(None if stage.last else self._returning)
        spent = time.perf_counter() - began
        for item in self.run.holdings:
            item.parameter.grad = None
        return spent

    def _begin(self, batch: Batch) -> Context:
        context = lm.make_context(self.run.model, batch, self.run.job, 0)
        context.training = True
        targets = sum(lm.num_targets(one) for one in self._micro)
        lm.aim(context, batch, targets, self._world.device, 1.0)
        return context


@contextmanager
def computing() -> Iterator[list[float]]:
    """Seconds of every forward and backward that stages of torch's pipelines do meanwhile."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments, **more)
            spent.append(time.perf_counter() - began)
            return result

        return call

    with ExitStack() as stack:
        for name in COMPUTING:
            method = timed(getattr(PipelineStage, name))
            stack.enter_context(mock.patch.object(PipelineStage, name, method))
        yield spent
