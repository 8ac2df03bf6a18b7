"""From how many rows on a copy of an expert pays over a link: as the model foretells it, and as it
is.

Two hosts of a rank; an expert of the first one is chosen more and more often by both. A layer
without copies and one where the second rank has a copy, whatever that costs, are timed in turn;
between shares of the choices at which the ratio of their times goes through 1 the crossing is taken
to be on a line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks import measure, skewed
from benchmarks.layer import in_turn
from moesaic.dist.world import World
from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.facts.job import BalanceConfig
from moesaic.policy.balance import setting_of, times, within
from moesaic.testing.hosts import impossible, met
from moesaic.train import balancing

EXPERTS, MEGABITS = 16, 200
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0)
"""Of what is foretold."""
_COPY = np.array([[0, 1]])
_RESAMPLES = 2000


def rows(rounds: int) -> Iterator[measure.Row]:
    """What is foretold of what is measured."""
    name = f"rows at which a copy pays, over {MEGABITS} Mbit/s, foretold over measured"
    hindrance = impossible()
    if hindrance:
        yield measure.row(name, None, "ratio", bar="", against=f"untried: {hindrance}", repeats=0)
        return
    yield compared(name, *skewed.on_ranks(_measured, rounds, megabits=MEGABITS))


def compared(name: str, foretold: int | None, hot: Ints, gains: np.ndarray) -> measure.Row:
    """Rows that are foretold over those measured, by gains [rows, rounds]; no figure where one of
    the two is not among the rows tried, and no interval where its ends are not."""
    rounds = gains.shape[1]
    crossing = _crossing(hot, np.median(gains, axis=1))
    known = foretold is not None and hot[0] <= crossing <= hot[-1]
    said = f"more than {skewed.TOKENS}" if foretold is None else str(foretold)
    against = f"{said} rows of one expert on each rank foretold, {_words(hot, crossing)} measured"
    value, interval = None, None
    if foretold is not None and known:
        draw = np.random.default_rng(0)
        drawn = [
            _crossing(hot, np.median(gains[:, draw.integers(rounds, size=rounds)], axis=1))
            for _ in range(_RESAMPLES)
        ]
        low, high = np.percentile(drawn, (2.5, 97.5), method="nearest").tolist()
        value = foretold / crossing
        if low >= hot[0] and high <= hot[-1]:
            interval = (foretold / high, foretold / low)
        else:
            against += f"; by its interval {_words(hot, low)} to {_words(hot, high)}"
    return measure.row(
        name, value, "ratio", bar="", against=against, interval=interval, repeats=rounds
    )


def _words(hot: Ints, crossing: float) -> str:
    if crossing < hot[0]:
        return f"fewer than {hot[0]} (beyond the shares tried)"
    if crossing > hot[-1]:
        return f"more than {hot[-1]} (beyond the shares tried)"
    return f"{crossing:.0f}"


def _crossing(hot: Ints, gains: np.ndarray) -> float:
    """Rows from which on the gain of a copy is 1 or more; 0 where it is with the fewest already,
    and infinity where it is not with the most."""
    below = np.flatnonzero(gains < 1)
    if not len(below):
        return 0.0
    last = int(below[-1])
    if last == len(hot) - 1:
        return np.inf
    share = (1 - gains[last]) / (gains[last + 1] - gains[last])
    return float(hot[last] + share * (hot[last + 1] - hot[last]))


@dataclass(frozen=True)
class Hot(skewed.Work):
    """So many of each rank's choices are of one expert, all others spread evenly."""

    hot: int = 0

    def choices(self, rank: int) -> list[Tensor]:
        """The same in each step."""
        others = 1 + np.arange(skewed.TOKENS - self.hot) % (self.experts - 1)
        chosen = np.concatenate((np.zeros(self.hot, np.int64), others))
        return [torch.from_numpy(np.random.default_rng(rank).permutation(chosen)[:, None])]


class Forced:
    """A copy of the first expert on the other rank, whatever it costs."""

    early = False

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def ahead(self) -> Balance:
        """Nobody asks for that."""
        return unchanged()

    def think(self) -> None:
        """Nobody has to."""

    def __call__(self, counts: Ints) -> Balance:
        """As many rows as are best."""
        return within(counts, self._setting, _COPY)


def _measured(
    world: World, rounds: int, root: int, hosts: tuple[str, str]
) -> tuple[int | None, Ints, np.ndarray] | None:
    """Rows of the hot expert on each rank that are foretold, those tried, and times without a copy
    over those with it, [rows, rounds]."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    with met(world, hosts) as world:
        work = Hot(skewed.Skew("hot", 1), EXPERTS, None)
        moe, job, plan = skewed.moe_of(world, work, skewed.PLAIN)
        prices = balancing.measured(moe, None, world)
        setting = setting_of(job, plan, BalanceConfig(), prices, 0)
        least = _foretold(setting)
        most = skewed.TOKENS
        tried = {min(round((least or most) * factor), most) for factor in FACTORS}
        hot = np.array(sorted(tried))
        calls = {}
        for number in hot.tolist():
            one = Hot(work.skew, EXPERTS, None, hot=number)
            for name in (skewed.PLAIN, "copy"):
                layer = skewed.layer_of(world, one, skewed.PLAIN, prices)
                if name == "copy":
                    layer.moe.balancer = Forced(setting)
                calls[f"{number} {name}"] = partial(layer)
        found = in_turn(world, calls, rounds, root)
    if found is None:
        return None
    gains = [found.ratios(f"{n} {skewed.PLAIN}", f"{n} copy") for n in hot.tolist()]
    return least, hot, np.stack(gains)


def _foretold(setting: Setting) -> int | None:
    """The fewest rows of the hot expert on each rank with which the model has a copy pay; None: not
    with all."""
    for hot in range(1, skewed.TOKENS + 1):
        one = Hot(skewed.Skew("hot", 1), EXPERTS, None, hot=hot).choices(0)[0]
        counts = np.tile(np.bincount(one.view(-1).numpy(), minlength=EXPERTS), (2, 1))
        copied = within(counts, setting, _COPY)
        if times(counts, setting, copied).whole <= times(counts, setting, unchanged()).whole:
            return hot
    return None
