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
from moesaic.facts.balance import IntArray
from moesaic.facts.job import BalanceConfig, BalanceCosts, Job
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.job.job import parse_language_model
from moesaic.facts.plan import Plan
from moesaic.policy.balance import (
    BalanceCostFacts,
    BalanceStats,
    LayerBalancer,
    RankDevice,
    balance_stats,
    default_balance_costs,
    layer_problem,
    should_balance,
)
from moesaic.policy.balance.yardsticks import make_balancer

if TYPE_CHECKING:
    import pyarrow as pa

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
    """Costs that policies assume; unset: those of the run, or typical ones of its devices."""

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


def _describe_layer(layer: int, stats: Sequence[BalanceStats]) -> dict[str, Any]:
    """Return means over all micro-batches and expert-parallel groups of a layer."""
    mean = {
        name: sum(getattr(one, source) for one in stats) / len(stats)
        for name, source in _COLUMNS.items()
    }
    speedup = _speedup(mean["unbalanced_s"], mean["balanced_s"])
    return {"layer": layer, "micro_batches": len(stats), **mean, "speedup": speedup}


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
    job = parse_language_model(facts.job, str(run / "job.json"))
    plan = parse(Plan, facts.plan, str(run / "plan.json"))
    if plan.ep == 1:
        raise ConfigError(
            f"'{run}' had all experts on every rank (layout.ep = 1), so no rank has more load: "
            "replay a run with layout.ep above 1"
        )
    costs = config.costs or _find_costs(facts, job, plan)
    groups = sorted(
        {tuple(r % plan.ranks_per_stage // plan.etp for r in g) for g in plan.ep_groups()}
    )
    balancers: dict[tuple[int, tuple[int, ...]], LayerBalancer] = {}
    stats: dict[int, list[BalanceStats]] = {}
    table, num_left_out = _read_loads(run, facts)
    for layer, counts in _read_passes(table, plan, job.train.micro_batches):
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
            f"'{run}' has no loads by rank under loads/{_in_layout(num_left_out)}: replay a run of "
            "this version, with log.loads_every not above its steps"
        )
    layers = [_describe_layer(layer, passes) for layer, passes in sorted(stats.items())]
    unbalanced_s, balanced_s = (
        sum(one[name] for one in layers) for name in ("unbalanced_s", "balanced_s")
    )
    return {
        "run": str(run), "policy": config.display_name, "costs": costs.model_dump(),
        "enabled": _is_enabled(job, plan, config), "simulated": True,
        "steps_left_out": num_left_out, "layers": layers,
        "unbalanced_s": unbalanced_s, "balanced_s": balanced_s,
        "speedup": _speedup(unbalanced_s, balanced_s),
    }  # fmt: skip


def _in_layout(num_left_out: int) -> str:
    return " of the layout of its last start" * bool(num_left_out)


def _is_enabled(job: Job, plan: Plan, config: BalanceConfig) -> bool:
    """Return whether a job with these settings would use the policy at all."""
    return should_balance(job.model_copy(update={"balance": config}), plan)


def _read_loads(run: Path, facts: RunStats) -> tuple[pa.Table | None, int]:
    """Return the loads of the steps that ran in the layout of the last start, and the number of
    recorded steps that did not."""
    table = latest_loads(run)
    if table is None or not facts.launches:
        return table, 0
    last = facts.launches[-1]
    others = [one for one in facts.launches if (one.ranks, one.layout) != (last.ranks, last.layout)]
    if not others:
        return table, 0
    same = facts.launches[facts.launches.index(others[-1]) + 1 :]
    first_step = min(one.step for one in same)
    steps = table.column("step").to_numpy()
    # Steps that were not repeated after a way back have loads, but no event any more.
    is_kept = (steps > first_step) & (steps <= facts.last_step)
    return table.filter(is_kept), len(np.unique(steps[~is_kept]))


def _read_passes(
    table: pa.Table | None, plan: Plan, micro_batches: int
) -> Iterator[tuple[int, IntArray]]:
    """Yield layers with their routed tokens in a micro-batch, [ranks of the stage, experts].

    A micro-batch gets an equal share of a step.
    """
    if table is None or "counts_by_rank" not in table.column_names:
        return
    columns = (table.column(name) for name in ("layer", "counts_by_rank"))
    for layer, by_rank in zip(*columns, strict=True):
        if by_rank.is_valid and len(by_rank):
            counts = by_rank.values.to_numpy().reshape(-1, plan.experts) / micro_batches
            yield layer.as_py(), np.rint(counts).astype(np.int64)


def _find_costs(run: RunStats, job: Job, plan: Plan) -> BalanceCosts:
    """Return the costs that the run recorded, else those typical of its devices."""
    if plan.balance_costs is not None:
        return plan.balance_costs
    machines = run.launches[-1].machines if run.launches else ()
    if len(machines) != plan.ranks:
        raise StoreError(
            f"'{run.directory}' has not recorded the devices of its ranks: give prices, such as "
            "prices.bytes_per_s"
        )
    ranks = [RankDevice(str(one.host), one.kind, one.threads) for one in machines]
    return default_balance_costs(BalanceCostFacts.of_job(job, plan, ranks))
