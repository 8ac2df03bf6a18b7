"""Rows split over homes and copies: the busiest rank has the least that is possible, and no row
moves that need not.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_balance import cases

from moesaic.facts.balance import Ints, Setting, unchanged
from moesaic.policy.balance import at_copies, eplb, rows
from moesaic.policy.balance.yardsticks import levelled, lp


def least(counts: Ints, setting: Setting, copies: Ints) -> int:
    """Of the busiest rank, by duality: those experts' rows that can only be computed within a set
    of ranks, shared out evenly among these, for the set where that is most."""
    places = np.zeros((len(setting.homes), setting.ranks), bool)
    places[np.arange(len(setting.homes)), setting.homes] = True
    places[copies[:, 0], copies[:, 1]] = True
    totals, most = counts.sum(axis=0), 0
    for number in range(1, setting.ranks + 1):
        for chosen in combinations(range(setting.ranks), number):
            others = np.setdiff1d(np.arange(setting.ranks), chosen)
            among = int(totals[~places[:, others].any(axis=1)].sum())
            most = max(most, -(-among // number))
    return most


def drawn(setting: Setting, seed: int, odds: float) -> Ints:
    """Copies by chance."""
    chosen = np.random.default_rng(seed).random((len(setting.homes), setting.ranks)) < odds
    chosen[np.arange(len(setting.homes)), setting.homes] = False
    return np.argwhere(chosen)


@given(case=cases(), seed=st.integers(0, 999), odds=st.sampled_from((0.1, 0.25, 0.5)))
@settings(max_examples=500, deadline=None)
def test_the_busiest_rank_has_the_least_that_is_possible(
    case: tuple[Ints, Setting], seed: int, odds: float
) -> None:
    counts, setting = case
    copies = drawn(setting, seed, odds)
    found = levelled(counts, setting, copies)
    assert found.copies.tolist() == copies.tolist()
    after = rows(counts, setting.homes, found)
    assert after.computed.max() == least(counts, setting, copies)
    assert after.computed.sum() == counts.sum()
    pairs = set(map(tuple, copies.tolist()))
    assert all((expert, target) in pairs for expert, _, target, _ in found.diverted.tolist())


@given(case=cases(), seed=st.integers(0, 999))
@settings(max_examples=300, deadline=None)
def test_ranks_compute_their_own_rows_as_far_as_they_have_a_place(
    case: tuple[Ints, Setting], seed: int
) -> None:
    """No rank computes another's rows of an expert while its own leave, and where all computing
    their own is as good, that is what they do."""
    counts, setting = case
    copies = drawn(setting, seed, 0.4)
    found = levelled(counts, setting, copies)
    away = np.zeros((len(setting.homes), setting.ranks), np.int64)
    stay, come = np.zeros_like(away), np.zeros_like(away)
    for expert, source, target, number in found.diverted.tolist():
        away[expert, source] += number
        (stay if source == target else come)[expert, target] += number
    for expert, rank in copies.tolist():
        assert come[expert, rank] == 0 or stay[expert, rank] == counts[rank, expert]
    at_home = (np.arange(len(setting.homes)), setting.homes)
    others = counts.sum(axis=0) - counts.T[at_home] - (away.sum(axis=1) - away[at_home])
    assert ((away[at_home] == 0) | (others == 0)).all()
    own = at_copies(counts, copies)
    if rows(counts, setting.homes, own).computed.max() == least(counts, setting, copies):
        assert sorted(found.diverted.tolist()) == sorted(own.diverted.tolist())


def test_rows_go_along_chains_of_ranks() -> None:
    """The first rank has a copy on the second alone, which is full but hands on to the third."""
    counts = np.zeros((3, 3), np.int64)
    counts[0] = 60, 30, 0
    setting = Setting(np.array([0, 1, 2]), 3, 1.0, 1.0, 1.0, 1.0, 1.0)
    found = levelled(counts, setting, np.array([[0, 1], [1, 2]]))
    assert rows(counts, setting.homes, found).computed.tolist() == [30, 30, 30]
    assert found.diverted.tolist() == [[0, 0, 1, 30], [1, 0, 2, 30]]


def test_many_ranks_are_as_level_as_a_copy_each_allows() -> None:
    """Every set of ranks that a shortage could be in is too many to try; that nobody is above the
    mean, rounded up, needs no more."""
    draw = np.random.default_rng(0)
    odds = draw.permutation(np.arange(1, 257.0) ** -0.8)
    counts = draw.multinomial(4096, odds / odds.sum(), size=64)
    setting = Setting(np.arange(256) // 4, 64, 4e6, 2048.0, 1e10, 1e7, 1e7)
    found = lp(counts, setting, each=2)
    after = rows(counts, setting.homes, found).computed
    assert after.max() == -(-counts.sum() // 64)
    spread = rows(counts, setting.homes, eplb(counts, setting, each=2)).computed
    assert after.max() < spread.max()
    assert np.bincount(found.copies[:, 1], minlength=64).max() <= 2


@pytest.mark.parametrize("each", [0, 3])
def test_without_copies_everything_stays_at_home(each: int) -> None:
    counts = np.zeros((4, 8), np.int64)
    setting = Setting(np.arange(8) // 2, 4, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert all(map(np.array_equal, lp(counts, setting, each), unchanged()))
