"""The built-in stream of clicks: against plain integers, and its frequencies, drift and teacher."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from click_oracles import GOLDEN, WORDS, key, mix, unpack
from numpy.typing import NDArray

from moesaic.dist.world import World
from moesaic.facts.job.clicks import ClicksConfig, StreamConfig
from moesaic.train.data.clicks import ClickData


def open_stream(seed: int = 5, **settings: Any) -> ClickData:
    return ClickData.open(ClicksConfig(stream=StreamConfig(**settings)), seed, World.solo())


def unit(word: int) -> float:
    return (word >> 11) * 2.0**-53


def plain_sample(
    config: StreamConfig, seed: int, day: int, position: int
) -> tuple[float, list[float], list[list[int]], int, float]:
    """Return label, dense features, keys, user and click probability of a sample."""
    digest = hashlib.blake2b(f"{seed}/clicks".encode(), digest_size=16).digest()
    draws, teacher = (int.from_bytes(digest[part : part + 8], "little") for part in (0, 8))
    word = mix(draws + (day * config.samples_per_day + position) * GOLDEN)

    def draw(number: int) -> float:
        return unit(mix(word + (number + 1) * GOLDEN))

    def weight(value: float, std: float) -> float:
        return (2 * value - 1) * std * math.sqrt(3)

    frequencies = [rank**-config.zipf for rank in range(1, config.keys + 1)]
    shares = [sum(frequencies[: rank + 1]) / sum(frequencies) for rank in range(config.keys)]
    slots, logit = list[list[int]](), -1.2
    mean_keys = sum(config.multi_hot / 2 if slot % 2 else 1 for slot in range(config.slots))
    for slot in range(config.slots):
        first = 2 + config.dense + slot * (config.multi_hot + 1)
        count = int(draw(first) * (config.multi_hot + 1)) if slot % 2 else 1
        ranks = [bisect_right(shares, draw(first + 1 + number)) for number in range(count)]
        slot_word = mix((slot + 1) * GOLDEN)
        generations = [
            math.floor(day * config.drift + unit(mix(slot_word ^ teacher ^ rank))) for rank in ranks
        ]
        ids = [
            generation * config.keys + rank
            for generation, rank in zip(generations, ranks, strict=True)
        ]
        slots.append([key(slot, one) for one in ids])
        for one in slots[-1]:
            logit += weight(unit(mix(one % WORDS ^ teacher)), 1.5 / math.sqrt(mean_keys))
    dense = [weight(draw(2 + feature), 1.0) for feature in range(config.dense)]
    for feature, value in enumerate(dense):
        std = 0.7 / math.sqrt(config.dense)
        logit += value * weight(unit(mix(teacher + (feature + 1) * GOLDEN)), std)
    probability = 1 / (1 + math.exp(-logit))
    return float(draw(0) < probability), dense, slots, int(draw(1) * config.users), probability


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 5, "dense": 3, "keys": 40, "multi_hot": 3, "drift": 0.4, "users": 7},
        {"slots": 1, "dense": 0, "keys": 2, "zipf": 0.0, "drift": 1.0},
    ],
    ids=["mixed", "least"],
)
def test_samples_equal_plain_ones(settings: dict[str, Any]) -> None:
    config = StreamConfig(days=3, samples_per_day=20, **settings)
    data = open_stream(days=3, samples_per_day=20, **settings)
    assert data.validation is not None
    for samples, first in ((data.train, 0), (data.validation, 3)):
        batch = samples.load(range(len(samples)), shuffled=False)
        probabilities = batch.probabilities
        assert probabilities is not None
        for index, one in enumerate(unpack(batch, config.slots)):
            day = first + index // 20
            label, dense, slots, user, probability = plain_sample(config, 5, day, index % 20)
            assert (one.label, one.slots, one.user, one.day) == (label, slots, user, day)
            np.testing.assert_allclose(one.dense, dense, rtol=1e-6)
            assert probabilities[index] == pytest.approx(probability, abs=1e-7)
            assert one.weight == 1.0


def slot_keys(data: ClickData, slot: int, day: int) -> NDArray[np.int64]:
    """Return the keys of a slot on a day."""
    size = len(data.train) // data.train.num_days
    batch = data.train.read(range(day * size, (day + 1) * size), shuffled=False)
    return batch.keys[batch.offsets[slot * size] : batch.offsets[(slot + 1) * size]]


def test_frequencies_follow_zipf() -> None:
    data = open_stream(samples_per_day=40_000, slots=2, keys=1000, zipf=1.2, multi_hot=4, drift=0.0)
    frequencies = np.arange(1, 1001) ** -1.2
    for slot, per_sample in ((0, 1), (1, 2)):
        keys = slot_keys(data, slot, 0)
        assert len(keys) == pytest.approx(per_sample * 40_000, rel=0.02)
        expected = frequencies / frequencies.sum() * len(keys)
        for rank in (0, 1, 9, 99):
            found = (keys == key(slot, rank)).sum()
            assert abs(found - expected[rank]) < 5 * math.sqrt(expected[rank])


def test_keys_drift_by_day() -> None:
    data = open_stream(days=11, samples_per_day=4000, slots=4, keys=100, zipf=0.0, drift=0.1)
    days = [
        {(slot, one) for slot in range(4) for one in slot_keys(data, slot, day).tolist()}
        for day in range(11)
    ]
    for before, after in pairwise(days):
        assert len(after) == 400
        assert 0.05 < len(after - before) / 400 < 0.15
    assert not days[10] & days[0]


def test_the_teacher_is_as_good_as_it_says() -> None:
    data = open_stream(samples_per_day=50_000)
    assert data.validation is not None
    batch = data.validation.load(range(50_000), shuffled=False)
    chances = batch.probabilities
    assert chances is not None
    order = np.argsort(chances)
    # Labels are as frequent as the probabilities say, in each tenth of the samples.
    for part in np.array_split(order, 10):
        error = batch.labels[part].sum() - chances[part].sum()
        assert abs(error) < 5 * math.sqrt((chances[part] * (1 - chances[part])).sum())
    ranks = np.empty(50_000)
    ranks[order] = np.arange(50_000)
    clicks = batch.labels.sum()
    auc = (ranks[batch.labels == 1].sum() - clicks * (clicks - 1) / 2) / (
        clicks * (50_000 - clicks)
    )
    assert 0.78 < auc < 0.88
    assert 0.2 < clicks / 50_000 < 0.4


def test_seeds_and_settings_differ() -> None:
    digests = [
        open_stream().digest, open_stream(seed=6).digest, open_stream(drift=0.5).digest,
        open_stream(users=3).digest,
    ]  # fmt: skip
    assert len(set(digests)) == 4
    assert open_stream().digest == digests[0]
    assert open_stream().files() == {}
    first, other = (open_stream(seed=seed).train.load(range(50), shuffled=False) for seed in (5, 6))
    assert set(first.keys.tolist()) != set(other.keys.tolist())
    assert (first.dense != other.dense).all()
