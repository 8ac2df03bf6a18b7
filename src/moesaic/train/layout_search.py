"""Search for the layout of a run on the machines of its ranks, before the first step.

Rank 0 searches, over a cluster that is given or that all ranks measure first; every rank gets its
plan. The search is a decision of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.probe.compute import Axes
from moesaic.dist.probe.probe import probe
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job, LayoutConfig
from moesaic.facts.plan import Plan, RankPlace, placement_mismatch
from moesaic.facts.plan.layout import plan_from_layout
from moesaic.facts.plan.search import SEARCH_WORK, SearchFacts
from moesaic.facts.workload import GROUPED_MM, workload
from moesaic.policy.plan.found import (
    Search,
    left_out_text,
    predict_found,
    run_search,
    search_lines,
    shortfall_text,
)
from moesaic.policy.plan.mapping import assign_places
from moesaic.policy.plan.search import search_facts
from moesaic.train.job_file import LoadedJob, apply_plan
from moesaic.train.topology import gather_places

_PROBE_S = 4.0
"""Seconds of measuring, without startup."""
_MAX_SIZES = 4
"""Sizes along an axis, besides the smallest."""


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
    log, places = list[Search](), gather_places(world)

    def choose() -> str:
        assert cluster is not None
        facts = search_facts(
            loaded.job, cluster, world.size, opens_micro_batches=loaded.has_open_micro_batches
        ).model_copy(update={"max_work": SEARCH_WORK})
        _check_hosts(facts, places, loaded.origin)
        result = run_search(facts, log=log)
        if result.shortfall is not None:
            raise ConfigError(
                f"{loaded.origin}: the job does not fit: {shortfall_text(result, result.shortfall)}"
            )
        planned = predict_found(facts, result)
        for line in search_lines(facts, result, planned):
            say(line)
        return planned.plan.to_json()

    plan = json.loads(world.run_on_rank_zero(choose))
    return replace(apply_plan(loaded, plan), decisions=tuple(log))


def _check_hosts(facts: SearchFacts, places: Sequence[RankPlace], origin: str) -> None:
    """Raise ConfigError unless the ranks are at `places` like those that the search plans for."""
    planned = assign_places(Plan.data_parallel(facts.ranks), facts.cluster)
    mismatch = placement_mismatch(planned, places)
    if mismatch is not None:
        why = f" ({left_out_text(facts)})" if facts.left_out else ""
        raise ConfigError(
            f"{origin}: {mismatch} in cluster '{facts.cluster.name}'{why}: give a cluster with "
            "the hosts of the ranks alone, in their order"
        )


def _measure(job: Job, world: World) -> Cluster | None:
    """Return the cluster of these ranks on rank 0, None elsewhere."""
    dtypes = list(dict.fromkeys((job.train.precision, "fp32")))
    settings = {"seconds": _PROBE_S, "disks": [], "device": job.train.device, "dtypes": dtypes}
    config, sizes = parse(ProbeConfig, settings, "probe"), job_sizes(job, world.size)
    result = probe(world, config, lambda _phase: None, sizes)
    return None if result is None else result.cluster


def job_sizes(job: Job, ranks: int) -> Axes:
    """Return the sizes of the job's matmuls that have most flops under data parallelism.

    Other layouts have the same ones, or parts of them; an expert gets at most `ranks` times the
    rows.
    """
    plan = plan_from_layout(LayoutConfig(), job.model, ranks)
    blocks = workload(job, plan, ranks - 1)  # The last rank has a sample if any rank has.
    works = [work for one in blocks for work in (one.forward, one.backward)]
    plain, grouped, scores = (Counter[tuple[int, int, int]]() for _ in range(3))
    for op in (op for work in works for op in work.ops):
        is_attention = op.kind.startswith("attention")
        flops = scores if is_attention else grouped if op.kind == GROUPED_MM else plain
        for shape in op.matmuls[:1] if is_attention else op.matmuls:
            if not shape.is_weight_gradient:  # Its sizes are those of its layer.
                flops[shape.rows, shape.columns, shape.inner] += shape.flops
    expert_rows = max((shape[0] for shape in grouped), default=1)  # Dense models have none.
    (length, _, head_dim), _ = scores.most_common(1)[0]
    return Axes(
        _most_frequent(plain, [0]), _most_frequent(plain + grouped, [1, 2]),
        sorted({max(expert_rows // 4, 1), expert_rows, expert_rows * ranks}),
        sorted({max(length // 4, 1), length}), head_dim,
    )  # fmt: skip


def _most_frequent(flops: Counter[tuple[int, int, int]], axes: list[int]) -> list[int]:
    """Return the sizes along `axes` with most flops, and the smallest one, ascending."""
    sizes = Counter[int]()
    for shape, weight in flops.items():
        for size in {shape[axis] for axis in axes}:
            sizes[size] += weight
    return sorted({size for size, _ in sizes.most_common(_MAX_SIZES)} | {min(sizes)})
