"""Balance statistics of expert layers: token counts before and after balancing, replica traffic,
predicted and measured times. A run's `balance/` holds one row per layer and step.

Values add up over micro-batches, except those of `_MAXIMA`. Tokens, replicas and bytes cover all
ranks of an EP group; seconds are those of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from moesaic.dist.all_to_all import BACKWARD_EXCHANGE, FORWARD_EXCHANGE
from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.nn.experts.grouped import BACKWARD, FORWARD
from moesaic.policy.balance.cost_model import (
    count_rank_tokens,
    count_replica_transfers,
    layer_times_from_tokens,
    load_imbalance,
    replica_cpu_s,
)

BALANCE_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("tokens_before", pa.list_(pa.int64())),
        ("tokens_after", pa.list_(pa.int64())),
        ("imbalance_before", pa.float64()),
        ("imbalance_after", pa.float64()),
        ("std_before", pa.float64()),
        ("std_after", pa.float64()),
        ("replicas", pa.int64()),
        ("replica_bytes", pa.int64()),
        ("planning_s", pa.float64()),
        ("replica_wait_s", pa.float64()),
        ("gradient_wait_s", pa.float64()),
        ("forward_s", pa.float64()),
        ("backward_s", pa.float64()),
        ("predicted_experts_s", pa.float64()),
        ("predicted_transfer_s", pa.float64()),
        ("predicted_exposed_s", pa.float64()),
        ("predicted_s", pa.float64()),
        ("predicted_unbalanced_s", pa.float64()),
    ]
)
_MAXIMA = ("imbalance_before", "imbalance_after")
"""Fields that combine by maximum instead of by sum."""


def _no_tokens() -> IntArray:
    return np.zeros(1, np.int64)


@dataclass(frozen=True)
class BalanceStats:
    """Balance statistics of one layer, over one or more micro-batches."""

    replicas: int = 0
    """Expert replicas created."""
    imbalance_before: float = 1.0
    """Tokens of the busiest rank over the mean if owner ranks computed everything; the maximum over
    micro-batches."""
    imbalance_after: float = 1.0
    """Tokens of the busiest rank over the mean as computed; the maximum over micro-batches."""
    planning_s: float = 0.0
    tokens_before: IntArray = field(default_factory=_no_tokens)
    """Tokens per rank if owner ranks computed everything, [ranks]."""
    tokens_after: IntArray = field(default_factory=_no_tokens)
    max_tokens_before: int = 0
    """Tokens of the busiest rank, summed over micro-batches; the busiest rank may differ between
    them."""
    max_tokens_after: int = 0
    std_before: float = 0.0
    """Standard deviation of tokens over ranks."""
    std_after: float = 0.0
    replica_bytes: int = 0
    """Bytes of parameters sent to replicas and of gradients sent back."""
    predicted_experts_s: float = 0.0
    """Predicted seconds of this rank's experts, forward and backward, with the CPU time spent on
    replica traffic."""
    predicted_transfer_s: float = 0.0
    """Predicted seconds of replica transfers, out and back, overlapped or not."""
    predicted_exposed_s: float = 0.0
    """Predicted seconds of replica transfers that no computation overlaps."""
    predicted_s: float = 0.0
    """Predicted seconds of the layer, forward and backward."""
    predicted_unbalanced_s: float = 0.0
    """Predicted seconds of the layer if owner ranks computed everything."""
    replica_wait_s: float = math.nan
    """Seconds this rank spent handling and awaiting replicas in forward; NaN without a clock."""
    gradient_wait_s: float = math.nan
    """Seconds this rank spent handling and awaiting replica gradients in backward; NaN without a
    clock."""
    forward_s: float = math.nan
    """Seconds this rank's experts computed in forward; NaN without a clock."""
    backward_s: float = math.nan

    @classmethod
    def from_balance(
        cls, counts: IntArray, setting: BalanceProblem, balance: BalanceDecision, rank: int
    ) -> BalanceStats:
        """Return the statistics of rank `rank` for `counts` [ranks, experts] balanced by
        `balance`."""
        unbalanced, balanced = (
            count_rank_tokens(counts, setting.owners, decision)
            for decision in (no_replicas(), balance)
        )
        no_transfers = np.zeros(setting.num_ranks, np.int64)
        unbalanced_times = layer_times_from_tokens(unbalanced, no_transfers, no_transfers, setting)
        transfers = count_replica_transfers(balance, setting)
        balanced_times = layer_times_from_tokens(balanced, *transfers, setting)
        bytes_per_replica = setting.num_forwards * setting.expert_bytes + setting.gradient_bytes
        num_replicas = int((balance.replicas[:, 1] == rank).sum())
        weight_read_s = setting.weight_read_s * (1 + num_replicas / setting.experts_per_rank)
        forward_s = int(balanced.computed[rank]) / setting.expert_tokens_per_s + weight_read_s
        return cls(
            replicas=len(balance.replicas),
            imbalance_before=load_imbalance(unbalanced.computed),
            imbalance_after=load_imbalance(balanced.computed),
            tokens_before=unbalanced.computed, tokens_after=balanced.computed,
            max_tokens_before=int(unbalanced.computed.max()),
            max_tokens_after=int(balanced.computed.max()),
            std_before=float(unbalanced.computed.std()), std_after=float(balanced.computed.std()),
            replica_bytes=round(len(balance.replicas) * bytes_per_replica),
            predicted_experts_s=(
                setting.num_passes * forward_s + replica_cpu_s(rank, *transfers, setting)
            ),
            predicted_transfer_s=(
                setting.num_forwards * balanced_times.replica_send_s
                + balanced_times.gradient_return_s
            ),
            predicted_exposed_s=balanced_times.exposed_s,
            predicted_s=balanced_times.total_s, predicted_unbalanced_s=unbalanced_times.total_s,
        )  # fmt: skip

    @property
    def exposed_s(self) -> float:
        """Seconds for which replica traffic kept this rank from computing."""
        return self.replica_wait_s + self.gradient_wait_s

    def combine(self, other: BalanceStats) -> BalanceStats:
        """Return the sum of both; fields of `_MAXIMA` take the maximum."""
        combined = {}
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            combined[entry.name] = max(mine, theirs) if entry.name in _MAXIMA else mine + theirs
        return BalanceStats(**combined)

    def with_times(self, seconds: Mapping[str, float]) -> BalanceStats:
        """Return a copy with the measured `seconds` of a clock, by kind."""
        replica_wait_s, gradient_wait_s, forward_s, backward_s = (
            seconds.get(kind, 0.0)
            for kind in (FORWARD_EXCHANGE, BACKWARD_EXCHANGE, FORWARD, BACKWARD)
        )
        return replace(
            self,
            replica_wait_s=replica_wait_s,
            gradient_wait_s=gradient_wait_s,
            forward_s=forward_s,
            backward_s=backward_s,
        )

    def to_row(self, step: int, layer: int) -> dict[str, Any]:
        """Return the row of one layer and step, by `BALANCE_SCHEMA`."""
        values = {name: getattr(self, name) for name in BALANCE_SCHEMA.names if hasattr(self, name)}
        by_rank = {name: values[name].tolist() for name in ("tokens_before", "tokens_after")}
        num_ranks, num_tokens = len(self.tokens_before), int(self.tokens_before.sum())
        imbalances = {
            name: max_tokens * num_ranks / num_tokens if num_tokens else 1.0
            for name, max_tokens in (
                ("imbalance_before", self.max_tokens_before),
                ("imbalance_after", self.max_tokens_after),
            )
        }
        return {**values, **by_rank, **imbalances, "step": step, "layer": layer}
