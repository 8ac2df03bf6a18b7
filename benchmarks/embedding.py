"""The embedding and its update on two hosts: a copy of the table on every rank, its words shared
out, or its columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.layer import PATIENCE_S, in_turn
from moesaic.dist.collectives import sum_buckets_
from moesaic.dist.world import World
from moesaic.facts.job import OptimizerConfig
from moesaic.models.lm import Embedding
from moesaic.nn.columns import ALONE, Columns
from moesaic.nn.context import Context, Rotary
from moesaic.nn.slices import WHOLE, Slices
from moesaic.testing.hosts import impossible, met, two_hosts
from moesaic.testing.memory import most_allocated
from moesaic.testing.ranks import Ranks
from moesaic.train.optim import AdamW, zeros

RATES = {"1 Gbit/s": 1000}
RANKS = 4
COPIES, WORDS, COLUMNS = "a copy on every rank", "words shared out", "columns shared out"
FORMS = (COPIES, WORDS, COLUMNS)


class Size(NamedTuple):
    """Of a table, and tokens of a rank."""

    vocab: int = 50_304
    hidden: int = 1024
    tokens: int = 1024


def rows(rounds: int, size: Size = Size()) -> Iterator[measure.Row]:  # noqa: B008 - it is frozen
    """Every figure, as it comes."""
    hindrance = impossible()
    peer = "moesaic, a copy of the table on every rank, gradients summed"
    shape = f"{size.vocab:,} words of {size.hidden:,} numbers, {size.tokens:,} tokens a rank, fp32"
    for name, megabits in RATES.items():
        step = f"embedding and its update, two hosts of two ranks, {name}"
        if hindrance:
            yield measure.row(
                f"{step}, {COLUMNS}", None, "ratio", bar="", against=f"untried: {hindrance}",
                repeats=0,
            )  # fmt: skip
            continue
        with two_hosts(megabits) as hosts:
            pool = Ranks()
            try:
                found: list[Found] = pool.run(
                    RANKS, on_hosts, hosts, size, rounds, os.getpid(), timeout_s=PATIENCE_S
                )
            finally:
                pool.close()
        times = found[0].times
        assert times is not None
        for form in FORMS[1:]:
            ratio, interval = times.ratio(COPIES, form)
            yield measure.row(
                f"{step}, {form}", ratio, "ratio", bar="",
                interval=interval, repeats=rounds, against=f"{peer}; {shape}",
            )  # fmt: skip
        seconds = np.median(times.seconds[COLUMNS])
        yield measure.row(
            f"{step}, {COLUMNS}, time", float(seconds), "s", bar="", repeats=rounds, against=shape
        )
    if hindrance:
        return
    for form in FORMS[1:]:
        held = [one.bytes_by_form[form] / one.bytes_by_form[COPIES] for one in found]
        yield measure.row(
            f"most memory of embedding and update, {RANKS} ranks, {form}", max(held), "ratio",
            bar="", repeats=1, against=f"{peer}; {shape}",
        )  # fmt: skip


class Found(NamedTuple):
    """What a rank has found."""

    bytes_by_form: dict[str, int]
    """The most that a step needs, parameters, gradients and moments among it."""
    times: measure.Times | None
    """On rank 0."""


def on_hosts(world: World, hosts: tuple[str, str], size: Size, rounds: int, root: int) -> Found:
    """On each rank: memory of one form after another, and then all of them in turn."""
    with met(world, hosts) as world:
        held = {form: needed(world, form, size) for form in FORMS}
        forms = {form: Table(world, form, size) for form in FORMS}
        compare(list(forms.values()))
        calls: dict[str, Callable[[], object]] = dict(forms.items())
        return Found(held, in_turn(world, calls, rounds, root))


def needed(world: World, form: str, size: Size) -> int:
    """Bytes of a step at its fullest."""
    made: list[Table] = []
    first, second = most_allocated(
        lambda: made.append(Table(world, form, size)), lambda: made[0](), lambda: made[0]()
    )[1:]
    return min(first, second)


def compare(forms: list[Table]) -> None:
    """Raise unless all find the same, and make the same of their tables."""
    copies = forms[0]
    expected = [copies() for _ in range(2)]
    for other in forms[1:]:
        for one in expected:
            torch.testing.assert_close(other(), one)
        own = copies.embedding.weight.detach()[other.place]
        torch.testing.assert_close(other.embedding.weight.detach(), own)


@dataclass
class Table:
    """An embedding, and AdamW, on a rank with samples of its own; words that are shared out are
    looked up for the samples of all ranks, which then have a run of the result each."""

    world: World
    form: str
    size: Size
    step: int = 0
    place: tuple[slice, ...] = (slice(None),)
    """What of the table is here."""
    embedding: Embedding = field(init=False)

    def __post_init__(self) -> None:
        world, (vocab, hidden, tokens) = self.world, self.size
        everyone = [list(range(world.size))]
        slices, columns = WHOLE, ALONE
        if self.form == WORDS:
            slices = Slices(world.rank, world.size, world.partition(everyone))
            self.place = (slices.run(vocab),)
        elif self.form == COLUMNS:
            columns = Columns(world.size, world.carrier(everyone))
            width = hidden // world.size
            self.place = slice(None), slice(world.rank * width, (world.rank + 1) * width)
        self.embedding = Embedding(vocab, hidden, slices, columns)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            whole = torch.randn(vocab, hidden, generator=draw)
            self.embedding.weight.copy_(whole[self.place])
        ids = torch.randint(vocab, (world.size, tokens), generator=draw)
        self._ids = ids if self.form == WORDS else ids[world.rank : world.rank + 1]
        draw.manual_seed(4 + world.rank)
        self._cotangent = torch.randn(1, tokens, hidden, generator=draw)
        self._optimizer = AdamW(OptimizerConfig())
        self._moments = zeros(self.embedding.weight.detach())

    def __call__(self) -> Tensor:
        """One step; what was found for this rank's tokens."""
        weight = self.embedding.weight
        nowhere = Rotary(self._ids, self._ids)
        found = self.embedding(self._ids, Context(nowhere))
        found.backward(self._cotangent)
        assert weight.grad is not None
        if self.form == COPIES:
            sum_buckets_([weight.grad], self.world.everyone)
        self.step += 1
        self._optimizer.update(
            [weight.detach()], [weight.grad], [self._moments], self.step,
            lr=1e-3, clip=1.0, decay=True,
        )  # fmt: skip
        weight.grad = None
        result: Tensor = found.detach()
        return result
