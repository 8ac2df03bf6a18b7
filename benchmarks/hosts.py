"""Dispatch and combine between two hosts of two ranks: each dispatch method against all_to_all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.on_ranks import in_turn, on_ranks, plan_of
from benchmarks.training import Ours, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.models.build import make_dispatch_ranks
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.dispatch.permute import Permutation
from moesaic.testing.hosts import unsupported_reason

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


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure both rates; the claim is the slower of the two gains."""
    details, claims = list[measure.Row](), list[measure.Row]()
    hindrance = unsupported_reason()
    for rate, megabits in RATES.items():
        title = f"dispatch and combine, two hosts of two ranks, {rate}"
        if hindrance:
            claims.append(measure.untried(f"{title}, {OURS}", BAR, hindrance))
            continue
        passes, steps = on_ranks(RANKS, timed, rounds, megabits=megabits)
        gains = [
            measure.compare(
                f"{title}, {method}", passes, PEER, method,
                against=f"moesaic, {PEER}; top 8 of 64, {TOKENS} tokens a rank, {HIDDEN} channels",
            )
            for method in TIMED[1:]
        ]  # fmt: skip
        claims.append(gains[-1])
        step = measure.compare(
            f"training step, two hosts of two ranks, {rate}, {OURS}", steps, PEER, OURS,
            against=f"moesaic, {PEER}; OLMoE-shaped, 4 x 128 tokens",
        )  # fmt: skip
        details += [*gains, step]
    title = f"dispatch and combine between two hosts, {OURS} against {PEER}"
    yield measure.worst(f"{title}, worst of 1 Gbit/s and 200 Mbit/s", claims, BAR)
    yield from details


def timed(world: World, rounds: int, root: int) -> tuple[measure.Times, measure.Times] | None:
    """On each rank: check that all methods give the same sums, then time them in turn."""
    jobs = {name: layer_job(layout) for name, layout in METHODS.items()}
    passes = {name: Pass(job, plan_of(job, world), world) for name, job in jobs.items()}
    runs = {name: Ours(_step_job(METHODS[name]), world) for name in (PEER, OURS)}
    results = [one() for one in passes.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    calls: dict[str, Callable[[], object]] = {name: passes[name] for name in TIMED}
    exchanged = in_turn(world, calls, rounds, root)
    stepped = in_turn(world, {name: run.step for name, run in runs.items()}, rounds, root)
    for run in runs.values():
        run.run.close()
    if exchanged is None or stepped is None:
        return None
    return exchanged, stepped


class Pass:
    """Dispatch and combine of one layer, forward; the experts are the identity."""

    def __init__(self, job: Job, plan: Plan, world: World) -> None:
        model, draw = job.model, torch.Generator().manual_seed(world.rank)
        self.dispatcher = Dispatcher(
            model.experts, make_dispatch_ranks(plan, world), dedup=plan.dispatch == "dedup"
        )
        self._tokens = torch.randn(TOKENS, model.hidden, generator=draw)
        odds = torch.rand(TOKENS, model.experts, generator=draw).softmax(dim=-1)
        self._weights, self.choices = odds.topk(model.top_k, dim=-1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Run one pass."""
        counted = self.dispatcher.count(self.choices, training=False)
        placed = self.dispatcher.assign_slots(counted)
        return self.dispatcher.start_dispatch(self._tokens, self._weights, placed).run_experts(
            identity
        )


def identity(rows: Tensor, routes: Permutation, weights_NK: Tensor | None) -> Tensor:
    """Return tokens as they came, weighted if there are weights."""
    return rows if weights_NK is None else rows * weights_NK.sum(dim=1, keepdim=True)


def layer_job(layout: dict[str, Any]) -> Job:
    """Return the job of one layer: top 8 of 64 experts, as many tokens on each of the ranks."""
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), "hidden": HIDDEN, "layers": 1}
    return olmoe(RANKS, TOKENS, model=model, layout={"ep": RANKS, **layout})


def _step_job(layout: dict[str, Any]) -> Job:
    return olmoe(4, 128, layout={"ep": RANKS, **layout})
