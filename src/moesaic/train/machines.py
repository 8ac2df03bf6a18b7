"""The machines at hand, held against those of a plan."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from moesaic.dist import device as devices
from moesaic.dist.collectives import gather
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, RankPlace, check_places
from moesaic.policy import balance
from moesaic.policy.dispatch import usual


def places(world: World) -> list[RankPlace]:
    """Where each rank runs; every rank of the world must call this."""
    mine = {
        "host": platform.node() or "localhost",
        "device": devices.model(world.device),
        "kind": devices.kind(world.device),
    }
    said = [mine] * world.size
    if world.everyone is not None:
        dist.all_gather_object(said, mine, group=world.everyone)
    return [RankPlace.model_validate(one) for one in said]


def ranks(world: World) -> list[balance.Rank]:
    """Where each rank runs, and with what; every rank of the world must call this."""
    threads = torch.tensor([torch.get_num_threads()], device=world.device)
    each = gather(threads, world.everyone).flatten().tolist()
    return [
        balance.Rank(place.host, place.kind, number)
        for place, number in zip(places(world), each, strict=True)
    ]


def described(world: World) -> list[dict[str, Any]]:
    """The same for a run's record, hosts by number; every rank of the world must call this."""
    found = ranks(world)
    hosts = {host: number for number, host in enumerate(dict.fromkeys(one.host for one in found))}
    return [{"host": hosts[one.host], "kind": one.kind, "threads": one.threads} for one in found]


def settled(plan: Plan, job: Job, world: World) -> Plan:
    """`plan`, in which tokens travel as is usual between the hosts at hand if the job leaves that
    open; every rank of the world must call this."""
    if job.layout.dispatch != "auto" or plan.ep == 1:
        return plan
    return usual(plan, [place.host for place in places(world)], job.model.top_k)


def check_machines(plan: Plan, world: World, origin: str) -> None:
    """Raise, on every rank, unless the ranks run where `plan` has them."""
    if plan.places:
        check_places(plan, places(world), origin)
