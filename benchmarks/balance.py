"""Expert load balance: an expert layer over two ranks under skewed routing, policy by policy.

Forward and backward of one layer, each rank with one core to itself; the same choices, tokens and
experts for all. What all are held against are as many rows, spread evenly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import balance_simulated, measure
from benchmarks.layer import PATIENCE_S, in_turn, plan_of
from benchmarks.training import olmoe
from moesaic.dist.exchange import Carrier
from moesaic.dist.world import World
from moesaic.facts.job import BalanceConfig, Job
from moesaic.facts.job.balance import Policy
from moesaic.facts.plan import Plan
from moesaic.nn.bank import Bank
from moesaic.nn.context import Context, Rotary
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router, Routing
from moesaic.nn.routes import Routes
from moesaic.policy.balance import Asked, lp, quota, setting_of
from moesaic.testing.hosts import impossible, met, two_hosts
from moesaic.testing.ranks import Ranks
from moesaic.train import balancing
from moesaic.train.assemble import ranks_of

RANKS, TOKENS, HIDDEN, FFN = 2, 2048, 512, 512
EVEN, PLAIN, OURS = "even routing", "none", "auto"
POLICIES: tuple[Policy, ...] = (
    "auto", "quota", "pro-prophet", "faster-moe", "top-k-broadcast", "eplb", "llep", "lp",
)  # fmt: skip
MOVES_EVERY = 10
_STEPS = 40
"""Of choices, which a layer takes in turn."""


class Skew(NamedTuple):
    """How choices are spread."""

    name: str
    top_k: int
    bar: str = ""
    """For ours over none."""


SKEWS = (
    Skew("a run trained without balance loss", 2),
    Skew("Zipf 1.2", 2),
    Skew("one expert has 80%", 1, ">= 1.5"),
    Skew("a hot expert that moves", 2),
    Skew("even", 2, ">= 0.99"),
)
EXPERTS = (16, 64)


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    for part in PARTS.values():
        yield from part(rounds)
    yield from simulated_rows()


def on_one_host(rounds: int) -> Iterator[measure.Row]:
    """Two ranks, and the host's memory between them."""
    learnt = {experts: natural(experts) for experts in EXPERTS}
    for experts in EXPERTS:
        for skew in SKEWS:
            pool = Ranks()
            try:
                work = Work(skew, experts, learnt[experts])
                found = pool.run(RANKS, taken, work, rounds, os.getpid(), timeout_s=PATIENCE_S)
            finally:
                pool.close()
            title = f"two ranks, {experts} experts, {skew.name}"
            yield from _rows(title, skew.bar, found[0], rounds, ">= 0.95")


def on_two_hosts(rounds: int) -> Iterator[measure.Row]:
    """A link of 1 Gbit/s between them, over which copies have a price."""
    for experts in EXPERTS:
        for skew in SKEWS[1:]:
            title = f"two hosts of a rank, 1 Gbit/s, {experts} experts, {skew.name}"
            hindrance = impossible()
            if hindrance:
                yield measure.row(
                    title, None, "ratio", bar=">= 1.0", against=f"untried: {hindrance}", repeats=0
                )
                continue
            with two_hosts(1000) as hosts:
                pool = Ranks()
                try:
                    found = pool.run(
                        RANKS, taken, Work(skew, experts, None), rounds, os.getpid(), hosts,
                        timeout_s=PATIENCE_S,
                    )  # fmt: skip
                finally:
                    pool.close()
            yield from _rows(title, ">= 0.99", found[0], rounds, "")


def model(rounds: int) -> Iterator[measure.Row]:
    """How far what policies count on is from what is measured."""
    for where, megabits in {"on one host": 0, "over 1 Gbit/s": 1000}.items():
        hindrance = impossible() if megabits else ""
        if hindrance:
            yield measure.row(
                f"the model's mean error of links, {where}", None, "ratio", bar="<= 0.1",
                against=f"untried: {hindrance}", repeats=0,
            )  # fmt: skip
            continue
        with two_hosts(megabits) if megabits else nullcontext() as hosts:
            pool = Ranks()
            try:
                found = pool.run(RANKS, modelled, rounds, os.getpid(), hosts, timeout_s=PATIENCE_S)[
                    0
                ]
            finally:
                pool.close()
        assert found is not None
        for what, bar in (("experts", "<= 0.05"), ("links", "<= 0.1")):
            errors = {
                name: abs(foretold_s / found.times.median(name) - 1)
                for name, foretold_s in found.foretold.items()
                if name.startswith(what)
            }
            worst = max(errors, key=lambda name: errors[name])
            yield measure.row(
                f"the model's mean error of {what}, {where}", float(np.mean(list(errors.values()))),
                "ratio", bar=bar, repeats=rounds,
                against=f"medians of {len(errors)} loads; the worst, {worst}: {errors[worst]:.3f}",
            )  # fmt: skip


