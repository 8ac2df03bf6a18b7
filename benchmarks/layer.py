"""Theme `layer`: the expert layer and what it sends, and the embedding, against peers and limits;
layer.md says what bounds the figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import decoding_on_gpu, experts, measure, on_gpu, on_tutel
from benchmarks.training import Ours, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, lay_out
from moesaic.facts.workload.loads import routed, visit_bytes
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.routes import Routes
from moesaic.testing.hosts import impossible, met, sent_bytes, two_hosts
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import ranks_of

FORMS: dict[str, dict[str, Any]] = {
    "straight": {"dispatch": "rows"},
    "by hosts": {"dispatch": "rows", "hosts": 2},
    "straight visits": {"dispatch": "visits"},
    "visits by hosts": {"dispatch": "visits", "hosts": 2},
}
"""Ways of tokens between ranks on two hosts, by what they are called here."""
RATES = {"1 Gbit/s": (1000, ">= 3.0"), "200 Mbit/s": (200, ">= 3.5")}
HIDDEN, TOKENS, RANKS = 1024, 1024, 4
COUNTED = 5
STEPPED, STEP_BAR = ("olmoe", "mixtral"), ">= 1.3"
"""Families whose whole steps are taken, and the goal."""
PATIENCE_S = 3600.0


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure of the theme, as it comes."""
    for part in WHOLES.values():
        yield from part(rounds)


def overlapping(rounds: int) -> Iterator[measure.Row]:
    """What chunks hide."""
    from benchmarks import overlap  # It takes from this module.

    yield from overlap.rows(rounds)


def tables(rounds: int) -> Iterator[measure.Row]:
    """What sharing out the embedding saves."""
    from benchmarks import embedding  # Likewise.

    yield from embedding.rows(rounds)


def fusing(rounds: int) -> Iterator[measure.Row]:
    """What buckets of gradients bring."""
    from benchmarks import fusion  # It takes from this module.

    yield from fusion.rows(rounds)


def against_peers(rounds: int) -> Iterator[measure.Row]:
    """The layer over two ranks against those of others."""
    from benchmarks import peers

    yield from peers.rows(rounds)


def exchanges(rounds: int) -> Iterator[measure.Row]:
    """Rows among ranks of one host."""
    from benchmarks import exchange

    yield from exchange.rows(rounds)


def steps(rounds: int) -> Iterator[measure.Row]:
    """Whole steps of one rank, as the theme `families` takes them."""
    from benchmarks import families

    for family in STEPPED:
        for row in families.training(family, rounds, STEP_BAR):
            yield replace(row, name=f"whole step, one rank: {row.name}")


def between_hosts(rounds: int) -> Iterator[measure.Row]:
    """Two hosts of two ranks: dispatch and combine of one layer, and whole training steps."""
    hindrance = impossible()
    for name, (megabits, bar) in RATES.items():
        if hindrance:
            yield measure.row(
                f"dispatch and combine, two hosts of two ranks, {name}", None, "ratio", bar=bar,
                against=f"untried: {hindrance}", repeats=0,
            )  # fmt: skip
            continue
        with two_hosts(megabits) as hosts:
            pool = Ranks()
            try:
                found = pool.run(RANKS, on_hosts, hosts, rounds, os.getpid(), timeout_s=PATIENCE_S)
            finally:
                pool.close()
        yield from _host_rows(name, bar, found[0], rounds)


WHOLES = {
    "experts": experts.rows, "hosts": between_hosts, "overlap": overlapping, "fusion": fusing,
    "embedding": tables, "peers": against_peers, "exchange": exchanges, "step": steps,
    "gpu": on_gpu.rows, "gpu-decoding": decoding_on_gpu.rows, "tutel": on_tutel.rows,
}  # fmt: skip
OF_EXPERTS = {one.name.lower(): partial(experts.rows, shapes=[one]) for one in experts.SHAPES}
"""A shape at a time, each a quarter of the whole."""
OF_GPU = {
    f"gpu-{one.name.split(',')[0].lower()}": partial(on_gpu.rows, shapes=[one])
    for one in on_gpu.SHAPES
}
"""Likewise."""
PARTS = {**WHOLES, **OF_EXPERTS, **OF_GPU, **on_tutel.OF_SHAPES}


@dataclass(frozen=True)
class Found:
    """What two hosts were found to do."""

    exchanges: measure.Times
    steps: measure.Times
    counted: dict[str, tuple[int, int]]
    """By form, bytes that a host sent over the link, and bytes of what it had to send."""


def _host_rows(name: str, bar: str, found: Found, rounds: int) -> Iterator[measure.Row]:
    where = f"two hosts of two ranks, {name}"
    straight = "moesaic, once for each expert, straight to its rank"
    for form in list(FORMS)[1:]:
        ratio, interval = found.exchanges.ratio("straight", form)
        yield measure.row(
            f"dispatch and combine, {where}, {form}", ratio, "ratio",
            bar=bar if form == "visits by hosts" else "", interval=interval, repeats=rounds,
            against=f"{straight}; top 8 of 64, {TOKENS} tokens a rank of {HIDDEN} numbers",
        )  # fmt: skip
    for form, (counted, due) in found.counted.items():
        yield measure.row(
            f"bytes over the link, {where}, {form}", counted / due, "ratio", bar="",
            against=f"limit: {due:,} bytes of rows and visits, headers aside", repeats=1,
        )  # fmt: skip
    for form in list(FORMS)[1:]:
        ratio, interval = found.steps.ratio("straight", form)
        yield measure.row(
            f"training step, {where}, {form}", ratio, "ratio", bar="", interval=interval,
            against=f"{straight}; OLMoE-shaped, 4 x 128 tokens", repeats=rounds,
        )  # fmt: skip


