"""Expert balancing in a run: its policy decides per layer from the exact token counts of each
micro-batch.

Prices of replicas come from the job or the plan, from defaults for the device, or from measurements
at the start. All ranks of an EP group know the same counts and prices, so each computes the same
decision by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.dist.all_to_all import BACKWARD_EXCHANGE, FORWARD_EXCHANGE, Transport
from moesaic.dist.clock import Clock
from moesaic.dist.collectives import all_gather
from moesaic.dist.shm_all_to_all import SHARED_MEMORY
from moesaic.dist.world import World
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.kernels import device as devices
from moesaic.models.lm import LanguageModel
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.grouped import BACKWARD, FORWARD
from moesaic.nn.inputs import LOW_PRECISION
from moesaic.nn.moe import MoE
from moesaic.policy import balance as policies
from moesaic.train import topology

_NUM_EXPERTS, _TOKENS_PER_EXPERT, _REPEATS = 4, (32, 96, 384), 11
"""Experts to time, tokens of each, and repetitions."""
_EXCHANGE_BYTES = (1 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes that a rank sends per timed exchange."""
_ROUND_TRIP_BYTES = 8 << 20
"""Bytes that a rank sends in a timed round trip, out and back."""
_CACHE_FLUSH_BYTES = 64 << 20
"""Bytes that evict all caches."""


def attach_balancers(
    model: LanguageModel, job: Job, plan: Plan, world: World, log: Callable[[str], None] | None
) -> Plan:
    """Attach a balancer to every expert layer if the job balances, and return `plan` with prices.
    Every rank must call this. `log` receives a message before slow work."""
    prices = job.balance.prices or plan.prices
    if prices is None and job.balance.measure_prices:
        moe = next((moe for _, moe in model.expert_layers()), None)
        prices = measure_prices(moe, LOW_PRECISION.get(job.train.precision), world)
    elif prices is None:
        prices = policies.default_prices(job, plan, topology.gather_ranks(world))
    for layers in (
        _consecutive_layers(model, job, plan) if policies.should_balance(job, plan) else ()
    ):
        for before, later in pairwise(layers):
            before.next_layers = (later,)
        for index, moe in enumerate(layers):
            problem = policies.layer_problem(job, plan, job.balance, prices, moe.router.layer)
            balancer = policies.LayerBalancer(job.balance, problem, follows_expert_layer=index > 0)
            balancer.warm_up(log)
            moe.clock = Clock() if devices.is_synchronous(world.device) else None
            moe.balancer = balancer
    return plan.model_copy(update={"prices": prices})


def _consecutive_layers(model: LanguageModel, job: Job, plan: Plan) -> list[list[MoE]]:
    """Return expert layers grouped by uninterrupted computation; with recomputation each is
    alone."""
    local = dict(model.expert_layers())
    if any(layer.recompute for layer in model.decoder_layers()):
        return [[moe] for moe in local.values()]
    runs = stage_blocks(plan, job.model)
    return [[moe for index, moe in local.items() if f"layers.{index}" in run] for run in runs]


class LayerBalance(NamedTuple):
    """Balance of one layer in one step, in the EP group of this rank."""

    decisions: list[policies.LayerDecision]
    stats: policies.BalanceStats


def take_layer_balance(moe: MoE) -> LayerBalance:
    """Return a layer's decisions since the last call, and their statistics. They are computed after
    the step, because a pass would delay its tokens."""
    assert isinstance(moe.balancer, policies.LayerBalancer)
    groups, decisions = moe.dispatcher.groups, moe.balancer.take_decisions()
    rank = groups.ep_ranks.index(groups.rank)
    stats = policies.balance_stats(decisions, len(groups.ep_ranks), rank)
    if moe.clock is not None:
        seconds = moe.clock.pop_seconds()
        stats.replica_wait_s = seconds.get(FORWARD_EXCHANGE, 0.0)
        stats.gradient_wait_s = seconds.get(BACKWARD_EXCHANGE, 0.0)
        stats.forward_s, stats.backward_s = seconds.get(FORWARD, 0.0), seconds.get(BACKWARD, 0.0)
    return LayerBalance(decisions, stats)


def measure_prices(moe: MoE | None, compute_dtype: torch.dtype | None, world: World) -> Prices:
    """Return prices of the slowest rank, measured on one expert layer of each. `moe` is None on
    ranks without one."""
    measured = torch.zeros(6, dtype=torch.float64)
    if moe is not None:
        dtype, transport = (
            compute_dtype or moe.bank.arena.dtype,
            moe.dispatcher.groups.replica_transport,
        )
        assert transport is not None
        expert_s = _measure_experts(moe.bank, dtype, world.device)
        transfer_s = _measure_transfer(transport, moe.bank.hidden, dtype, world.device)
        is_shared_memory, cpu_s_per_byte = transport.name == SHARED_MEMORY, 0.0
        if world.device.type == "cpu" and not is_shared_memory:
            cpu_s_per_byte = _measure_cpu_per_byte(transport, moe.bank.arena.dtype, dtype)
        measured = torch.tensor([*expert_s, *transfer_s, cpu_s_per_byte, is_shared_memory]).double()
    gathered = all_gather(measured.to(world.device), world.group)
    token_s, weight_read_s, byte_s, latency_s, cpu_s_per_byte, is_shared_memory = gathered.amax(
        0
    ).tolist()
    return Prices(
        expert_tokens_per_s=1 / token_s, bytes_per_s=1 / byte_s, latency_s=latency_s,
        weight_read_s=weight_read_s, overlaps=not is_shared_memory,
        cpu_s_per_byte=cpu_s_per_byte * (not is_shared_memory),
    )  # fmt: skip


