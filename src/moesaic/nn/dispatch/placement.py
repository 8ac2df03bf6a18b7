"""Slots of rows when some experts have replicas.

Each rank has `slots_per_rank` slots: its own experts, then its replicas. Rerouted rows go to
replicas, the others to the owner rank. Each chunk reroutes about the same share of a rank's rows
for an expert, the first ones in token order. All ranks derive this from the same counts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moesaic.facts.balance import BalanceDecision, IntArray
from moesaic.nn.experts.replicas import ExpertPlacement


class ReplicaPlacement:
    """Slots of all rows of a balanced layer; G ranks of the EP group, C chunks, E experts.

    The M reroutes are the rows of `BalanceDecision.rerouted`.
    """

    def __init__(
        self, expert_placement: ExpertPlacement, balance: BalanceDecision, counts_GCE: IntArray
    ) -> None:
        """Place rows.

        Args:
            expert_placement: slots of the owned experts.
            balance: replicas and rerouted rows.
            counts_GCE: rows of each rank and chunk for each expert.
        """
        self.slots_per_rank = expert_placement.slots_per_rank + int(
            np.bincount(balance.replicas[:, 1]).max(initial=0)
        )
        slots = expert_placement.slot_of_expert
        self._owner_slots_E = (
            slots // expert_placement.slots_per_rank * self.slots_per_rank
            + slots % expert_placement.slots_per_rank
        )
        self._reroutes = balance.rerouted[np.lexsort(balance.rerouted[:, [2, 1, 0]].T)]
        self._counts_GCE = counts_GCE
        experts, sources, targets, _ = self._reroutes.T
        self._target_slots = self._replica_slots(expert_placement, balance)[experts, targets]
        self._rerouted_CM = _split_over_chunks(self._reroutes, counts_GCE[sources, :, experts].T)

    def _replica_slots(
        self, expert_placement: ExpertPlacement, balance: BalanceDecision
    ) -> IntArray:
        """Return the slot of each (expert, rank) replica, [E, G]; 0 where there is none."""
        experts, ranks = balance.replicas[expert_placement.replica_order(balance)].T
        first = np.searchsorted(ranks, ranks)
        slots = np.zeros((len(expert_placement.slot_experts), expert_placement.num_ranks), np.int64)
        slots[experts, ranks] = (
            ranks * self.slots_per_rank
            + expert_placement.slots_per_rank
            + np.arange(len(ranks))
            - first
        )
        return slots

    def slot_counts(self) -> IntArray:
        """Return the rows of each rank and chunk for all slots, [G, C, G * slots_per_rank]."""
        ranks, chunks, _ = self._counts_GCE.shape
        counts = np.zeros((ranks, chunks, ranks * self.slots_per_rank), np.int64)
        counts[:, :, self._owner_slots_E] = self._counts_GCE
        experts, sources, _, _ = self._reroutes.T
        for chunk, rerouted_M in enumerate(self._rerouted_CM):
            np.subtract.at(counts, (sources, chunk, self._owner_slots_E[experts]), rerouted_M)
            np.add.at(counts, (sources, chunk, self._target_slots), rerouted_M)
        return counts

    def assign_slots(self, experts_TK: Tensor, rank: int, chunk: int) -> Tensor:
        """Return the slot of each choice of one rank's chunk, [T, K]; expert E stands for none."""
        device, ranks = experts_TK.device, len(self._counts_GCE)
        owner_slots = np.append(self._owner_slots_E, ranks * self.slots_per_rank)
        assigned = torch.from_numpy(owner_slots).to(device)[experts_TK].view(-1)
        experts, sources, _, _ = self._reroutes.T
        own = (sources == rank) & (self._rerouted_CM[chunk] > 0)
        if not own.any():
            return assigned.view_as(experts_TK)
        experts, slots = experts[own], self._target_slots[own]
        rerouted = self._rerouted_CM[chunk][own]
        is_rerouted = torch.zeros(len(owner_slots), dtype=torch.bool)
        is_rerouted[torch.from_numpy(experts)] = True
        flat = experts_TK.reshape(-1)
        rows = is_rerouted.to(device)[flat].nonzero()[:, 0]
        rows = rows[flat[rows].argsort(stable=True)]
        # `rows` is sorted by expert. The first rows of an expert go to its replicas in turn.
        first = np.searchsorted(experts, experts)
        before = np.cumsum(rerouted) - rerouted
        sizes = self._counts_GCE[rank, chunk, np.unique(experts)]
        starts = dict(zip(np.unique(experts).tolist(), np.cumsum(sizes) - sizes, strict=True))
        at = np.array([starts[expert] for expert in experts.tolist()]) + before - before[first]
        index = np.repeat(at - before, rerouted) + np.arange(rerouted.sum())
        chosen = torch.from_numpy(index).to(device)
        assigned[rows[chosen]] = torch.from_numpy(np.repeat(slots, rerouted)).to(device)
        return assigned.view_as(experts_TK)


def _split_over_chunks(reroutes: IntArray, counts_CM: IntArray) -> IntArray:
    """Return the rows of each of M reroutes in each chunk, [C, M].

    `counts_CM` has all rows that the reroute's source rank has for its expert. Each chunk gives the
    same share of them, up to whole rows.
    """
    remaining, chunks = reroutes[:, 3].copy(), len(counts_CM)
    if chunks == 1 or not len(remaining):
        return np.repeat(remaining[None], chunks, axis=0)
    pairs = reroutes[:, 0] * (reroutes[:, 1].max() + 1) + reroutes[:, 1]
    first = np.searchsorted(pairs, pairs)
    remaining_counts, split = counts_CM.sum(0), list[IntArray]()
    for counts_M in counts_CM:
        after = np.cumsum(remaining)
        after -= (after - remaining)[first]  # Running sum within each (expert, source rank).
        total = np.maximum(remaining_counts, 1)
        part = counts_M * after // total - counts_M * (after - remaining) // total
        split.append(part)
        remaining, remaining_counts = remaining - part, remaining_counts - counts_M
    return np.stack(split)
