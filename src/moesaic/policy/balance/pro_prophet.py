"""Pro-Prophet's planner: a greedy search that replicates the hottest expert of the hottest rank.

Replicas go to all ranks except those with the fewest tokens for the expert. The best of all these
placements by the paper's performance model wins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import use_local_replicas


def pro_prophet(
    counts: IntArray,
    problem: BalanceProblem,
    *,
    imbalance_tolerance: float = 0.1,
    num_excluded_ranks: int = 0,
) -> BalanceDecision:
    """Return the placement of the paper's greedy search, for any number of experts per rank.

    Args:
        counts: routed tokens [ranks, experts].
        problem: costs of the layer.
        imbalance_tolerance: range of loads that counts as even, as a multiple of the mean. The
            released code uses 3, with which few ranks never search at all.
        num_excluded_ranks: ranks that get no replica of a chosen expert.
    """
    owners, chosen, best = problem.owners, list[tuple[int, IntArray]](), 0
    by_rank = [np.flatnonzero(owners == rank) for rank in range(problem.num_ranks)]
    state = _State.from_counts(counts, problem)
    best_s = state.layer_s(problem, 0, num_excluded_ranks)
    used = np.zeros(len(owners), bool)
    total = int(counts.sum())
    while np.ptp(state.computed) >= imbalance_tolerance * total / problem.num_ranks:
        hottest = int(state.computed.argmax())
        unused = by_rank[hottest][~used[by_rank[hottest]]]
        if not len(unused):
            break
        remote = counts.sum(axis=0)[unused] - counts[hottest, unused]
        expert = int(unused[remote.argmax()])
        used[expert] = True
        receivers = _receivers(counts[:, expert], hottest, num_excluded_ranks)
        state.replicate(counts[:, expert], hottest, receivers)
        chosen.append((expert, receivers))
        layer_s = state.layer_s(problem, len(chosen), num_excluded_ranks)
        if layer_s < best_s:
            best_s, best = layer_s, len(chosen)
    pairs = [(expert, int(rank)) for expert, ranks in chosen[:best] for rank in ranks]
    return use_local_replicas(counts, np.array(sorted(pairs))) if pairs else no_replicas()


def _receivers(tokens: IntArray, owner: int, num_excluded: int) -> IntArray:
    """Return all ranks but the owner and those with the fewest tokens; among equals the first
    receive."""
    others = np.delete(np.arange(len(tokens)), owner)
    order = others[np.argsort(-tokens[others], kind="stable")]
    return np.sort(order[: max(len(others) - num_excluded, 0)])


class _State(NamedTuple):
    """Routed tokens that each rank computes, and receives from others."""

    computed: IntArray
    received: IntArray

    @classmethod
    def from_counts(cls, counts: IntArray, problem: BalanceProblem) -> _State:
        """Start with all tokens on owner ranks."""
        computed, received = (np.zeros(problem.num_ranks, np.int64) for _ in range(2))
        experts = np.arange(len(problem.owners))
        np.add.at(computed, problem.owners, counts.sum(axis=0))
        np.add.at(received, problem.owners, counts.sum(axis=0) - counts[problem.owners, experts])
        return cls(computed, received)

    def replicate(self, tokens: IntArray, owner: int, receivers: IntArray) -> None:
        """Keep the receivers' tokens of an expert on the receivers."""
        stay = int(tokens[receivers].sum())
        self.computed[receivers] += tokens[receivers]
        self.computed[owner] -= stay
        self.received[owner] -= stay

    def layer_s(self, problem: BalanceProblem, num_replicated: int, num_excluded: int) -> float:
        """Return the layer's seconds by equations (6) and (8) of the paper.

        They count received tokens only, and spread replica traffic evenly over all ranks.
        """
        exchange = int(self.received.max()) * problem.token_bytes / problem.bytes_per_s
        experts = int(self.computed.max()) / problem.expert_tokens_per_s
        each = (
            num_replicated
            * (problem.num_ranks - num_excluded)
            / problem.num_ranks
            / problem.bytes_per_s
        )
        out, back = each * problem.expert_bytes, each * problem.gradient_bytes
        hidden = (experts + problem.dense_compute_s) * problem.overlaps
        exposed = problem.num_forwards * max(0.0, out - hidden) + max(0.0, back - 2 * hidden)
        return problem.num_exchanges * exchange + problem.num_passes * experts + exposed
