"""What multiplies a run's experts, where neither job nor plan say: the fastest on its devices.

Every rank tries kernels of our own, in the memory of its own experts, before these have values, and
with as many rows as it will have. They are taken if
they are right on all ranks, and the faster on the slowest one; a run that goes on in the same
layout goes on with what it had, if that is right where it is now. All ranks meet in each of two
exchanges, whatever befalls one of them in between, and decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moesaic.base.errors import UserError
from moesaic.dist import device as devices
from moesaic.dist.products import engine, leaves_choice, obstacle
from moesaic.dist.world import World
from moesaic.facts.job.train import Products
from moesaic.nn.context import NARROW
from moesaic.nn.moe import MoE
from moesaic.nn.trial import Load, Trial, said
from moesaic.policy.products import fastest
from moesaic.train.run import Run, Tried

_MOST_TOLD = 3
"""Of what speaks against kernels: ranks whose memory is full have words of their own each."""
_SHORT = 150
"""Letters of such words at either end."""


def begin(
    run: Run, wide: torch.dtype, before: str | None, say: Callable[[str], None] | None
) -> None:
    """Find what multiplies experts of `run`, if that is open on devices such as these, and note it
    in its plan; every rank must call this.

    Args:
        run: whose experts.
        wide: what products take unless the job's precision is narrower.
        before: what multiplied them until now, in the same layout.
        say: told that kernels are tried, and what came of it.
    """
    job, device = run.job, run.world.device
    kind = NARROW.get(job.train.precision, wide)
    if run.plan.products != "auto" or not job.model.experts:
        return
    if not leaves_choice(device) or kind not in devices.OF_KERNELS:
        return
    taken: Products = "torch"
    if before != taken:
        if say is not None:
            say(
                "experts: trying kernels of our own, where they can be used "
                '(layout.products = "torch" does without)'
            )
        run.tried = _found(run, kind, timed=before != "triton")
        taken = "torch" if run.tried.faults else fastest(run.tried.seconds or {"triton": 0.0})
        devices.begin_anew(device)
    for _, moe in run.model.expert_layers():
        moe.bank.by = taken
    run.plan = run.plan.model_copy(update={"products": taken})
    if say is not None:
        for line in _words(run, kind):
            say(line)
        if before == taken:
            say(f"experts: as before by {engine(device, kind, taken)}")


def tokens_of(run: Run) -> int:
    """Of a rank in a micro-batch, at most."""
    train, plan = run.job.train, run.plan
    samples = -(-train.batch // (train.micro_batches * plan.replicas))
    return -(-samples * run.job.data.sequence // plan.tp)


def _found(run: Run, kind: torch.dtype, *, timed: bool) -> Tried:
    """What trying comes to on all ranks; some may have no experts."""
    moe, world = next((moe for _, moe in run.model.expert_layers()), None), run.world
    again = any(layer.recompute for layer in run.model.decoder_layers())

    def trial(moe: MoE) -> Trial:
        return Trial(moe.bank, Load.all_of(moe, tokens_of(run), kind, again=again))

    def fault() -> str | None:
        return None if moe is None else obstacle(world.device) or trial(moe).fault()

    def seconds() -> dict[Products, float]:
        return {} if moe is None else trial(moe).seconds()

    faults = _on_all(world, fault)
    if any(one.told for one in faults) or not timed:
        return Tried(faults=_by_words(faults))
    each = _on_all(world, seconds)
    if any(one.failed for one in each):
        return Tried(faults=_by_words([_Outcome(None, one.failed) for one in each]))
    slowest = dict[Products, float]()
    for one in each:
        for name, taken_s in one.found.items():
            slowest[name] = max(taken_s, slowest.get(name, 0.0))
    return Tried(slowest)


def _by_words(outcomes: Sequence[_Outcome]) -> dict[str, list[int]]:
    """The ranks that tell the same."""
    found = dict[str, list[int]]()
    for rank, one in enumerate(outcomes):
        if one.told is not None:
            found.setdefault(one.told, []).append(rank)
    return found


class _Outcome(NamedTuple):
    """Of a rank's work."""

    found: Any
    failed: str | None = None
    """What it raised instead."""

    @property
    def told(self) -> str | None:
        """What it raised, or what was found, in words."""
        return self.failed or self.found


def _on_all(world: World, work: Callable[[], object]) -> list[_Outcome]:
    """What came of `work` on every rank, by rank; who fails tells the others, who would wait."""
    try:
        mine = _Outcome(work())
    except Exception as error:  # noqa: BLE001 - torch can have the run, whatever it is
        mine = _Outcome(None, said(error))
    try:
        devices.now(world.device)
    except Exception as error:
        why = mine.told if isinstance(mine.told, str) else said(error)
        raise UserError(
            f"experts: kernels of our own have left the device of rank {world.rank} unusable "
            f'({why}): set layout.products = "torch"'
        ) from error
    everyones = [mine] * world.size
    if world.everyone is not None:
        dist.all_gather_object(everyones, mine, group=world.everyone)
    return everyones


def _words(run: Run, kind: torch.dtype) -> Iterator[str]:
    """What came of trying, for a person."""
    device, size = run.world.device, run.world.size
    told = list(run.tried.faults.items())
    for fault, ranks in told[:_MOST_TOLD]:
        where = "" if len(ranks) == size else f"on {_named(ranks)}: "
        yield f"experts: {engine(device, kind, 'triton')} are not taken: {where}{_short(fault)}"
    if len(told) > _MOST_TOLD:
        more = len(told) - _MOST_TOLD
        yield f"experts: {more} more such faults are in the event run_start"
    if told:
        yield (
            f"experts: so this run has {engine(device, kind)}, also when it goes on in this "
            "layout; a new run tries again"
        )
    if run.tried.seconds:
        each = [
            f"{1e3 * taken_s:.3g} ms by {engine(device, kind, by)}"
            for by, taken_s in run.tried.seconds.items()
        ]
        yield f"experts of a layer, there and back: {', '.join(each)}"


def _short(fault: str) -> str:
    """Its beginning and its end: compilers have their word behind pages of what it is about."""
    if len(fault) <= 2 * _SHORT:
        return fault
    return f"{fault[:_SHORT]} ... {fault[-_SHORT:]}"


def _named(ranks: Sequence[int]) -> str:
    """The first of them, and how many more there are."""
    more = len(ranks) - 1
    return f"rank {ranks[0]}" + f" and {more} more" * (more > 0)
