"""Built-in stream of click samples: each is a function of seed, day and position.

The frequencies of keys follow Zipf's law. Every key lives `1 / drift` days; then another one takes
its place. A logistic teacher draws the labels, so the true probabilities are known. Its weights are
functions of the seed and of the key or the dense feature.
"""

from __future__ import annotations

import hashlib
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.facts.job.clicks import StreamConfig
from moesaic.train.data.clicks_batch import ClickBatch, offsets_of
from moesaic.train.data.clicks_hash import GOLDEN, integer_key, mix, slot_word

_BIAS = -1.2
_KEYS_STD, _DENSE_STD = 1.5, 0.7
"""Standard deviations of the parts of the logit."""
_LABEL, _USER, _DENSE = 0, 1, 2
"""Numbers of a sample's draws; those of its slots follow the dense features'."""
_ONE, _S11 = np.uint64(1), np.uint64(11)


class Stream:
    """Samples of all days."""

    def __init__(self, config: StreamConfig, seed: int) -> None:
        self.config = config
        digest = hashlib.blake2b(f"{seed}/clicks".encode(), digest_size=16).digest()
        self.words = np.frombuffer(digest, "<u8").astype(np.uint64)
        """Words that key the draws of samples, and the teacher with its drift."""
        frequencies = np.arange(1, config.keys + 1, dtype=np.float64) ** -config.zipf
        shares = np.cumsum(frequencies)
        self.shares = shares / shares[-1]
        """Share of the keys up to each rank, [keys]."""
        odd = config.slots // 2
        num_keys = config.slots - odd + odd * config.multi_hot / 2
        self.scales = np.array(
            [_BIAS, _KEYS_STD / sqrt(num_keys), _DENSE_STD / sqrt(max(config.dense, 1))]
        )
        """Bias of the teacher, and standard deviations of its weights of keys and features."""


class StreamDay:
    """Samples of one day of a stream; implements `Day`."""

    def __init__(self, stream: Stream, day: int) -> None:
        self._stream, self._day = stream, day

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._stream.config.samples_per_day

    def load(self, positions: NDArray[np.int64], number: int) -> ClickBatch:
        """Return the samples at `positions`, marked as samples of day `number`."""
        stream, config, size = self._stream, self._stream.config, len(positions)
        numbers = self._day * config.samples_per_day + positions
        words = np.empty(size, np.uint64)
        counts = np.empty((config.slots, size), np.int64)
        first_draw = _DENSE + config.dense
        _count_keys(stream.words[0], numbers, first_draw, config.multi_hot, words, counts)
        offsets = offsets_of(counts)
        keys = np.empty(offsets[-1], np.int64)
        dense = np.empty((size, config.dense), np.float32)
        probabilities = np.full(size, stream.scales[0])
        _draw_keys(
            words, first_draw + np.arange(config.slots) * (config.multi_hot + 1),
            self._day * config.drift, stream.words[1], stream.shares, offsets, keys,
        )  # fmt: skip
        _add_key_weights(keys, offsets, stream.words[1], stream.scales[1], probabilities)
        _draw_dense(words, stream.words[1], stream.scales[2], dense, probabilities)
        labels, users = np.empty(size, np.float32), np.empty(size, np.int64)
        _draw_labels(words, config.users, probabilities, labels, users)
        days, weights = np.full(size, number, np.int32), np.ones(size, np.float32)
        return ClickBatch(labels, weights, dense, keys, offsets, users, days, probabilities)


@cached_njit
def _draw(word: Any, number: int) -> Any:
    """Return draw `number` of the sample with `word`."""
    return mix(word + np.uint64(number + 1) * GOLDEN)


@cached_njit
def _unit(word: Any) -> Any:
    """Return a number in [0, 1)."""
    return np.float64(word >> _S11) * 2.0**-53


@cached_njit
def _count_keys(
    key: Any, numbers: Any, first_draw: int, multi_hot: int, words: Any, counts: Any
) -> None:
    """Set the samples' words, and the number of keys of each bag."""
    for sample in range(len(numbers)):
        words[sample] = mix(key + np.uint64(numbers[sample]) * GOLDEN)
    for slot in range(len(counts)):
        number = first_draw + slot * (multi_hot + 1)
        for sample in range(len(words)):
            count = 1
            if slot % 2:
                count = int(_unit(_draw(words[sample], number)) * (multi_hot + 1))
            counts[slot, sample] = count


@cached_njit
def _draw_keys(
    words: Any, first_draws: Any, drifted: float, teacher: Any, shares: Any, offsets: Any, keys: Any
) -> None:
    """Draw the keys of all bags.

    A rank's key has been replaced as often as `drifted`, plus its own phase, has passed a whole
    number.
    """
    size = len(words)
    for slot in range(len(first_draws)):
        slot_id = slot_word(slot)
        for sample in range(size):
            start = offsets[slot * size + sample]
            for index in range(start, offsets[slot * size + sample + 1]):
                unit = _unit(_draw(words[sample], first_draws[slot] + 1 + index - start))
                low, high = 0, len(shares) - 1
                while low < high:
                    middle = (low + high) // 2
                    if shares[middle] > unit:
                        high = middle
                    else:
                        low = middle + 1
                phase = _unit(mix(slot_id ^ teacher ^ np.uint64(low)))
                keys[index] = integer_key(slot_id, int(drifted + phase) * len(shares) + low)


@cached_njit
def _weight(word: Any, std: float) -> Any:
    """Return a weight of the teacher, uniform with mean 0 and standard deviation `std`."""
    return (2.0 * _unit(word) - 1.0) * std * sqrt(3.0)


@cached_njit
def _add_key_weights(keys: Any, offsets: Any, teacher: Any, std: float, logits: Any) -> None:
    """Add the weights of each sample's keys to its logit."""
    size = len(logits)
    for bag in range(len(offsets) - 1):
        for index in range(offsets[bag], offsets[bag + 1]):
            logits[bag % size] += _weight(mix(np.uint64(keys[index]) ^ teacher), std)


@cached_njit
def _draw_dense(words: Any, teacher: Any, std: float, dense: Any, logits: Any) -> None:
    """Draw the dense features, uniform with mean 0 and variance 1, and add them to the logits."""
    for feature in range(dense.shape[1]):
        weight = _weight(mix(teacher + np.uint64(feature + 1) * GOLDEN), std)
        for sample in range(len(words)):
            value = _weight(_draw(words[sample], _DENSE + feature), 1.0)
            dense[sample, feature] = value
            logits[sample] += weight * dense[sample, feature]


@cached_njit
def _draw_labels(words: Any, num_users: int, logits: Any, labels: Any, users: Any) -> None:
    """Make click probabilities of the logits, and draw labels and users."""
    for sample in range(len(words)):
        logits[sample] = 1.0 / (1.0 + np.exp(-logits[sample]))
        labels[sample] = _unit(_draw(words[sample], _LABEL)) < logits[sample]
        users[sample] = int(_unit(_draw(words[sample], _USER)) * num_users)
