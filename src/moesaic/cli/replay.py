"""`moesaic replay`: a balance policy applied to the expert loads that a run recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from pydantic import model_validator

from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError, StoreError, UserError
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.facts.balance import IntArray
from moesaic.facts.job import BalanceConfig, Job, Prices
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.plan import Plan
from moesaic.policy.balance import (
    BalanceStats,
    LayerBalancer,
    RankDevice,
    balance_stats,
    can_migrate,
    default_prices,
    layer_problem,
    should_balance,
)
from moesaic.policy.balance.yardsticks import make_balancer

if TYPE_CHECKING:
    from moesaic.report import RunStats

_JOB_PREFIX = "balance."
"""Prefix of these settings in a job file."""

Run = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Run directory.", show_default=False),
]
PolicyName = Annotated[
    str | None,
    typer.Option("--policy", metavar="POLICY", help="Short for --set policy=POLICY."),
]


_COLUMNS = {
    "replicas": "replicas", "imbalance_before": "imbalance_before",
    "imbalance_after": "imbalance_after", "unbalanced_s": "predicted_unbalanced_s",
    "balanced_s": "predicted_s",
}  # fmt: skip
"""Keys of a layer's result, and the statistics that they show."""


class ReplayConfig(YardstickConfig):
    """Policy to replay and its settings, as in a job's [balance]."""

    prices: Prices | None = None
    """Costs that policies assume; unset: those of the run, its job or its plan, or typical ones of
    its devices."""

    @model_validator(mode="after")
    def _check_replayable(self) -> ReplayConfig:
        if self.migrate_every:
            raise ValueError(
                f"migrate_every = {self.migrate_every}, but a replay keeps experts on their first "
                "owner ranks: remove it"
            )
        return self

    def ineffective_settings(self) -> list[str]:
        """Return these sentences in replay's own names. Prices always count: even layers without
        replicas have a predicted time."""
        sentences = (text.replace(_JOB_PREFIX, "") for text in super().ineffective_settings())
        return [text for text in sentences if not text.startswith("prices has no effect")]