class Foretold(NamedTuple):
    """Seconds of single loads, as measured and as the model has them."""

    times: measure.Times
    foretold: dict[str, float]


def modelled(
    world: World, rounds: int, root: int, hosts: tuple[str, str] | None = None
) -> Foretold | None:
    """On each rank, with a core to itself."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    if hosts is None:
        return _modelled(world, rounds, root)
    with met(world, hosts) as world:
        return _modelled(world, rounds, root)


def _modelled(world: World, rounds: int, root: int) -> Foretold | None:
    moe, job, plan = _moe(world, Work(SKEWS[1], EXPERTS[0], None), PLAIN)
    prices = balancing.measured(moe, None, world)
    setting = setting_of(job, plan, BalanceConfig(), prices)
    carrier, bank, foretold = moe.dispatcher.ranks.straight, moe.bank, dict[str, float]()
    assert carrier is not None
    calls = dict[str, Callable[[], object]]()
    for rows in (512, 2048, 8192):
        name = f"experts with {rows} rows"
        calls[name] = partial(_computing, bank, rows)
        foretold[name] = 3 * rows / setting.rows_per_s
    for rows in (256, 1024, 4096):
        name = f"links with {rows} rows"
        calls[name] = partial(_exchanging, carrier, rows, HIDDEN)
        foretold[name] = rows * setting.row_bytes / setting.bytes_per_s + setting.latency_s
    for copies in (1, 2, 4):
        name = f"links with {copies} experts"
        calls[name] = partial(_exchanging, carrier, copies, bank.arena.shape[1])
        each_s = setting.expert_bytes / setting.bytes_per_s + setting.latency_s
        foretold[name] = copies * each_s
    times = in_turn(world, calls, rounds, root)
    return None if times is None else Foretold(times, foretold)


def _computing(bank: Bank, rows: int) -> None:
    """Forward and backward of so many rows, by Zipf over the experts of a rank."""
    slots = len(bank.arena)
    shares = 1.0 / np.arange(1, slots + 1)
    counts = np.floor(rows * shares / shares.sum()).astype(np.int64)
    counts[0] += rows - counts.sum()
    tokens = torch.ones(rows, bank.hidden, requires_grad=True)
    routes = Routes(torch.from_numpy(counts), torch.arange(rows))
    with bank.at_work() as compute:
        out = compute(tokens, routes, None)
    torch.autograd.grad(out, (tokens, bank.arena), torch.ones_like(out))


def _exchanging(carrier: Carrier, rows: int, width: int) -> None:
    """So many rows from each of two ranks to the other."""
    to = [0 if rank == carrier.group.rank() else rows for rank in range(RANKS)]
    _, work = carrier.start(torch.zeros(rows, width), to, to)
    work.wait()


def planning(rounds: int) -> Iterator[measure.Row]:
    """How long it takes to decide on a layer: ours, and a copy on each rank with an exact split."""
    for (ranks, experts), bar in {(64, 256): "<= 1.0", (1024, 512): "<= 20.0"}.items():
        every = list(balance_simulated.loads(ranks, experts, ranks * 4096, 8, 0))
        setting = balance_simulated.large(ranks, experts)
        for policy, said in {quota: "", lp: ", lp"}.items():
            policy(every[0], setting)
            taken_s = list[float]()
            for turn in range(rounds):
                began = time.perf_counter()
                policy(every[turn % len(every)], setting)
                taken_s.append(time.perf_counter() - began)
            low, high = measure.bootstrap(taken_s)
            yield measure.row(
                f"deciding on a layer, {ranks:,} devices, {experts} experts{said}",
                1e3 * float(np.median(taken_s)), "ms", bar=bar,
                against="limit: nobody is to wait", interval=(1e3 * low, 1e3 * high),
                repeats=rounds,
            )  # fmt: skip


PARTS: dict[str, Callable[[int], Iterator[measure.Row]]] = {
    "host": on_one_host,
    "hosts": on_two_hosts,
    "model": model,
    "planning": planning,
}
simulated_rows = balance_simulated.rows
"""Those of the model, which may be taken alone."""


def _rows(
    title: str, bar: str, found: Found | None, rounds: int, even_bar: str
) -> Iterator[measure.Row]:
    assert found is not None
    times = found.times
    shape = f"{TOKENS} tokens a rank, {HIDDEN} x {FFN}, forward and backward"
    for policy in POLICIES:
        ratio, interval = times.ratio(of=PLAIN, to=policy)
        yield measure.row(
            f"{title}: {policy} over none", ratio, "ratio", bar=bar if policy == OURS else "",
            against=f"every row at home; {found.told[policy]}; {shape}", interval=interval,
            repeats=rounds,
        )  # fmt: skip
    ratio, interval = times.ratio(of=EVEN, to=OURS)
    yield measure.row(
        f"{title}: {OURS}, of as many rows spread evenly", ratio, "ratio", bar=even_bar,
        against=f"limit: even routing; {shape}", interval=interval, repeats=rounds,
    )  # fmt: skip
    best = min((name for name in POLICIES if name != OURS), key=times.median)
    ratio, interval = times.ratio(of=best, to=OURS)
    yield measure.row(
        f"{title}: {OURS} over the best of the others", ratio, "ratio",
        bar=">= 0.98" if even_bar else "", against=f"{best}; {shape}", interval=interval,
        repeats=rounds,
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a rank is given to choose."""

    skew: Skew
    experts: int
    learnt: NDArray[np.float64] | None
    """Shares of experts in a real run."""

    def choices(self, rank: int) -> list[Tensor]:
        """[tokens, choices] of each step."""
        draw = np.random.default_rng([rank, self.experts])
        return [self._chosen(self._shares(step), draw) for step in range(_STEPS)]

    def even(self) -> Tensor:
        """As many choices, of all experts in turn."""
        chosen = np.arange(TOKENS * self.skew.top_k).reshape(TOKENS, -1) % self.experts
        return torch.from_numpy(chosen)

    def _shares(self, step: int) -> NDArray[np.float64]:
        """Of experts, in a step; which of them is hot is not in their order."""
        order = np.random.default_rng(1).permutation(self.experts)
        flat = np.full(self.experts, 1.0 / self.experts)
        if self.skew.name.startswith("Zipf"):
            shares = 1.0 / np.arange(1, self.experts + 1) ** 1.2
            return (shares / shares.sum())[order]
        if self.skew.name.startswith("one expert"):
            return np.where(order == 0, 0.8, 0.2 / (self.experts - 1))
        if self.skew.name.startswith("a hot"):
            hot = step // MOVES_EVERY % self.experts
            return np.where(order == hot, 0.4, 0.6 / (self.experts - 1))
        if self.skew.name.startswith("a run"):
            assert self.learnt is not None
            return self.learnt
        return flat

    def _chosen(self, shares: NDArray[np.float64], draw: np.random.Generator) -> Tensor:
        """Choices of each token, none of them twice."""
        if self.skew.name == "even":
            return self.even()
        odds = np.log(np.maximum(shares, 1e-9)) + draw.gumbel(size=(TOKENS, self.experts))
        return torch.from_numpy(np.argsort(-odds, axis=1)[:, : self.skew.top_k].copy())


