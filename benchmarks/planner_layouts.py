"""Layouts of a job on two ranks: found by the search, timed in turn on the same ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import measure
from benchmarks.facts import probe, reference_s
from benchmarks.on_ranks import alone, in_turn
from benchmarks.training import UniformSamples
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster, load_cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, job_under_plan
from moesaic.facts.plan.search import FoundPlan, SearchMethod, Settings
from moesaic.kernels import device as devices
from moesaic.models.init import InitialSource
from moesaic.policy.plan.found import run_search
from moesaic.policy.plan.search import search_facts
from moesaic.testing.ranks import RankPool
from moesaic.train.assemble import LMRun, assemble

RANKS = 2
MANY = 100
"""Runners-up to report: all of a small space."""
PATIENCE_S = 10.0
"""Seconds for which disturbed rounds are repeated, before the probe and after it."""
QUIET_S = 30.0
LIMIT_S = 900.0
"""Seconds of one job on the ranks, at most."""
DRAWS = 2000
Seconds = NDArray[np.float64]


class Layout(NamedTuple):
    """A plan of a job, and the job under it."""

    name: str
    job: Job
    plan: Plan


class Timed(NamedTuple):
    """Layouts that were timed in turn, and the machine amid them."""

    seconds: Seconds
    """Seconds of a step, [layouts][rounds]."""
    cluster: Cluster
    """Machine, probed between the halves of the rounds."""
    unsteady: float
    """Slowest over quickest time of the same work, before, amid and after the rounds."""
    disturbed: int
    """Rounds that other programs disturbed."""


def find(job: Job, cluster: Cluster, method: SearchMethod = "best-first") -> list[FoundPlan]:
    """Return the plans that a search tries and that fit, the fastest by prediction first."""
    facts = search_facts(job, cluster, RANKS)
    result = run_search(facts.model_copy(update={"method": method, "num_runners_up": MANY}))
    assert result.best is not None
    return [result.best, *result.runners_up]


def layouts(job: Job, cluster: Cluster) -> list[Layout]:
    """Return every layout that the search may choose."""
    found = find(job, cluster, "exhaustive")
    return [layout_of(job, one.plan, title(one.settings)) for one in found]


def layout_of(job: Job, plan: Plan, name: str) -> Layout:
    """Return the layout of a plan."""
    return Layout(name, job_under_plan(job, plan), plan)


def title(settings: Settings) -> str:
    """Return what tells a layout from the others of a space, such as "ep 2, dedup"."""
    axes = ("pp", "tp", "etp", "ep", "dp_shard")
    words = [f"{key} {settings[f'layout.{key}']}" for key in axes if settings[f"layout.{key}"] > 1]
    if settings["layout.ep"] > 1:
        words.append(settings["layout.dispatch"])
    if settings["layout.pp"] > 1:
        words.append(f"{settings['stages']} stages")
    return ", ".join(words) or "replicas"


def index_of(plan: Plan, among: Sequence[Layout]) -> int:
    """Return the index of the layout with this plan."""
    return [_decisions(one.plan) for one in among].index(_decisions(plan))


def _decisions(plan: Plan) -> str:
    return plan.model_dump_json(exclude={"places", "predictions"})


def timed(pool: RankPool, among: Sequence[Layout], rounds: int) -> Timed:
    """Time steps of layouts in turn, with a probe amid them."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "cluster.toml"
        measure.wait_for_quiet(limit_s=QUIET_S)
        given = among, rounds, path, os.getpid(), PATIENCE_S
        halves, references = pool.run(RANKS, take_turns, *given, timeout_s=LIMIT_S)[0]
        cluster = load_cluster(path)
    seconds = [
        [second for half in halves for second in half.seconds[name]] for name in halves[0].seconds
    ]
    unsteady = max(references) / min(references)
    return Timed(np.array(seconds), cluster, unsteady, sum(half.disturbed for half in halves))


def take_turns(
    world: World,
    among: Sequence[Layout],
    rounds: int,
    path: Path | None,
    root: int,
    patience_s: float,
) -> tuple[list[measure.Times | None], list[float]]:
    """On each rank: time all layouts in turn, half of the rounds before a probe by rank 0.

    Return times and, before, amid and after them, seconds of work that is always the same. Without
    `path` there is no probe.
    """
    torch.set_num_threads(devices.num_cores() // world.size)
    samples = UniformSamples(among[0].job)
    runs, calls = list[LMRun](), dict[str, Callable[[], object]]()
    for one in among:
        source = InitialSource(one.job.seed, one.job.model.init_std)
        run = assemble(one.job, one.plan, world, source)
        runs.append(run)
        calls[one.name] = lambda run=run: run.step(samples)
    halves, references = list[measure.Times | None](), list[float]()

    def look(probes: bool) -> None:
        if probes and path is not None:
            probe(path)
        references.append(reference_s())

    alone(world, "begin", partial(look, False))
    for half, own in enumerate(((rounds + 1) // 2, rounds // 2)):
        if half:
            alone(world, "probe", partial(look, True))
        halves.append(in_turn(world, calls, own, root, warmup=2 - half, patience_s=patience_s))
    alone(world, "end", partial(look, False))
    for run in runs:
        run.close()
    return halves, references


def split(seconds: Seconds) -> tuple[Seconds, Seconds]:
    """Return every other round to choose by, and the others to judge by."""
    judged = seconds[:, 1::2]
    return seconds[:, ::2], judged if judged.size else seconds


def best_of(seconds: Seconds) -> int:
    """Return the layout with the least median."""
    return int(np.median(seconds, axis=1).argmin())


def over_rounds(
    series: Sequence[Seconds], statistic: Callable[[Seconds], Seconds]
) -> tuple[float, tuple[float, float]]:
    """Return a statistic of medians, and its interval by draws of the rounds of each series.

    `statistic` reduces the first axis of [series][draws].
    """
    draw = np.random.default_rng(0)
    value = float(statistic(np.array([[np.median(one)] for one in series]))[0])
    medians = [
        np.median(one[draw.integers(len(one), size=(DRAWS, len(one)))], axis=1) for one in series
    ]
    low, high = np.percentile(statistic(np.array(medians)), (2.5, 97.5))
    return value, (min(float(low), value), max(float(high), value))
