"""Balance of a run: its policy is asked, layer by layer, with the exact rows of each micro-batch.

What copies cost and save is what job or plan say, or as is usual of such devices, or measured when
a run starts. All ranks that share out experts know the same rows and prices, so that each works out
the same by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist.clock import Clock
from moesaic.dist.collectives import gather
from moesaic.dist.exchange import Carrier
from moesaic.dist.shared import MEMORY
from moesaic.dist.world import World
from moesaic.facts.balance import Balance, Ints, Setting
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, stages
from moesaic.models.lm import LanguageModel
from moesaic.nn.bank import Bank
from moesaic.nn.context import NARROW
from moesaic.nn.moe import MoE
from moesaic.nn.routes import Routes
from moesaic.policy import balance as policies
from moesaic.train import machines
from moesaic.train.spread import Spread

_SLOTS, _ROWS, _TIMES = 4, (32, 96, 384), 11
"""Experts that are tried, their rows each, and how often."""
_EXCHANGED_BYTES = (1 << 10, 1 << 20, 4 << 20, 16 << 20)
"""By a rank, to others."""
_HANDLED_BYTES = 8 << 20
"""By a rank, out and back."""
_CACHED_BYTES = 64 << 20
"""More than caches hold."""


class Balancer:
    """Asks a policy on one rank of a group, and keeps what came of it until that is told."""

    def __init__(self, policy: policies.Asked, rank: int = 0, clock: Clock | None = None) -> None:
        """`clock` has what the layer takes; None: nothing tells."""
        self._policy, self.early = policy, policy.early
        self._rank, self._clock = rank, clock
        self._passes = list[tuple[Ints, Setting, Balance]]()
        self._planning_s = 0.0

    def ahead(self) -> Balance:
        """Copies for rows that nobody knows yet."""
        with self._planning():
            return self._policy.ahead()

    def think(self) -> None:
        """Decide on those of the next time, as far as that can be done now."""
        with self._planning():
            self._policy.think()

    def __call__(self, counts: Ints) -> Balance:
        """Who computes what of rows [ranks, experts]."""
        with self._planning():
            balance = self._policy(counts)
        self._passes.append((counts, self._policy.setting, balance))
        return balance

    @contextmanager
    def _planning(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._planning_s += time.perf_counter() - began

    def rehome(self, homes: Ints) -> None:
        """These are the ranks of all experts from now on."""
        self._policy.rehome(homes)

    def told(self) -> Spread:
        """What came of it since this was asked last: worked out now, for in a pass tokens wait."""
        spread = Spread(planning_s=self._planning_s)
        for counts, setting, balance in self._passes:
            spread = spread.and_then(Spread.of(counts, setting, balance, self._rank))
        self._planning_s, self._passes = 0.0, []
        return spread if self._clock is None else spread.timed(self._clock.told())


def begin(
    model: LanguageModel, job: Job, plan: Plan, world: World, say: Callable[[str], None] | None
) -> Plan:
    """`plan` with what anything costs, and have the policy of `job` asked by every expert layer, if
    there is to be one; every rank must call this. To `say`: what takes long."""
    prices = job.balance.prices or plan.prices
    if prices is None and job.balance.measure:
        moe = next((moe for _, moe in model.expert_layers()), None)
        prices = measured(moe, NARROW.get(job.train.precision), world)
    elif prices is None:
        prices = policies.usual(job, plan, machines.ranks(world))
    for layers in _in_turn(model, job, plan) if policies.balances(job, plan) else ():
        for before, later in pairwise(layers):
            before.next = (later,)
        for place, moe in enumerate(layers):
            setting = policies.setting_of(job, plan, job.balance, prices, moe.router.layer)
            policy = policies.Asked(job.balance, setting, follows=place > 0)
            policy.prepare(lambda kept: say and say(policies.compiling(kept)))
            ranks = moe.dispatcher.ranks
            moe.clock = Clock() if devices.is_prompt(world.device) else None
            moe.balancer = Balancer(policy, ranks.group_ranks.index(ranks.rank), moe.clock)
    return plan.model_copy(update={"prices": prices})


def _in_turn(model: LanguageModel, job: Job, plan: Plan) -> list[list[MoE]]:
    """Expert layers by runs that are computed one after another; where they are computed again in
    backward, each is by itself."""
    mine = dict(model.expert_layers())
    if any(layer.recompute for layer in model.decoder_layers()):
        return [[moe] for moe in mine.values()]
    runs = stages(plan, job.model)
    return [[moe for index, moe in mine.items() if f"layers.{index}" in run] for run in runs]


def measured(moe: MoE | None, narrow: torch.dtype | None, world: World) -> Prices:
    """Prices of the slowest rank, by an expert layer of each; some may have none."""
    own = torch.zeros(6, dtype=torch.float64)
    if moe is not None:
        kind, straight = narrow or moe.bank.arena.dtype, moe.dispatcher.ranks.straight
        assert straight is not None
        computing = _computing(moe.bank, kind, world.device)
        travelling = _travelling(straight, moe.bank.hidden, kind, world.device)
        by_hand, handling_s = straight.name == MEMORY, 0.0
        if world.device.type == "cpu" and not by_hand:
            handling_s = _handling(straight, moe.bank.arena.dtype, kind)
        own = torch.tensor([*computing, *travelling, handling_s, by_hand]).double()
    all_of_them = gather(own.to(world.device), world.everyone)
    row_s, matrices_s, byte_s, latency_s, handling_s, by_hand = all_of_them.amax(0).tolist()
    return Prices(
        rows_per_s=1 / row_s, bytes_per_s=1 / byte_s, latency_s=latency_s, matrices_s=matrices_s,
        hides=not by_hand, handling_s=handling_s * (not by_hand),
    )  # fmt: skip


def _computing(bank: Bank, kind: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Seconds of a row, and of all experts beside rows, forward; backward is taken for twice
    that."""
    slots, times = min(_SLOTS, len(bank.arena)), dict[int, float]()
    for each in _ROWS:
        counts = torch.zeros(len(bank.arena), dtype=torch.int64)
        counts[:slots] = each
        rows = slots * each
        tokens = torch.ones((rows, bank.hidden), dtype=kind, device=device, requires_grad=True)
        routes = Routes(counts, torch.arange(rows, device=device))
        inputs = [tokens, bank.arena] if bank.arena.requires_grad else [tokens]
        times[rows] = _usual_s(partial(_there_and_back, bank, tokens, routes, inputs), device)
    slope, beside = _line(times)
    return slope / 3, beside / 3 * len(bank.arena) / slots


