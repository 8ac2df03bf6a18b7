"""Parts `clusters` and `instances` of the theme `planner`: large clusters, and small instances.

Large clusters: seconds of a price and of a search, and predicted steps beside published layouts.
Small instances: 300 random jobs on two or four ranks, whose every plan is tried.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.plan_instances import CachedEstimates, instance
from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan.search import SEARCH_WORK, SearchFacts, SearchMethod, SearchResult
from moesaic.policy.plan.estimates import SimulatedEstimates
from moesaic.policy.plan.found import run_search
from moesaic.policy.plan.predict import choose_plan, predict_plan
from moesaic.policy.plan.search import search_facts, search_plans

REPEATS = 3
NETWORK = 400e9
"""Bytes per second of a host, one way: eight adapters of 400 Gbit/s."""
LATENCY_S = 5e-6
ALL_ROUNDS, INSTANCES = 15, 300
TIMES = 10
"""Work of another method, at most, as a multiple of that of best-first search."""
OTHERS: tuple[SearchMethod, ...] = ("hill-climbing", "mcmc", "milp")
SAME = 1e-9
"""Relative difference of equal steps."""


@dataclass(frozen=True)
class Published:
    """A model on H100 with a published layout."""

    preset: str
    hosts: int
    batch: int
    micro_batches: int
    layout: dict[str, Any]
    """Published keys of the layout."""
    source: str

    @property
    def name(self) -> str:
        """Model and devices."""
        return f"{self.preset} on {8 * self.hosts:,} H100"

    def job(self, **layout: Any) -> Job:
        """Return the job with these keys of the layout; a search chooses the others."""
        raw = {
            "model": PRESETS[self.preset], "data": {"path": "unused", "sequence": 4096},
            "train": {
                "steps": 1, "batch": self.batch, "micro_batches": self.micro_batches,
                "precision": "bf16",
            },
            "layout": layout,
        }  # fmt: skip
        return parse(Job, raw, "benchmark")

    def cluster(self) -> Cluster:
        """Return hosts with eight H100 by their data sheet."""
        hosts = [{"name": "a", "preset": "h100-8", "replicas": self.hosts}]
        net = {
            "ends": ["*", "*"], "kind": "infiniband", "latency_s": LATENCY_S, "bandwidth": NETWORK,
        }  # fmt: skip
        return resolve_cluster({"name": self.name, "hosts": hosts, "links": [net]}, "benchmark")

    def search(self, **layout: Any) -> SearchResult:
        """Return what `moesaic plan --search` finds."""
        facts = search_facts(self.job(**layout), self.cluster())
        return run_search(facts.model_copy(update={"max_work": SEARCH_WORK}))


QWEN = Published(
    "qwen3-30b-a3b", 2, 1024, 64, {"tp": 1, "pp": 1, "ep": 16},
    "NVIDIA Megatron Bridge, recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
)  # fmt: skip
DEEPSEEK = Published(
    "deepseek-v3", 256, 15360, 120, {"tp": 1, "pp": 16, "ep": 64},
    "DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2; its cluster has H800",
)  # fmt: skip
PRICED = {
    **DEEPSEEK.layout, "dp_shard": 1, "schedule": "1f1b", "dispatch": "dedup",
    "dispatch_hosts": 8, "chunks": 1, "overlap_local": False, "embedding": "whole",
}  # fmt: skip
"""Layout of the plan that is priced, complete."""
SECONDS = {"price": 1.0, "large": 60.0, "small": 1.0}
"""Bars of CPU seconds."""


def clusters(rounds: int) -> Iterator[measure.Row]:
    """Measure CPU seconds of prices and searches; compare predictions with published layouts."""
    repeats = min(rounds, REPEATS)
    job, cluster = DEEPSEEK.job(**PRICED), DEEPSEEK.cluster()
    chosen = choose_plan(job, cluster)
    prices, _ = cpu_seconds(lambda: predict_plan(*chosen), repeats)
    small, found = cpu_seconds(QWEN.search, repeats)
    large, huge = cpu_seconds(DEEPSEEK.search, 1)
    details = [
        seconds_row(f"CPU seconds to price a plan, {DEEPSEEK.name}", prices, SECONDS["price"]),
        seconds_row(f"CPU seconds of a search, {DEEPSEEK.name}", large, SECONDS["large"], huge),
        seconds_row(f"CPU seconds of a search, {QWEN.name}", small, SECONDS["small"], found),
    ]
    shares = [
        (row.value or 0.0) / limit for row, limit in zip(details, SECONDS.values(), strict=True)
    ]
    at = int(np.argmax(shares))
    limit, worst = list(SECONDS.values())[at], details[at]
    low, high = worst.interval or (0.0, 0.0)
    yield replace(
        worst, name="CPU seconds of prices and searches over their limits, worst of 3",
        value=shares[at], unit="ratio", bar="<= 1", holds=measure.holds("<= 1", shares[at]),
        interval=(low / limit, high / limit) if worst.interval else None,
        against=f"{worst.name}; {worst.against}",
    )  # fmt: skip
    yield from details
    yield from simulated_rows(QWEN, found)
    yield from simulated_rows(DEEPSEEK, huge)


def cpu_seconds(work: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Return CPU seconds of calls, and the last result."""
    spent, found = list[float](), None
    for _ in range(repeats):
        began = time.process_time()
        found = work()
        spent.append(time.process_time() - began)
    return spent, found


