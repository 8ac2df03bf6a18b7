"""What multiplies a run's experts, where neither job nor plan say: the fastest on its devices.

Every rank tries kernels of our own, with experts and as many rows of its own. They are taken if
they are right on all ranks, and the faster on the slowest one; a run that goes on in the same
layout goes on with what it had, if that is right where it is now. All ranks meet in each of two
exchanges, whatever befalls one of them in between, and decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moesaic.dist import device as devices
from moesaic.dist.products import engine, leaves_choice, obstacle
from moesaic.dist.world import World
from moesaic.facts.job.train import Products
from moesaic.nn.context import NARROW
from moesaic.nn.trial import Load, Trial
from moesaic.policy.products import fastest
from moesaic.train.run import Run, Tried


def begin(
    run: Run, wide: torch.dtype, before: str | None, say: Callable[[str], None] | None
) -> None:
    """Find what multiplies experts of `run`, if that is open on devices such as these, and note it
    in its plan; every rank must call this.

    Args:
        run: whose experts.
        wide: what products take unless the job's precision is narrower.
        before: what multiplied them until now, in the same layout.
        say: told what came of it.
    """
    job, device = run.job, run.world.device
    kind = NARROW.get(job.train.precision, wide)
    if run.plan.products != "auto" or not job.model.experts:
        return
    if not leaves_choice(device) or kind not in devices.OF_KERNELS:
        return
    taken: Products = "torch"
    if before != taken:
        run.tried = _found(run, kind, timed=before != "triton")
        taken = "torch" if run.tried.faults else fastest(run.tried.seconds or {"triton": 0.0})
        devices.begin_anew(device)
    for _, moe in run.model.expert_layers():
        moe.bank.by = taken
    run.plan = run.plan.model_copy(update={"products": taken})
    if say is not None:
        for line in _words(run.tried, kind, device):
            say(line)


def tokens_of(run: Run) -> int:
    """Of a rank in a micro-batch, at most."""
    train, plan = run.job.train, run.plan
    samples = -(-train.batch // (train.micro_batches * plan.replicas))
    return -(-samples * run.job.data.sequence // plan.tp)


def _found(run: Run, kind: torch.dtype, *, timed: bool) -> Tried:
    """What trying comes to on all ranks; some may have no experts."""
    moe, world = next((moe for _, moe in run.model.expert_layers()), None), run.world
    trial = None if moe is None else Trial(moe.bank, Load.of(moe, tokens_of(run), kind))

    def fault() -> str | None:
        return None if trial is None else obstacle(world.device) or trial.fault()

    def seconds() -> dict[Products, float]:
        return {} if trial is None else trial.seconds()

    each = _on_all(world, fault)
    faults = {rank: one.found or one.failed for rank, one in enumerate(each)}
    wrong = {rank: fault for rank, fault in faults.items() if fault is not None}
    if wrong or not timed:
        return Tried(faults=wrong)
    each = _on_all(world, seconds)
    failed = {rank: one.failed for rank, one in enumerate(each) if one.failed is not None}
    if failed:
        return Tried(faults=failed)
    slowest = dict[Products, float]()
    for one in each:
        for name, taken_s in one.found.items():
            slowest[name] = max(taken_s, slowest.get(name, 0.0))
    return Tried(slowest)


class _Outcome(NamedTuple):
    """Of a rank's work."""

    found: Any
    failed: str | None = None
    """What it raised instead."""


def _on_all(world: World, work: Callable[[], object]) -> list[_Outcome]:
    """What came of `work` on every rank, by rank; who fails tells the others, who would wait."""
    try:
        mine = _Outcome(work())
    except Exception as error:  # noqa: BLE001 - torch can have the run, whatever it is
        mine = _Outcome(None, f"{type(error).__name__}: {error}")
    said = [mine] * world.size
    if world.everyone is not None:
        dist.all_gather_object(said, mine, group=world.everyone)
    return said


def _words(found: Tried, kind: torch.dtype, device: torch.device) -> Iterator[str]:
    """What came of trying, for a person."""
    kernels = engine(device, kind, "triton")
    for rank, fault in found.faults.items():
        yield f"experts: {kernels} are not taken, for on rank {rank}: {fault}"
    if found.seconds:
        each = [
            f"{1e3 * s:.3g} ms by {engine(device, kind, by)}" for by, s in found.seconds.items()
        ]
        yield f"experts of a layer, there and back: {', '.join(each)}"
