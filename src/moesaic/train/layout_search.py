"""Search for the layout of a run on the machines of its ranks, before the first step.

Rank 0 searches, over a cluster that is given or that all ranks measure first; every rank gets its
plan. The search is a decision of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.probe.probe import probe
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan.search import SEARCH_WORK
from moesaic.policy.plan.found import (
    Search,
    predict_found,
    run_search,
    search_lines,
    shortfall_text,
)
from moesaic.policy.plan.search import search_facts
from moesaic.train.job_file import LoadedJob, apply_plan

_PROBE_S = 4.0
"""Seconds of measuring, without startup."""


def search_layout(
    loaded: LoadedJob[Job], world: World, cluster: Cluster | None, say: Callable[[str], None]
) -> LoadedJob[Job]:
    """Return the job under the fastest plan found; every rank of the world must call this.

    Args:
        loaded: the job.
        world: the ranks.
        cluster: cluster to search on; None: the ranks measure their machines.
        say: function that shows a message.
    """
    if cluster is None:
        say(f"plan: measuring this machine for about {_PROBE_S:.0f} s, then searching for a layout")
        cluster = _measure(loaded.job, world)
    log = list[Search]()

    def choose() -> str:
        assert cluster is not None
        facts = search_facts(
            loaded.job, cluster, world.size, opens_micro_batches=loaded.has_open_micro_batches
        ).model_copy(update={"max_work": SEARCH_WORK})
        result = run_search(facts, log=log)
        if result.shortfall is not None:
            raise ConfigError(
                f"{loaded.origin}: no layout fits: {shortfall_text(result.shortfall)}"
            )
        planned = predict_found(facts, result)
        for line in search_lines(facts, result, planned):
            say(line)
        return planned.plan.to_json()

    plan = json.loads(world.run_on_rank_zero(choose))
    return replace(apply_plan(loaded, plan), decisions=tuple(log))


def _measure(job: Job, world: World) -> Cluster | None:
    """Return the cluster of these ranks on rank 0, None elsewhere."""
    dtypes = list(dict.fromkeys((job.train.precision, "fp32")))
    settings = {"seconds": _PROBE_S, "disks": [], "device": job.train.device, "dtypes": dtypes}
    result = probe(world, parse(ProbeConfig, settings, "probe"), lambda _phase: None)
    return None if result is None else result.cluster
