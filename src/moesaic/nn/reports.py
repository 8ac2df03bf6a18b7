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
    num_tokens: int
    """Tokens that this rank dispatched."""
    probability_sum: Tensor
    """Router probabilities of this rank's tokens, summed, [experts]. With gradient."""
    z_sum: Tensor
    """Squared log-sum-exp of this rank's router logits, summed over tokens. With gradient."""
    requested: Tensor
    """Assignments that this rank's tokens requested, before drops by capacity, [experts]."""
    balanced: Tensor
    """Assignments that the balance loss counts, [experts]: first choices with a gshard router, else
    `requested`."""
    kept: Tensor
    """Assignments of this rank's tokens after drops, [experts]; `requested` without capacity."""
    counts: Tensor
    """Assignments of each EP rank to each expert after drops, [EP ranks, experts]; on the host, or
    on the device if the host has not waited."""
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
            probability_sum=self.probability_sum.detach(),
            z_sum=self.z_sum.detach(),
            router_logits=None if logits is None else logits.detach(),
        )


class AttentionReport(NamedTuple):
    """Report of one attention layer."""

    queries: Tensor | None = None
    """Queries after rotation, [batch, heads, sequence, channels], if kept. With gradient."""
    keys: Tensor | None = None
    """Keys after rotation, [batch, heads, sequence, channels], if kept. With gradient."""
    scale: float | None = None
    """Factor on scores; None: 1 / sqrt(channels)."""


class FollowerLosses(NamedTuple):
    """Losses of the students that follow a head."""

    loss: Tensor
    """Sum of each student's weighted losses over tokens, [followers]. With gradient."""
    sums: Tensor
    """Cross-entropy and divergence, unweighted sums over tokens with a target, [followers, 2];
    a divergence with factor 0 is not computed and counts 0."""


class BlockReport(NamedTuple):
    """Report of one block; None for a layer that the block does not have."""

    attention: AttentionReport | None = None
    moe: MoEReport | None = None
    hidden_states: Tensor | None = None
    """Output of a decoder layer, if kept. With gradient."""
    label_logits: Tensor | None = None
    """Class logits of the classifier at each token, [batch, sequence, labels], if kept. With
    gradient."""
    follower_losses: FollowerLosses | None = None
    """Losses of `Inputs.followers`, from the head alone."""


Reports = dict[str, BlockReport]
"""Reports by name of the block."""


def moe_reports(reports: Iterable[BlockReport]) -> dict[int, MoEReport]:
    """Return the reports of MoE layers by layer."""
    found = (report.moe for report in reports)
    return {moe.layer: moe for moe in found if moe is not None}
