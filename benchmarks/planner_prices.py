"""Theme `planner`, prices: seconds to predict time and memory of one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import measure
from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan, complete_plan, plan_from_job
from moesaic.policy.plan.estimates import SimulatedEstimates
from moesaic.policy.plan.mapping import assign_places

BAR = "<= 1.0"
NETWORK = 400e9
"""Bytes per second of a host, one way: eight adapters of 400 Gbit/s."""
PIPELINE = {"pp": 16, "ep": 64}
LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b, pp 16, ep 64, 120 micro-batches": (PIPELINE, {"micro_batches": 120}),
    "interleaved, pp 16, ep 64, dp_shard 128, 128 micro-batches": (
        {**PIPELINE, "schedule": "interleaved", "dp_shard": "all"}, {"micro_batches": 128},
    ),
    "zero-bubble, pp 16, ep 64, 128 micro-batches": (
        {**PIPELINE, "schedule": "zero-bubble"}, {"micro_batches": 128, "recompute": False},
    ),
    "1f1b, pp 8, tp 8, ep 32, dp_shard 32, 60 micro-batches": (
        {"pp": 8, "tp": 8, "ep": 32, "dp_shard": "all"}, {"micro_batches": 60},
    ),
    "no pipeline, ep 256, dp_shard 2,048, 8 micro-batches": (
        {"ep": 256, "dp_shard": "all"}, {"micro_batches": 8, "batch": 16384},
    ),
}  # fmt: skip
"""Layout and training of DeepSeek-V3, by name."""


class Case(NamedTuple):
    """A plan to predict."""

    job: Job
    plan: Plan
    cluster: Cluster

    def price(self) -> None:
        """Predict time and memory, without anything known from before."""
        estimates = SimulatedEstimates(self.cluster)
        estimates.step(self.job, self.plan)
        estimates.memory(self.job, self.plan)


def make_case(preset: str, ranks: int, layout: dict[str, Any], train: dict[str, Any]) -> Case:
    """Return the plan of a model on hosts with eight H100 each."""
    raw = {
        "seed": 0, "model": dict(PRESETS[preset]), "data": {"path": "unused", "sequence": 4096},
        "train": {"steps": 1, "batch": 15360, "precision": "bf16", "recompute": True, **train},
        "layout": layout,
    }  # fmt: skip
    job = parse(Job, raw, "benchmark")
    hosts = [{"name": "a", "preset": "h100-8", "replicas": -(-ranks // 8)}]
    links = [{"ends": ["*", "*"], "kind": "infiniband", "latency_s": 5e-6, "bandwidth": NETWORK}]
    cluster = resolve_cluster({"name": "benchmark", "hosts": hosts, "links": links}, "benchmark")
    plan = complete_plan(assign_places(plan_from_job(job, ranks), cluster), job)
    return Case(job, plan, cluster)


def prices(rounds: int) -> Iterator[measure.Row]:
    """Time predictions, the large ones in turn."""
    cases = {
        name: make_case("deepseek-v3", 2048, layout, train)
        for name, (layout, train) in LARGE.items()
    }
    yield from measure.claim(
        f"one price of DeepSeek-V3 on 2,048 ranks, worst of {len(cases)} plans", BAR,
        list(_timed(cases, rounds, "DeepSeek-V3 on 2,048 ranks")),
    )  # fmt: skip
    small = {
        "Qwen3-30B on 16 ranks, ep 8, dp_shard 16, 8 micro-batches": make_case(
            "qwen3-30b-a3b", 16, {"ep": 8, "dp_shard": "all"}, {"micro_batches": 8, "batch": 256}
        ),
        "a tiny model on 2 ranks, ep 2": make_case("tiny-mixtral", 2, {"ep": 2}, {"batch": 8}),
    }
    yield from _timed(small, rounds, "")


def _timed(cases: dict[str, Case], rounds: int, title: str) -> Iterator[measure.Row]:
    times = measure.interleave({name: one.price for name, one in cases.items()}, rounds, warmup=1)
    for name in cases:
        yield measure.row(
            f"one price of {title}: {name}" if title else f"one price of {name}",
            times.median(name), "s", bar="", repeats=rounds,
            against="limit; hosts of preset h100-8, time and tightest rank, nothing cached",
            interval=measure.bootstrap(times.seconds[name]),
        )  # fmt: skip


PARTS: dict[str, Callable[[int], Iterator[measure.Row]]] = {"prices": prices}
