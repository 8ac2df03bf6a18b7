"""A balance policy applied to the expert loads that a run recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import model_validator

from moesaic.api.loads import latest_loads
from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.events import RUN_LOG, read_events
from moesaic.facts.balance import IntArray
from moesaic.facts.job import BalanceConfig, BalanceCosts, Job
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.plan import Plan
from moesaic.policy.balance import (
    BalanceCostFacts,
    BalanceStats,
    LayerBalancer,
    RankDevice,
    balance_stats,
    can_migrate,
    default_balance_costs,
    layer_problem,
    should_balance,
)
from moesaic.policy.balance.yardsticks import make_balancer

if TYPE_CHECKING:
    from moesaic.report import RunStats

_COLUMNS = {
    "replicas": "replicas", "imbalance_before": "imbalance_before",
    "imbalance_after": "imbalance_after", "unbalanced_s": "predicted_unbalanced_s",
    "balanced_s": "predicted_s",
}  # fmt: skip
"""Keys of a layer's result, and the statistics that they show."""


class ReplayConfig(YardstickConfig):
    """Policy to replay and its settings, as in a job's [balance]."""

    key_prefix: ClassVar[str] = ""

    costs: BalanceCosts | None = None
    """Costs that policies assume; unset: those of the run, its job or its plan, or typical ones of
    its devices."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, raw: dict[str, Any]) -> dict[str, Any]:
        table = raw.get("balance")
        for key, value in table.items() if isinstance(table, dict) else ():
            raise ValueError(
                f"balance.{key} = {keys.show(value)} has the name of a job's key: "
                f"did you mean '{key}'?"
            )
        return raw

    @model_validator(mode="after")
    def _check_replayable(self) -> ReplayConfig:
        if self.migrate_every:
            raise ValueError(
                f"migrate_every = {self.migrate_every}, but a replay keeps experts on their first "
                "owner ranks: remove it"
            )
        return self

    def ineffective_settings(self) -> list[str]:
        """Return these sentences in replay's own names. Costs always count: even layers without
        replicas have a predicted time."""
        sentences = (
            text.replace(BalanceConfig.key_prefix, "") for text in super().ineffective_settings()
        )
        return [text for text in sentences if not text.startswith("costs has no effect")]


def _describe_layer(
    layer: int, stats: Sequence[BalanceStats], recorded_replicas: float | None
) -> dict[str, Any]:
    """Return means over all micro-batches and expert-parallel groups of a layer, beside the
    replicas that the run itself made."""
    mean = {
        name: sum(getattr(one, source) for one in stats) / len(stats)
        for name, source in _COLUMNS.items()
    }
    return {
        "layer": layer, "micro_batches": len(stats), "recorded_replicas": recorded_replicas, **mean,
        "speedup": _speedup(mean["unbalanced_s"], mean["balanced_s"]),
    }  # fmt: skip


def _speedup(unbalanced_s: float, balanced_s: float) -> float:
    return unbalanced_s / balanced_s if balanced_s else 1.0


def replay_run(
    run: Path, config: ReplayConfig, log: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the outcome of a policy on the loads of `run`, as plain data.

    `log` gets a line before a slow compilation.
    """
    from moesaic.report import RunStats  # Slow to import, like the imports below.

    facts = RunStats.read(run)
    job = parse(Job, facts.job, str(run / "job.json"))
    plan = parse(Plan, facts.plan, str(run / "plan.json"))
    if plan.ep == 1:
        raise ConfigError(
            f"'{run}' had all experts on every rank (layout.ep = 1), so no rank has more load: "
            "replay a run with layout.ep above 1"
        )
    costs, source = _find_costs(facts, job, plan, config.costs)
    groups = sorted(
        {tuple(r % plan.ranks_per_stage // plan.etp for r in g) for g in plan.ep_groups()}
    )
    balancers: dict[tuple[int, tuple[int, ...]], LayerBalancer] = {}
    stats: dict[int, list[BalanceStats]] = {}
    for layer, counts in _read_passes(run, plan, job.train.micro_batches):
        if layer not in stats:
            stats[layer] = []
            problem = layer_problem(job, plan, config, costs, layer)
            balancers |= {(layer, group): make_balancer(config, problem) for group in groups}
            balancers[layer, groups[0]].warm_up(log)
        for group in groups:
            balancer = balancers[layer, group]
            balancer(counts[list(group)])
            stats[layer].append(balance_stats(balancer.take_decisions(), plan.ep, rank=0))
    if not stats:
        raise StoreError(
            f"'{run}' has no loads by rank under loads/: replay a run of this version, with "
            "log.loads_every not above its steps"
        )
    recorded = _read_replicas(run)
    layers = [
        _describe_layer(layer, passes, recorded.get(layer))
        for layer, passes in sorted(stats.items())
    ]
    unbalanced_s, balanced_s = (
        sum(one[name] for one in layers) for name in ("unbalanced_s", "balanced_s")
    )
    return {
        "run": str(run), "policy": config.policy,
        "as_published": config.as_published and not config.has_cost_check,
        "costs": costs.model_dump(), "costs_source": source,
        "enabled": _is_enabled(job, plan, config), "simulated": True, "layers": layers,
        "unbalanced_s": unbalanced_s, "balanced_s": balanced_s,
        "speedup": _speedup(unbalanced_s, balanced_s),
    }  # fmt: skip


def _is_enabled(job: Job, plan: Plan, config: BalanceConfig) -> bool:
    """Return whether a job with these settings would use the policy at all."""
    return should_balance(job.model_copy(update={"balance": config}), plan)


def _read_passes(run: Path, plan: Plan, micro_batches: int) -> Iterator[tuple[int, IntArray]]:
    """Yield layers with their routed tokens in a micro-batch, [ranks of the stage, experts].

    A micro-batch gets an equal share of a step.
    """
    table = latest_loads(run)
    if table is None or "counts_by_rank" not in table.column_names:
        return
    columns = (table.column(name) for name in ("layer", "counts_by_rank"))
    for layer, by_rank in zip(*columns, strict=True):
        if by_rank.is_valid and len(by_rank):
            counts = by_rank.values.to_numpy().reshape(-1, plan.experts) / micro_batches
            yield layer.as_py(), np.rint(counts).astype(np.int64)


def _read_replicas(run: Path) -> dict[int, float]:
    """Return the mean replicas of a micro-batch by layer, from the decisions that the run recorded
    in the EP group of rank 0."""
    numbers: dict[int, list[int]] = {}
    for event in read_events(run / RUN_LOG):
        for decision in event.get("balance", ()) if event["event"] == "decisions" else ():
            if not decision["is_ahead"]:  # Of tokens that it has seen.
                numbers.setdefault(decision["layer"], []).append(len(decision["replicas"]))
    return {layer: sum(found) / len(found) for layer, found in numbers.items()}


def _find_costs(
    run: RunStats, job: Job, plan: Plan, requested: BalanceCosts | None
) -> tuple[BalanceCosts, str]:
    """Return the costs that a policy assumes for `run`, and their source.

    Without costs in the run, its job or its plan, they are typical of the run's devices.
    """
    if requested is not None:
        return requested, "given"
    if plan.balance_costs is not None and (should_balance(job, plan) or can_migrate(job, plan)):
        return plan.balance_costs, "of the run"
    if job.balance.costs is not None:
        return job.balance.costs, "of the job"
    if plan.balance_costs is not None:
        return plan.balance_costs, "of the plan"
    machines = run.launches[-1].machines if run.launches else ()
    if len(machines) == plan.ranks:
        ranks = [RankDevice(str(one.host), one.kind, one.threads) for one in machines]
        source = "typical of such devices"
    elif plan.places:
        ranks = [RankDevice(place.host, place.kind, 1) for place in plan.places]
        source = "typical of the plan's devices"
    else:
        ranks = [RankDevice("0", "cpu", 1)] * plan.ranks
        source = (
            "typical of one CPU thread per rank on one host; the run has not recorded its devices"
        )
    return default_balance_costs(BalanceCostFacts.of_job(job, plan, ranks)), source
