"""Dispatch and combine between two hosts of two ranks: each dispatch method against all_to_all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.on_ranks import in_turn, on_ranks, plan_of
from benchmarks.training import Ours, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.loads import dedup_token_bytes, routed_by_layer
from moesaic.models.build import make_dispatch_ranks
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.dispatch.permute import Permutation
from moesaic.testing.hosts import sent_bytes, unsupported_reason

METHODS: dict[str, dict[str, Any]] = {
    "all_to_all": {"dispatch": "all_to_all"},
    "hierarchical all_to_all": {"dispatch": "all_to_all", "dispatch_hosts": 2},
    "dedup": {"dispatch": "dedup"},
    "hierarchical dedup": {"dispatch": "dedup", "dispatch_hosts": 2},
}
"""Dispatch methods between ranks on two hosts, by name."""
PEER, OURS = "all_to_all", "hierarchical dedup"
TIMED = (PEER, "dedup", OURS)
RATES = {"1 Gbit/s": 1000, "200 Mbit/s": 200}
BAR = ">= 3.0"
HIDDEN, TOKENS, RANKS = 1024, 1024, 4
COUNTED = 5


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure both rates; the claim is the slower of the two gains."""
    details, claims = list[measure.Row](), list[measure.Row]()
    hindrance = unsupported_reason()
    for rate, megabits in RATES.items():
        if hindrance:
            claims.append(measure.untried(title(rate, OURS), BAR, hindrance))
            continue
        found = on_ranks(RANKS, timed, rounds, megabits=megabits)
        details += _rows(rate, found, rounds)
        claims += [row for row in details if row.name == title(rate, OURS)]
    yield measure.worst(
        f"dispatch and combine between two hosts, {OURS} against {PEER}, worst of 1 Gbit/s and "
        "200 Mbit/s", claims, BAR,
    )  # fmt: skip
    yield from details


def title(rate: str, method: str) -> str:
    """Return the name of a figure."""
    return f"dispatch and combine, two hosts of two ranks, {rate}, {method}"


@dataclass(frozen=True)
class Found:
    """Figures of two hosts."""

    passes: measure.Times
    steps: measure.Times
    counted: dict[str, tuple[int, int]]
    """By method, bytes that a host sent over the link, and bytes predicted."""


def _rows(rate: str, found: Found, rounds: int) -> Iterator[measure.Row]:
    for method in TIMED[1:]:
        ratio, interval = found.passes.ratio(PEER, method)
        yield measure.row(
            title(rate, method), ratio, "ratio", bar="", interval=interval, repeats=rounds,
            against=f"moesaic, {PEER}; top 8 of 64, {TOKENS} tokens a rank, {HIDDEN} channels",
        )  # fmt: skip
    ratio, interval = found.steps.ratio(PEER, OURS)
    yield measure.row(
        f"training step, two hosts of two ranks, {rate}, {OURS}", ratio, "ratio", bar="",
        against=f"moesaic, {PEER}; OLMoE-shaped, 4 x 128 tokens", interval=interval,
        repeats=rounds,
    )  # fmt: skip
    method = max(found.counted, key=lambda one: found.counted[one][0] / found.counted[one][1])
    sent, due = found.counted[method]
    yield measure.row(
        f"bytes over the link over those predicted, {rate}, most of {len(METHODS)} methods",
        sent / due, "ratio", bar="", repeats=1,
        against=f"limit: {due:,} bytes predicted for {method}, without packet headers",
    )  # fmt: skip


def timed(world: World, rounds: int, root: int) -> Found | None:
    """On each rank: check that all methods give the same sums, then time them in turn."""
    jobs = {name: layer_job(layout) for name, layout in METHODS.items()}
    passes = {name: Pass(job, plan_of(job, world), world) for name, job in jobs.items()}
    runs = {name: Ours(_step_job(METHODS[name]), world) for name in (PEER, OURS)}
    results = [one() for one in passes.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    counted = {name: one.counted() for name, one in passes.items()}
    calls: dict[str, Callable[[], object]] = {name: passes[name] for name in TIMED}
    exchanged = in_turn(world, calls, rounds, root)
    stepped = in_turn(world, {name: run.step for name, run in runs.items()}, rounds, root)
    for run in runs.values():
        run.run.close()
    if exchanged is None or stepped is None:
        return None
    return Found(exchanged, stepped, counted)


class Pass:
    """Dispatch and combine of one layer, forward; the experts are the identity."""

    def __init__(self, job: Job, plan: Plan, world: World) -> None:
        self._job, self._plan, self._world = job, plan, world
        model, draw = job.model, torch.Generator().manual_seed(world.rank)
        self._dispatcher = Dispatcher(
            model.experts, make_dispatch_ranks(plan, world), dedup=plan.dispatch == "dedup"
        )
        self._tokens = torch.randn(TOKENS, model.hidden, generator=draw)
        odds = torch.rand(TOKENS, model.experts, generator=draw).softmax(dim=-1)
        self._weights, self._choices = odds.topk(model.top_k, dim=-1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Run one pass."""
        counted = self._dispatcher.count(self._choices, training=False)
        placed = self._dispatcher.assign_slots(counted)
        return self._dispatcher.start_dispatch(self._tokens, self._weights, placed).run_experts(
            identity
        )

    def counted(self) -> tuple[int, int]:
        """Return bytes that this host sends over the link in a pass, and those predicted.

        It takes the pass with the fewest bytes: a busy machine sends packets again.
        """
        sent = min(self._sent() for _ in range(COUNTED))
        counted = self._dispatcher.count(self._choices, training=False)
        known, visits_RP = (
            [counted.counts_RE],
            self._dispatcher.assign_slots(counted).dedup_counts_RP,
        )
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
        if self._plan.dispatch == "dedup":
            there = dedup_token_bytes(model.hidden, model.top_k, 4)[0]
        (rows,) = routed_by_layer(self._job, self._plan, rank, [load])
        due = 0
        for trip in rows.exchanges:
            for other, to, back in zip(
                trip.group, trip.send_tokens, trip.receive_tokens, strict=True
            ):
                due += (other // 2 != rank // 2) * (to * there + back * row)
        return due


def identity(rows: Tensor, routes: Permutation, weights_NK: Tensor | None) -> Tensor:
    """Return tokens as they came, weighted if there are weights."""
    return rows if weights_NK is None else rows * weights_NK.sum(dim=1, keepdim=True)


def layer_job(layout: dict[str, Any]) -> Job:
    """Return the job of one layer: top 8 of 64 experts, as many tokens on each of the ranks."""
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), "hidden": HIDDEN, "layers": 1}
    return olmoe(RANKS, TOKENS, model=model, layout={"ep": RANKS, **layout})


def _step_job(layout: dict[str, Any]) -> Job:
    return olmoe(4, 128, layout={"ep": RANKS, **layout})
