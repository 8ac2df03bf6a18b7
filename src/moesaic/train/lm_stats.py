"""Statistics of one training step of a language model, and how they are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import torch
from torch import Tensor

from moesaic.train.balance_stats import BALANCE_SCHEMA, BalanceStats
from moesaic.train.expert_migration import LayerMigration
from moesaic.train.kinds import Recorder

LOADS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()),
        ("counts_by_rank", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True)
class LMStepStats:
    """Statistics of one step, equal on every rank except for `phases` and `balance_stats`."""

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
    """Tokens per rank and expert of this pipeline rank's layers, [ranks, experts]. Only ranks that
    between them dispatch each token once have a row."""
    phases: dict[str, float]
    loss_scale: float | None = None
    """Loss scale of fp16 in this step; None in other precisions."""
    is_skipped: bool = False
    """True if the gradient overflowed and the update was skipped."""
    balance_stats: dict[int, BalanceStats] = field(default_factory=dict)
    """Balance statistics by layer, for layers and EP groups of this rank."""
    migrations: Sequence[LayerMigration] = ()
    """Experts of all layers that migrated after this step."""

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
        if self.balance_stats:
            figures |= _balance_figures(list(self.balance_stats.values()))
        if self.loss_scale is not None:
            figures |= {"loss_scale": self.loss_scale, "skipped": float(self.is_skipped)}
        return figures

    def write(self, record: Recorder) -> None:
        """Write migrations, expert loads and balance statistics."""
        for one in self.migrations:
            record.write_event(
                "experts_migrated", step=self.step, layer=one.layer, moves=one.decision.moves,
                bytes=one.num_bytes, seconds=one.seconds, gain_s=one.decision.gain_s,
                imbalance_before=one.decision.imbalance_before,
                imbalance_after=one.decision.imbalance_after,
            )  # fmt: skip
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
        balance = (stats.to_row(self.step, layer) for layer, stats in self.balance_stats.items())
        if self.balance_stats:
            record.write_rows("balance", BALANCE_SCHEMA, self.step, balance)

    def messages(self) -> Iterator[str]:
        """Yield a message about migrated experts."""
        if self.migrations:
            yield _describe_migrations(self.migrations)


def _balance_figures(layers: Sequence[BalanceStats]) -> dict[str, float]:
    """Return replica totals over all layers, and the imbalance of the worst layer."""
    exposed_s = sum(one.exposed_s for one in layers)
    return {
        "replicas": sum(one.replicas for one in layers),
        "replica_bytes": sum(one.replica_bytes for one in layers),
        "planning_s": sum(one.planning_s for one in layers),
        "imbalance_before": max(one.imbalance_before for one in layers),
        "imbalance_after": max(one.imbalance_after for one in layers),
        **({} if math.isnan(exposed_s) else {"replica_exposed_s": exposed_s}),
    }


def _describe_migrations(migrations: Sequence[LayerMigration]) -> str:
    """Describe migrated experts for the user."""
    number = sum(len(migration.decision.moves) for migration in migrations)
    layers = f"{len(migrations)} layer{'s'[: len(migrations) > 1]}"
    size = f"{sum(migration.num_bytes for migration in migrations) / 1e6:,.3g} MB"
    worst = max(migrations, key=lambda migration: migration.decision.imbalance_before)
    return (
        f"migrated {number} experts of {layers}, {size}; the busiest rank of layer {worst.layer} "
        f"had {worst.decision.imbalance_before:.2f} times the mean tokens, "
        f"{worst.decision.imbalance_after:.2f} under the new placement"
    )
