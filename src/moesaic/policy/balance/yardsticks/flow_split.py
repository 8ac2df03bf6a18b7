"""Compiled search for the token split with the smallest maximum load: a max-flow over replica
slots.

X experts with replicas, P slots of these experts (owners and replicas), D ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesaic.base.compiled import cached_njit
from moesaic.facts.balance import BalanceProblem, IntArray


class ReplicaSlots(NamedTuple):
    """Slots in which experts with replicas can be computed."""

    experts: IntArray
    """Experts with replicas, [X]."""
    expert_offsets: IntArray
    """First slot of each expert, its owner's, and the end, [X + 1]."""
    slot_expert: IntArray
    """Expert of each slot, as an index into `experts`, [P]."""
    slot_rank: IntArray
    """Rank of each slot, [P]."""
    rank_offsets: IntArray
    """First position of each rank in `slots_by_rank`, and the end, [D + 1]."""
    slots_by_rank: IntArray
    """Slots, ordered by rank, [P]."""

    @classmethod
    def from_replicas(cls, replicas: IntArray, problem: BalanceProblem) -> ReplicaSlots:
        """Lay out slots of sorted replicas (expert, rank)."""
        experts, first, number = np.unique(replicas[:, 0], return_index=True, return_counts=True)
        rank = np.insert(replicas[:, 1], first, problem.owners[experts])
        return cls(
            experts, np.append(0, np.cumsum(number + 1)),
            np.repeat(np.arange(len(experts)), number + 1), rank,
            np.append(0, np.cumsum(np.bincount(rank, minlength=problem.num_ranks))),
            np.argsort(rank, kind="stable"),
        )  # fmt: skip


def minimize_max_load(counts_XD: Any, fixed_load: IntArray, slots: ReplicaSlots) -> IntArray:
    """Return the tokens of each slot, [P], that minimize the busiest rank's load.

    Args:
        counts_XD: routed tokens of experts with replicas by source.
        fixed_load: tokens of experts without replicas by rank, [D].
        slots: slots of experts with replicas.
    """
    target = -(-(int(counts_XD.sum()) + int(fixed_load.sum())) // len(fixed_load))
    start = _local_split(counts_XD, slots)
    rows, needed = _shift_tokens(start.copy(), fixed_load, slots, target)
    if needed > target:  # Repeat with the final target, so that no token moves without need.
        rows, _ = _shift_tokens(start, fixed_load, slots, needed)
    found: IntArray = rows
    return found


@cached_njit
def _local_split(counts_XD: Any, slots: ReplicaSlots) -> Any:
    """Return the tokens of each slot if ranks with replicas compute their own tokens."""
    rows = np.zeros(len(slots.slot_rank), np.int64)
    for expert in range(len(slots.experts)):
        owner_slot = slots.expert_offsets[expert]
        rows[owner_slot] = counts_XD[expert].sum()
        for slot in range(owner_slot + 1, slots.expert_offsets[expert + 1]):
            rows[slot] = counts_XD[expert, slots.slot_rank[slot]]
            rows[owner_slot] -= rows[slot]
    return rows


@cached_njit
def _shift_tokens(
    slot_tokens: IntArray, fixed_load: IntArray, slots: ReplicaSlots, target: int
) -> tuple[Any, int]:
    """Return tokens by slot, and the smallest possible maximum load that is at least `target`.

    Tokens move along paths of ranks: each rank takes tokens of one expert and hands on as many of
    another, up to a rank below the target. If no path exists, the ranks that were reached must keep
    all their tokens. Their mean, rounded up, is a lower bound and becomes the new target. So the
    target never exceeds the optimum, and reaches it in the end.
    """
    load = fixed_load.copy()
    for slot in range(len(slot_tokens)):
        load[slots.slot_rank[slot]] += slot_tokens[slot]
    search = (
        np.zeros(len(load), np.int64), np.zeros(len(slots.experts), np.int64),
        np.empty(len(load), np.int64), np.empty(len(load), np.int64),
        np.empty(len(load), np.int64),
    )  # fmt: skip
    queue, leaves, gets = search[2:]
    turn = 0
    for rank in range(len(load)):
        while load[rank] > target:
            turn += 1
            reached, end = _find_path(slot_tokens, load, slots, target, rank, turn, search)
            if end < 0:
                total = 0
                for at in range(reached):
                    total += load[queue[at]]
                target = -(-total // reached)
                continue
            number = min(load[rank] - target, target - load[end])
            at = end
            while at != rank:
                number = min(number, slot_tokens[leaves[at]])
                at = slots.slot_rank[leaves[at]]
            load[rank] -= number
            load[end] += number
            while end != rank:
                slot_tokens[leaves[end]] -= number
                slot_tokens[gets[end]] += number
                end = slots.slot_rank[leaves[end]]
    return slot_tokens, target


@cached_njit
def _find_path(
    slot_tokens: IntArray,
    load: IntArray,
    slots: ReplicaSlots,
    target: int,
    first: int,
    search_id: int,
    buffers: Any,
) -> tuple[int, int]:
    """Find the nearest rank with room by breadth-first search from `first`.

    Return how many ranks the search reached, and that rank, or -1. For each rank on the path,
    `leaves` and `gets` hold the slots that tokens leave and enter.
    """
    seen, seen_X, queue, leaves, gets = buffers
    seen[first], queue[0] = search_id, first
    at, reached = 0, 1
    while at < reached:
        rank = queue[at]
        at += 1
        for one in slots.slots_by_rank[slots.rank_offsets[rank] : slots.rank_offsets[rank + 1]]:
            expert = slots.slot_expert[one]
            if slot_tokens[one] == 0 or seen_X[expert] == search_id:
                continue
            seen_X[expert] = search_id
            for other in range(slots.expert_offsets[expert], slots.expert_offsets[expert + 1]):
                to = slots.slot_rank[other]
                if seen[to] == search_id:
                    continue
                seen[to], queue[reached] = search_id, to
                leaves[to], gets[to] = one, other
                reached += 1
                if load[to] < target:
                    return reached, to
    return reached, -1
