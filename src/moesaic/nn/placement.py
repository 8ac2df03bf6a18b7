"""Placement: the slot of every row, where some experts have guests' slots beside their own.

A rank has `each` slots: its homes, then its guests. Of a rank's rows for an expert, those that are
diverted go to copies and the rest home: in every chunk of its tokens about the same share of them,
and of those in the order of tokens. All ranks work that out from the same counts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moesaic.facts.balance import Balance, Ints
from moesaic.nn.guests import Homes


class Placement:
    """Of G ranks of a group, C chunks and E experts."""

    def __init__(self, homes: Homes, balance: Balance, counts_GCE: Ints) -> None:
        """`counts_GCE` are the rows of each."""
        self.each = homes.each + int(np.bincount(balance.copies[:, 1]).max(initial=0))
        places = homes.places
        self._homes_E = places // homes.each * self.each + places % homes.each
        self._diverted = balance.diverted[np.lexsort(balance.diverted[:, [2, 1, 0]].T)]
        self._counts_GCE = counts_GCE
        experts, sources, targets, _ = self._diverted.T
        self._slots = self._guests_slots(homes, balance)[experts, targets]
        self._parts_CM = _parts(self._diverted, counts_GCE[sources, :, experts].T)

    def _guests_slots(self, homes: Homes, balance: Balance) -> Ints:
        """[E, G]; 0 where there is no copy."""
        experts, ranks = balance.copies[homes.order(balance)].T
        first = np.searchsorted(ranks, ranks)
        found = np.zeros((len(homes.slots), homes.ranks), np.int64)
        found[experts, ranks] = ranks * self.each + homes.each + np.arange(len(ranks)) - first
        return found

    def counts(self) -> Ints:
        """Rows of each rank and chunk for all slots of the group, [G, C, G * each]."""
        ranks, chunks, _ = self._counts_GCE.shape
        found = np.zeros((ranks, chunks, ranks * self.each), np.int64)
        found[:, :, self._homes_E] = self._counts_GCE
        experts, sources, _, _ = self._diverted.T
        for chunk, parts_M in enumerate(self._parts_CM):
            np.subtract.at(found, (sources, chunk, self._homes_E[experts]), parts_M)
            np.add.at(found, (sources, chunk, self._slots), parts_M)
        return found

    def slots(self, experts_TK: Tensor, rank: int, chunk: int) -> Tensor:
        """Of rows of one rank's chunk, each for an expert, or for E: nobody."""
        device, ranks = experts_TK.device, len(self._counts_GCE)
        homes = torch.from_numpy(np.append(self._homes_E, ranks * self.each)).to(device)
        found = homes[experts_TK].view(-1)
        experts, sources, _, _ = self._diverted.T
        own = (sources == rank) & (self._parts_CM[chunk] > 0)
        if not own.any():
            return found.view_as(experts_TK)
        experts, slots, parts = experts[own], self._slots[own], self._parts_CM[chunk][own]
        asked = torch.zeros(len(homes), dtype=torch.bool)
        asked[torch.from_numpy(experts)] = True
        flat = experts_TK.reshape(-1)
        rows = asked.to(device)[flat].nonzero()[:, 0]
        rows = rows[flat[rows].argsort(stable=True)]
        # Of each of these experts the rows for copies, and then those that go home.
        first = np.searchsorted(experts, experts)
        before = np.cumsum(parts) - parts
        sizes = self._counts_GCE[rank, chunk, np.unique(experts)]
        starts = dict(zip(np.unique(experts).tolist(), np.cumsum(sizes) - sizes, strict=True))
        at = np.array([starts[expert] for expert in experts.tolist()]) + before - before[first]
        diverted = np.repeat(at - before, parts) + np.arange(parts.sum())
        chosen = torch.from_numpy(diverted).to(device)
        found[rows[chosen]] = torch.from_numpy(np.repeat(slots, parts)).to(device)
        return found.view_as(experts_TK)


def _parts(diverted: Ints, counts_CM: Ints) -> Ints:
    """How many rows of each of M diversions are of each chunk, given all rows that its rank has for
    its expert there: of all the same share, as far as whole rows go."""
    number, chunks = diverted[:, 3].copy(), len(counts_CM)
    if chunks == 1 or not len(number):
        return np.repeat(number[None], chunks, axis=0)
    pairs = diverted[:, 0] * (diverted[:, 1].max() + 1) + diverted[:, 1]
    first = np.searchsorted(pairs, pairs)
    left, found = counts_CM.sum(0), list[Ints]()
    for counts_M in counts_CM:
        after = np.cumsum(number)
        after -= (after - number)[first]  # Up to each, of the same rank and expert.
        share = np.maximum(left, 1)
        part = counts_M * after // share - counts_M * (after - number) // share
        found.append(part)
        number, left = number - part, left - counts_M
    return np.stack(found)
