"""Observed steps: their prediction by factors equals the simulation of a calibrated cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesaic.base.config import parse
from moesaic.facts.cluster import Calibration
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.job import fill_preset
from moesaic.facts.plan import plan_from_layout
from moesaic.policy.cost.calibrate import KINDS, UNCALIBRATED, observe_step
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_step
from moesaic.policy.plan.estimates import SimulatedEstimates
from moesaic.testing.jobs import TINY, tiny_job

CLUSTER: dict[str, Any] = {
    "name": "any",
    "hosts": [
        {
            "name": "here", "memory_bytes": 24e9,
            "link": {"kind": "loopback", "latency_s": 2e-5, "bandwidth": 2e9, "skew_s": 0.02},
            "devices": [
                {
                    "kind": "gpu", "model": model, "count": 2, "memory_bytes": 8e9,
                    "memory_bandwidth": 2e10, "launch_s": 1e-5,
                    "matmul": [{"dtype": "fp64", "flops": flops}],
                }
                for model, flops in (("quick", 2e11), ("slow", 1e11))
            ],
        }
    ]
}  # fmt: skip


@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 2, "dp_shard": 2}, {"pp": 2, "ep": 2}])
@pytest.mark.parametrize("skew_s", [0.0, 0.02])
def test_prediction_by_factors_matches_a_calibrated_cluster(
    layout: dict[str, int], skew_s: float
) -> None:
    tables = {"layout": layout, "train": {"micro_batches": 2, "batch": 8}}
    job, cluster = tiny_job(**tables), resolve_cluster(CLUSTER, "test")
    links = [link.model_copy(update={"skew_s": skew_s}) for link in cluster.links]
    cluster = cluster.model_copy(update={"links": links})
    plan = plan_from_layout(job.layout, job.model, 4)
    step = observe_step("", 1.0, job, plan, cluster)
    for factors in (UNCALIBRATED, np.array([0.5, 2.0, 1.3]), np.array([4.0, 0.25, 1.0])):
        by = dict(zip(KINDS, factors.tolist(), strict=True))
        calibration = Calibration(runs=1, devices=["quick", "slow"], **by)
        calibrated = cluster.model_copy(update={"calibration": calibration})
        expected = simulate_step(JobCosts.from_job(job, plan, calibrated).step(), 4).step_s
        assert step.predict_s(factors) == pytest.approx(expected, rel=1e-9)


def test_a_job_with_students_is_predicted_with_all_of_its_parts() -> None:
    alone = tiny_job(layout={"ep": 4})
    raw = {**TINY, "layout": {"ep": 4}, "student": [{"name": "small", "model": TINY["model"]}]}
    beside = parse(Job, fill_preset(raw), "job")
    plan = plan_from_layout(alone.layout, alone.model, 4)
    cluster = resolve_cluster(CLUSTER, "test")
    seconds = [
        observe_step("", 1.0, job, plan, cluster).predict_s(UNCALIBRATED) for job in (alone, beside)
    ]
    expected = [SimulatedEstimates(cluster).step(job, plan).step_s for job in (alone, beside)]
    assert seconds == pytest.approx(expected, rel=1e-9)
    assert seconds[1] > 1.5 * seconds[0]
