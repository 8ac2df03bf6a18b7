"""What multiplies a run's experts, where neither job nor plan say: the fastest on its devices.

Every rank tries what there is, with experts and as many rows of its own, and the slowest rank
counts. A run that goes on from a checkpoint of the same layout goes on with what that had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from moesaic.dist import device as devices
from moesaic.dist.collectives import gather
from moesaic.dist.products import engine, leaves_choice
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.job.train import Products
from moesaic.facts.plan import Plan
from moesaic.nn.context import NARROW
from moesaic.nn.trial import Load, Tried, tried
from moesaic.policy.products import fastest
from moesaic.train.run import Run

_NAMES: tuple[Products, ...] = ("torch", "triton")
"""What may be taken unasked."""


def begin(run: Run, wide: torch.dtype, say: Callable[[str], None] | None) -> None:
    """Find what multiplies experts of `run`, if that is open on devices such as these; every rank
    must call this. What came of it goes to its plan, and to `say`; products take numbers as `wide`
    as that, unless the job's precision is narrower."""
    job, plan, world = run.job, run.plan, run.world
    if plan.products != "auto" or not (job.model.experts and leaves_choice(world.device)):
        return
    layers, own = [moe for _, moe in run.model.expert_layers()], None
    kind = NARROW.get(job.train.precision, wide)
    if layers:
        own = tried(layers[0].bank, Load.of(layers[0], tokens_of(job, plan), kind))
        devices.forget_peak(world.device)  # Two gradients of a layer are the trial's, not a step's.
    run.tried_s = times = agreed(own, world)
    taken = fastest(times) if times else "torch"
    for moe in layers:
        moe.bank.by = taken
    run.plan = plan.model_copy(update={"products": taken})
    if say is not None and own is not None:
        for line in _words(own.faults, times, world, kind):
            say(line)


def tokens_of(job: Job, plan: Plan) -> int:
    """Of a rank in a micro-batch, at most."""
    samples = math.ceil(job.train.batch / job.train.micro_batches / plan.replicas)
    return math.ceil(samples * job.data.sequence / plan.tp)


def agreed(own: Tried | None, world: World) -> dict[Products, float]:
    """Seconds of the slowest rank by each that all ranks can take; some may have no experts. Every
    rank of the world must call this."""
    mine = [0.0] * len(_NAMES)
    if own is not None:  # Where there was no choice nothing was timed, and all can take torch's.
        mine = [own.seconds.get(name, 0.0 if name == "torch" else math.inf) for name in _NAMES]
    told = torch.tensor(mine, dtype=torch.float64, device=world.device)
    slowest = gather(told, world.everyone).amax(0).tolist()
    times = zip(_NAMES, slowest, strict=True)
    return {name: seconds for name, seconds in times if 0.0 < seconds < math.inf}


def as_left(plan: Plan, before: str, device: torch.device) -> Plan:
    """`plan` with what multiplied experts `before`, where it leaves that open."""
    for name in _NAMES:
        if name == before and plan.products == "auto" and leaves_choice(device):
            return plan.model_copy(update={"products": name})
    return plan


def _words(
    faults: Mapping[Products, str], times: Mapping[Products, float], world: World, kind: torch.dtype
) -> Iterator[str]:
    """What came of trying, for a person."""
    names = {name: engine(world.device, kind, name) for name in (*times, *faults)}
    for name, fault in faults.items():
        yield f"experts: {names[name]} cannot be taken here: {fault}"
    if len(times) > 1:
        each = [f"{1e3 * times[name]:.3g} ms by {names[name]}" for name in times]
        yield f"experts of a layer, there and back: {', '.join(each)}"
