"""KeyIndex against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.ps.index import ABSENT, KeyIndex, _key, hash_keys

CHANGES = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2**32), st.integers(0, 900)), min_size=1, max_size=8
)
"""Whether keys are set or removed, a seed of keys, and their number."""


def assert_same(index: KeyIndex, expected: dict[int, int], others: list[int]) -> None:
    keys = np.array([*expected, *others], np.int64)
    assert index.find(keys).tolist() == [expected.get(int(key), ABSENT) for key in keys]
    assert index.find_hashed(hash_keys(keys)).tolist() == index.find(keys).tolist()
    found, locations = index.items()
    assert dict(zip(found.tolist(), locations.tolist(), strict=True)) == expected
    assert np.all(np.diff(hash_keys(found).astype(object)) > 0)
    assert len(index) == len(expected)


@settings(max_examples=25, deadline=None)
@given(CHANGES, st.integers(0, 3))
def test_sets_and_removals_are_those_of_a_dict(
    changes: list[tuple[bool, int, int]], spread: int
) -> None:
    """Keys are few, so that they are set and removed again, or crowd at the largest hashes."""
    index, expected = KeyIndex(), dict[int, int]()
    for is_set, seed, count in changes:
        draw = np.random.default_rng(seed)
        numbers = draw.permutation(1500)[:count].astype(np.int64)
        keys = [
            numbers,
            numbers * 2**52,
            keys_of(np.uint64(2**64 - 1) - numbers.astype(np.uint64)),
            keys_of(numbers.astype(np.uint64)),
        ][spread]
        if is_set:
            locations = draw.integers(-(2**62), 2**62, len(keys))
            index.set(keys, locations)
            expected.update(zip(keys.tolist(), locations.tolist(), strict=True))
        else:
            index.remove(keys)
            for key in keys.tolist():
                expected.pop(key, None)
        assert_same(index, expected, keys.tolist())


def keys_of(hashes: np.ndarray) -> np.ndarray:
    """Return keys with given hashes."""
    keys = np.array([_key(one) for one in hashes], np.int64)
    assert (hash_keys(keys) == hashes).all()
    return keys


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63)])
def test_any_number_is_a_key(key: int) -> None:
    index = KeyIndex()
    assert index.find(np.array([key])).tolist() == [ABSENT]
    index.set(np.array([key]), np.array([5]))
    assert_same(index, {key: 5}, [1])


def test_growth_keeps_entries_and_wastes_little() -> None:
    index, keys = KeyIndex(), np.random.default_rng(0).permutation(200_000) * 7919
    for start in range(0, len(keys), 30_000):
        part = slice(start, start + 30_000)
        index.set(keys[part], np.arange(len(keys))[part])
    assert (index.find(keys) == np.arange(len(keys))).all()
    assert index.memory_bytes / len(keys) < 26
    index.remove(keys[::2])
    assert (index.find(keys[::2]) == ABSENT).all()
    assert (index.find(keys[1::2]) == np.arange(len(keys))[1::2]).all()
    assert len(index) == len(keys) // 2


def test_order_of_items_depends_on_keys_alone() -> None:
    keys = np.arange(3000) * 31
    one, other = KeyIndex(), KeyIndex()
    one.set(keys, keys)
    other.set(np.arange(9000), np.zeros(9000, np.int64))
    other.remove(np.arange(9000))
    other.set(keys[::-1], keys[::-1])
    assert (one.items()[0] == other.items()[0]).all()


def test_reserved_room_holds_keys_in_the_order_of_hashes() -> None:
    index, keys = KeyIndex(), np.arange(50_000)
    keys = keys[np.argsort(hash_keys(keys))]
    index.set(keys[:100], np.arange(100))
    index.reserve(len(keys))
    before = index.memory_bytes
    index.set(keys, np.arange(len(keys)))
    assert index.memory_bytes == before
    assert np.array_equal(index.find(keys), np.arange(len(keys)))
    found, rows = index.find_keys(np.arange(len(keys)) % 3 == 0)
    assert np.array_equal(found, keys[::3])
    assert np.array_equal(rows, np.arange(len(keys))[::3])
    assert len(index.find_keys(np.zeros(0, np.bool_))[0]) == 0