class Chosen(torch.nn.Module):
    """A router that has been told what to choose."""

    layer, kind = 0, "top-k"

    def __init__(self, weights: Tensor, choices: list[Tensor], experts: int) -> None:
        super().__init__()
        self._weights, self._choices, self._step = weights, choices, 0
        self._scores = torch.zeros(TOKENS, experts)

    def forward(self, tokens: Tensor, context: Context) -> Routing:
        """The choices of the next step."""
        del tokens, context
        chosen = self._choices[self._step % len(self._choices)]
        self._step += 1
        return Routing(chosen, self._weights, self._scores, self._scores, 0)


class Found(NamedTuple):
    """What a case came to."""

    times: measure.Times
    told: dict[str, str]
    """What each policy did."""


def taken(
    world: World, work: Work, rounds: int, root: int, hosts: tuple[str, str] | None = None
) -> Found | None:
    """On each rank, with a core to itself: all in turn, as rank 0 says."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    if hosts is None:
        return _taken(world, work, rounds, root)
    with met(world, hosts) as world:
        return _taken(world, work, rounds, root)


def _taken(world: World, work: Work, rounds: int, root: int) -> Found | None:
    layers = {name: _layer(world, work, name) for name in (EVEN, PLAIN, *POLICIES)}
    results = {name: one() for name, one in layers.items() if name != EVEN}
    for name, result in results.items():
        torch.testing.assert_close(result, results[PLAIN], rtol=1e-4, atol=1e-5, msg=name)
    times = in_turn(world, dict(layers), rounds, root)
    told = {name: layers[name].words() for name in POLICIES}
    return None if times is None else Found(times, told)


class Layer:
    """One contender's."""

    def __init__(self, moe: MoE, tokens: Tensor, cotangent: Tensor) -> None:
        self._moe, self._tokens, self._cotangent = moe, tokens, cotangent
        self._calls = self._copies = 0
        self._left = list[float]()

    def __call__(self) -> Tensor:
        """One pass; what the tokens' gradients are."""
        context = Context(Rotary(torch.empty(0), torch.empty(0)))
        context.training = True
        self._moe(self._tokens, context).backward(self._cotangent)
        gradient = self._tokens.grad
        assert gradient is not None
        self._tokens.grad = self._moe.bank.arena.grad = None
        if isinstance(self._moe.balancer, balancing.Balancer):
            told = self._moe.balancer.told()
            self._calls += 1
            self._copies += told.copies
            self._left.append(told.after)
        return gradient

    def words(self) -> str:
        """What became of its rows."""
        each = self._copies / max(self._calls, 1)
        return f"{each:.3g} copies a step, then {np.mean(self._left):.2f} times the mean at most"


