"""Policies of balance against one another, simulated: layers of many kinds, by the model that all
policies are held against.

No clock is in it, nor what deciding takes. Each policy has the rows at hand, those that go by the
time before as well; ratios are of seconds of a layer with its copies and rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks import measure
from moesaic.facts.balance import Ints, Setting, unchanged
from moesaic.policy.balance import Policy, eplb, faster_moe, pro_prophet, quota, times
from moesaic.policy.balance.yardsticks import llep, lp, top_k_broadcast

POLICIES: dict[str, Policy] = {
    "none": lambda counts, setting: unchanged(), "quota": quota,
    "pro-prophet": pro_prophet, "faster-moe": faster_moe,
    "top-k-broadcast": partial(top_k_broadcast, number=1), "eplb": partial(eplb, each=1),
    "llep": llep, "lp": partial(lp, each=1),
}  # fmt: skip
RANKS = (2, 4, 8, 16, 32, 64)
EXPERTS = (64, 256)
LOADS = ("even", "Zipf 0.6", "Zipf 1.2", "one expert has 80%")
GIGABITS = (1, 10, 50, 200, 800, 2000)
TOKENS = (512, 4096)
"""Of a rank, with two choices each."""
SHAPES = ((512, 512), (2048, 1024))
"""Width and inner width of an expert."""
NEAR = 1.01
"""Times the best policy's seconds, that still count as the best."""
_FLOPS, _LATENCY_S = 0.5 * 312e12, 1e-5


class Layer(NamedTuple):
    """One kind."""

    ranks: int
    experts: int
    load: str
    gigabits: float
    tokens: int
    shape: tuple[int, int]

    def counts(self, seed: int) -> Ints:
        """Rows of every rank for every expert."""
        draw = np.random.default_rng(seed)
        odds = np.ones(self.experts)
        if self.load.startswith("Zipf"):
            odds = np.arange(1, self.experts + 1) ** -float(self.load.split()[1])
        elif self.load.startswith("one"):
            odds[0] = 4.0 * (self.experts - 1)
        odds = draw.permutation(odds / odds.sum())
        return draw.multinomial(2 * self.tokens, odds, size=self.ranks)

    def setting(self) -> Setting:
        """What it costs: GPUs at half of 312 TFLOP/s, bf16, copies travel under experts."""
        width, inner = self.shape
        numbers = 3 * width * inner
        return Setting(
            np.arange(self.experts) * self.ranks // self.experts, self.ranks,
            _FLOPS / (2 * numbers), 2.0 * width, self.gigabits * 1e9 / 8, 2.0 * numbers,
            4.0 * numbers, latency_s=_LATENCY_S, least_rows=64,
        )  # fmt: skip


def layers() -> list[Layer]:
    """Every one."""
    return [Layer(*one) for one in product(RANKS, EXPERTS, LOADS, GIGABITS, TOKENS, SHAPES)]


def rows() -> Iterator[measure.Row]:
    """Two figures of each policy."""
    yield from compared(layers())


def compared(every: list[Layer]) -> Iterator[measure.Row]:
    """Of these layers."""
    seconds = np.array([seconds_of(layer, seed) for seed, layer in enumerate(every)])
    ratios = seconds / seconds.min(axis=1, keepdims=True)
    title = f"policies against one another, {len(every):,} layers"
    said = f"the best of {len(POLICIES)} policies in each layer"
    for name, each in zip(POLICIES, ratios.T, strict=True):
        yield measure.row(
            f"{title}: {name} over the best, mean", float(each.mean()), "ratio", bar="",
            against=f"{said}; at worst {each.max():.3g}", repeats=1, simulated=True,
        )  # fmt: skip
        yield measure.row(
            f"{title}: {name} within 1% of the best", float((each <= NEAR).mean()),
            "share", bar="", against=said, repeats=1, simulated=True,
        )  # fmt: skip


def seconds_of(layer: Layer, seed: int) -> list[float]:
    """By each policy."""
    counts, setting = layer.counts(seed), layer.setting()
    return [times(counts, setting, policy(counts, setting)).whole for policy in POLICIES.values()]
