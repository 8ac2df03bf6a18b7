"""Reports of a model's blocks on one micro-batch: statistics, losses, and requested by-products.

They are named tuples: FSDP of some torch versions finds no tensors in dataclasses that a module
returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from moesaic.facts.balance import BalanceDecision


class MoEReport(NamedTuple):
    """Report of one MoE layer."""

    layer: int
    balance_loss: Tensor
    """This rank's share of the load-balance loss; the shares of all ranks add up. With gradient."""
    z_loss: Tensor
    """This rank's share of the z-loss. With gradient."""
    requested: Tensor
    """Assignments per expert over all ranks before drops, [experts]; on the host, or on the device
    if the host has not waited."""
    counts: Tensor
    """Assignments of each rank to each expert after drops, [ranks, experts]; on host or device
    alike."""
    num_dropped: int
    """Assignments dropped by capacity, over all ranks."""
    dedup_counts: Tensor | None
    """Deduplicated tokens of each rank for each EP rank, then for each host, [ranks, destinations];
    on the host. None without deduplication."""
    num_replay_mismatches: int
    """This rank's assignments in which a replayed choice differs from the router's own."""
    balance_decision: BalanceDecision | None = None
    """Replicas and rerouted rows; None without balancing."""
    router_logits: Tensor | None = None
    """Logits of this rank's tokens, [tokens, experts], if kept. With gradient."""
    router_choices: Tensor | None = None
    """Chosen experts, [tokens, choices], if kept; -1 - e where the router dropped expert e."""

    def detach(self) -> MoEReport:
        """Return the report without gradients, so that it does not keep the graph alive."""
        logits = self.router_logits
        return self._replace(
            balance_loss=self.balance_loss.detach(),
            z_loss=self.z_loss.detach(),
            router_logits=None if logits is None else logits.detach(),
        )


class AttentionReport(NamedTuple):
    """Report of one attention layer."""

    queries: Tensor | None = None
    """Queries after rotation, [batch, heads, sequence, channels], if kept. With gradient."""
    keys: Tensor | None = None
    """Keys after rotation, [batch, heads, sequence, channels], if kept. With gradient."""


class BlockReport(NamedTuple):
    """Report of one block; None for a layer that the block does not have."""

    attention: AttentionReport | None = None
    moe: MoEReport | None = None
    hidden_states: Tensor | None = None
    """Output of a decoder layer, if kept. With gradient."""


Reports = dict[str, BlockReport]
"""Reports by name of the block."""


def moe_reports(reports: Iterable[BlockReport]) -> dict[int, MoEReport]:
    """Return the reports of MoE layers by layer."""
    found = (report.moe for report in reports)
    return {moe.layer: moe for moe in found if moe is not None}
