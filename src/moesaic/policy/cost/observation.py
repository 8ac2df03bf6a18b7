"""Observation of a measured step: its prediction as a function of calibration factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from moesaic.facts.cluster import Calibration, Cluster, device_models
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.cost.calibrate import KINDS, UNCALIBRATED, Factors, Observation
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_events


def observe_step(
    name: str,
    measured_s: float,
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[ArrayLike] | None = None,
) -> Observation:
    """Return the measured step of `job` with its prediction; an earlier calibration is ignored."""
    models = device_models(cluster, plan.ranks)
    uncalibrated = Calibration(runs=1, devices=models, **dict.fromkeys(KINDS, 1.0))

    def events(factors: Factors) -> list[Event]:
        values = dict(zip(KINDS, factors.tolist(), strict=True))
        calibrated = cluster.model_copy(
            update={"calibration": uncalibrated.model_copy(update=values)}
        )
        return JobCosts.from_job(job, plan, calibrated, loads).events()

    events_before = events(UNCALIBRATED)
    # Seconds of an event are linear in the factors, so a unit change of each one gives its part.
    changed = [events(UNCALIBRATED + kind) for kind in np.eye(len(KINDS))]
    parts = [
        np.stack([two.seconds - one.seconds for two in variants])
        for one, *variants in zip(events_before, *changed, strict=True)
    ]

    def step_function(base: Sequence[Event]) -> Callable[[Factors], float]:
        @cache
        def step_s(*factors: float) -> float:
            values = np.array(factors)
            scaled = (
                replace(event, seconds=values @ part)
                for event, part in zip(base, parts, strict=True)
            )
            return simulate_events(scaled, plan.ranks).step_s

        return lambda factors: step_s(*factors.tolist())

    without_skew = [replace(event, skew_s=0.0) for event in events_before]
    return Observation(name, measured_s, step_function(events_before), step_function(without_skew))
