from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.train.data.shuffle import Shuffle

SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 2**31))
def test_every_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    found = Shuffle(length, seed)(np.arange(length) + epoch * length)
    assert sorted(found.tolist()) == list(range(length))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**40), SEEDS, st.lists(st.integers(0, 2**50), max_size=20))
def test_indices_are_independent(length: int, seed: int, indices: list[int]) -> None:
    together = Shuffle(length, seed)(indices)
    alone = [int(Shuffle(length, seed)([index])[0]) for index in indices]
    assert together.tolist() == alone
    assert all(0 <= sample < length for sample in alone)


def test_large_lengths_have_no_collisions() -> None:
    length = 10**13 + 37
    found = Shuffle(length, 5)(np.arange(200_000) * 49_999_999)
    assert len(np.unique(found)) == 200_000


@pytest.mark.parametrize("length", [2, 3, 5, 7, 12])
def test_every_place_is_equally_likely_for_every_sample(length: int) -> None:
    epochs = 6000
    table = Shuffle(length, 11)(np.arange(epochs * length)).reshape(epochs, length)
    counts = np.stack([np.bincount(table[:, place], minlength=length) for place in range(length)])
    expected = epochs / length
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (length - 1) ** 2
    assert chi_squared < freedom + 5 * np.sqrt(2 * freedom)


def test_the_order_is_pinned() -> None:
    """Any change of the function changes every run, so it must not happen by accident."""
    assert Shuffle(10, 0)(np.arange(10)).tolist() == [4, 2, 5, 8, 1, 6, 0, 7, 3, 9]
