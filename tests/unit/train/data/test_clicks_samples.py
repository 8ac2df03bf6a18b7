"""Order of click samples over days and epochs, and reading ahead."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.base.errors import DataError
from moesaic.train.data.clicks_batch import ClickBatch
from moesaic.train.data.clicks_samples import ClickSamples
from moesaic.train.data.read_ahead import ReadAhead

SIZES = (5, 1, 7)


class NumberedDay:
    """Day whose samples have users 100 * day + position, and as many keys as the position."""

    def __init__(self, day: int, size: int) -> None:
        self.day, self.size = day, size

    def __len__(self) -> int:
        return self.size

    def load(self, positions: NDArray[np.int64], number: int) -> ClickBatch:
        size = len(positions)
        counts = np.concatenate((positions, np.full(size, 1)))
        keys = [np.full(count, 100 * self.day + count) for count in counts]
        return ClickBatch(
            labels=np.zeros(size, np.float32), weights=np.ones(size, np.float32),
            dense=np.zeros((size, 1), np.float32),
            keys=np.concatenate([*keys, np.empty(0)]).astype(np.int64),
            offsets=np.concatenate(([0], np.cumsum(counts))),
            users=100 * self.day + positions, days=np.full(size, number, np.int32),
        )  # fmt: skip


def make_samples(*, shuffle: bool = True, seed: int = 1, first_day: int = 0) -> ClickSamples:
    days = [NumberedDay(day, size) for day, size in enumerate(SIZES)]
    return ClickSamples(days, seed, shuffle=shuffle, first_day=first_day)


def users(samples: ClickSamples, indices: range, *, shuffled: bool = True) -> list[int]:
    found = samples.read(indices, shuffled=shuffled).users
    assert found is not None
    return [int(user) for user in found]


def test_days_follow_one_another_in_each_epoch() -> None:
    samples = make_samples(first_day=2)
    assert len(samples) == 13
    orders = set()
    for epoch in range(4):
        batch = samples.read(range(13 * epoch, 13 * (epoch + 1)), shuffled=True)
        number = 2 + 3 * epoch
        assert batch.days.tolist() == [number] * 5 + [number + 1] + [number + 2] * 7
        assert [samples.day_of(13 * epoch + index) for index in range(13)] == batch.days.tolist()
        assert batch.users is not None
        found = batch.users.tolist()
        assert sorted(found[:5]) == list(range(5))
        assert found[5] == 100
        assert sorted(found[6:]) == list(range(200, 207))
        orders |= {tuple(found[:5]), tuple(found[6:])}
    assert len(orders) > 5
    assert users(samples, range(13), shuffled=False) == [*range(5), 100, *range(200, 207)]
    assert users(make_samples(shuffle=False), range(13, 26)) == [*range(5), 100, *range(200, 207)]
    assert users(make_samples(seed=2), range(26)) != users(samples, range(26))


def test_any_range_is_the_same_part_of_the_sequence() -> None:
    samples = make_samples()
    whole = users(samples, range(70))
    for start in range(0, 60, 7):
        for stop in (start, start + 1, start + 9, 60):
            assert users(make_samples(), range(start, stop)) == whole[start:stop]
    with pytest.raises(IndexError):
        samples.read(range(-1, 3), shuffled=True)


def test_bags_over_several_days_are_ordered_by_slot() -> None:
    batch = make_samples().read(range(3, 12), shuffled=False)
    bags = [
        batch.keys[start:stop].tolist()
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    places = [(0, 3), (0, 4), (1, 0), *((2, position) for position in range(6))]
    assert bags[:9] == [[100 * day + position] * position for day, position in places]
    assert bags[9:] == [[100 * day + 1] for day, _ in places]
    empty = make_samples().read(range(4, 4), shuffled=True)
    assert (len(empty), empty.offsets.tolist(), len(empty.keys)) == (0, [0], 0)


def test_loads_equal_reads_in_any_pattern() -> None:
    samples = make_samples()
    steps = [*range(0, 40, 4), *range(100, 120, 4), 3, 3, 50, 54, 58, 5, 9, 13]
    for start in steps:
        for shuffled in (True, False):
            indices = range(start, start + 2)
            loaded = samples.load(indices, shuffled=shuffled).users
            assert loaded is not None
            assert loaded.tolist() == users(samples, indices, shuffled=shuffled)


def test_reading_ahead_is_bounded_and_on_another_thread() -> None:
    calls, release = list[tuple[int, bool]](), threading.Event()

    def read(indices: range) -> int:
        is_ahead = threading.current_thread() is not threading.main_thread()
        calls.append((indices.start, is_ahead))
        if is_ahead:
            assert release.wait(10)
        return indices.start

    ahead = ReadAhead(read, stop=90)
    assert [ahead.load(range(start, start + 10)) for start in (0, 10)] == [0, 10]
    release.set()
    assert [ahead.load(range(start, start + 10)) for start in (20, 30)] == [20, 30]
    assert ahead.load(range(40, 50)) == 40
    assert calls[:2] == [(0, False), (10, False)]
    assert [ahead.load(range(start, start + 10)) for start in (50, 60, 70, 80)] == [50, 60, 70, 80]
    assert calls[2:] == [(start, True) for start in range(20, 90, 10)]
    assert ahead.load(range(0, 10)) == 0


def test_an_error_of_reading_ahead_reaches_the_caller() -> None:
    def read(indices: range) -> int:
        if indices.start == 30:
            raise DataError("index 30")
        return indices.start

    ahead = ReadAhead(read)
    assert [ahead.load(range(start, start + 10)) for start in (0, 10, 20)] == [0, 10, 20]
    with pytest.raises(DataError, match="index 30"):
        ahead.load(range(30, 40))
