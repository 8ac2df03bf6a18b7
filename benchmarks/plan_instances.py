"""Small random instances of a plan search: jobs, and clusters of one or two kinds of devices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import PlanEstimate, RankNeed, SearchFacts
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.search import search_facts

ROOM = 1e12


def cluster(
    speeds: list[float], per_host: int, memory: float = ROOM, bandwidth: float = 1e9
) -> Cluster:
    hosts = [
        {
            "name": f"h{index}", "memory_bytes": ROOM,
            "devices": [
                {
                    "kind": "gpu", "model": f"gpu {speed:g}", "count": per_host,
                    "memory_bytes": memory, "memory_bandwidth": speed / 10,
                    "matmul": [{"dtype": "fp32", "flops": speed}],
                }
            ],
            "link": {"kind": "pcie", "latency_s": 1e-5, "bandwidth": 10 * bandwidth},
        }
        for index, speed in enumerate(speeds)
    ]  # fmt: skip
    links = [{"ends": ["*", "*"], "kind": "ethernet", "latency_s": 3e-5, "bandwidth": bandwidth}]
    name = {"name": "c", "hosts": hosts}
    return resolve_cluster({**name, "links": links} if len(speeds) > 1 else name, "here")


def job(
    preset: str = "tiny-dense", layers: int = 2, micro_batches: int = 2, batch: int = 8,
    sequence: int = 32, train: dict[str, Any] | None = None, **layout: Any,
) -> Job:  # fmt: skip
    model = {**PRESETS[preset], "layers": layers}
    sizes = {"steps": 1, "batch": batch, "micro_batches": micro_batches, **(train or {})}
    data = {"path": "x", "sequence": sequence}
    return parse(Job, {"model": model, "layout": layout, "data": data, "train": sizes}, "job")


def instance(seed: int) -> SearchFacts:
    """Return two or four ranks, often with binding memory, where some keys are pinned."""
    draw = random.Random(seed)
    num_hosts = draw.choice([1, 2])
    per_host = 2 if num_hosts == 1 else draw.choice([1, 1, 2])
    speeds = [draw.choice([1e12, 2e12, 4e12]) for _ in range(num_hosts)]
    memory = draw.choice([ROOM, 1e7, 1.4e7, 2e7])
    where = cluster(speeds, per_host, memory, draw.choice([1e8, 1e9, 1e10]))
    layout: dict[str, Any] = {"chunks": 1, "overlap_local": False}
    is_large = num_hosts * per_host == 4
    if is_large or draw.random() < 0.7:
        layout["schedule"] = draw.choice(["1f1b", "gpipe", "zero-bubble"])
    if is_large:
        layout["dp_shard"] = "all"
    if is_large or draw.random() < 0.8:
        layout["embedding"] = draw.choice(["whole", "columns"])
        layout["dispatch"] = "all_to_all"
    recompute = {"recompute": draw.random() < 0.5} if is_large or draw.random() < 0.7 else {}
    preset = "tiny-dense" if is_large else draw.choice(["tiny-dense", "tiny-qwen3"])
    own = job(
        preset, draw.choice([2, 3]), draw.choice([1, 2, 4]), train=recompute,
        sequence=draw.choice([32, 128]), **layout,
    )  # fmt: skip
    return search_facts(own, where)


class CachedEstimates:
    """Estimates that compute each plan once, for comparisons of methods."""

    def __init__(self, inner: Estimates) -> None:
        self._inner, self._found = inner, dict[object, Any]()

    def _of(self, name: str, job: Job, plan: Plan, *more: Any) -> Any:
        key = name, job.train.micro_batches, plan.model_dump_json(), str(more)
        if key not in self._found:
            self._found[key] = getattr(self._inner, name)(job, plan, *more)
        return self._found[key]

    def memory(self, job: Job, plan: Plan) -> RankNeed:
        found: RankNeed = self._of("memory", job, plan)
        return found

    def fits(self, job: Job, plan: Plan, stages: Sequence[int] | None = None) -> bool:
        found: bool = self._of("fits", job, plan, stages)
        return found

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        found: PlanEstimate = self._of("step", job, plan)
        return found

    def on_cluster(self, cluster: Cluster) -> Estimates:
        return self._inner.on_cluster(cluster)

    def note_progress(self) -> None:
        self._inner.note_progress()
