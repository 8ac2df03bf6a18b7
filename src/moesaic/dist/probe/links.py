"""Network speed: messages between two ranks, and collectives of a group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.all_to_all import Transport
from moesaic.dist.collectives import all_gather
from moesaic.dist.probe.timing import Figures, geometric_sizes, time_call, time_collective
from moesaic.dist.world import Group, World
from moesaic.kernels import device as devices

_COMPUTE_S = 8e-3
_MIN_SKEW_S = 1e-6
_COLLECTIVE_WEIGHT = 3
"""Time of a collective relative to a message, because ranks compute between collectives."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def message_bytes(most: int) -> list[int]:
    """Return the message sizes between two ranks, up to `most` bytes."""
    return [8, *geometric_sizes(1 << 10, most, 8)]


def collective_bytes(ranks: int, most: int) -> list[int]:
    """Return the collective sizes, up to about `most` bytes per rank, in whole fp32 elements per
    rank."""
    return [-(-size // (4 * ranks)) * 4 * ranks for size in geometric_sizes(1 << 12, most, 8)]


def link_pairs(hosts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the measured pairs: per host its first rank with the second and the last; between
    hosts their first ranks."""
    inside = [
        (host[0], other)
        for host in hosts
        for other in dict.fromkeys([*host[1:2], host[-1]])
        if other != host[0]
    ]
    return inside + list(combinations([host[0] for host in hosts], 2))


def measure(world: World, hosts: Sequence[Sequence[int]], most: int, budget_s: float) -> Figures:
    """Return the seconds of messages and collectives: `A-B one way`, `A-B both`, `NAME within`,
    `NAME across`.

    `within` are collectives inside each host, all hosts at once; `across` are those of all ranks.
    Times start when the last rank arrives. `skew` is the delay of the last rank after a second of
    computing, relative to computing without collectives.
    """
    pairs = link_pairs(hosts)
    scopes = [("within", hosts)] if max(map(len, hosts)) > 1 else []
    if len(hosts) > 1:
        scopes.append(("across", [range(world.size)]))
    transports = [(scope, world.transport(sets)) for scope, sets in scopes]
    sizes = message_bytes(most)
    num_operations = len(COLLECTIVES) * len(collective_bytes(2, most)) * len(transports)
    share_s = budget_s / (len(pairs) * (len(sizes) + 1) + _COLLECTIVE_WEIGHT * num_operations)
    figures: Figures = {}
    for first, second in pairs:
        world.barrier()
        if world.rank in (first, second):
            figures |= _measure_pair(world, first, second, sizes, share_s)
    for scope, transport in transports:
        world.barrier()
        if transport is not None:
            figures |= _measure_collectives(
                world, transport, scope, most, _COLLECTIVE_WEIGHT * share_s
            )
    return figures


def _measure_pair(
    world: World, first: int, second: int, sizes: list[int], share_s: float
) -> Figures:
    """Return the seconds one way by size, and of the largest message in both directions at once."""
    peer = second if world.rank == first else first

    def agree(count: int) -> int:
        number = torch.tensor([count], device=world.device)
        if world.rank == first:
            dist.send(number, peer, group=world.group)
        else:
            dist.recv(number, peer, group=world.group)
        return int(number.item())

    def ping_pong(message: Tensor) -> None:
        if world.rank == first:
            dist.send(message, peer, group=world.group)
            dist.recv(message, peer, group=world.group)
        else:
            dist.recv(message, peer, group=world.group)
            dist.send(message, peer, group=world.group)

    def both_ways(outgoing: Tensor, incoming: Tensor) -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, peer, world.group),
                dist.P2POp(dist.irecv, incoming, peer, world.group),
            ]
        )
        for work in works:
            work.wait()

    def time(work: Callable[[], object]) -> float:
        return fmean(
            time_collective(
                work, lambda: devices.synchronized_time_s(world.device), agree, share_s
            ).calls_s
        )

    times = []
    for size in sizes:
        message = torch.zeros(size, dtype=torch.uint8, device=world.device)
        times.append(time(lambda message=message: ping_pong(message)) / 2)  # type: ignore[misc]
    both = time(lambda: both_ways(message, torch.empty_like(message)))
    return {f"{first}-{second} one way": times, f"{first}-{second} both": [both]}


def _measure_collectives(
    world: World, transport: Transport, scope: str, most: int, share_s: float
) -> Figures:
    group = transport.group
    ranks, first = group.size(), dist.get_global_rank(group, 0)

    def agree(count: int) -> int:
        number = torch.tensor([count], device=world.device)
        dist.broadcast(number, src=first, group=group)
        return int(number.item())

    compute, clock = (
        make_filler_compute(world.device, agree),
        lambda: devices.synchronized_time_s(world.device),
    )
    figures: Figures = {}
    between_s: list[float] = []
    alone_s = [_compute_without_collectives_s(compute, world.device, group, share_s)]
    for name in COLLECTIVES:
        times = figures[f"{name} {scope}"] = []
        for num_bytes in collective_bytes(ranks, most):
            work = make_collective(name, num_bytes, world.device, transport)
            measured = time_collective(work, clock, agree, share_s, compute)
            # The last rank to arrive waits for no other.
            times.append(float(_gather_times(measured.calls_s, world, group).amin(dim=0).mean()))
            between_s += _gather_times(measured.compute_s, world, group).amax(dim=0).tolist()
        alone_s.append(_compute_without_collectives_s(compute, world.device, group, share_s))
    late_s = max(fmean(between_s) - fmean(alone_s), _MIN_SKEW_S)
    figures[f"skew {scope}"] = [late_s / math.sqrt(fmean(alone_s))]
    return figures


def _gather_times(measured: list[float], world: World, group: Group) -> Tensor:
    """Return the times of every rank, [ranks, calls]."""
    own = torch.tensor(measured, dtype=torch.float64, device=world.device)
    return all_gather(own, group)


def _compute_without_collectives_s(
    work: Callable[[], object], device: torch.device, group: Group, budget_s: float
) -> float:
    """Return the mean time of `work` over ranks that run it at once without collectives."""
    dist.barrier(group)
    own = torch.tensor(
        [time_call(work, lambda: devices.synchronized_time_s(device), budget_s)],
        dtype=torch.float64,
        device=device,
    )
    return float(all_gather(own, group).mean())


def make_filler_compute(device: torch.device, agree: Callable[[int], int]) -> Callable[[], object]:
    """Return matmuls with cold weights that take about `_COMPUTE_S`, to run between collectives."""
    left, weights = torch.ones(256, 512, device=device), torch.ones(64, 512, 512, device=device)
    next_weight = itertools.cycle(weights)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, next(next_weight))

    once_s = time_call(lambda: multiply(1), lambda: devices.synchronized_time_s(device), 0.0)
    times = agree(max(1, min(len(weights), round(_COMPUTE_S / once_s))))
    return lambda: multiply(times)


def make_collective(
    name: str, num_bytes: int, device: torch.device, transport: Transport
) -> Callable[[], object]:
    """Return the collective `name` for `num_bytes` per rank (all_gather: of its output), as
    training calls it. all_to_all goes through `transport`."""
    group = transport.group
    ranks = group.size()
    whole = torch.zeros(num_bytes // 4, device=device)
    part = torch.zeros(num_bytes // 4 // ranks, device=device)
    counts = [num_bytes // 4 // ranks] * ranks
    # torch before 2.13 has only the other names, which newer versions deprecate.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_to_all": lambda: transport.start(whole, counts, counts)[1].wait(),
    }
    return works[name]
