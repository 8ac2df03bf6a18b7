"""Expert migration: new owner ranks for experts, from the loads of previous steps.

The number of experts per rank stays. Candidates are:

- swaps of the busiest rank's experts with others, the best swap first, as in SmartMoE
- a new packing, largest expert first to the least loaded rank, as in EPLB

The candidate with the largest predicted gain wins. The gain is what it saves over as many future
steps, minus the cost of moving. If no candidate has a gain, no expert moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import BalanceProblem, IntArray
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.balance.cost_model import load_imbalance


class MigrationCosts(NamedTuple):
    """Costs of loads and of migration."""

    token_s: float
    """Seconds per additional routed token on the busiest rank, forward and backward."""
    expert_s: float
    """Seconds per expert that leaves a rank, with its moments, while another one arrives."""
    exchange_s: float
    """Seconds per exchange, independent of its size."""


class MigrationFacts(NamedTuple):
    """Facts of a migration decision."""

    expert_tokens: IntArray
    """Routed tokens of each expert, [experts]."""
    slots: Sequence[int]
    """Expert in each slot of two ranks or more."""
    num_ranks: int
    costs: MigrationCosts


class Migration(NamedTuple):
    """New slots of a layer's experts, with their gain."""

    slots: tuple[int, ...]
    """Expert in each slot of a group of ranks, rank by rank; an expert that stays keeps its slot.
    """
    moves: tuple[tuple[int, int, int], ...]
    """Moves (expert, from, to), sorted by expert."""
    gain_s: float
    """Seconds saved over as many future steps, minus the cost of moving."""
    imbalance_before: float
    """Tokens of the busiest rank over the mean, with old owners."""
    imbalance_after: float
    """Tokens of the busiest rank over the mean, with new owners."""


def can_migrate(job: Job, plan: Plan) -> bool:
    """Return whether experts may migrate."""
    return job.balance.migrate_every > 0 and plan.ep > 1 and job.model.experts > 0


def migration_costs(
    problem: BalanceProblem, expert_bytes: float, num_groups: int
) -> MigrationCosts:
    """Return costs for `num_groups` groups of ranks that share a layer's tokens equally.

    Every rank of a group sends equally many tokens. The busiest rank's traffic is what it receives,
    except its own tokens.
    """
    remote_fraction = (1 - 1 / problem.num_ranks) * (1.0 if problem.overlaps else 0.5)
    row_s = problem.num_passes / problem.expert_tokens_per_s
    row_s += problem.num_exchanges * remote_fraction * problem.token_bytes / problem.bytes_per_s
    return MigrationCosts(row_s / num_groups, expert_bytes / problem.bytes_per_s, problem.latency_s)


def plan_migration(facts: MigrationFacts) -> Migration:
    """Return new owners for the experts."""
    expert_tokens, slots, num_ranks, cost = facts
    each = len(slots) // num_ranks
    owners: IntArray = np.argsort(slots) // each
    best, best_s = owners, 0.0
    for other in (
        *_swap_owners(expert_tokens, owners, num_ranks),
        _pack_owners(expert_tokens, owners, num_ranks),
    ):
        gain_s = migration_gain_s(expert_tokens, owners, other, num_ranks, cost)
        if gain_s > best_s:
            best, best_s = other, gain_s
    moved = np.flatnonzero(best != owners)
    moves = zip(moved.tolist(), owners[moved].tolist(), best[moved].tolist(), strict=True)
    spread = (load_imbalance(_rank_loads(expert_tokens, one, num_ranks)) for one in (owners, best))
    return Migration(_assign_slots(slots, best, each), tuple(moves), best_s, *spread)


def migration_gain_s(
    expert_tokens: IntArray,
    owners: IntArray,
    new_owners: IntArray,
    num_ranks: int,
    cost: MigrationCosts,
) -> float:
    """Return the seconds that `new_owners` save, minus the cost of moving there."""
    moved = np.bincount(owners[owners != new_owners], minlength=num_ranks).max()
    if not moved:
        return 0.0
    fewer = (
        _rank_loads(expert_tokens, owners, num_ranks).max()
        - _rank_loads(expert_tokens, new_owners, num_ranks).max()
    )
    return float(fewer * cost.token_s - moved * cost.expert_s - cost.exchange_s)


def _rank_loads(expert_tokens: IntArray, owners: IntArray, num_ranks: int) -> IntArray:
    best = np.zeros(num_ranks, np.int64)
    np.add.at(best, owners, expert_tokens)
    return best


def _swap_owners(expert_tokens: IntArray, owners: IntArray, num_ranks: int) -> Iterator[IntArray]:
    """Yield owners after one swap, after two, and so on, while each swap lowers the maximum load.

    Any assignment is reachable with fewer swaps than experts.
    """
    owners, loads = owners.copy(), _rank_loads(expert_tokens, owners, num_ranks)
    for _ in range(len(owners)):
        rank = int(loads.argmax())
        own, others = np.flatnonzero(owners == rank), np.flatnonzero(owners != rank)
        fewer = expert_tokens[own][:, None] - expert_tokens[others]
        worse = np.maximum(loads[rank] - fewer, loads[owners[others]] + fewer)
        place = int(worse.argmin())
        if worse.flat[place] >= loads[rank]:
            return
        own_expert, other_expert = own[place // len(others)], others[place % len(others)]
        loads[rank] -= expert_tokens[own_expert] - expert_tokens[other_expert]
        loads[owners[other_expert]] += expert_tokens[own_expert] - expert_tokens[other_expert]
        owners[own_expert], owners[other_expert] = owners[other_expert], rank
        yield owners.copy()


def _pack_owners(expert_tokens: IntArray, owners: IntArray, num_ranks: int) -> IntArray:
    """Return a new packing: largest expert first to the least loaded rank that has a free slot.

    Bins are matched to ranks so that many experts stay.
    """
    each = len(owners) // num_ranks
    loads, number, group_of_expert = (
        np.zeros(num_ranks),
        np.zeros(num_ranks, np.int64),
        np.zeros_like(owners),
    )
    for expert in np.argsort(-expert_tokens, kind="stable").tolist():
        group = int(np.where(number < each, loads, np.inf).argmin())
        group_of_expert[expert] = group
        loads[group] += expert_tokens[expert]
        number[group] += 1
    stay = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(stay, (group_of_expert, owners), 1)
    rank_of_group = np.zeros(num_ranks, np.int64)
    for _ in range(num_ranks):
        group, rank = divmod(int(stay.argmax()), num_ranks)
        rank_of_group[group] = rank
        stay[group], stay[:, rank] = -1, -1
    best: IntArray = rank_of_group[group_of_expert]
    return best


def _assign_slots(slots: Sequence[int], owners: IntArray, slots_per_rank: int) -> tuple[int, ...]:
    """Return the expert in each slot for `owners`.

    An expert that stays on its rank keeps its slot. Others take free slots in the order of experts.
    """
    stays = [int(owners[expert]) == at // slots_per_rank for at, expert in enumerate(slots)]
    arriving = sorted(expert for at, expert in enumerate(slots) if not stays[at])
    best = list(slots)
    for at, stay in enumerate(stays):
        if not stay:
            best[at] = next(expert for expert in arriving if owners[expert] == at // slots_per_rank)
            arriving.remove(best[at])
    return tuple(best)
