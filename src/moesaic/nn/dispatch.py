"""Dispatch: tokens to the slots of their experts, wherever those live, and results back.

`count` says how many tokens go where, over all ranks: one all-gather of counts serves the exchange,
the balance loss, capacity and the report. `start` launches the exchange of tokens. However they
travel, rows come about in order of (slot, global token), the same whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import gather
from moesaic.nn.router import NOBODY
from moesaic.nn.travel import ByRows, Leaving, Ranks, RowsByHosts, Sent, Stay
from moesaic.nn.visits import ByHosts, ByVisits, Visits, stops


@dataclass(frozen=True)
class Counted:
    """Where tokens go; R ranks, K choices, E experts. All tensors on the host but `experts_TK`."""

    experts_TK: Tensor
    """Choices of this rank's tokens, NOBODY where given up or dropped."""
    asked_KE: Tensor
    """Assignments that routers asked for, over all ranks."""
    counts_RE: Tensor
    """Assignments that are carried out."""
    num_tokens: int
    """Tokens over all ranks."""
    dropped: int
    """Assignments dropped for want of capacity, over all ranks."""
    visits: Visits | None
    """Where tokens go that travel once to each rank."""


class Dispatcher:
    """Carries the tokens of one layer; it holds no parameters.

    `slots` are the experts of all slots of the group, rank by rank; absent: in turn. A token
    travels once for each of its experts, or in `visits`, once to each rank that has some.
    """

    def __init__(
        self,
        experts: int,
        ranks: Ranks,
        capacity: float | None = None,
        slots: Sequence[int] | None = None,
        *,
        visits: bool = False,
    ) -> None:
        self.experts, self.ranks, self.capacity = experts, ranks, capacity
        in_turn = slots is None or list(slots) == list(range(experts))
        self._slots = None if in_turn or slots is None else list(slots)
        self._places_E: Tensor | None = None
        self._stops = _stops(ranks) if visits else []

    def count(self, experts_TK: Tensor, *, training: bool) -> Counted:
        """Count assignments over all ranks and drop those beyond capacity (while training)."""
        num_tokens, top_k = experts_TK.shape
        known_TK = torch.where(experts_TK == NOBODY, self.experts, experts_TK)
        ids = known_TK + torch.arange(top_k, device=known_TK.device) * (self.experts + 1)
        local = torch.bincount(ids.reshape(-1), minlength=top_k * (self.experts + 1))
        slots_TK = self._to_slots(known_TK) if self._stops else known_TK
        asked_TP = [stops(slots_TK, self.experts, places) for places in self._stops]
        said = torch.cat((local, local.new_tensor([num_tokens]), *(one.sum(0) for one in asked_TP)))
        everywhere = gather(said, self.ranks.everyone).cpu()
        asked_R, tokens_R, visits_RP = everywhere.split((len(local), 1, sum(self._stops)), dim=1)
        asked_RKE = asked_R.view(-1, top_k, self.experts + 1)[:, :, : self.experts]
        visits = Visits(slots_TK, torch.cat(asked_TP, dim=1), visits_RP) if asked_TP else None
        tokens = int(tokens_R.sum())
        if self.capacity is None or not training:
            asked_KE = asked_RKE.sum(0)
            return Counted(experts_TK, asked_KE, asked_RKE.sum(1), tokens, 0, visits)
        share = round(self.capacity * tokens * top_k / self.experts, 9)
        limit = math.ceil(min(share, tokens * top_k))
        kept_RKE = _within(asked_RKE, limit)
        kept_TK = _keep_first(experts_TK, kept_RKE[self.ranks.rank], self.experts)
        dropped = int(asked_RKE.sum() - kept_RKE.sum())
        return Counted(kept_TK, asked_RKE.sum(0), kept_RKE.sum(1), tokens, dropped, visits)

    def start(self, tokens_TH: Tensor, weights_TK: Tensor, counted: Counted) -> Sent:
        """Launch the exchange of tokens."""
        present_TK = counted.experts_TK != NOBODY
        slots_TK = torch.where(present_TK, counted.experts_TK, self.experts)
        slots_TK, counts_RS = self._to_slots(slots_TK), counted.counts_RE
        if self._slots is not None:
            counts_RS = counts_RS[:, self._slots]
        weights_TK = torch.where(present_TK, weights_TK, 0.0).to(tokens_TH.dtype)
        leaving = Leaving(tokens_TH, weights_TK, slots_TK, present_TK, counts_RS)
        if not self.ranks.carriers:
            return Stay(leaving, self.ranks)
        straight = len(self.ranks.carriers) == 1
        if counted.visits is None:
            return (ByRows if straight else RowsByHosts)(leaving, self.ranks)
        return (ByVisits if straight else ByHosts)(leaving, self.ranks, counted.visits)

    def _to_slots(self, experts: Tensor) -> Tensor:
        """The slot of each expert, of all slots of the group, and after them that of nobody."""
        if self._slots is None:
            return experts
        if self._places_E is None or self._places_E.device != experts.device:
            slots = torch.tensor([*self._slots, self.experts], device=experts.device)
            self._places_E = slots.argsort()
        return self._places_E[experts]


def _stops(ranks: Ranks) -> list[int]:
    """Where tokens stop that travel once to each: how many ranks, and how many hosts."""
    if not ranks.carriers:
        return []
    first, *more = ranks.carriers
    return [len(ranks.group_ranks), *([first.group.size()] if more else [])]


def _within(asked_RKE: Tensor, limit: int) -> Tensor:
    """How many of each rank's assignments fit: first choices of all ranks before second ones."""
    ranks, top_k, experts = asked_RKE.shape
    queue = asked_RKE.transpose(0, 1).reshape(top_k * ranks, experts)
    before = queue.cumsum(0) - queue
    kept = torch.minimum(queue, (limit - before).clamp(min=0))
    return kept.view(top_k, ranks, experts).transpose(0, 1)


def _keep_first(experts_TK: Tensor, kept_KE: Tensor, experts: int) -> Tensor:
    """Choices with all but the first `kept_KE` tokens of each (choice, expert) dropped."""
    result = experts_TK.clone()
    for choice in range(experts_TK.shape[1]):
        column = torch.where(experts_TK[:, choice] == NOBODY, experts, experts_TK[:, choice])
        order = column.argsort(stable=True)
        ordered = column[order]
        starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=column.device))
        place = torch.arange(len(column), device=column.device) - starts[ordered]
        limits = F.pad(kept_KE[choice], (0, 1)).to(column.device)
        result[order[place >= limits[ordered]], choice] = NOBODY
    return result