def on_hosts(world: World, hosts: tuple[str, str], rounds: int, root: int) -> Found | None:
    """On each rank: all forms in turn, as rank 0 says."""
    with met(world, hosts) as world:
        jobs = {form: layer_job(layout) for form, layout in FORMS.items()}
        passes = {form: Pass(job, plan_of(job, world), world) for form, job in jobs.items()}
        runs = {form: Ours(_step_job(layout), world) for form, layout in FORMS.items()}
        results = [one() for one in passes.values()]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])
        counted = {form: one.counted() for form, one in passes.items()}
        exchanges = in_turn(world, passes, rounds, root)
        steps = in_turn(world, {form: run.step for form, run in runs.items()}, rounds, root)
        for run in runs.values():
            run.run.close()
        if exchanges is None or steps is None:
            return None
        return Found(exchanges, steps, counted)


def in_turn(
    world: World, calls: Mapping[str, Callable[[], object]], rounds: int, root: int
) -> measure.Times | None:
    """Times of calls that all ranks make together, on rank 0."""
    names, word = list(calls), torch.zeros(1, dtype=torch.int64)

    def together(number: int) -> None:
        word.fill_(number)
        dist.broadcast(word, 0, group=world.everyone)
        if number >= 0:
            calls[names[number]]()
            world.barrier()

    if world.leads:
        contenders = {name: partial(together, number) for number, name in enumerate(names)}
        times = measure.interleave(contenders, rounds, root=root)
        together(-1)
        return times
    while True:
        dist.broadcast(word, 0, group=world.everyone)
        if word.item() < 0:
            return None
        calls[names[int(word)]]()
        world.barrier()


class Pass:
    """Dispatch and combine of one layer, forward; experts give back what they get."""

    def __init__(self, job: Job, plan: Plan, world: World) -> None:
        self._job, self._plan, self._world = job, plan, world
        model, draw = job.model, torch.Generator().manual_seed(world.rank)
        self._dispatcher = Dispatcher(
            model.experts, ranks_of(plan, world), visits=plan.dispatch == "visits"
        )
        self._tokens = torch.randn(TOKENS, model.hidden, generator=draw)
        odds = torch.rand(TOKENS, model.experts, generator=draw).softmax(dim=-1)
        self._weights, self._choices = odds.topk(model.top_k, dim=-1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """One pass."""
        counted = self._dispatcher.count(self._choices, training=False)
        placed = self._dispatcher.place(counted)
        return self._dispatcher.start(self._tokens, self._weights, placed).through(nothing)

    def counted(self) -> tuple[int, int]:
        """Bytes that this host sends over the link in a pass, and those of rows and visits.

        Of several passes it is the one with the fewest: on a busy machine packets are sent again.
        """
        sent = min(self._sent() for _ in range(COUNTED))
        counted = self._dispatcher.count(self._choices, training=False)
        known, visits_RP = [counted.counts_RE], self._dispatcher.place(counted).visits_RP
        known += [] if visits_RP is None else [visits_RP]
        load = torch.cat(known, dim=1).tolist()
        first = self._world.rank // 2 * 2
        due = sum(self._due(rank, load) for rank in (first, first + 1))
        return sent, due

    def _sent(self) -> int:
        self._world.barrier()
        before = sent_bytes()
        self()
        self._world.barrier()
        return sent_bytes() - before

    def _due(self, rank: int, load: list[list[int]]) -> int:
        model = self._job.model
        row = model.hidden * 4
        there = row
        if self._plan.dispatch == "visits":
            there = visit_bytes(model.hidden, model.top_k, 4)[0]
        (rows,) = routed(self._job, self._plan, rank, [load])
        due = 0
        for trip in rows.trips:
            for other, to, back in zip(trip.group, trip.to, trip.back, strict=True):
                due += (other // 2 != rank // 2) * (to * there + back * row)
        return due


def nothing(rows: Tensor, routes: Routes, weights_NK: Tensor | None) -> Tensor:
    """What comes of experts that give back what they get."""
    return rows if weights_NK is None else rows * weights_NK.sum(dim=1, keepdim=True)


def layer_job(layout: dict[str, Any]) -> Job:
    """Top 8 of 64 experts, as many tokens on each of the ranks."""
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), "hidden": HIDDEN, "layers": 1}
    return olmoe(RANKS, TOKENS, model=model, layout={"ep": RANKS, **layout})


def _step_job(layout: dict[str, Any]) -> Job:
    return olmoe(4, 128, layout={"ep": RANKS, **layout})


def plan_of(job: Job, world: World) -> Plan:
    """What its layout means here."""
    return lay_out(job.layout, job.model, world.size)
