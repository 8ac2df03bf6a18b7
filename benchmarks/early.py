"""Copies that leave before rows are known, against those that wait for them: whole training steps
of two hosts with a link between them, with attention for copies to travel under.

Choices are drawn, not routed, and are those of the same draws in every layer, so that the time
before says what is hot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from benchmarks.layer import in_turn
from benchmarks.skewed import RANKS, TOKENS, Chosen, Skew, Work, on_ranks
from benchmarks.training import Ours, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.hosts import impossible, met
from moesaic.train import balancing

EXPERTS, MEGABITS, SEQUENCE, LAYERS = 16, 1000, 512, 4
NONE, EXACT, EARLY = "none", "quota", "quota, early"
CONTENDERS: dict[str, dict[str, Any]] = {
    NONE: {"policy": "none"}, EXACT: {"policy": "quota"},
    EARLY: {"policy": "quota", "early": True},
    "pro-prophet": {"policy": "pro-prophet", "as_published": True},
}  # fmt: skip


def rows(rounds: int) -> Iterator[measure.Row]:
    """Early copies over exact ones, and both over none."""
    title = f"training steps, two hosts of a rank, {MEGABITS // 1000} Gbit/s, Zipf 1.2"
    hindrance = impossible()
    if hindrance:
        yield measure.row(title, None, "ratio", bar="", against=f"untried: {hindrance}", repeats=0)
        return
    times, kept_ms = on_ranks(_timed, rounds, megabits=MEGABITS)
    shape = f"{LAYERS} layers, {EXPERTS} experts, {TOKENS} tokens a rank, a core each"
    for one, other in ((EXACT, NONE), (EARLY, NONE), ("pro-prophet", NONE), (EARLY, EXACT)):
        ratio, interval = times.ratio(of=other, to=one)
        yield measure.row(
            f"{title}: {one} over {other}", ratio, "ratio", bar="", interval=interval,
            repeats=rounds,
            against=f"copies kept rank 0 for {kept_ms[one]:.3g} ms a step; of {other} for "
            f"{kept_ms[other]:.3g}; {shape}",
        )  # fmt: skip


class Steps:
    """Of one contender."""

    def __init__(self, job: Job, world: World) -> None:
        self._ours = Ours(job, world)
        work, draw = Work(Skew("Zipf 1.2", 2), EXPERTS, None), torch.Generator().manual_seed(1)
        weights = torch.rand(TOKENS, 2, generator=draw)
        for layer, moe in self._ours.run.model.expert_layers():
            router = Chosen(weights, work.choices(world.rank), EXPERTS)
            router.layer = layer  # type: ignore[misc]
            moe.router = router  # type: ignore[assignment]
        self.kept_s = list[float]()

    def __call__(self) -> None:
        """The next one."""
        spread = self._ours.run.step(self._ours.samples).spread
        self.kept_s.append(sum(one.exposed_s for one in spread.values()))

    def close(self) -> None:
        """Let go of it."""
        self._ours.run.close()


def job_of(balance: dict[str, Any]) -> Job:
    """Of experts of 512 x 512."""
    sizes = {"ffn": 512, "experts": EXPERTS, "top_k": 2, "layers": LAYERS}
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **sizes}
    batch = RANKS * TOKENS // SEQUENCE
    return olmoe(batch, SEQUENCE, model=model, layout={"ep": RANKS}, balance=balance)


def _timed(
    world: World, rounds: int, root: int, hosts: tuple[str, str]
) -> tuple[measure.Times, dict[str, float]] | None:
    """On each rank, with a core to itself."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    with met(world, hosts) as world:
        first = Ours(job_of({"policy": "quota"}), world).run
        _, moe = next(iter(first.model.expert_layers()))
        prices = balancing.measured(moe, None, world).model_dump()
        first.close()
        steps = {
            name: Steps(job_of({**balance, "prices": prices}), world)
            for name, balance in CONTENDERS.items()
        }
        for one in steps.values():
            one()  # Without a time before there are no early copies.
            one.kept_s.clear()
        times = in_turn(world, {name: partial(one) for name, one in steps.items()}, rounds, root)
        kept = {name: 1e3 * float(np.median(one.kept_s)) for name, one in steps.items()}
        for one in steps.values():
            one.close()
    return None if times is None else (times, kept)
