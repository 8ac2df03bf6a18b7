"""Hosts and devices of the ranks, compared with those of a plan."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from moesaic.base.decisions import Decision, decide
from moesaic.dist.collectives import all_gather
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, RankPlace, check_places
from moesaic.kernels import device as devices
from moesaic.policy import balance
from moesaic.policy.plan.dispatch import DispatchFacts, default_dispatch


def gather_places(world: World) -> list[RankPlace]:
    """Return the host and device of each rank; every rank of the world must call this."""
    local = {
        "host": platform.node() or "localhost",
        "device": devices.model(world.device),
        "kind": devices.kind(world.device),
    }
    places = [local] * world.size
    if world.group is not None:
        dist.all_gather_object(places, local, group=world.group)
    return [RankPlace.model_validate(place) for place in places]


def gather_ranks(world: World) -> list[balance.RankDevice]:
    """Return host, device kind and threads of each rank; every rank of the world must call this."""
    threads = torch.tensor([torch.get_num_threads()], device=world.device)
    num_threads = all_gather(threads, world.group).flatten().tolist()
    return [
        balance.RankDevice(place.host, place.kind, number)
        for place, number in zip(gather_places(world), num_threads, strict=True)
    ]


def describe_ranks(world: World) -> list[dict[str, Any]]:
    """Return the same as plain data with numbered hosts; every rank of the world must call this."""
    ranks = gather_ranks(world)
    hosts = {host: number for number, host in enumerate(dict.fromkeys(rank.host for rank in ranks))}
    return [
        {"host": hosts[rank.host], "kind": rank.kind, "threads": rank.num_threads} for rank in ranks
    ]


def resolve_dispatch(plan: Plan, job: Job, world: World, log: list[Decision[Any, Any]]) -> Plan:
    """Return `plan` with the default dispatch for the ranks' hosts if the job says "auto", and add
    the decision to `log`. Every rank of the world must call this."""
    if job.layout.dispatch != "auto" or plan.ep == 1:
        return plan
    hosts = [place.host for place in gather_places(world)]
    facts = DispatchFacts(list(plan.ep_groups()), hosts, job.model.top_k)
    return plan.model_copy(update=decide(default_dispatch, facts, log)._asdict())


def check_topology(plan: Plan, world: World, origin: str) -> None:
    """Raise on every rank unless the ranks run where `plan` places them."""
    if plan.places:
        check_places(plan, gather_places(world), origin)
