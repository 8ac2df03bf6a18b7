"""`moesaic replay`: what a policy would have made of the loads that a run recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from pydantic import model_validator
from rich.table import Table

from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError, StoreError, UserError
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.prices import Priced, priced
from moesaic.facts.balance import Balance, Ints, unchanged
from moesaic.facts.job import BalanceConfig, Job, Prices
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.plan import Plan
from moesaic.policy.balance import Asked, balances, busiest, compiling, rows, setting_of, times
from moesaic.policy.balance.yardsticks import asked as asked_of

_JOBS = "balance."
"""What a job has before the names of these settings."""

Run = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="A run directory.", show_default=False),
]
Named = Annotated[
    str | None,
    typer.Option("--policy", metavar="POLICY", help="Whom to ask, as --set policy=POLICY."),
]


class ReplayConfig(YardstickConfig):
    """The policy to replay, and its settings; as in a job's [balance]."""

    prices: Prices | None = None
    """What copies cost and save; unset: what the run went by, or as a job finds them that does not
    measure."""

    @model_validator(mode="after")
    def _is_of_a_record(self) -> ReplayConfig:
        if self.measure:
            raise ValueError(
                "measure = true, but a record has no ranks to be measured: leave it out, or say "
                "prices"
            )
        if self.rehome_every:
            raise ValueError(
                f"rehome_every = {self.rehome_every}, but replay has experts where the run began "
                "with them: leave it out"
            )
        return self

    def idle(self) -> list[str]:
        """As of a job, in replay's own names; by prices a layer has its time without copies,
        too."""
        found = (one.replace("balance.", "") for one in super().idle())
        return [one for one in found if not one.startswith("prices has no effect")]


