"""Distance of each policy to the optimum, for layers small enough to try everything.

docs/policies.md contains these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance import faster_moe, layer_times, pro_prophet, quota
from moesaic.policy.balance.eplb import eplb
from moesaic.policy.balance.yardsticks import best, llep, lp, top_k_broadcast

POLICIES: dict[str, Callable[[IntArray, BalanceProblem], BalanceDecision]] = {
    "none": lambda counts, problem: no_replicas(), "best": best, "quota": quota, "llep": llep,
    "lp": lp, "eplb": eplb, "pro-prophet": pro_prophet, "faster-moe": faster_moe,
    "top-k-broadcast": top_k_broadcast,
}  # fmt: skip
DRAWS = 100
DOCS = Path(__file__).parents[3] / "docs" / "policies.md"


def instances(number: int) -> Iterator[tuple[IntArray, BalanceProblem]]:
    """Yield three ranks with one expert each and two ranks with two each, in turn.

    Loads range from even to one hot expert; replicas, links and overlap from cheap to expensive.
    """
    draw = np.random.default_rng(0)
    for turn in range(number):
        ranks, owners = (3, np.arange(3)) if turn % 2 else (2, np.arange(4) // 2)
        odds = draw.dirichlet(np.full(len(owners), draw.choice((0.3, 1.0, 10.0))))
        counts = draw.multinomial(8, odds, size=ranks)
        yield counts, BalanceProblem(
            owners, ranks, 1.0, token_bytes=float(draw.choice((0.02, 0.2, 2.0))), bytes_per_s=1.0,
            expert_bytes=(each := float(draw.choice((0.5, 3.0, 12.0)))), gradient_bytes=each,
            latency_s=0.05, dense_compute_s=4.0, weight_read_s=float(draw.choice((0.0, 0.5))),
            overlaps=bool(draw.integers(2)), cpu_s_per_byte=float(draw.choice((0.0, 0.1, 0.4))),
            num_forwards=int(draw.integers(1, 3)), min_replica_tokens=1,
        )  # fmt: skip


def optimum_s(counts: IntArray, problem: BalanceProblem) -> float:
    """Return the least seconds of a layer over all splits.

    Each expert's tokens are divided in any way over all ranks, and ranks with any have a replica. A
    rank computes as many of its own tokens as possible, which minimizes its traffic.
    """
    ranks = problem.num_ranks
    parts = [_splits(counts[:, expert], int(owner)) for expert, owner in enumerate(problem.owners)]
    sums = np.zeros((1, 5 * ranks), np.int64)
    for one in parts:
        sums = (sums[:, None] + one[None]).reshape(-1, 5 * ranks)
    computed, sent, received, replicas_sent, replicas_received = np.split(sums, 5, axis=1)
    traffic = max_traffic(sent, received, problem)
    exchange = traffic * problem.token_bytes / problem.bytes_per_s + problem.latency_s * (
        traffic > 0
    )
    weights_s = problem.weight_read_s * (1 + replicas_received * ranks / len(problem.owners))
    experts = (computed / problem.expert_tokens_per_s + weights_s).max(axis=1)
    most = max_traffic(replicas_sent, replicas_received, problem)
    overlapped = (experts + problem.dense_compute_s) * problem.overlaps
    out, back = (
        most * size / problem.bytes_per_s + problem.latency_s * (most > 0)
        for size in (problem.expert_bytes, problem.gradient_bytes)
    )
    cpu_s = (
        problem.cpu_s_per_byte * problem.overlaps * (replicas_sent + replicas_received).max(axis=1)
    )
    out = np.maximum(cpu_s * problem.expert_bytes, out - overlapped)
    back = np.maximum(cpu_s * problem.gradient_bytes, back - 2 * overlapped)
    forwards = problem.num_forwards
    computing = (2 * forwards + 2) * exchange + (forwards + 2) * experts
    return float((computing + forwards * out + back).min())


def max_traffic(sent: IntArray, received: IntArray, problem: BalanceProblem) -> Any:
    """Return the largest traffic of a rank."""
    if problem.overlaps:
        return np.maximum(sent.max(axis=1), received.max(axis=1))
    return (sent + received).max(axis=1) / 2


def _splits(own: IntArray, owner: int) -> IntArray:
    """Return every way to divide an expert with `own` tokens by rank.

    Columns are the tokens that each rank computes, sends and receives, and replicas sent and
    received.
    """
    ranks = len(own)
    grids = np.meshgrid(*[np.arange(own.sum() + 1)] * ranks, indexing="ij")
    computed = np.stack(grids, axis=-1).reshape(-1, ranks)
    computed = computed[computed.sum(axis=1) == own.sum()]
    stay = np.minimum(computed, own)
    replicas_received = (computed > 0) & (np.arange(ranks) != owner)
    replicas_sent = np.zeros_like(computed)
    replicas_sent[:, owner] = replicas_received.sum(axis=1)
    return np.concatenate(
        (computed, own - stay, computed - stay, replicas_sent, replicas_received), axis=1
    )


@cache
def distances() -> dict[str, list[float]]:
    """Return, by policy, the relative excess over the optimum for each layer."""
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for counts, problem in instances(DRAWS):
        best_s = optimum_s(counts, problem)
        for name, policy in POLICIES.items():
            found[name].append(
                layer_times(counts, problem, policy(counts, problem)).total_s / best_s - 1
            )
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_the_optimum(name: str) -> None:
    assert min(distances()[name]) >= -1e-12


def test_optimum_of_trivial_layers() -> None:
    """One expert has all tokens of all ranks, and replicas are free: each rank computes its own."""
    counts = np.zeros((3, 3), np.int64)
    counts[:, 1] = 4
    problem = BalanceProblem(np.arange(3), 3, 1.0, 1.0, 1.0, 0.0, 0.0)
    assert optimum_s(counts, problem) == 3 * 4
    expensive = problem._replace(expert_bytes=1e9, token_bytes=0.0)
    assert optimum_s(counts, expensive) == 3 * 12


def test_quota_is_near_the_optimum_and_best_of_all_policies() -> None:
    mean = {name: float(np.mean(one)) for name, one in distances().items()}
    assert mean["quota"] < 0.05
    assert mean["quota"] <= min(one for name, one in mean.items() if name not in ("best", "quota"))


def test_docs_contain_these_figures() -> None:
    rows = [
        f"| `{name}` | {100 * np.mean(one):.1f}% | {100 * np.max(one):.0f}% |"
        for name, one in distances().items()
    ]
    assert "\n".join(rows) in DOCS.read_text()
