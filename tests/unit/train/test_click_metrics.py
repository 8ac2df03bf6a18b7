"""Click metrics equal their definitions over all pairs of samples, on one rank and on several."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool
from moesaic.train.click_metrics import ClickMetrics, ClickScores, click_metrics

Samples = tuple[list[float], list[float], list[float], list[int]]


def make_samples(seed: int, number: int = 120, distinct: int = 9) -> Samples:
    """Return labels, logits with many ties, weights and users."""
    rng = np.random.default_rng(seed)
    logits = 4 * rng.integers(0, distinct, number) / distinct - 2
    labels = rng.random(number) < 1 / (1 + np.exp(-logits))
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], number)
    users = rng.integers(-3, 25, number)
    return labels.astype(float).tolist(), logits.tolist(), weights.tolist(), users.tolist()


def auc_of_pairs(samples: list[tuple[float, float, float]]) -> float | None:
    """Return the AUC of (label, logit, weight) by its definition."""
    pairs = [
        (a[2] * b[2], (a[1] > b[1]) + (a[1] == b[1]) / 2)
        for a, b in product(samples, samples)
        if a[0] == 1 and b[0] == 0
    ]
    total = sum(weight for weight, _ in pairs)
    return sum(weight * won for weight, won in pairs) / total if total else None


def by_definition(
    labels: list[float], logits: list[float], weights: list[float], users: list[int]
) -> ClickMetrics:
    """Return all metrics by their definitions."""
    samples = list(zip(labels, logits, weights, strict=True))
    probabilities = [1 / (1 + math.exp(-x)) for x in logits]
    weight, clicks = sum(weights), sum(y * w for y, _, w in samples)
    log_loss = (
        sum(
            -w * math.log(p if y else 1 - p)
            for (y, _, w), p in zip(samples, probabilities, strict=True)
        )
        / weight
    )
    rate = clicks / weight
    calibration = sum(p * w for (_, _, w), p in zip(samples, probabilities, strict=True)) / clicks
    by_user = [
        [one for one, other in zip(samples, users, strict=True) if other == user]
        for user in set(users)
    ]
    found = [(auc_of_pairs(one), sum(w for *_, w in one)) for one in by_user]
    defined = [(auc, w) for auc, w in found if auc is not None]
    return ClickMetrics(
        len(labels), weight, log_loss, auc_of_pairs(samples),
        log_loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)),
        calibration, sum(auc * w for auc, w in defined) / sum(w for _, w in defined), len(defined),
    )  # fmt: skip


def assert_equal(found: ClickMetrics, expected: ClickMetrics) -> None:
    for name, value in vars(expected).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize(("seed", "distinct"), [(0, 2), (1, 9), (2, 10_000)])
def test_metrics_equal_their_definitions(seed: int, distinct: int) -> None:
    samples = make_samples(seed, distinct=distinct)
    assert_equal(click_metrics(*samples), by_definition(*samples))


def test_unset_weights_are_one() -> None:
    labels, logits, _, users = make_samples(3)
    ones = [1.0] * len(labels)
    assert_equal(
        click_metrics(labels, logits, users=users), by_definition(labels, logits, ones, users)
    )


def test_float32_probabilities_near_one_lose_nothing() -> None:
    found = click_metrics([1, 0, 0], np.array([40, 39, -200], np.float32))
    assert found.auc == 1
    assert found.log_loss == pytest.approx(39 / 3)


def metrics_of_rank(world: World, samples: Samples, batch: int) -> ClickMetrics:
    """Return the metrics of samples whose batches are dealt to the ranks, the last ones to none."""
    scores = ClickScores(has_users=True)
    for start in range(world.rank * batch, len(samples[0]), world.size * batch):
        scores.add(*(column[start : start + batch] for column in samples))
    return scores.metrics(world)


@pytest.mark.parametrize(("batch", "number"), [(7, 120), (80, 120), (60, 60)])
def test_metrics_over_ranks_equal_those_of_one(ranks: RankPool, batch: int, number: int) -> None:
    samples = make_samples(4, number)
    for found in ranks.run(3, metrics_of_rank, samples, batch):
        assert_equal(found, by_definition(*samples))


def test_undefined_metrics_over_ranks_are_none(ranks: RankPool) -> None:
    for found in ranks.run(2, metrics_of_rank, ([1.0], [0.0], [1.0], [5]), 1):
        assert found == ClickMetrics(1, 1.0, math.log(2), calibration=0.5)


@pytest.mark.parametrize(
    ("labels", "logits", "weights", "defined", "remark"),
    [
        ([], [], [], set(), "there are no samples"),
        ([0, 1], [0, 1], [0, 0], set(), "weight above zero"),
        ([0, 0], [0, 1], [1, 2], {"log_loss"}, "all labels are equal"),
        ([1, 1], [0, 1], [1, 2], {"log_loss", "calibration"}, "all labels are equal"),
        ([0, 1], [math.nan, 1], [1, 1], set(), "not finite"),
        ([0, 1], [math.inf, 1], [1, 1], set(), "not finite"),
        ([0, 1], [0, 1], [1, 1], {"log_loss", "auc", "calibration", "normalized_entropy"},
         "no user has both"),
    ],
)  # fmt: skip
def test_undefined_metrics_are_none_and_say_why(
    labels: list[float], logits: list[float], weights: list[float], defined: set[str], remark: str
) -> None:
    found = click_metrics(labels, logits, weights, list(range(len(labels))))
    assert found.figures().keys() == defined
    assert [remark in line for line in found.remarks(has_users=True)] == [True]


@pytest.mark.parametrize("label", [0, 1])
def test_rounded_weights_make_no_second_class(label: int) -> None:
    for seed in range(40):
        weights = np.random.default_rng(seed).random(1000)
        found = click_metrics(np.full(1000, label), np.zeros(1000), weights)
        assert (found.auc, found.normalized_entropy) == (None, None)
        assert found.log_loss == pytest.approx(math.log(2))


def test_defined_metrics_need_no_remark() -> None:
    assert not list(click_metrics(*make_samples(5)).remarks(has_users=True))
