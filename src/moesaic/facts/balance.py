"""Inputs and result of balancing one expert layer in one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class BalanceProblem(NamedTuple):
    """Costs and limits of one expert layer in its EP group; D ranks, E experts."""

    owners: IntArray
    """Owner rank of each expert, [E]."""
    num_ranks: int
    """Ranks of the EP group (D)."""
    expert_tokens_per_s: float
    """Tokens a second that one rank's experts process in forward; backward is twice the work."""
    token_bytes: float
    """Bytes of one routed token in one exchange."""
    bytes_per_s: float
    """Bytes a second that a rank sends while it receives as many."""
    expert_bytes: float
    """Bytes of one expert's parameters."""
    gradient_bytes: float
    """Bytes of one expert's gradients."""
    latency_s: float = 0.0
    """Seconds of latency per message."""
    dense_compute_s: float = 0.0
    """Seconds of a rank's forward compute between two expert layers; backward is twice the work."""
    weight_read_s: float = 0.0
    """Seconds that a rank's experts need in forward to read their weights, whatever the number of
    tokens; backward is twice the work."""
    overlaps: bool = True
    """True if replicas are sent while ranks compute. Otherwise sender and receiver copy the bytes
    themselves."""
    cpu_s_per_byte: float = 0.0
    """CPU seconds per byte of overlapped replica traffic, for both sender and receiver. Unused
    without `overlaps`."""
    num_forwards: int = 1
    """Forward passes of a layer in a step: two if backward recomputes it."""
    max_replicas: int | None = None
    """Most replicas that a rank has memory for; None: no limit."""
    max_replicas_sent: int | None = None
    """Most replicas that a rank sends; None: no limit."""
    min_replica_tokens: int = 0
    """Fewest tokens of a replica; smaller matmuls are no faster."""

    @property
    def num_passes(self) -> int:
        """All compute of a step in units of one forward pass; backward is twice the work."""
        return self.num_forwards + 2

    @property
    def num_exchanges(self) -> int:
        """Exchanges of tokens in a step: dispatch and combine, in each forward and in backward."""
        return 2 * self.num_forwards + 2

    @property
    def experts_per_rank(self) -> float:
        """Experts owned by one rank."""
        return len(self.owners) / self.num_ranks


class BalanceDecision(NamedTuple):
    """Replicas and rerouted tokens of one layer in one step."""

    replicas: IntArray
    """Pairs (expert, rank), sorted, [C, 2]: ranks that get an expert's parameters besides its
    owner."""
    rerouted: IntArray
    """Rows (expert, source, target, tokens), [M, 4], in any order: tokens of rank `source` that the
    replica on rank `target` computes. All other tokens go to the owner rank."""
    prefetched: BoolArray | None = None
    """Mask of the replicas that are sent during the previous layer's experts, [C]; None: none."""


class BalanceFacts(NamedTuple):
    """Facts of a balance decision."""

    problem: BalanceProblem
    counts: IntArray
    """Routed tokens, [ranks, experts]."""
    replicas: IntArray | None = None
    """Replicas (expert, rank) that earlier loads placed, [C, 2]; None: the policy places them."""
    is_ahead: bool = False
    """True if `counts` are earlier loads, by which the policy places replicas for later tokens."""


def no_replicas() -> BalanceDecision:
    """Return a decision without replicas."""
    return BalanceDecision(np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64))
