"""Factors from predicted and measured steps: found where runs show them, else near 1."""

from __future__ import annotations

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
        found.append(Observed(str(number), predicted_s, took))
    return found


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
    disturbed = [Observed(first.name, first.predicted_s, 3 * first.measured_s), *usual[1:]]
    assert fit(disturbed) == pytest.approx(fit(usual), rel=0.1)


def test_a_run_is_predicted_from_the_others() -> None:
    found = steps(5, noise=0.1)
    assert [one.tolist() for one in left_out(found)] == [
        fit([*found[:index], *found[index + 1 :]]).tolist() for index in range(5)
    ]
    tried = [one.error(factors) for one, factors in zip(steps(8), left_out(steps(8)), strict=True)]
    assert max(map(abs, tried)) < 0.05


@given(
    st.lists(
        st.tuples(*[st.floats(0, 10)] * 3, st.floats(0.001, 100)).filter(lambda row: any(row[:3])),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_factors_stay_within_bounds(rows: list[tuple[float, float, float, float]]) -> None:
    factors = fit([Observed("", np.array(row[:3]), row[3]) for row in rows])
    assert ((factors >= LEAST) & (factors <= MOST)).all()
