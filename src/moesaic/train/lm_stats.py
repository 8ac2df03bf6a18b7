"""Statistics of one training step of a language model, and how they are recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from moesaic.base.units import plural
from moesaic.policy.balance import BalanceStats, LayerDecision
from moesaic.train.balancing import LayerBalance
from moesaic.train.expert_migration import LayerMigration
from moesaic.train.kinds import Recorder
from moesaic.train.tiers import TierStats

LOADS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()),
        ("counts_by_rank", pa.list_(pa.int64())),
    ]
)


_COLUMN_TYPES = {"int": pa.int64(), "float": pa.float64(), "IntArray": pa.list_(pa.int64())}
BALANCE_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        *((column.name, _COLUMN_TYPES[str(column.type)]) for column in fields(BalanceStats)),
    ]
)


@dataclass(frozen=True)
class StudentStats:
    """Statistics of one student in one step, equal on every rank."""

    losses: Mapping[str, float]
    """Losses by name, without their weights; "loss" is that of the text. Steps that do not distil
    have no others."""
    grad_norm: float
    lr: float

    def figures(self, name: str) -> dict[str, float]:
        """Return scalars of student `name`, such as "small/loss"."""
        figures = {**self.losses, "grad_norm": self.grad_norm, "lr": self.lr}
        return {f"{name}/{key}": value for key, value in figures.items()}


@dataclass(frozen=True)
class LMStepStats:
    """Statistics of one step, equal on every rank except for `phases`, `balance` and
    `counts_by_rank`."""

    step: int
    loss: float
    total_loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    num_replay_mismatches: int
    dropped: dict[int, int]
    counts: dict[int, Tensor]
    """Tokens per expert of each expert layer over the whole batch, [experts]."""
    counts_by_rank: dict[int, Tensor]
    """Tokens per rank and expert of each expert layer of this pipeline stage, [ranks, experts].
    Set on the first rank of the stage, in sampled steps. If several ranks dispatch the same tokens,
    one of them has a row."""
    phases: dict[str, float]
    loss_scale: float | None = None
    """Loss scale of fp16 in this step; None in other precisions."""
    is_skipped: bool = False
    """True if the gradient overflowed and the update was skipped."""
    has_run: bool = True
    """False for a frozen teacher from which no student learnt in this step: it has no loss."""
    balance: dict[int, LayerBalance] = field(default_factory=dict)
    """Balance decisions and statistics by layer, for layers and EP groups of this rank."""
    memory: TierStats | None = None
    """Traffic of this rank's expert state between memory and drive; None without a budget."""
    migrations: Sequence[LayerMigration] = ()
    """Experts of all layers that migrated after this step."""
    students: Mapping[str, StudentStats] = field(default_factory=dict)
    """Statistics of each student by its name."""

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of the step, which took `step_s` seconds."""
        figures = {
            "loss": self.loss, "total_loss": self.total_loss,
            "balance_loss": self.balance_loss, "z_loss": self.z_loss,
            "grad_norm": self.grad_norm, "lr": self.lr, "tokens": self.tokens,
            "tokens_per_s": self.tokens / max(step_s, 1e-9),
            "dropped": sum(self.dropped.values()),
            "num_replay_mismatches": self.num_replay_mismatches,
        }  # fmt: skip
        if not self.has_run:
            figures = {key: figures[key] for key in ("grad_norm", "lr", "tokens", "tokens_per_s")}
        figures |= self.rank_figures()
        if self.balance:
            figures |= _balance_figures([one.stats for one in self.balance.values()])
        if self.loss_scale is not None:
            figures |= {"loss_scale": self.loss_scale, "skipped": float(self.is_skipped)}
        for name, student in self.students.items():
            figures |= student.figures(name)
        return figures

    def rank_figures(self) -> dict[str, float]:
        """Return scalars of this rank alone."""
        return {} if self.memory is None else self.memory.figures()

    def write(self, record: Recorder) -> None:
        """Write decisions, expert loads and balance statistics."""
        decisions: dict[str, list[dict[str, Any]]] = {}
        if self.balance and record.is_sampled(self.step):
            decisions["balance"] = [
                _balance_record(layer, decision)
                for layer, one in self.balance.items()
                for decision in one.decisions
            ]
        if self.migrations:
            decisions["migration"] = [_migration_record(one) for one in self.migrations]
        if self.memory is not None and record.is_sampled(self.step):
            decisions["memory"] = [self.memory.record()]
        if decisions:
            record.write_event("decisions", step=self.step, **decisions)
        none = torch.zeros(0, dtype=torch.int64)  # For layers of other pipeline ranks.
        loads = (
            {
                "step": self.step, "layer": layer, "counts": counts.tolist(),
                "dropped": self.dropped[layer],
                "counts_by_rank": self.counts_by_rank.get(layer, none).flatten().numpy(),
            }
            for layer, counts in self.counts.items()
        )  # fmt: skip
        record.write_rows("loads", LOADS_SCHEMA, self.step, loads)
        balance = (
            {"step": self.step, "layer": layer, **vars(one.stats)}
            for layer, one in self.balance.items()
        )
        if self.balance:
            record.write_rows("balance", BALANCE_SCHEMA, self.step, balance)

    def messages(self) -> Iterator[str]:
        """Yield a message about migrated experts."""
        if self.migrations:
            yield _describe_migrations(self.migrations)


def _balance_figures(layers: Sequence[BalanceStats]) -> dict[str, float]:
    """Return replica totals over all layers, and the imbalance of the worst layer."""
    exposed_s = sum(one.replica_wait_s + one.gradient_wait_s for one in layers)
    return {
        "replicas": sum(one.replicas for one in layers),
        "replica_bytes": sum(one.replica_bytes for one in layers),
        "planning_s": sum(one.planning_s for one in layers),
        "imbalance_before": max(one.imbalance_before for one in layers),
        "imbalance_after": max(one.imbalance_after for one in layers),
        **({} if math.isnan(exposed_s) else {"replica_exposed_s": exposed_s}),
    }


def _balance_record(layer: int, decision: LayerDecision) -> dict[str, Any]:
    """Return a balance decision as JSON.

    Its loads are in `loads/`, and its costs in job and plan."""
    tokens = Counter[tuple[int, int]]()
    for expert, _, target, number in decision.outcome.rerouted.tolist():
        tokens[expert, target] += number
    replicas = decision.outcome.replicas.tolist()
    return {
        "layer": layer, "is_ahead": decision.facts.is_ahead,
        "replicas": [[expert, rank, tokens[expert, rank]] for expert, rank in replicas],
        "planning_s": decision.seconds,
    }  # fmt: skip


def _migration_record(migration: LayerMigration) -> dict[str, Any]:
    """Return a migration as JSON."""
    facts, outcome, planning_s = migration.decision
    return {
        "layer": migration.layer, "expert_tokens": facts.expert_tokens.tolist(),
        "moves": outcome.moves, "gain_s": outcome.gain_s,
        "imbalance_before": outcome.imbalance_before, "imbalance_after": outcome.imbalance_after,
        "bytes": migration.num_bytes, "seconds": migration.seconds, "planning_s": planning_s,
    }  # fmt: skip


def _describe_migrations(migrations: Sequence[LayerMigration]) -> str:
    """Describe migrated experts for the user."""
    number = sum(len(migration.decision.outcome.moves) for migration in migrations)
    layers = plural(len(migrations), "layer")
    size = f"{sum(migration.num_bytes for migration in migrations) / 1e6:,.3g} MB"
    worst = max(migrations, key=lambda migration: migration.decision.outcome.imbalance_before)
    outcome = worst.decision.outcome
    return (
        f"migrated {number} experts of {layers}, {size}; the busiest rank of layer {worst.layer} "
        f"had {outcome.imbalance_before:.2f} times the mean tokens, "
        f"{outcome.imbalance_after:.2f} under the new placement"
    )