def replay(
    run: Run = None,
    policy: Named = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Say what a policy of balance would have made of a run's recorded loads.

    No ranks are started and no device is used: rows by rank and expert, as the run recorded them,
    go through the policy, and its model says what each layer takes with and without copies.
    """
    if explain is not None:
        flags.explain(ReplayConfig, explain, as_json)
        return 0
    directory = flags.need(run, "RUN", "replay")
    config = _settings(policy, sets or ())
    for warning in config.idle():
        screen.warn(warning)
    facts = replayed(directory, config, screen.note if as_json else screen.say)
    if out is not None and not dry_run:
        flags.write("--out", out, screen.dumps(facts) + "\n")
    if as_json:
        screen.as_json(facts)
    else:
        _show(facts)
    return 0


def _settings(policy: str | None, sets: Sequence[str]) -> ReplayConfig:
    """What is asked for; a mistake is told as it was typed."""
    plain = {item.removeprefix(_JOBS): item for item in sets}  # As a job names them, too.
    try:
        return flags.settings(ReplayConfig, _agreed(policy, list(plain)))
    except ConfigError as error:
        said = str(error).replace(_JOBS, "")
        for item, typed in plain.items():
            said = said.replace(f"--set {item}", f"--set {typed}")
        if policy is not None:
            said = said.replace(f"--set policy={policy}", f"--policy {policy}")
        raise ConfigError(said) from None


def _agreed(policy: str | None, sets: Sequence[str]) -> list[str]:
    """What is set, with the policy that `--policy` names; both may say it if they say the same."""
    if policy is None:
        return list(sets)
    named, key = f"policy={policy}", "policy"
    said = apply_sets({}, sets)
    if key in said and said[key] != apply_sets({}, [named])[key]:
        items = [item for item in sets if item.partition("=")[0].partition(".")[0].strip() == key]
        raise ConfigError(f"--set {items[-1]} beside --policy {policy}: leave one of them out")
    return [*sets, named]


class Recorded(NamedTuple):
    """Rows of one layer in one micro-batch of a step, about."""

    step: int
    layer: int
    counts: Ints
    """[ranks, experts], of all ranks of a part."""


@dataclass
class _Layer:
    """What came of one layer, over all steps and groups of ranks."""

    passes: int = 0
    copies: int = 0
    before: float = 0.0
    after: float = 0.0
    plain_s: float = 0.0
    step_s: float = 0.0

    def add(self, counts: Ints, asked: Asked, balance: Balance) -> None:
        """One pass more."""
        setting = asked.setting
        self.passes += 1
        self.copies += len(balance.copies)
        self.before += busiest(rows(counts, setting.homes, unchanged()).computed)
        self.after += busiest(rows(counts, setting.homes, balance).computed)
        self.plain_s += times(counts, setting, unchanged()).whole
        self.step_s += times(counts, setting, balance).whole

    def facts(self, layer: int) -> dict[str, Any]:
        """Means over passes."""
        return {
            "layer": layer, "passes": self.passes, "copies": self.copies / self.passes,
            "busiest_before": self.before / self.passes, "busiest_after": self.after / self.passes,
            "plain_s": self.plain_s / self.passes, "step_s": self.step_s / self.passes,
            "gain": self.plain_s / self.step_s if self.step_s else 1.0,
        }  # fmt: skip


def replayed(
    run: Path, config: ReplayConfig, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """What `config` makes of a run, as plain data. To `say`: what takes long."""
    from moesaic.report import RunFacts  # Slow to import, as is what follows.

    facts = RunFacts.read(run)
    job = parse(Job, facts.job, str(run / "job.json"))
    plan = parse(Plan, facts.plan, str(run / "plan.json"))
    if plan.ep == 1:
        raise UserError(
            f"'{run}' had all experts on every rank (layout.ep = 1), where nothing is uneven: "
            "replay a run whose ranks shared them out"
        )
    prices, source = priced(facts, job, plan, config.prices)
    groups = sorted({tuple(r % plan.span // plan.etp for r in g) for g in plan.expert_groups()})
    asked: dict[tuple[int, tuple[int, ...]], Asked] = {}
    layers: dict[int, _Layer] = {}
    for _, layer, counts in _recorded(run, plan, job.train.micro_batches):
        if layer not in layers:
            layers[layer] = _Layer()
            setting = setting_of(job, plan, config, prices, layer)
            asked |= {(layer, group): asked_of(config, setting) for group in groups}
            asked[layer, groups[0]].prepare(lambda kept: say and say(compiling(kept)))
        for group in groups:
            policy, own = asked[layer, group], counts[list(group)]
            layers[layer].add(own, policy, policy(own))
    if not layers:
        raise StoreError(
            f"'{run}' has no loads by rank under loads/: replay a run of this version, with "
            "log.loads_every not above its steps"
        )
    found = [one.facts(layer) for layer, one in sorted(layers.items())]
    plain_s, step_s = (sum(one[name] for one in found) for name in ("plain_s", "step_s"))
    return {
        "run": str(run), "policy": config.policy,
        "as_published": config.as_published and not config.is_careful,
        "prices": prices.model_dump(), "prices_from": source,
        "begins": _begins(job, plan, config), "simulated": True, "layers": found,
        "plain_s": plain_s, "step_s": step_s, "gain": plain_s / step_s if step_s else 1.0,
    }  # fmt: skip


def _begins(job: Job, plan: Plan, config: BalanceConfig) -> bool:
    """Whether a job with that policy would ask it at all."""
    return balances(job.model_copy(update={"balance": config}), plan)


def _recorded(run: Path, plan: Plan, micro_batches: int) -> Iterator[Recorded]:
    """What each layer had, in the order of steps: those of a micro-batch are about its share of the
    step's. A part of the record is in memory at a time, and nothing is kept of it."""
    from moesaic.base.records import read_part

    path, table = None, None
    for step, layer, (part, row) in _found(run):
        if part != path:
            path, table = part, read_part(part)
        assert table is not None
        counts = table.column("by_rank")[row].values.to_numpy().reshape(-1, plan.experts)
        yield Recorded(step, layer, np.rint(counts / micro_batches).astype(np.int64))


def _found(run: Path) -> Iterator[tuple[int, int, tuple[Path, int]]]:
    """Steps and layers in their order, and the part and the row where each was recorded last; not
    those of other parts of a pipeline, whose rows by rank are empty."""
    from moesaic.base.records import list_parts, read_part

    latest: dict[tuple[int, int], tuple[Path, int]] = {}
    for part in list_parts(run / "loads"):
        table = read_part(part)
        if "by_rank" not in table.column_names:
            continue
        lengths = (len(one) if one.is_valid else 0 for one in table.column("by_rank"))
        keys = zip(*(table.column(name).to_pylist() for name in ("step", "layer")), strict=True)
        for row, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            if length:
                latest[key] = (part, row)
    for step, layer in sorted(latest):
        yield step, layer, latest[step, layer]


def _show(facts: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    heads = (
        "layer",
        "passes",
        "busiest at home",
        "with copies",
        "copies",
        "at home",
        "with",
        "gain",
    )
    for name in heads:
        table.add_column(name, justify="right")
    for one in facts["layers"]:
        table.add_row(*_cells(one))
    screen.show(table)
    screen.say(Priced(Prices(**facts["prices"]), facts["prices_from"]).words())
    name = f"{facts['policy']}{', as published' if facts['as_published'] else ''}"
    if not facts["begins"] and facts["policy"] != "none":
        screen.say(
            f"a job with {name} would have made no copies: it has no room for any "
            "(balance.copies = 0), its ranks have too few rows of a layer (balance.least_rows), or "
            "experts have adapters"
        )
    screen.say(
        f"modelled, not measured: with {name} the expert layers would have taken "
        f"{1e3 * facts['step_s']:.4g} ms for {1e3 * facts['plain_s']:.4g} ms of a micro-batch, "
        f"{facts['gain']:.3g} times as fast"
    )


def _cells(one: dict[str, Any]) -> Sequence[str]:
    return (
        str(one["layer"]), str(one["passes"]), f"{one['busiest_before']:.2f}x",
        f"{one['busiest_after']:.2f}x", f"{one['copies']:.3g}", f"{1e3 * one['plain_s']:.4g} ms",
        f"{1e3 * one['step_s']:.4g} ms", f"{one['gain']:.3g}x",
    )  # fmt: skip
