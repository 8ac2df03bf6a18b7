"""Gradients in buckets that leave during backward, against one all-reduce a parameter after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measure
from benchmarks.on_ranks import in_turn, on_ranks
from benchmarks.training import Ours, olmoe
from moesaic.dist.buckets import GradientBuckets, ReducedParameter
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.hosts import unsupported_reason

RANKS = 2
LINKS = {"one host": 0, "two hosts, 1 Gbit/s": 1000, "two hosts, 200 Mbit/s": 200}
"""Mbit/s; 0: no link."""
SINGLE, BUCKETS = "one all-reduce a parameter", "buckets"
BAR = ">= 1.0"


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure every link; the claim is the worst of them."""
    details = [_row(name, rounds) for name in LINKS]
    yield measure.worst(
        f"training step, two ranks, gradients in buckets during backward, worst of {len(LINKS)} "
        "links", details, BAR,
    )  # fmt: skip
    yield from details


def _row(name: str, rounds: int) -> measure.Row:
    title = f"training step, two ranks, {name}, gradients in buckets during backward"
    megabits, hindrance = LINKS[name], unsupported_reason()
    if megabits and hindrance:
        return measure.untried(title, "", hindrance)
    times = on_ranks(RANKS, timed, rounds, megabits=megabits, pinned=True)
    ratio, interval = times.ratio(SINGLE, BUCKETS)
    return measure.row(
        title, ratio, "ratio", bar="", interval=interval, repeats=rounds,
        against=f"moesaic, {SINGLE} after backward; OLMoE-shaped, 8 layers of 4 experts, "
        "8 x 128 tokens, a core a rank",
    )  # fmt: skip


def timed(world: World, rounds: int, root: int) -> measure.Times | None:
    """On each rank: check that both sum the same gradients, then time steps in turn."""
    ours = Ours(job(), world)
    arenas = {id(item.parameter) for item in ours.run.part.trainable if item.bank is not None}
    sums = [
        ReducedParameter(one, bucket.group, "experts" if id(one) in arenas else "", one.dim() > 1)
        for bucket in ours.run.part.buckets.buckets
        for one in bucket.parameters
    ]
    ours.run.part.buckets.close()
    kinds: dict[str, Callable[[], Any]] = {
        SINGLE: lambda: OneByOne(sums),
        BUCKETS: lambda: GradientBuckets(sums, overlaps_backward=True),
    }  # fmt: skip

    def step(kind: str) -> None:
        ours.run.part.buckets = kinds[kind]()
        ours.step()
        ours.run.part.buckets.close()

    found = [gradients(ours, kind) for kind in kinds.values()]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return in_turn(world, {kind: partial(step, kind) for kind in kinds}, rounds, root)


def gradients(ours: Ours, kind: Callable[[], Any]) -> list[torch.Tensor]:
    """Return those of the next step; two ranks sum them to the same bits."""
    ours.run.part.buckets = kind()
    ours.run.compute_gradients(ours.samples)
    found = [item.grad.clone() for item in ours.run.part.trainable]
    for item in ours.run.part.trainable:
        item.parameter.grad = None
    ours.run.part.buckets.close()
    return found


class OneByOne:
    """One all-reduce a parameter after backward, in place of a run's buckets."""

    def __init__(self, sums: list[ReducedParameter]) -> None:
        self._sums = sums

    def expect(self) -> None:
        """Do nothing: no gradient leaves before the end."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def finish(self) -> None:
        """Reduce all, one after another."""
        for parameter, group, *_ in self._sums:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def job() -> Job:
    """Return eight layers of four experts, all of them on either rank: only gradients travel."""
    sizes = {**olmoe(1, 8).model.model_dump(exclude_none=True), "layers": 8}
    return olmoe(8, 128, model={**sizes, "experts": 4, "top_k": 2})
