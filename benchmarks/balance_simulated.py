"""Balance policies on many simulated devices, by the model that policies themselves use.

No clock is involved. Loads are drawn by Zipf's law; hot experts change a little from one iteration
to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure
from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance import faster_moe, layer_times, pro_prophet, quota

Floats = NDArray[np.float64]
SKEW = 1.0
ITERATIONS, WARM = 12, 2
"""Iterations of a run, and those before the ones that count."""
DRIFT = 0.05
"""Change of the logarithm of a share, by chance, from one iteration to the next."""
MANY = ((64, 64), (64, 256), (256, 256), (1024, 512), (2048, 512))
"""Devices and experts."""
TOKENS, TOP_K = 4096, 8
"""Tokens of each device, and choices of each token."""
BAR = ">= 1.0"
POLICIES: dict[str, Callable[[IntArray, BalanceProblem], BalanceDecision]] = {
    "quota": quota, "pro-prophet": pro_prophet, "faster-moe": faster_moe,
}  # fmt: skip


def rows() -> Iterator[measure.Row]:
    """Simulate every size; the claim is the worst of them."""
    details, best = list[measure.Row](), list[measure.Row]()
    for ranks, experts in MANY:
        every = list(loads(ranks, experts, ranks * TOKENS, TOP_K, 0))[WARM:]
        over_none, over_best = _compared(f"{ranks:,} devices, {experts} experts", every)
        details.append(over_none)
        best.append(over_best)
    title = f"quota over the better of pro-prophet and faster-moe, worst of {len(MANY)} sizes"
    yield measure.worst(f"{title}, 64 to 2,048 devices", best, BAR)
    yield from details


def loads(ranks: int, experts: int, tokens: int, top_k: int, seed: int) -> Iterator[IntArray]:
    """Yield tokens of every rank for every expert, iteration after iteration."""
    draw = np.random.default_rng([seed, ranks, experts])
    shares = draw.permutation(-SKEW * np.log(np.arange(1, experts + 1)))
    for _ in range(ITERATIONS):
        yield _drawn(np.exp(shares) / np.exp(shares).sum(), ranks, tokens // ranks * top_k, draw)
        shares = shares + DRIFT * draw.standard_normal(experts)


def _drawn(odds: Floats, ranks: int, rows: int, draw: np.random.Generator) -> IntArray:
    """Draw so many rows of each rank, by shares of its own around `odds`."""
    each = np.stack([draw.dirichlet(200 * odds) for _ in range(ranks)])
    return np.stack([draw.multinomial(rows, one) for one in each])


def large(ranks: int, experts: int) -> BalanceProblem:
    """Return GPUs at half of 312 TFLOP/s, 25 GB/s each, and experts of 2,048 x 1,024 in bf16."""
    numbers = 3 * 2048 * 1024
    return BalanceProblem(
        np.arange(experts) * ranks // experts, ranks, 0.5 * 312e12 / (2 * numbers), 2 * 2048.0,
        2.5e10, 2.0 * numbers, 4.0 * numbers, latency_s=1e-5,
        dense_compute_s=1e-3, min_replica_tokens=64,
    )  # fmt: skip


def layer_s(
    counts: IntArray, problem: BalanceProblem, balance: BalanceDecision, *, hides: bool
) -> float:
    """Return seconds of a layer and the work up to the next; FasterMoE overlaps no replicas."""
    taken = layer_times(counts, problem, balance)
    whole = (
        taken.total_s
        if hides
        else 4 * taken.exchange_s
        + 3 * taken.experts_s
        + taken.replica_send_s
        + taken.gradient_return_s
    )
    return whole + 3 * problem.dense_compute_s


def _compared(shape: str, every: list[IntArray]) -> tuple[measure.Row, measure.Row]:
    """Return quota over none, and over the better of the others."""
    problem = large(*every[0].shape)
    none_s = sum(layer_s(one, problem, no_replicas(), hides=True) for one in every)
    seconds = {
        name: sum(
            layer_s(one, problem, policy(one, problem), hides=name != "faster-moe") for one in every
        )
        for name, policy in POLICIES.items()
    }
    best = min(list(POLICIES)[1:], key=lambda name: seconds[name])
    pairs = (
        ("quota over none", none_s, "no replicas"),
        ("quota over the better of the others", seconds[best], best),
    )
    over_none, over_best = (
        measure.row(
            f"{shape}: {name}", other_s / seconds["quota"], "ratio", bar="", repeats=1,
            against=f"{peer}; top-{TOP_K}, GPUs at half of 312 TFLOP/s, 25 GB/s", simulated=True,
        )
        for name, other_s, peer in pairs
    )  # fmt: skip
    return over_none, over_best
