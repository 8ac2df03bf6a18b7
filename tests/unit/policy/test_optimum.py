"""How far from the best each policy is, by the model, where layers are so small that everything can
be tried; docs/policies.md has these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance import eplb, faster_moe, pro_prophet, quota, times
from moesaic.policy.balance.yardsticks import best, llep, lp, top_k_broadcast

POLICIES: dict[str, Callable[[Ints, Setting], Balance]] = {
    "none": lambda counts, setting: unchanged(), "best": best, "quota": quota, "llep": llep,
    "lp": lp, "eplb": eplb, "pro-prophet": pro_prophet, "faster-moe": faster_moe,
    "top-k-broadcast": partial(top_k_broadcast, number=1),
}  # fmt: skip
DRAWS = 100
DOCS = Path(__file__).parents[3] / "docs" / "policies.md"


def instances(number: int) -> Iterator[tuple[Ints, Setting]]:
    """Three ranks with an expert each and two ranks with two, in turn: rows from even to one hot
    expert, and copies, links and what hides them from cheap to dear."""
    draw = np.random.default_rng(0)
    for turn in range(number):
        ranks, homes = (3, np.arange(3)) if turn % 2 else (2, np.arange(4) // 2)
        odds = draw.dirichlet(np.full(len(homes), draw.choice((0.3, 1.0, 10.0))))
        counts = draw.multinomial(8, odds, size=ranks)
        yield counts, Setting(
            homes, ranks, 1.0, row_bytes=float(draw.choice((0.02, 0.2, 2.0))), bytes_per_s=1.0,
            expert_bytes=(each := float(draw.choice((0.5, 3.0, 12.0)))), gradient_bytes=each,
            latency_s=0.05, beside_s=4.0, matrices_s=float(draw.choice((0.0, 0.5))),
            hides=bool(draw.integers(2)), handling_s=float(draw.choice((0.0, 0.1, 0.4))),
            forwards=int(draw.integers(1, 3)), least_rows=1,
        )  # fmt: skip


def optimum_s(counts: Ints, setting: Setting) -> float:
    """Of all there is: each expert's rows divided in any way over all ranks, of which those that
    get any have a copy. Whose rows these are follows: a rank's own as many as may be, which is the
    least that it sends and that it receives."""
    ranks = setting.ranks
    parts = [_parts(counts[:, expert], int(home)) for expert, home in enumerate(setting.homes)]
    sums = np.zeros((1, 5 * ranks), np.int64)
    for one in parts:
        sums = (sums[:, None] + one[None]).reshape(-1, 5 * ranks)
    computed, sent, received, gives, gets = np.split(sums, 5, axis=1)
    traffic = most_handled(sent, received, setting)
    exchange = traffic * setting.row_bytes / setting.bytes_per_s + setting.latency_s * (traffic > 0)
    matrices_s = setting.matrices_s * (1 + gets * ranks / len(setting.homes))
    experts = (computed / setting.rows_per_s + matrices_s).max(axis=1)
    most = most_handled(gives, gets, setting)
    hidden = (experts + setting.beside_s) * setting.hides
    out, back = (
        most * size / setting.bytes_per_s + setting.latency_s * (most > 0)
        for size in (setting.expert_bytes, setting.gradient_bytes)
    )
    handled = setting.handling_s * setting.hides * (gives + gets).max(axis=1)
    out = np.maximum(handled * setting.expert_bytes, out - hidden)
    back = np.maximum(handled * setting.gradient_bytes, back - 2 * hidden)
    forwards = setting.forwards
    computing = (2 * forwards + 2) * exchange + (forwards + 2) * experts
    return float((computing + forwards * out + back).min())


def most_handled(sent: Ints, received: Ints, setting: Setting) -> Any:
    """By the rank that has the most to do with what travels."""
    if setting.hides:
        return np.maximum(sent.max(axis=1), received.max(axis=1))
    return (sent + received).max(axis=1) / 2


def _parts(own: Ints, home: int) -> Ints:
    """Of an expert with rows `own` of each rank, every way to divide them: what each rank computes,
    sends and receives of it, and copies that it gives and gets."""
    ranks = len(own)
    grids = np.meshgrid(*[np.arange(own.sum() + 1)] * ranks, indexing="ij")
    computed = np.stack(grids, axis=-1).reshape(-1, ranks)
    computed = computed[computed.sum(axis=1) == own.sum()]
    stay = np.minimum(computed, own)
    gets = (computed > 0) & (np.arange(ranks) != home)
    gives = np.zeros_like(computed)
    gives[:, home] = gets.sum(axis=1)
    return np.concatenate((computed, own - stay, computed - stay, gives, gets), axis=1)


@cache
def distances() -> dict[str, list[float]]:
    """As much longer than the best each policy makes each layer."""
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for counts, setting in instances(DRAWS):
        best_s = optimum_s(counts, setting)
        for name, policy in POLICIES.items():
            found[name].append(times(counts, setting, policy(counts, setting)).whole / best_s - 1)
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_better_than_the_best(name: str) -> None:
    assert min(distances()[name]) >= -1e-12


def test_the_best_is_reached_where_it_is_plain() -> None:
    """One expert has all rows of all ranks, and copies cost nothing: everybody computes its own."""
    counts = np.zeros((3, 3), np.int64)
    counts[:, 1] = 4
    setting = Setting(np.arange(3), 3, 1.0, 1.0, 1.0, 0.0, 0.0)
    assert optimum_s(counts, setting) == 3 * 4
    dear = setting._replace(expert_bytes=1e9, row_bytes=0.0)
    assert optimum_s(counts, dear) == 3 * 12


def test_ours_is_near_the_best_and_no_worse_than_others() -> None:
    mean = {name: float(np.mean(one)) for name, one in distances().items()}
    assert mean["quota"] < 0.05
    assert mean["quota"] <= min(one for name, one in mean.items() if name not in ("best", "quota"))


def test_the_documents_have_these_figures() -> None:
    rows = [
        f"| `{name}` | {100 * np.mean(one):.1f}% | {100 * np.max(one):.0f}% |"
        for name, one in distances().items()
    ]
    assert "\n".join(rows) in DOCS.read_text()