def replay(
    run: Run = None,
    policy: PolicyName = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Apply a balance policy to the expert loads that a run recorded.

    No rank starts and no device is used. The policy sees the recorded tokens of each rank and
    expert. Its cost model predicts the time of each layer with and without replicas.
    """
    if explain is not None:
        flags.print_explanation(ReplayConfig, explain, as_json)
        return 0
    directory = flags.require(run, "RUN", "replay")
    config = _settings(policy, sets or ())
    for warning in config.ineffective_settings():
        screen.print_warning(warning)
    facts = replay_run(directory, config, screen.print_note if as_json else screen.print_line)
    if out is not None and not dry_run:
        flags.write_file("--out", out, screen.dumps(facts) + "\n")
    if as_json:
        screen.print_json(facts)
    else:
        _print_facts(facts)
    return 0


def _settings(policy: str | None, sets: Sequence[str]) -> ReplayConfig:
    """Return the settings; errors quote the flags as they were typed."""
    typed = {item.removeprefix(_JOB_PREFIX): item for item in sets}  # Both forms of a key work.
    try:
        return flags.parse_settings(ReplayConfig, _merge_policy(policy, list(typed)))
    except ConfigError as error:
        message = str(error).replace(_JOB_PREFIX, "")
        for item, original in typed.items():
            message = message.replace(f"--set {item}", f"--set {original}")
        if policy is not None:
            message = message.replace(f"--set policy={policy}", f"--policy {policy}")
        raise ConfigError(message) from None


def _merge_policy(policy: str | None, sets: Sequence[str]) -> list[str]:
    """Return `sets` with the policy of `--policy`; a different policy in `sets` is an error."""
    if policy is None:
        return list(sets)
    policy_item, key = f"policy={policy}", "policy"
    settings = apply_sets({}, sets)
    if key in settings and settings[key] != apply_sets({}, [policy_item])[key]:
        items = [item for item in sets if item.partition("=")[0].partition(".")[0].strip() == key]
        raise ConfigError(f"--set {items[-1]} beside --policy {policy}: remove one of them")
    return [*sets, policy_item]


class RecordedPass(NamedTuple):
    """Approximate tokens of one layer in one micro-batch."""

    step: int
    layer: int
    counts: IntArray
    """Routed tokens, [ranks of the stage, experts]."""


def _describe_layer(layer: int, stats: Sequence[BalanceStats]) -> dict[str, Any]:
    """Return means over all micro-batches and expert-parallel groups of a layer."""
    mean = {
        name: sum(getattr(one, source) for one in stats) / len(stats)
        for name, source in _COLUMNS.items()
    }
    return {
        "layer": layer, "micro_batches": len(stats), **mean,
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
        raise UserError(
            f"'{run}' had all experts on every rank (layout.ep = 1), so no rank has more load: "
            "replay a run with layout.ep above 1"
        )
    prices, source = _find_prices(facts, job, plan, config.prices)
    groups = sorted(
        {tuple(r % plan.ranks_per_stage // plan.etp for r in g) for g in plan.ep_groups()}
    )
    balancers: dict[tuple[int, tuple[int, ...]], LayerBalancer] = {}
    stats: dict[int, list[BalanceStats]] = {}
    for _, layer, counts in _read_passes(run, plan, job.train.micro_batches):
        if layer not in stats:
            stats[layer] = []
            problem = layer_problem(job, plan, config, prices, layer)
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
    layers = [_describe_layer(layer, passes) for layer, passes in sorted(stats.items())]
    unbalanced_s, balanced_s = (
        sum(one[name] for one in layers) for name in ("unbalanced_s", "balanced_s")
    )
    return {
        "run": str(run), "policy": config.policy,
        "as_published": config.as_published and not config.has_cost_check,
        "prices": prices.model_dump(), "prices_source": source,
        "enabled": _is_enabled(job, plan, config), "simulated": True, "layers": layers,
        "unbalanced_s": unbalanced_s, "balanced_s": balanced_s,
        "speedup": _speedup(unbalanced_s, balanced_s),
    }  # fmt: skip


def _is_enabled(job: Job, plan: Plan, config: BalanceConfig) -> bool:
    """Return whether a job with these settings would use the policy at all."""
    return should_balance(job.model_copy(update={"balance": config}), plan)


def _read_passes(run: Path, plan: Plan, micro_batches: int) -> Iterator[RecordedPass]:
    """Yield the tokens of each layer, step by step; a micro-batch gets an equal share of a step.

    One part of the record is in memory at a time.
    """
    from moesaic.base.records import read_part

    path, table = None, None
    for step, layer, (part, row) in _locate_rows(run):
        if part != path:
            path, table = part, read_part(part)
        assert table is not None
        counts = table.column("counts_by_rank")[row].values.to_numpy().reshape(-1, plan.experts)
        yield RecordedPass(step, layer, np.rint(counts / micro_batches).astype(np.int64))


def _locate_rows(run: Path) -> Iterator[tuple[int, int, tuple[Path, int]]]:
    """Yield steps and layers in order, with the file and the row of the last record of each.

    Rows without counts by rank belong to other pipeline ranks and are skipped.
    """
    from moesaic.base.records import list_parts, read_part

    latest: dict[tuple[int, int], tuple[Path, int]] = {}
    for part in list_parts(run / "loads"):
        table = read_part(part)
        if "counts_by_rank" not in table.column_names:
            continue
        lengths = (len(one) if one.is_valid else 0 for one in table.column("counts_by_rank"))
        keys = zip(*(table.column(name).to_pylist() for name in ("step", "layer")), strict=True)
        for row, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            if length:
                latest[key] = (part, row)
    for step, layer in sorted(latest):
        yield step, layer, latest[step, layer]


def _find_prices(
    run: RunStats, job: Job, plan: Plan, requested: Prices | None
) -> tuple[Prices, str]:
    """Return the prices that a policy assumes for `run`, and their source.

    Without prices in the run, its job or its plan, they are typical of the run's devices."""
    if requested is not None:
        return requested, "given"
    if plan.prices is not None and (should_balance(job, plan) or can_migrate(job, plan)):
        return plan.prices, "of the run"
    if job.balance.prices is not None:
        return job.balance.prices, "of the job"
    if plan.prices is not None:
        return plan.prices, "of the plan"
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
    return default_prices(job, plan, ranks), source


def _print_facts(facts: dict[str, Any]) -> None:
    titles = (
        "layer", "micro-batches", "imbalance before", "after", "replicas", "unbalanced", "balanced",
        "speedup",
    )  # fmt: skip
    screen.print_table(titles, map(_cells, facts["layers"]), left=0)
    screen.print_line(f"prices {facts['prices_source']}; {Prices(**facts['prices']).describe()}")
    name = f"{facts['policy']}{', as published' if facts['as_published'] else ''}"
    if not facts["enabled"] and facts["policy"] != "none":
        screen.print_line(
            f"a job with {name} would make no replicas: balance.max_replicas = 0, too few routed "
            "tokens per rank and layer (balance.min_replica_tokens), or experts with adapters"
        )
    screen.print_line(
        f"predicted, not measured: with {name} the expert layers take "
        f"{1e3 * facts['balanced_s']:.4g} ms per micro-batch instead of "
        f"{1e3 * facts['unbalanced_s']:.4g} ms ({facts['speedup']:.3g}x)"
    )


def _cells(layer: dict[str, Any]) -> Sequence[str]:
    return (
        str(layer["layer"]), str(layer["micro_batches"]), f"{layer['imbalance_before']:.2f}x",
        f"{layer['imbalance_after']:.2f}x", f"{layer['replicas']:.3g}",
        f"{1e3 * layer['unbalanced_s']:.4g} ms", f"{1e3 * layer['balanced_s']:.4g} ms",
        f"{layer['speedup']:.3g}x",
    )  # fmt: skip
