"""Click samples in the order of training: day after day, shuffled inside each day."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from moesaic.train.data.clicks_batch import ClickBatch, Day, concatenate
from moesaic.train.data.read_ahead import ReadAhead
from moesaic.train.data.shuffle import Shuffle


class ClickSamples:
    """Endless sequence of samples: the days of one epoch after those of the other."""

    def __init__(
        self, days: Sequence[Day], seed: int, *, shuffle: bool = True, first_day: int = 0
    ) -> None:
        """Arrange the samples of `days`.

        Args:
            days: the days of one epoch; none is empty.
            seed: seed of the order inside the days.
            shuffle: if False, `shuffled` has no effect.
            first_day: number of the first day.
        """
        self._days, self._shuffle, self._first_day = tuple(days), shuffle, first_day
        self._starts = np.concatenate(([0], np.cumsum([len(day) for day in days], dtype=np.int64)))
        self._orders = [Shuffle(len(day), (seed << 32) + n) for n, day in enumerate(days)]

        self._ahead = {
            True: ReadAhead(partial(self.read, shuffled=True)),
            False: ReadAhead(partial(self.read, shuffled=False), stop=len(self)),
        }

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return int(self._starts[-1])

    @property
    def num_days(self) -> int:
        """Number of days per epoch."""
        return len(self._days)

    def day_of(self, index: int) -> int:
        """Return the number of the day of the global sample `index`; it rises from epoch to
        epoch."""
        epoch, position = divmod(index, len(self))
        return self._first_day + epoch * self.num_days + self._day_at(position)

    def load(self, indices: range, *, shuffled: bool) -> ClickBatch:
        """Return the samples of the global `indices`; one thread calls this, and the next batches
        are read ahead."""
        return self._ahead[shuffled].load(indices)

    def read(self, indices: range, *, shuffled: bool) -> ClickBatch:
        """Return the samples of the global `indices`; any thread may call this at any time.

        With `shuffled`, each epoch has the samples of a day in another order, else in the order of
        the files.
        """
        if not len(indices):
            return self._days[0].load(np.empty(0, np.int64), self._first_day)
        if indices[0] < 0 or indices.step != 1:
            raise IndexError(f"samples {indices} of {len(self)}")
        parts, start = list[ClickBatch](), indices[0]
        while start < indices.stop:
            epoch, position = divmod(start, len(self))
            day = self._day_at(position)
            stop = min(indices.stop, start + int(self._starts[day + 1]) - position)
            positions = np.arange(stop - start) + (position - self._starts[day])
            if shuffled and self._shuffle:
                positions = self._orders[day](positions + epoch * len(self._days[day]))
            number = self._first_day + epoch * self.num_days + day
            parts.append(self._days[day].load(positions, number))
            start = stop
        return concatenate(parts)

    def _day_at(self, position: int) -> int:
        """Return the day, from 0, of a position in the epoch."""
        return int(np.searchsorted(self._starts, position, side="right")) - 1
