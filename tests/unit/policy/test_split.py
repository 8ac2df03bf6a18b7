"""Optimal split over owners and replicas: minimal maximum load."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_balance import cases

from moesaic.facts.balance import BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import count_rank_tokens
from moesaic.policy.balance.eplb import eplb
from moesaic.policy.balance.yardsticks import lp, split_optimally


def minimal_max_load(counts: IntArray, problem: BalanceProblem, replicas: IntArray) -> int:
    """Return the minimal maximum load, by duality.

    It is the largest mean over sets of ranks of the tokens that only this set can compute.
    """
    can_compute = np.zeros((len(problem.owners), problem.num_ranks), bool)
    can_compute[np.arange(len(problem.owners)), problem.owners] = True
    can_compute[replicas[:, 0], replicas[:, 1]] = True
    totals, most = counts.sum(axis=0), 0
    for number in range(1, problem.num_ranks + 1):
        for chosen in combinations(range(problem.num_ranks), number):
            others = np.setdiff1d(np.arange(problem.num_ranks), chosen)
            total = int(totals[~can_compute[:, others].any(axis=1)].sum())
            most = max(most, -(-total // number))
    return most


def random_replicas(problem: BalanceProblem, seed: int, odds: float) -> IntArray:
    """Return random replicas."""
    chosen = np.random.default_rng(seed).random((len(problem.owners), problem.num_ranks)) < odds
    chosen[np.arange(len(problem.owners)), problem.owners] = False
    return np.argwhere(chosen)


@given(case=cases(), seed=st.integers(0, 999), odds=st.sampled_from((0.1, 0.25, 0.5)))
@settings(max_examples=500, deadline=None)
def test_maximum_load_is_minimal(
    case: tuple[IntArray, BalanceProblem], seed: int, odds: float
) -> None:
    counts, problem = case
    replicas = random_replicas(problem, seed, odds)
    found = split_optimally(counts, problem, replicas)
    assert found.replicas.tolist() == replicas.tolist()
    after = count_rank_tokens(counts, problem.owners, found)
    assert after.computed.max() == minimal_max_load(counts, problem, replicas)
    assert after.computed.sum() == counts.sum()
    pairs = set(map(tuple, replicas.tolist()))
    assert all((expert, target) in pairs for expert, _, target, _ in found.rerouted.tolist())


def test_tokens_move_along_paths_of_ranks() -> None:
    """The first rank has a replica on the second only, which is full but hands on to the third."""
    counts = np.zeros((3, 3), np.int64)
    counts[0] = 60, 30, 0
    problem = BalanceProblem(np.array([0, 1, 2]), 3, 1.0, 1.0, 1.0, 1.0, 1.0)
    found = split_optimally(counts, problem, np.array([[0, 1], [1, 2]]))
    assert count_rank_tokens(counts, problem.owners, found).computed.tolist() == [30, 30, 30]
    assert found.rerouted.tolist() == [[0, 0, 1, 30], [1, 0, 2, 30]]


def test_many_ranks_reach_the_mean_load() -> None:
    """Too many sets of ranks to try; a maximum equal to the mean, rounded up, is optimal."""
    draw = np.random.default_rng(0)
    odds = draw.permutation(np.arange(1, 257.0) ** -0.8)
    counts = draw.multinomial(4096, odds / odds.sum(), size=64)
    problem = BalanceProblem(np.arange(256) // 4, 64, 4e6, 2048.0, 1e10, 1e7, 1e7)
    found = lp(counts, problem, replicas_per_rank=2)
    after = count_rank_tokens(counts, problem.owners, found).computed
    assert after.max() == -(-counts.sum() // 64)
    spread = count_rank_tokens(
        counts, problem.owners, eplb(counts, problem, replicas_per_rank=2)
    ).computed
    assert after.max() < spread.max()
    assert np.bincount(found.replicas[:, 1], minlength=64).max() <= 2


@pytest.mark.parametrize("each", [0, 3])
def test_without_replicas_all_tokens_stay_with_owners(each: int) -> None:
    counts = np.zeros((4, 8), np.int64)
    problem = BalanceProblem(np.arange(8) // 2, 4, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert all(map(np.array_equal, lp(counts, problem, each), no_replicas()))
