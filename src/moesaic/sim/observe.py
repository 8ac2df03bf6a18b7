"""A step that was measured, as a cluster's figures predict it by factors that are to be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from moesaic.facts.cluster import Calibration, Cluster, device_models
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.cost.calibrate import BARE, KINDS, Factors, Observed
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.step import Costs
from moesaic.sim.timeline import run


def observe(
    name: str,
    measured_s: float,
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[ArrayLike] | None = None,
) -> Observed:
    """The step of `job` on `cluster`; what that had learnt before does not count."""
    models = device_models(cluster, plan.ranks)
    even = Calibration(runs=1, devices=models, **dict.fromkeys(KINDS, 1.0))

    def events(factors: Factors) -> list[Event]:
        by = dict(zip(KINDS, factors.tolist(), strict=True))
        tried = cluster.model_copy(update={"calibration": even.model_copy(update=by)})
        return Costs.of(job, plan, tried, loads).events()

    bare = events(BARE)
    # Seconds of an event are so much for each kind by its factor: as much again with twice that.
    more = [events(BARE + kind) for kind in np.eye(len(KINDS))]
    parts = [
        np.stack([two.seconds - one.seconds for two in several])
        for one, *several in zip(bare, *more, strict=True)
    ]

    def timed(known: Sequence[Event]) -> Callable[[Factors], float]:
        @cache
        def step_s(*factors: float) -> float:
            by = np.array(factors)
            moved = (
                replace(event, seconds=by @ part) for event, part in zip(known, parts, strict=True)
            )
            return run(moved, plan.ranks).step_s

        return lambda factors: step_s(*factors.tolist())

    punctual = [replace(event, skew_s=0.0) for event in bare]
    return Observed(name, measured_s, timed(bare), timed(punctual))
