"""Plain implementation of quota, step by step: the reference for the compiled search."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import (
    count_rank_tokens,
    count_replica_transfers,
    layer_times,
    layer_times_from_tokens,
)
from moesaic.policy.balance.quota import max_local_replicas

_Strategy = Literal["up to mean", "half of gap", "mean plus movable", "local tokens"]
_MIN_SPEEDUP = 1.01
"""Smallest speedup for which replicas are made."""


def slow_quota(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Return the fastest state of all strategies, from tokens on owner ranks to equal loads."""
    found, least_s = (
        no_replicas(),
        layer_times(counts, problem, no_replicas()).total_s / _MIN_SPEEDUP,
    )
    for strategy in get_args(_Strategy):
        state, best = _State(counts, problem, strategy), 0
        most = max_local_replicas(counts, least_s) if strategy == "local tokens" else counts.size
        while state.num_replicas < most and state.add_replica():
            step_s = state.step_s()
            if step_s < least_s:
                least_s, best = step_s, state.num_replicas
        if best:
            found = state.sources.balance(best)
    return found


class _State:
    """State of the search: tokens and replicas by rank."""

    def __init__(self, counts: IntArray, problem: BalanceProblem, strategy: _Strategy) -> None:
        self._counts, self._problem, self._strategy, self.num_replicas = (
            counts,
            problem,
            strategy,
            0,
        )
        self._tokens = count_rank_tokens(counts, problem.owners, no_replicas())
        self._replicas = count_replica_transfers(no_replicas(), problem)
        self.sources = Sources(counts, problem)
        self._owner_tokens = counts.sum(axis=0)
        self._mean = -(-int(self._owner_tokens.sum()) // problem.num_ranks)
        experts = len(problem.owners)
        self._free_slots = np.full(
            problem.num_ranks, experts if problem.max_replicas is None else problem.max_replicas
        )
        self._max_sent = (
            counts.size if problem.max_replicas_sent is None else problem.max_replicas_sent
        )
        self._by_rank = [
            np.flatnonzero(problem.owners == rank) for rank in range(problem.num_ranks)
        ]
        self._has_replica = np.zeros((problem.num_ranks, experts), bool)
        self._movable = self._tokens.computed.copy()
        """Tokens of each rank's own experts that it can still hand over."""

    def step_s(self) -> float:
        """Return the layer's seconds in this state."""
        return layer_times_from_tokens(self._tokens, *self._replicas, self._problem).total_s

    def add_replica(self) -> bool:
        """Add one replica, if a useful one exists."""
        if self._strategy == "local tokens":
            return self._add_local_replica()
        computed = self._tokens.computed
        busiest = int(computed.argmax())
        excess = int(computed[busiest]) - self._mean
        if excess < max(self._problem.min_replica_tokens, 1):
            return False
        if self._replicas[0][busiest] >= self._max_sent:
            return False
        own = self._by_rank[busiest]
        for expert in own[np.argsort(-self._owner_tokens[own], kind="stable")].tolist():
            found = self._best_receiver(expert, min(excess, int(self._owner_tokens[expert])))
            if found is not None:
                self._apply(expert, busiest, *found)
                return True
        return False

    def _add_local_replica(self) -> bool:
        """Add the replica for local tokens that relieves the rank with the most traffic."""
        problem, (computed, sent, received) = self._problem, self._tokens
        own = np.stack([self.sources.left(expert) for expert in range(len(problem.owners))])
        allowed = (
            ~self._has_replica.T
            & (own >= max(problem.min_replica_tokens, 1))
            & (self._free_slots > 0)
        )
        allowed[np.arange(len(own)), problem.owners] = False
        allowed[self._replicas[0][problem.owners] >= self._max_sent] = False
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
        if saved[expert, rank] <= 0:
            return False
        self._apply(expert, int(problem.owners[expert]), rank, int(own[expert, rank]))
        return True

    def _best_receiver(self, expert: int, number: int) -> tuple[int, int] | None:
        """Return the rank that saves most by taking some of `number` tokens, and how many."""
        problem, least = self._problem, max(self._problem.min_replica_tokens, 1)
        accepted = np.minimum(self._limits(number), number)
        accepted[(self._free_slots <= 0) | self._has_replica[:, expert]] = 0
        saved = accepted * (problem.num_passes / problem.expert_tokens_per_s)
        local = np.minimum(self._counts[:, expert], accepted)
        saved += local * (problem.num_exchanges * problem.token_bytes / problem.bytes_per_s)
        saved[accepted < least] = 0
        rank = int(saved.argmax())
        return (rank, int(accepted[rank])) if saved[rank] > 0 else None

    def _limits(self, number: int) -> IntArray:
        """Return the tokens that each rank would take of `number`."""
        computed, most = self._tokens.computed, self._mean - self._tokens.computed
        top = int(computed.max())
        if self._strategy == "half of gap":
            return np.maximum(most, (top - computed) // 2)
        if self._strategy == "mean plus movable":
            more = most + np.minimum(self._movable, self._mean)
            return np.where(computed + np.minimum(more, number) < top, more, most)
        return most

    def _apply(self, expert: int, owner: int, rank: int, number: int) -> None:
        taken = self.sources.take(expert, rank, number)
        computed, sent, received = self._tokens
        computed[owner] -= number
        computed[rank] += number
        sent -= taken  # Undo the traffic to the owner,
        sent[owner] += taken[owner]
        received[owner] -= number - int(taken[owner])
        sent += taken  # then count the traffic to the replica.
        sent[rank] -= taken[rank]
        received[rank] += number - int(taken[rank])
        self._replicas[0][owner] += 1
        self._replicas[1][rank] += 1
        self._owner_tokens[expert] -= number
        self._movable[owner] -= number
        self._free_slots[rank] -= 1
        self._has_replica[rank, expert] = True
        self.num_replicas += 1


class Sources:
    """Tokens by expert and source that are still assigned to owners.

    A replica takes its own rank's tokens first, then those that other ranks would send to the
    owner, and the owner's last.
    """

    def __init__(self, counts: IntArray, problem: BalanceProblem) -> None:
        self._counts, self._owners = counts, problem.owners
        self._left: dict[int, IntArray] = {}
        self._taken: dict[tuple[int, int], IntArray] = {}

    def left(self, expert: int) -> IntArray:
        """Return the tokens of `expert` that are left for the owner, by source rank."""
        return self._left.get(expert, self._counts[:, expert])

    def take(self, expert: int, rank: int, number: int) -> IntArray:
        """Assign `number` tokens of `expert` to its replica on `rank`, and return them by source
        rank."""
        left = self._left.setdefault(expert, self._counts[:, expert].copy())
        found = np.zeros_like(left)
        found[rank] = min(number, int(left[rank]))
        owner = int(self._owners[expert])
        others = left.copy()
        others[[rank, owner]] = 0
        wanted = number - int(found[rank])
        before = np.cumsum(others) - others
        found += np.clip(wanted - before, 0, others)
        found[owner] += number - int(found.sum())
        left -= found
        self._taken[expert, rank] = found
        return found

    def balance(self, moves: int | None = None) -> BalanceDecision:
        """Return the decision for everything taken, or for the first `moves` replicas."""
        taken = list(self._taken.items())[:moves]
        if not taken:
            return no_replicas()
        replicas, rerouted = [key for key, _ in taken], list[tuple[int, int, int, int]]()
        for (expert, rank), found in taken:
            rerouted += [(expert, int(at), rank, int(found[at])) for at in np.flatnonzero(found)]
        return BalanceDecision(
            np.array(sorted(replicas), np.int64), np.array(sorted(rerouted), np.int64)
        )
