"""Theme `facts`: cases that can be laid out and predicted, and what their errors are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks import facts

from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.plan import plan_from_layout
from moesaic.policy.cost.calibrate import UNCALIBRATED, Observation, observe_step

CLUSTER = {
    "name": "any",
    "hosts": [
        {
            "name": "here", "memory_bytes": 24e9,
            "link": {"kind": "loopback", "latency_s": 2e-5, "bandwidth": 2e9, "skew_s": 0.02},
            "devices": [
                {
                    "kind": "cpu", "model": "any", "count": count, "memory_bytes": 24e9 / count,
                    "memory_bandwidth": 2e10 / count,
                    "matmul": [{"dtype": "fp32", "flops": 2e11 / count}],
                }
                for count in (1, 2)
            ],
        }
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def observed() -> list[Observation]:
    """Every case as it would go on a machine whose products are slow and passes quick."""
    cluster, found = resolve_cluster(CLUSTER, "test"), []
    for case in facts.cases()[::3]:
        plan = plan_from_layout(case.job.layout, case.job.model, case.ranks)
        one = observe_step(case.name, 1.0, case.job, plan, cluster)
        found.append(replace(one, measured_s=one.predict_s(np.array([1.3, 0.8, 1.0]))))
    return found


def test_there_are_as_many_cases_as_were_asked_for() -> None:
    cases = facts.cases()
    assert len({case.name for case in cases}) == len(cases) >= 12
    assert {case.ranks for case in cases} == {1, 2}


def test_errors_of_steps(observed: list[Observation]) -> None:
    median, worst, calibrated, calibrated_worst = facts.step_errors(observed, 7)
    errors = [abs(one.predict_s(UNCALIBRATED) / one.measured_s - 1.0) for one in observed]
    assert median.value == pytest.approx(np.median(errors))
    assert (median.bar, worst.bar) == ("<= 0.06", "<= 0.18")
    assert worst.value == pytest.approx(max(errors))
    assert worst.value > 0.1
    assert calibrated.value < 0.02 < median.value
    assert calibrated.value <= calibrated_worst.value < worst.value
    assert (calibrated.bar, calibrated_worst.bar) == ("", "")


def test_errors_of_single_operations() -> None:
    rounds = [
        facts.over_measured([1.0, 2.0], [1.0, 2.0], [1.0, 6.0]),
        facts.over_measured([1.2, 6.0], [0.9, 4.0], [1.1, 4.0]),
    ]
    assert rounds == [pytest.approx([1.0, 0.5]), pytest.approx([1.2, 1.5])]
    single = facts.error_row("a matmul", "<= 0.05", "torch", rounds)
    assert (single.value, single.holds, single.repeats) == (pytest.approx(0.35), False, 2)
    # Operations of a round are off together: drawn round by round, it may be either alone.
    assert single.interval == pytest.approx((0.25, 0.35))