def _there_and_back(bank: Bank, tokens: Tensor, routes: Routes, inputs: list[Tensor]) -> None:
    with torch.enable_grad(), bank.at_work() as through:
        out = through(tokens, routes, None)
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def _travelling(
    carrier: Carrier, width: int, kind: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Seconds of a byte, and of an exchange beside bytes."""
    others, me = carrier.group.size() - 1, carrier.group.rank()
    row_bytes, times = width * kind.itemsize, dict[int, float]()

    def exchange(rows: int) -> None:
        leaving = torch.zeros((others * rows, width), dtype=kind, device=device)
        each = [rows * (rank != me) for rank in range(others + 1)]
        _, work = carrier.start(leaving, each, each)
        work.wait()

    for num_bytes in _EXCHANGED_BYTES:
        rows = max(num_bytes // (row_bytes * others), 1)
        times[others * rows * row_bytes] = _usual_s(partial(exchange, rows), device)
    return _line(times)


def _handling(carrier: Carrier, kept: torch.dtype, kind: torch.dtype) -> float:
    """Seconds of its processor that a rank has to give for a byte of a copy or a gradient that it
    sends or gets: parameters are brought together, go through sockets, and gradients are added."""
    others, me = carrier.group.size() - 1, carrier.group.rank()
    before, after = (me - 1) % (others + 1), (me + 1) % (others + 1)
    numbers = _HANDLED_BYTES // (2 * kept.itemsize)
    parameters = torch.ones((1, numbers), dtype=kept)
    gradients = torch.zeros_like(parameters)

    def moved(row: Tensor, target: int, source: int) -> Tensor:
        send, receive = (
            [int(rank == one) for rank in range(others + 1)] for one in (target, source)
        )
        come, work = carrier.start(row, send, receive)
        work.wait()
        return come

    def there_and_back() -> None:
        moved(parameters.to(kind, copy=True), after, before)
        gradients.add_(moved(gradients, before, after))

    taken_s = _usual_s(there_and_back, torch.device("cpu"), time.process_time)
    return taken_s / (2 * numbers * (kind.itemsize + kept.itemsize))


def _line(times: dict[int, float]) -> tuple[float, float]:
    """Slope and beginning of the line whose values are, in parts of them, nearest to `times`; it
    rises, and begins at 0 or above."""
    sizes, seconds = (torch.tensor([*column]).double() for column in (times, times.values()))
    parts = torch.stack((sizes, torch.ones_like(sizes)), 1) / seconds[:, None]
    slope, begins = torch.linalg.lstsq(parts, torch.ones_like(seconds)[:, None]).solution.flatten()
    if begins < 0 or slope <= 0:
        through_0 = (sizes / seconds).sum() / ((sizes / seconds) ** 2).sum()
        return float(through_0), 0.0
    return float(slope), float(begins)


def _usual_s(
    call: Callable[[], object], device: torch.device, now: Callable[[], float] | None = None
) -> float:
    """The middle one of several times, after one that warms up; as in a step, nothing that it takes
    is in a cache. By the wall's clock, if no other is given."""
    now = now or partial(devices.now, device)
    other = torch.zeros(_CACHED_BYTES, dtype=torch.uint8, device=device)
    call()
    times = list[float]()
    for _ in range(_TIMES):
        other.add_(1)
        began = now()
        call()
        times.append(now() - began)
    return statistics.median(times)