def _moe(world: World, work: Work, name: str) -> tuple[MoE, Job, Plan]:
    """A contender's layer, without a policy, and the job that it is of."""
    sizes = {"hidden": HIDDEN, "layers": 1, "ffn": FFN, "experts": work.experts}
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **sizes, "top_k": work.skew.top_k}
    job = olmoe(RANKS, TOKENS, model=model, layout={"ep": RANKS})
    plan = plan_of(job, world)
    ranks = ranks_of(plan, world, copies=True)
    draw, own = torch.Generator().manual_seed(world.rank), torch.Generator().manual_seed(9)
    weights = torch.rand(TOKENS, work.skew.top_k, generator=draw)
    choices = [work.even()] if name == EVEN else work.choices(world.rank)
    moe = MoE(
        Router(0, HIDDEN, work.experts, work.skew.top_k),
        Bank(plan.homes_at(ranks.rank), HIDDEN, FFN),
        Dispatcher(work.experts, ranks, slots=plan.slots(), visits=plan.dispatch == "visits"),
    )
    moe.router = Chosen(weights, choices, work.experts)  # type: ignore[assignment]
    with torch.no_grad():
        every = torch.randn(work.experts, moe.bank.arena.shape[1], generator=own)
        moe.bank.arena.copy_(every[list(plan.homes_at(ranks.rank))] * 0.02)
    return moe, job, plan


def _layer(world: World, work: Work, name: str) -> Layer:
    moe, job, plan = _moe(world, work, name)
    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=draw, requires_grad=True)
    cotangent = torch.randn(TOKENS, HIDDEN, generator=draw)
    if name not in (EVEN, PLAIN):
        config = BalanceConfig.model_validate({"policy": name})
        prices = balancing.measured(moe, None, world)
        policy = Asked(config, setting_of(job, plan, config, prices))
        policy.prepare()
        moe.balancer = balancing.Balancer(policy)
    return Layer(moe, tokens, cotangent)


def natural(experts: int) -> NDArray[np.float64]:
    """Shares of experts of the least even layer of a small model that was trained without a loss
    that evens them out."""
    demo = measure.ROOT / "examples" / "demo"
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, demo / "make_text.py", place], check=True)
        changed = {
            "data.path": f"{place}/topics.jsonl", "layout.ep": 1, "routing.balance_loss": 0.0,
            "model.experts": experts, "model.top_k": 2, "train.steps": 150,
            "data.cache": f"{place}/cache",
        }  # fmt: skip
        sets = [f"--set={key}={json.dumps(value)}" for key, value in changed.items()]
        command = [sys.executable, "-m", "moesaic", "train", demo / "demo.toml", *sets]
        subprocess.run([*command, "--out", f"{place}/run"], check=True, capture_output=True)
        table = pq.read_table(Path(place) / "run" / "loads").to_pylist()
    last = max(one["step"] for one in table)
    counts = [np.array(one["counts"], float) for one in table if one["step"] == last]
    return max((one / one.sum() for one in counts), key=lambda shares: float(shares.max()))
