"""How fast messages travel: between two ranks, and in whole operations of a group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist.collectives import gather
from moesaic.dist.exchange import Carrier
from moesaic.dist.probe.timing import Figures, powers, seconds, together
from moesaic.dist.world import Group, World

_OWN_S = 8e-3
_LEAST_LATE_S = 1e-6
_WEIGHT = 3
"""An operation is given so many times as long as a message, as ranks compute between them."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def message_bytes(most: int) -> list[int]:
    """Bytes of the messages between two ranks."""
    return [8, *powers(1 << 10, most, 8)]


def collective_bytes(ranks: int, most: int) -> list[int]:
    """Bytes that a rank holds in operations of `ranks` ranks: whole numbers for each of them."""
    return [-(-size // (4 * ranks)) * 4 * ranks for size in powers(1 << 12, most, 8)]


def pairs(hosts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ranks whose link is measured: neighbours and farthest of a host, and first ones of two."""
    inside = [
        (host[0], other)
        for host in hosts
        for other in dict.fromkeys([*host[1:2], host[-1]])
        if other != host[0]
    ]
    return inside + list(combinations([host[0] for host in hosts], 2))


def measure(world: World, hosts: Sequence[Sequence[int]], most: int, budget_s: float) -> Figures:
    """Seconds of messages and operations: `A-B one way`, `A-B both`, `NAME within`, `NAME across`.

    `within` are operations of each host's ranks, all hosts at once; `across` are those of everyone.
    They count from when the last rank has come; `skew within` is how much later that is, after a
    second of computing, than the same computing takes where there are no operations.
    """
    chosen = pairs(hosts)
    meeting = [("within", hosts)] if max(map(len, hosts)) > 1 else []
    if len(hosts) > 1:
        meeting.append(("across", [range(world.size)]))
    carriers = [(where, world.carrier(sets)) for where, sets in meeting]
    sizes = message_bytes(most)
    num_operations = len(COLLECTIVES) * len(collective_bytes(2, most)) * len(carriers)
    share_s = budget_s / (len(chosen) * (len(sizes) + 1) + _WEIGHT * num_operations)
    found: Figures = {}
    for first, second in chosen:
        world.barrier()
        if world.rank in (first, second):
            found |= _pair(world, first, second, sizes, share_s)
    for where, carrier in carriers:
        world.barrier()
        if carrier is not None:
            found |= _collectives(world, carrier, where, most, _WEIGHT * share_s)
    return found


def _pair(world: World, first: int, second: int, sizes: list[int], share_s: float) -> Figures:
    """Seconds one way by size, and of the largest message both ways at once."""
    peer = second if world.rank == first else first

    def agree(count: int) -> int:
        number = torch.tensor([count], device=world.device)
        if world.rank == first:
            dist.send(number, peer, group=world.everyone)
        else:
            dist.recv(number, peer, group=world.everyone)
        return int(number.item())

    def there_and_back(message: Tensor) -> None:
        if world.rank == first:
            dist.send(message, peer, group=world.everyone)
            dist.recv(message, peer, group=world.everyone)
        else:
            dist.recv(message, peer, group=world.everyone)
            dist.send(message, peer, group=world.everyone)

    def at_once(out: Tensor, back: Tensor) -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out, peer, world.everyone),
                dist.P2POp(dist.irecv, back, peer, world.everyone),
            ]
        )
        for work in works:
            work.wait()

    def time(work: Callable[[], object]) -> float:
        return fmean(together(work, lambda: devices.now(world.device), agree, share_s).calls_s)

    times = []
    for size in sizes:
        message = torch.zeros(size, dtype=torch.uint8, device=world.device)
        times.append(time(lambda message=message: there_and_back(message)) / 2)  # type: ignore[misc]
    both = time(lambda: at_once(message, torch.empty_like(message)))
    return {f"{first}-{second} one way": times, f"{first}-{second} both": [both]}


def _collectives(world: World, carrier: Carrier, where: str, most: int, share_s: float) -> Figures:
    group = carrier.group
    ranks, first = group.size(), dist.get_global_rank(group, 0)

    def agree(count: int) -> int:
        number = torch.tensor([count], device=world.device)
        dist.broadcast(number, src=first, group=group)
        return int(number.item())

    compute, clock = chore(world.device, agree), lambda: devices.now(world.device)
    found: Figures = {}
    between_s: list[float] = []
    alone_s = [_alone_s(compute, world.device, group, share_s)]
    for name in COLLECTIVES:
        times = found[f"{name} {where}"] = []
        for num_bytes in collective_bytes(ranks, most):
            work = collective(name, num_bytes, world.device, carrier)
            met = together(work, clock, agree, share_s, compute)
            # Whoever comes last waits for nobody.
            times.append(float(_by_rank(met.calls_s, world, group).amin(dim=0).mean()))
            between_s += _by_rank(met.own_s, world, group).amax(dim=0).tolist()
        alone_s.append(_alone_s(compute, world.device, group, share_s))
    late_s = max(fmean(between_s) - fmean(alone_s), _LEAST_LATE_S)
    found[f"skew {where}"] = [late_s / math.sqrt(fmean(alone_s))]
    return found


def _by_rank(measured: list[float], world: World, group: Group) -> Tensor:
    """What every rank measured, [ranks, calls]."""
    own = torch.tensor(measured, dtype=torch.float64, device=world.device)
    return gather(own, group)


def _alone_s(
    work: Callable[[], object], device: torch.device, group: Group, budget_s: float
) -> float:
    """What `work` takes ranks on average that do it at once and do not meet."""
    dist.barrier(group)
    mine = torch.tensor(
        [seconds(work, lambda: devices.now(device), budget_s)], dtype=torch.float64, device=device
    )
    return float(gather(mine, group).mean())


def chore(device: torch.device, agree: Callable[[int], int]) -> Callable[[], object]:
    """What ranks compute between operations, for about `_OWN_S`: products of cold weights."""
    left, weights = torch.ones(256, 512, device=device), torch.ones(64, 512, 512, device=device)
    following = itertools.cycle(weights)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, next(following))

    once_s = seconds(lambda: multiply(1), lambda: devices.now(device), 0.0)
    times = agree(max(1, min(len(weights), round(_OWN_S / once_s))))
    return lambda: multiply(times)


def collective(
    name: str, num_bytes: int, device: torch.device, carrier: Carrier
) -> Callable[[], object]:
    """The operation `name` of ranks that hold `num_bytes` each (all_gather: after it), as training
    has it: rows go to all as a carrier takes them."""
    group = carrier.group
    ranks = group.size()
    whole = torch.zeros(num_bytes // 4, device=device)
    part = torch.zeros(num_bytes // 4 // ranks, device=device)
    counts = [num_bytes // 4 // ranks] * ranks
    # The names of torch before 2.13, which warns of them.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_to_all": lambda: carrier.start(whole, counts, counts)[1].wait(),
    }
    return works[name]
