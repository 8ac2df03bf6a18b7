"""Calibration factors: recovered where runs determine them, else near 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.facts.cluster.cluster import MAX_FACTOR, MIN_FACTOR
from moesaic.policy.cost.calibrate import Observation, fit_factors, fit_leave_one_out

TRUE = np.array([0.8, 1.7, 1.3])


def steps(
    count: int, factors: np.ndarray = TRUE, noise: float = 0.0, *, collectives: bool = True
) -> list[Observation]:
    """Return steps of different jobs whose kinds take `factors` times the predicted time."""
    random = np.random.default_rng(3)
    found = []
    for number in range(count):
        predicted_s = random.dirichlet([2.0, 2.0, 1.0]) * random.uniform(0.01, 10.0)
        predicted_s[2] *= collectives
        measured_s = float(predicted_s @ factors) * random.normal(1.0, noise)
        found.append(linear_step(str(number), predicted_s, measured_s))
    return found


def linear_step(name: str, predicted_s: np.ndarray, measured_s: float) -> Observation:
    """Return a step that is linear in the factors."""
    return Observation(name, measured_s, lambda factors: float(predicted_s @ factors))


def test_factors_are_found_for_linear_steps() -> None:
    assert fit_factors(steps(40)) == pytest.approx(TRUE, rel=0.02)
    assert fit_factors(steps(40, noise=0.05)) == pytest.approx(TRUE, rel=0.1)


def test_undetermined_factors_stay_at_one() -> None:
    assert fit_factors([]).tolist() == [1.0, 1.0, 1.0]
    assert fit_factors(steps(10, collectives=False))[2] == 1.0
    exact = steps(10, np.ones(3))
    assert fit_factors(exact) == pytest.approx(1.0)


def test_one_run_determines_most_of_its_error() -> None:
    (one,) = steps(1, np.full(3, 1.5))
    assert abs(one.relative_error(fit_factors([one]))) < 0.02
    assert one.relative_error(np.ones(3)) == pytest.approx(1 / 1.5 - 1)


def test_an_outlier_has_little_weight() -> None:
    usual = steps(12)
    first = usual[0]
    disturbed = [replace(first, measured_s=3 * first.measured_s), *usual[1:]]
    assert fit_factors(disturbed) == pytest.approx(fit_factors(usual), rel=0.1)


def test_leave_one_out_matches_a_separate_fit() -> None:
    """This holds for nonlinear steps too, and for any time of the one that is left out."""
    plain = steps(5, noise=0.1)
    for found in (plain, [nonlinear_step(number) for number in range(3)]):
        odd = [*found[:-1], replace(found[-1], measured_s=3 * found[-1].measured_s)]
        for index, factors in enumerate(fit_leave_one_out(odd)):
            alone = fit_factors([*odd[:index], *odd[index + 1 :]])
            assert factors == pytest.approx(alone, rel=0.02)
    tried = [
        one.relative_error(factors)
        for one, factors in zip(steps(8), fit_leave_one_out(steps(8)), strict=True)
    ]
    assert max(map(abs, tried)) < 0.05


def nonlinear_step(number: int, measured_by: np.ndarray = TRUE) -> Observation:
    """Return a nonlinear step: waiting, a root of the computing, counts.

    Its two ranks may change places as the later one when factors change.
    """
    random = np.random.default_rng(number)
    each = random.dirichlet([2.0, 2.0, 1.0], size=2) * random.uniform(0.5, 1.5, size=(2, 1))

    def step_s(factors: np.ndarray) -> float:
        computing = each[:, :2] @ factors[:2]
        return float((computing + 0.4 * np.sqrt(computing) + each[:, 2] * factors[2]).max())

    return Observation(str(number), step_s(measured_by), step_s)


def test_factors_are_found_for_nonlinear_steps() -> None:
    found = [nonlinear_step(number) for number in range(30)]
    assert fit_factors(found) == pytest.approx(TRUE, rel=0.02)
    near = [
        one.relative_error(factors)
        for one, factors in zip(found, fit_leave_one_out(found), strict=True)
    ]
    assert max(map(abs, near)) < 0.02


@pytest.mark.parametrize("measured_s", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "step_s",
    [
        lambda factors: max(1.2 * factors[0], factors[2]),
        lambda factors: max(factors[0] + 0.1 * factors[1], 0.1 * factors[0] + factors[1]),
        lambda factors: max(1.2 * factors[0], factors[2]) + 0.3 * np.sqrt(factors[1]),
    ],
)
def test_a_step_with_changing_bottleneck_is_fitted(
    step_s: Callable[[np.ndarray], float], measured_s: float
) -> None:
    """The bottleneck changes with every move, which must not oscillate."""
    one = Observation("", measured_s, step_s)
    assert one.relative_error(np.ones(3)) > 0.2
    assert abs(one.relative_error(fit_factors([one]))) < 0.1


@given(
    st.lists(
        st.tuples(*[st.floats(0, 10)] * 3, st.floats(0.001, 100)).filter(lambda row: any(row[:3])),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_factors_stay_within_bounds(rows: list[tuple[float, float, float, float]]) -> None:
    factors = fit_factors([linear_step("", np.array(row[:3]), row[3]) for row in rows])
    assert ((factors >= MIN_FACTOR) & (factors <= MAX_FACTOR)).all()
