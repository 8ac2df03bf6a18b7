"""Pro-Prophet's planner: a greedy search that replicates the hottest expert of the hottest rank.

Replicas go to all ranks. The best of all these placements by the paper's performance model wins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray
from moesaic.policy.balance.faster_moe import replicate_everywhere

_EVEN_RANGE = 0.1
"""Range of loads that counts as even, as a multiple of the mean. The released code uses 3, with
which few ranks never search at all."""


def pro_prophet(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Return the placement of the paper's greedy search, for any number of experts per rank."""
    owners, chosen, best = problem.owners, list[int](), 0
    by_rank = [np.flatnonzero(owners == rank) for rank in range(problem.num_ranks)]
    state = _State.from_counts(counts, problem)
    best_s = state.layer_s(problem, 0)
    used = np.zeros(len(owners), bool)
    total = int(counts.sum())
    while np.ptp(state.computed) >= _EVEN_RANGE * total / problem.num_ranks:
        hottest = int(state.computed.argmax())
        unused = by_rank[hottest][~used[by_rank[hottest]]]
        if not len(unused):
            break
        remote = counts.sum(axis=0)[unused] - counts[hottest, unused]
        expert = int(unused[remote.argmax()])
        used[expert] = True
        state.replicate(counts[:, expert], hottest)
        chosen.append(expert)
        layer_s = state.layer_s(problem, len(chosen))
        if layer_s < best_s:
            best_s, best = layer_s, len(chosen)
    return replicate_everywhere(counts, problem, chosen[:best])


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

    def replicate(self, tokens: IntArray, owner: int) -> None:
        """Keep every rank's own tokens of an expert there."""
        remote = int(tokens.sum() - tokens[owner])
        self.computed[:] += tokens
        self.computed[owner] -= int(tokens.sum())
        self.received[owner] -= remote

    def layer_s(self, problem: BalanceProblem, num_replicated: int) -> float:
        """Return the layer's seconds by equations (6) and (8) of the paper.

        They count received tokens only, and spread replica traffic evenly over all ranks.
        """
        exchange = int(self.received.max()) * problem.token_bytes / problem.bytes_per_s
        experts = int(self.computed.max()) / problem.expert_tokens_per_s
        each = num_replicated / problem.bytes_per_s
        out, back = each * problem.expert_bytes, each * problem.gradient_bytes
        hidden = (experts + problem.dense_compute_s) * problem.overlaps
        exposed = problem.num_forwards * max(0.0, out - hidden) + max(0.0, back - 2 * hidden)
        return problem.num_exchanges * exchange + problem.num_passes * experts + exposed
