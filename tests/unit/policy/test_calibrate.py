"""Factors from predicted and measured steps: found where runs show them, else near 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.facts.cluster.calibration import LEAST, MOST
from moesaic.policy.cost.calibrate import Observed, fit, left_out

TRUE = np.array([0.8, 1.7, 1.3])


def steps(
    count: int, factors: np.ndarray = TRUE, noise: float = 0.0, *, messages: bool = True
) -> list[Observed]:
    """Steps of unlike jobs on a machine whose times are the predicted ones by `factors`."""
    random = np.random.default_rng(3)
    found = []
    for number in range(count):
        predicted_s = random.dirichlet([2.0, 2.0, 1.0]) * random.uniform(0.01, 10.0)
        predicted_s[2] *= messages
        took = float(predicted_s @ factors) * random.normal(1.0, noise)
        found.append(observed(str(number), predicted_s, took))
    return found


def observed(name: str, predicted_s: np.ndarray, measured_s: float) -> Observed:
    """A step that is the sum of what its kinds bring to it."""
    return stepping(name, lambda factors: float(predicted_s @ factors), measured_s)


def stepping(name: str, step_s: Callable[[np.ndarray], float], measured_s: float) -> Observed:
    """A step in which nobody is late."""
    return Observed(name, measured_s, step_s, step_s)


def test_factors_are_found() -> None:
    assert fit(steps(40)) == pytest.approx(TRUE, rel=0.02)
    assert fit(steps(40, noise=0.05)) == pytest.approx(TRUE, rel=0.1)


def test_what_runs_say_nothing_of_stays_as_it_is() -> None:
    assert fit([]).tolist() == [1.0, 1.0, 1.0]
    assert fit(steps(10, messages=False))[2] == 1.0
    exact = steps(10, np.ones(3))
    assert fit(exact) == pytest.approx(1.0)


def test_one_run_is_believed_for_the_most_part() -> None:
    (one,) = steps(1, np.full(3, 1.5))
    assert abs(one.error(fit([one]))) < 0.02
    assert one.error(np.ones(3)) == pytest.approx(1 / 1.5 - 1)


def test_a_run_that_was_disturbed_moves_little() -> None:
    usual = steps(12)
    first = usual[0]
    disturbed = [replace(first, measured_s=3 * first.measured_s), *usual[1:]]
    assert fit(disturbed) == pytest.approx(fit(usual), rel=0.1)


def test_a_run_is_predicted_from_the_others() -> None:
    """Of steps that are no sums, too, and whatever the one that is left out took."""
    plain = steps(5, noise=0.1)
    for found in (plain, [waiting(number) for number in range(3)]):
        odd = [*found[:-1], replace(found[-1], measured_s=3 * found[-1].measured_s)]
        for index, factors in enumerate(left_out(odd)):
            alone = fit([*odd[:index], *odd[index + 1 :]])
            assert factors == pytest.approx(alone, rel=0.02)
    tried = [one.error(factors) for one, factors in zip(steps(8), left_out(steps(8)), strict=True)]
    assert max(map(abs, tried)) < 0.05


def waiting(number: int, measured_by: np.ndarray = TRUE) -> Observed:
    """A step in which ranks meet so often that waiting, a root of what they compute, counts; of two
    ranks, of which the one that is later with these factors need not be that with others."""
    random = np.random.default_rng(number)
    each = random.dirichlet([2.0, 2.0, 1.0], size=2) * random.uniform(0.5, 1.5, size=(2, 1))

    def step_s(factors: np.ndarray) -> float:
        computing = each[:, :2] @ factors[:2]
        return float((computing + 0.4 * np.sqrt(computing) + each[:, 2] * factors[2]).max())

    return stepping(str(number), step_s, step_s(measured_by))


def test_factors_are_found_where_a_step_is_no_sum() -> None:
    found = [waiting(number) for number in range(30)]
    assert fit(found) == pytest.approx(TRUE, rel=0.02)
    near = [one.error(factors) for one, factors in zip(found, left_out(found), strict=True)]
    assert max(map(abs, near)) < 0.02


@pytest.mark.parametrize("by", [0.5, 0.8, 1.6])
def test_one_step_that_is_no_sum_comes_out_as_it_was(by: float) -> None:
    one = waiting(3, np.full(3, by))
    assert abs(one.error(np.ones(3))) > 0.2
    assert abs(one.error(fit([one]))) < 0.04


@pytest.mark.parametrize("measured_s", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "step_s",
    [
        lambda factors: max(1.2 * factors[0], factors[2]),
        lambda factors: max(factors[0] + 0.1 * factors[1], 0.1 * factors[0] + factors[1]),
        lambda factors: max(1.2 * factors[0], factors[2]) + 0.3 * np.sqrt(factors[1]),
    ],
)
def test_where_one_of_two_decides_most_of_an_error_goes(
    step_s: Callable[[np.ndarray], float], measured_s: float
) -> None:
    """Who decides changes with every move, which must not go to and fro."""
    one = stepping("", step_s, measured_s)
    assert one.error(np.ones(3)) > 0.2
    assert abs(one.error(fit([one]))) < 0.1


def test_shares_are_of_what_is_on_time() -> None:
    late = Observed("", 1.0, lambda by: 2 * by[0] + by[1] + np.sqrt(by[0]),
                    lambda by: 2 * by[0] + by[1])  # fmt: skip
    assert late.shares() == pytest.approx([0.5, 0.25, 0.0])


@given(
    st.lists(
        st.tuples(*[st.floats(0, 10)] * 3, st.floats(0.001, 100)).filter(lambda row: any(row[:3])),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_factors_stay_within_bounds(rows: list[tuple[float, float, float, float]]) -> None:
    factors = fit([observed("", np.array(row[:3]), row[3]) for row in rows])
    assert ((factors >= LEAST) & (factors <= MOST)).all()
