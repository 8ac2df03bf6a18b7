"""Balance of a run: its policy is asked, layer by layer, with the exact rows of each micro-batch.

What copies cost and save is what job or plan say, or as is usual of such devices, or measured when
a run starts. All ranks that share out experts know the same rows and prices, so that each works out
the same by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from moesaic.dist import device as devices
from moesaic.dist.clock import Clock
from moesaic.dist.collectives import gather
from moesaic.dist.shared import MEMORY
from moesaic.dist.world import World
from moesaic.facts.balance import Balance, Ints
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, stages
from moesaic.models.lm import LanguageModel
from moesaic.nn.context import NARROW
from moesaic.nn.moe import MoE
from moesaic.nn.routes import Routes
from moesaic.policy import balance as policies
from moesaic.train import machines
from moesaic.train.spread import Spread

_SLOTS, _ROWS, _TIMES = 4, 256, 5
"""Experts that are tried, their rows each, and how often."""
_EXCHANGE_BYTES = 4 << 20


class Balancer:
    """Asks a policy on one rank of a group, and keeps what came of it until that is told."""

    def __init__(self, policy: policies.Asked, rank: int = 0, clock: Clock | None = None) -> None:
        """`clock` has what the layer takes; None: nothing tells."""
        self._policy, self._spread, self.early = policy, Spread(), policy.early
        self._rank, self._clock = rank, clock

    def ahead(self) -> Balance:
        """Copies for rows that nobody knows yet."""
        began = time.perf_counter()
        early = self._policy.ahead()
        self._spread = self._spread.and_then(Spread(planning_s=time.perf_counter() - began))
        return early

    def think(self) -> None:
        """Decide on those of the next time, as far as that can be done now."""
        began = time.perf_counter()
        self._policy.think()
        self._spread = self._spread.and_then(Spread(planning_s=time.perf_counter() - began))

    def __call__(self, counts: Ints) -> Balance:
        """Who computes what of rows [ranks, experts]."""
        began = time.perf_counter()
        balance = self._policy(counts)
        planning_s = time.perf_counter() - began
        now = Spread.of(counts, self._policy.setting, balance, self._rank, planning_s)
        self._spread = self._spread.and_then(now)
        return balance

    def rehome(self, homes: Ints) -> None:
        """These are the ranks of all experts from now on."""
        self._policy.rehome(homes)

    def told(self) -> Spread:
        """What came of it since this was asked last."""
        spread, self._spread = self._spread, Spread()
        return spread if self._clock is None else spread.timed(self._clock.told())


def begin(model: LanguageModel, job: Job, plan: Plan, world: World) -> Prices:
    """What anything costs, and have the policy of `job` asked by every expert layer, if there is to
    be one; every rank must call this."""
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
            policy.prepare()
            ranks = moe.dispatcher.ranks
            moe.clock = Clock() if devices.is_prompt(world.device) else None
            moe.balancer = Balancer(policy, ranks.group_ranks.index(ranks.rank), moe.clock)
    return prices


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
    own = torch.zeros(4, dtype=torch.float64)
    if moe is not None:
        times = _of_layer(moe, narrow or moe.bank.arena.dtype, world.device)
        straight = moe.dispatcher.ranks.straight
        own = torch.tensor([*times, straight is not None and straight.name == MEMORY]).double()
    all_of_them = gather(own.to(world.device), world.everyone)
    row_s, byte_s, latency_s, by_hand = all_of_them.amax(0).tolist()
    return Prices(
        rows_per_s=1 / row_s, bytes_per_s=1 / byte_s, latency_s=latency_s, hides=not by_hand
    )


def _of_layer(moe: MoE, kind: torch.dtype, device: torch.device) -> tuple[float, float, float]:
    """Seconds of a row, of a byte, and of the least exchange."""
    bank, carrier = moe.bank, moe.dispatcher.ranks.straight
    assert carrier is not None
    counts = torch.zeros(len(bank.arena), dtype=torch.int64)
    counts[:_SLOTS] = _ROWS
    num_rows, ranks = int(counts.sum()), carrier.group.size()
    tokens = torch.ones((num_rows, bank.hidden), dtype=kind, device=device)
    routes, inputs = Routes(counts, torch.arange(num_rows, device=device)), [tokens]
    if bank.arena.requires_grad:
        inputs.append(bank.arena)

    def compute() -> None:
        with torch.enable_grad(), bank.at_work() as through:
            out = through(tokens.requires_grad_(), routes, None)
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    def exchange(rows: int) -> None:
        leaving = tokens.new_zeros((ranks * rows, bank.hidden))
        _, work = carrier.start(leaving, [rows] * ranks, [rows] * ranks)
        work.wait()

    row_bytes = bank.hidden * kind.itemsize
    many = max(_EXCHANGE_BYTES // (row_bytes * ranks), 2)
    computing_s, least_s, whole_s = (
        _least_s(call, device) for call in (compute, partial(exchange, 1), partial(exchange, many))
    )
    sent = (ranks - 1) * (many - 1) * row_bytes
    row_s = computing_s / (3 * num_rows)  # Backward is taken for twice forward.
    return row_s, max(whole_s - least_s, 1e-3 * whole_s) / sent, least_s


def _least_s(call: Callable[[], object], device: torch.device) -> float:
    """Of several times, after one that warms up."""
    call()
    times = list[float]()
    for _ in range(_TIMES):
        began = devices.now(device)
        call()
        times.append(devices.now(device) - began)
    return min(times)
