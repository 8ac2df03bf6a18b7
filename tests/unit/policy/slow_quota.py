"""Plain implementation of quota, step by step: the reference for the compiled search."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import (
    count_rank_tokens,
    count_replica_transfers,
    layer_times,
)
from moesaic.policy.balance.quota import max_local_replicas

_Strategy = Literal["up to mean", "half of gap", "mean plus movable", "local tokens"]
_MIN_SPEEDUP = 1.01
"""Smallest speedup for which replicas are made."""


def slow_quota(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Return the fastest state of all strategies, from tokens on owner ranks to equal loads."""
    found = no_replicas()
    least_s = layer_times(counts, problem, found).total_s / _MIN_SPEEDUP
    for strategy in get_args(_Strategy):
        search = _Search(counts, problem, strategy)
        most = max_local_replicas(counts, least_s) if strategy == "local tokens" else counts.size
        while len(search.taken) < most and search.add_replica():
            decision = search.decision()
            layer_s = layer_times(counts, problem, decision).total_s
            if layer_s < least_s:
                least_s, found = layer_s, decision
    return found


class _Search:
    """Replicas of one strategy so far; everything else is computed from them."""

    def __init__(self, counts: IntArray, problem: BalanceProblem, strategy: _Strategy) -> None:
        self._counts, self._problem, self._strategy = counts, problem, strategy
        self._left = counts.T.copy()
        """Tokens that are left for the owner by expert and source, [experts, ranks]."""
        self.taken: dict[tuple[int, int], IntArray] = {}
        """Tokens of each replica (expert, rank) by source rank."""

    def decision(self) -> BalanceDecision:
        """Return the decision for the replicas so far."""
        if not self.taken:
            return no_replicas()
        rerouted = [
            (expert, int(source), rank, int(tokens[source]))
            for (expert, rank), tokens in self.taken.items()
            for source in np.flatnonzero(tokens)
        ]
        return BalanceDecision(np.array(sorted(self.taken)), np.array(sorted(rerouted)))

    def add_replica(self) -> bool:
        """Add one replica, if a useful one exists."""
        problem, decision = self._problem, self.decision()
        sends, receives = count_replica_transfers(decision, problem)
        allowed = np.ones_like(self._left, bool)
        allowed[np.arange(len(allowed)), problem.owners] = False
        for expert, rank in self.taken:
            allowed[expert, rank] = False
        if problem.max_replicas is not None:
            allowed[:, receives >= problem.max_replicas] = False
        if problem.max_replicas_sent is not None:
            allowed[sends[problem.owners] >= problem.max_replicas_sent] = False
        computed, sent, received = count_rank_tokens(self._counts, problem.owners, decision)
        if self._strategy == "local tokens":
            found = self._best_local_replica(allowed, computed, sent, received)
        else:
            found = self._best_replica(allowed, computed)
        if found is None:
            return False
        self._take(*found)
        return True

    def _best_local_replica(
        self, allowed: IntArray, computed: IntArray, sent: IntArray, received: IntArray
    ) -> tuple[int, int, int] | None:
        """Return the replica for local tokens that relieves the rank with the most traffic."""
        problem, own = self._problem, self._left
        allowed = allowed & (own >= max(problem.min_replica_tokens, 1))
        if sent.max() >= received.max():
            allowed[:, np.arange(problem.num_ranks) != sent.argmax()] = False
        else:
            allowed[problem.owners != received.argmax()] = False
        more = np.maximum(computed + own - computed.max(), 0)
        saved = own * (problem.num_exchanges * problem.token_bytes / problem.bytes_per_s)
        saved = np.where(
            allowed, saved - more * (problem.num_passes / problem.expert_tokens_per_s), 0.0
        )
        expert, rank = divmod(int(saved.argmax()), problem.num_ranks)
        return (expert, rank, int(own[expert, rank])) if saved[expert, rank] > 0 else None

    def _best_replica(self, allowed: IntArray, computed: IntArray) -> tuple[int, int, int] | None:
        """Return the best replica of the busiest rank: of its largest expert that has one."""
        problem, left = self._problem, self._left.sum(axis=1)
        mean = -(-int(self._counts.sum()) // problem.num_ranks)
        busiest = int(computed.argmax())
        excess = int(computed[busiest]) - mean
        if excess < max(problem.min_replica_tokens, 1):
            return None
        own = np.flatnonzero(problem.owners == busiest)
        for expert in own[np.argsort(-left[own], kind="stable")].tolist():
            offered = min(excess, int(left[expert]))
            accepted = np.minimum(self._limits(computed, mean, offered), offered)
            accepted[~allowed[expert] | (accepted < max(problem.min_replica_tokens, 1))] = 0
            saved = accepted * (problem.num_passes / problem.expert_tokens_per_s)
            local = np.minimum(self._counts[:, expert], accepted)
            saved += local * (problem.num_exchanges * problem.token_bytes / problem.bytes_per_s)
            rank = int(saved.argmax())
            if saved[rank] > 0:
                return expert, rank, int(accepted[rank])
        return None

    def _limits(self, computed: IntArray, mean: int, offered: int) -> IntArray:
        """Return the tokens that each rank would take of those `offered`."""
        most, top = mean - computed, int(computed.max())
        if self._strategy == "half of gap":
            return np.maximum(most, (top - computed) // 2)
        if self._strategy == "mean plus movable":
            movable = np.zeros_like(computed)  # Tokens of a rank's own experts.
            np.add.at(movable, self._problem.owners, self._left.sum(axis=1))
            more = most + np.minimum(movable, mean)
            return np.where(computed + np.minimum(more, offered) < top, more, most)
        return most

    def _take(self, expert: int, rank: int, number: int) -> None:
        """Assign tokens to a replica: its own rank's first, the owner's last."""
        owner, left = int(self._problem.owners[expert]), self._left[expert]
        tokens = np.zeros_like(left)
        others = [one for one in range(len(left)) if one not in (rank, owner)]
        for source in (rank, *others, owner):
            tokens[source] = min(number - int(tokens.sum()), int(left[source]))
        left -= tokens
        self.taken[expert, rank] = tokens