def _measure_experts(
    bank: ExpertBank, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return forward seconds per token and for reading all expert weights. Backward counts as twice
    forward."""
    slots, times = min(_NUM_EXPERTS, len(bank.arena)), dict[int, float]()
    for num_each in _TOKENS_PER_EXPERT:
        counts = torch.zeros(len(bank.arena), dtype=torch.int64)
        counts[:slots] = num_each
        num_tokens = slots * num_each
        tokens = torch.ones(
            (num_tokens, bank.hidden), dtype=dtype, device=device, requires_grad=True
        )
        permutation = Permutation(counts, torch.arange(num_tokens, device=device))
        inputs = [tokens, bank.arena] if bank.arena.requires_grad else [tokens]
        times[num_tokens] = _median_s(
            partial(_forward_backward, bank, tokens, permutation, inputs), device
        )
    slope, intercept = _fit_line(times)
    return slope / 3, intercept / 3 * len(bank.arena) / slots


def _forward_backward(
    bank: ExpertBank, tokens: Tensor, permutation: Permutation, inputs: list[Tensor]
) -> None:
    with torch.enable_grad(), bank.expert_function() as experts:
        out = experts(tokens, permutation, None)
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def _measure_transfer(
    transport: Transport, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return seconds per byte and per exchange."""
    others, me = transport.group.size() - 1, transport.group.rank()
    row_bytes, times = width * dtype.itemsize, dict[int, float]()

    def exchange(num_rows: int) -> None:
        outgoing = torch.zeros((others * num_rows, width), dtype=dtype, device=device)
        counts = [num_rows * (rank != me) for rank in range(others + 1)]
        _, work = transport.start(outgoing, counts, counts)
        work.wait()

    for num_bytes in _EXCHANGE_BYTES:
        num_rows = max(num_bytes // (row_bytes * others), 1)
        times[others * num_rows * row_bytes] = _median_s(partial(exchange, num_rows), device)
    return _fit_line(times)


def _measure_cpu_per_byte(
    transport: Transport, param_dtype: torch.dtype, dtype: torch.dtype
) -> float:
    """Return CPU seconds per byte of replica traffic that a rank sends or receives. They cover
    packing parameters, sockets and adding gradients."""
    others, me = transport.group.size() - 1, transport.group.rank()
    previous, following = (me - 1) % (others + 1), (me + 1) % (others + 1)
    num_elements = _ROUND_TRIP_BYTES // (2 * param_dtype.itemsize)
    parameters = torch.ones((1, num_elements), dtype=param_dtype)
    gradients = torch.zeros_like(parameters)

    def shift(row: Tensor, target: int, source: int) -> Tensor:
        send, receive = (
            [int(rank == one) for rank in range(others + 1)] for one in (target, source)
        )
        received, work = transport.start(row, send, receive)
        work.wait()
        return received

    def round_trip() -> None:
        shift(parameters.to(dtype, copy=True), following, previous)
        gradients.add_(shift(gradients, previous, following))

    cpu_s = _median_s(round_trip, torch.device("cpu"), time.process_time)
    return cpu_s / (2 * num_elements * (dtype.itemsize + param_dtype.itemsize))


def _fit_line(times: dict[int, float]) -> tuple[float, float]:
    """Return slope and intercept of the line with the least relative error to `times`. The slope is
    positive and the intercept at least 0."""
    sizes, seconds = (torch.tensor([*column]).double() for column in (times, times.values()))
    relative = torch.stack((sizes, torch.ones_like(sizes)), 1) / seconds[:, None]
    slope, intercept = torch.linalg.lstsq(
        relative, torch.ones_like(seconds)[:, None]
    ).solution.flatten()
    if intercept < 0 or slope <= 0:
        proportional = (sizes / seconds).sum() / ((sizes / seconds) ** 2).sum()
        return float(proportional), 0.0
    return float(slope), float(intercept)


def _median_s(
    call: Callable[[], object], device: torch.device, now: Callable[[], float] | None = None
) -> float:
    """Return the median seconds of several calls after a warm-up, with caches flushed as in a step.
    `now` is the clock, by default wall time."""
    now = now or partial(devices.synchronized_time_s, device)
    flush = torch.zeros(_CACHE_FLUSH_BYTES, dtype=torch.uint8, device=device)
    call()
    times = list[float]()
    for _ in range(_REPEATS):
        flush.add_(1)
        start = now()
        call()
        times.append(now() - start)
    return statistics.median(times)