def seconds_row(
    name: str, spent: Sequence[float], limit: float, found: SearchResult | None = None
) -> measure.Row:
    """Return the median of CPU seconds, and in words what a search did."""
    words = ""
    if found is not None:
        gap = "unknown" if found.gap is None else f"at most {found.gap:.1%}"
        proven = "proven" if found.is_proven else f"not proven, gap {gap}"
        words = f"; {found.tried} layouts simulated, {found.too_large} too large; {proven}"
    return measure.row(
        name, float(np.median(spent)), "s", bar="", against=f"a limit of {limit:g} s{words}",
        interval=measure.bootstrap(spent) if len(spent) > 1 else None, repeats=len(spent),
    )  # fmt: skip


def simulated_rows(published: Published, found: SearchResult) -> Iterator[measure.Row]:
    """Yield predicted steps of the plan found and of a published layout, and the gap."""
    pinned = published.search(**published.layout)
    assert found.best is not None
    own_s = found.best.estimate.step_s
    yield _simulated(f"predicted step, {published.name}: the plan found", own_s, "s", brief(found))
    words = ", ".join(f"{key} {value}" for key, value in published.layout.items())
    name = f"predicted step, {published.name}: published layout"
    if pinned.best is None:
        yield _simulated(name, None, "s", f"{words} does not fit here; {published.source}")
        return
    other_s = pinned.best.estimate.step_s
    yield _simulated(
        name, other_s, "s", f"{words}, the rest by search: {brief(pinned)}; {published.source}"
    )
    yield _simulated(
        f"predicted speed of the plan found over the published layout, {published.name}",
        other_s / own_s, "ratio", published.source,
    )  # fmt: skip


def brief(found: SearchResult) -> str:
    """Return the settings of a plan that differ from one rank's, and its memory."""
    assert found.best is not None
    settings, words = found.best.settings, list[str]()
    for key, value in settings.items():
        is_quiet = value in (1, False, "even", "whole") or key == "train.micro_batches"
        if not is_quiet and not (key == "layout.schedule" and settings["layout.pp"] == 1):
            name = key.rpartition(".")[2]
            words.append(name if value is True else f"{name} {value}")
    return f"{', '.join(words)}; {found.best.memory.used_fraction:.0%} of a device's memory"


def _simulated(name: str, value: float | None, unit: str, against: str) -> measure.Row:
    return measure.row(
        name, value, unit, bar="", against=against, repeats=int(value is not None), simulated=True
    )


def instances(rounds: int) -> Iterator[measure.Row]:
    """Count small instances on which the search equals exhaustive search and no method is better;
    fewer rounds take fewer instances."""
    number = INSTANCES * min(rounds, ALL_ROUNDS) // ALL_ROUNDS
    yield from instance_rows([instance(seed) for seed in range(number)])


def instance_rows(each: Sequence[SearchFacts]) -> Iterator[measure.Row]:
    """Yield the count of instances, and for each other method how often it finds the best plan."""
    equal, better, reached, fitting = 0, Counter[str](), Counter[str](), 0
    for facts in each:
        best_s, own_s, others = compare_methods(facts)
        beaten = [name for name, other_s in others.items() if other_s < own_s * (1 - SAME)]
        better.update(beaten)
        equal += own_s == best_s and not beaten
        if best_s < float("inf"):
            fitting += 1
            reached.update(name for name, one_s in others.items() if one_s <= best_s * (1 + SAME))
    yield measure.row(
        "small instances where the search equals exhaustive search and no method is better", equal,
        "instances", bar=f"== {len(each)}",
        against=f"exhaustive search; {', '.join(OTHERS)}, with {TIMES} times its work (milp: "
        f"all that it needs): better on {sum(better.values())}",
        repeats=len(each),
    )  # fmt: skip
    for name in OTHERS:
        yield measure.row(
            f"small instances with a plan that fits, where {name} finds the best one",
            reached[name] / max(fitting, 1), "share", bar="",
            against=f"{fitting} instances", repeats=len(each),
        )  # fmt: skip


def compare_methods(facts: SearchFacts) -> tuple[float, float, dict[str, float]]:
    """Return seconds of a step by exhaustive search, by the search, and by the other methods.

    MILP does all the work that it needs.
    """
    cached = CachedEstimates(SimulatedEstimates.from_facts(facts))
    best_s = steps_of(search_plans(with_method(facts, "exhaustive"), cached))
    own = search_plans(with_method(facts, "best-first"), cached)
    max_work = max(TIMES * own.work, 1)
    others = dict[str, float]()
    for name in OTHERS:
        changed = with_method(facts, name, None if name == "milp" else max_work)
        others[name] = steps_of(search_plans(changed, cached))
    return best_s, steps_of(own), others


def with_method(
    facts: SearchFacts, method: SearchMethod, max_work: int | None = None
) -> SearchFacts:
    """Return the facts of the same search by another method."""
    changes = {"method": method, "max_work": max_work, "explains_shortfall": False}
    return facts.model_copy(update=changes)


def steps_of(found: SearchResult) -> float:
    """Return seconds of the best plan's step; infinity if none fits."""
    return float("inf") if found.best is None else found.best.estimate.step_s


PARTS = {"clusters": clusters, "instances": instances}
