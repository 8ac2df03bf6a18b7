"""Dispatch: tokens to the slots of their experts, wherever those live, and results back.

`count` says how many tokens go where, over all ranks: one all-gather of counts serves the exchange,
the balance loss, capacity and the report. `start` launches the exchange, `finish` waits for it and
puts rows in order of (slot, global token), the same whatever the layout. `combine` brings results
back and adds them up, weighted, in the order of each token's choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import Exchange, gather
from moesaic.dist.world import Group
from moesaic.nn.router import NOBODY
from moesaic.nn.slices import WHOLE, Slices

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Ranks:
    """Who takes part: this rank, everyone, and the group that shares out the experts.

    Where slices of several ranks make up an expert, tokens of all of them go to each, and those
    ranks are one place; `everyone` are then the ranks of all places with the same slice.
    """

    rank: int = 0
    everyone: Group | None = None
    group: Group | None = None
    group_ranks: tuple[int, ...] = (0,)
    slices: Slices = WHOLE
    """Ranks that share out the matrices of the same experts."""


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


@dataclass
class Sent:
    """Tokens on their way."""

    rows: Tensor
    works: list[Any]
    order: Tensor
    """Flat (token, choice) index of each row that leaves this rank, sorted by slot."""
    inverse_TK: Tensor
    """Row that carries each (token, choice); 0 where nobody does."""
    arrival: Tensor | None = None
    """Which arrived row stands at each place of slot order; None where they arrive in order."""
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)
    slot_counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


class Dispatcher:
    """Carries the tokens of one layer; it holds no parameters.

    `slots` are the experts of all slots of the group, rank by rank; absent: in turn.
    """

    def __init__(
        self,
        experts: int,
        ranks: Ranks,
        capacity: float | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        self.experts, self.ranks, self.capacity = experts, ranks, capacity
        in_turn = slots is None or list(slots) == list(range(experts))
        self._slots = None if in_turn or slots is None else list(slots)
        self._places_E: Tensor | None = None

    def count(self, experts_TK: Tensor, *, training: bool) -> Counted:
        """Count assignments over all ranks and drop those beyond capacity (while training)."""
        num_tokens, top_k = experts_TK.shape
        ids = torch.where(experts_TK == NOBODY, self.experts, experts_TK)
        ids = ids + torch.arange(top_k, device=ids.device) * (self.experts + 1)
        local = torch.bincount(ids.reshape(-1), minlength=top_k * (self.experts + 1))
        local = torch.cat((local, local.new_tensor([num_tokens])))
        everywhere = gather(local, self.ranks.everyone).cpu()
        asked_RKE = everywhere[:, :-1].view(-1, top_k, self.experts + 1)[:, :, : self.experts]
        tokens = int(everywhere[:, -1].sum())
        if self.capacity is None or not training:
            asked_KE = asked_RKE.sum(0)
            return Counted(experts_TK, asked_KE, asked_RKE.sum(1), tokens, 0)
        share = round(self.capacity * tokens * top_k / self.experts, 9)
        limit = math.ceil(min(share, tokens * top_k))
        kept_RKE = _within(asked_RKE, limit)
        kept_TK = _keep_first(experts_TK, kept_RKE[self.ranks.rank], self.experts)
        dropped = int(asked_RKE.sum() - kept_RKE.sum())
        return Counted(kept_TK, asked_RKE.sum(0), kept_RKE.sum(1), tokens, dropped)

    def start(self, tokens_TH: Tensor, counted: Counted) -> Sent:
        """Launch the exchange of tokens."""
        flat = counted.experts_TK.reshape(-1)
        flat = torch.where(flat == NOBODY, self.experts, flat)
        counts_RE = counted.counts_RE
        if self._slots is not None:  # From here on slots stand where experts did.
            flat, counts_RE = self._places(flat.device)[flat], counts_RE[:, self._slots]
        order = flat.argsort(stable=True)
        leaving = int(counts_RE[self.ranks.rank].sum())
        order = order[:leaving]
        inverse = torch.zeros_like(flat)
        inverse[order] = torch.arange(leaving, device=flat.device)
        inverse_TK = inverse.view(counted.experts_TK.shape)
        rows = Gather.apply(tokens_TH, order, inverse_TK, counted.experts_TK != NOBODY)
        sent = Sent(rows, [], order, inverse_TK)
        group = self.ranks.group
        if group is None:
            sent.slot_counts = counts_RE[self.ranks.rank]
            return sent
        share = self.experts // len(self.ranks.group_ranks)
        me = self.ranks.group_ranks.index(self.ranks.rank)
        mine_RS = counts_RE[list(self.ranks.group_ranks), me * share : (me + 1) * share]
        sent.send = counts_RE[self.ranks.rank].view(-1, share).sum(1).tolist()
        sent.receive = mine_RS.sum(1).tolist()
        sent.slot_counts = mine_RS.sum(0)
        sent.arrival = _slot_order(mine_RS).to(tokens_TH.device)
        sent.rows = Exchange.apply(rows, sent.send, sent.receive, group, sent.works)
        return sent

    def _places(self, device: torch.device) -> Tensor:
        """The slot of each expert, of all slots of the group, and after them that of nobody."""
        if self._places_E is None or self._places_E.device != device:
            assert self._slots is not None
            slots = torch.tensor([*self._slots, self.experts], device=device)
            self._places_E = slots.argsort()
        return self._places_E

    def finish(self, sent: Sent) -> tuple[Tensor, Tensor]:
        """Wait; rows in order of (slot, global token), and how many each slot has (on the host)."""
        _wait(sent.works)
        if sent.arrival is None:
            return sent.rows, sent.slot_counts
        sent.rows = Permute.apply(sent.rows, sent.arrival)
        return sent.rows, sent.slot_counts

    def combine(self, results: Tensor, weights_TK: Tensor, counted: Counted, sent: Sent) -> Tensor:
        """Bring results (in slot order) back to their tokens and add them up, weighted."""
        if sent.arrival is not None:
            back = torch.empty_like(sent.arrival)
            back[sent.arrival] = torch.arange(len(back), device=back.device)
            results = Permute.apply(results, back)
            works: list[Any] = []
            group = self.ranks.group
            results = Exchange.apply(results, sent.receive, sent.send, group, works)
            _wait(works)
        present = counted.experts_TK != NOBODY
        weights_TK = torch.where(present, weights_TK, 0.0).to(results.dtype)
        combined: Tensor = Combine.apply(results, weights_TK, sent.order, sent.inverse_TK)
        return combined


def _wait(works: list[Any]) -> None:
    """Wait for `works` and let go of them, and so of what was sent."""
    while works:
        works.pop().wait()


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


def _slot_order(counts_RS: Tensor) -> Tensor:
    """Index that takes rows from order (rank, slot) to order (slot, rank)."""
    sizes = counts_RS.reshape(-1)
    starts = (sizes.cumsum(0) - sizes).view(counts_RS.shape)
    sizes_SR, starts_SR = counts_RS.T.reshape(-1), starts.T.reshape(-1)
    ends = sizes_SR.cumsum(0)
    offset = starts_SR - (ends - sizes_SR)
    return torch.arange(int(sizes.sum())) + offset.repeat_interleave(sizes_SR)


class Gather(torch.autograd.Function):
    """Copy each token once for every expert it visits."""

    @staticmethod
    def forward(
        ctx: Any, tokens_TH: Tensor, order: Tensor, inverse_TK: Tensor, present_TK: Tensor
    ) -> Tensor:
        """Rows sorted by slot."""
        ctx.save_for_backward(inverse_TK, present_TK)
        return tokens_TH.index_select(0, order // inverse_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add up the gradients of a token's copies, in the order of its choices."""
        inverse_TK, present_TK = ctx.saved_tensors
        return _add_up(grads[0], inverse_TK, present_TK.to(grads[0].dtype)), None, None, None


class Combine(torch.autograd.Function):
    """The weighted sum of a token's results, in the order of its choices."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights_TK: Tensor, order: Tensor, inverse_TK: Tensor
    ) -> Tensor:
        """Tokens from rows."""
        ctx.save_for_backward(rows, weights_TK, order, inverse_TK)
        return _add_up(rows, inverse_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of rows and weights."""
        rows, weights_TK, order, inverse_TK = ctx.saved_tensors
        weights = weights_TK.view(-1)[order]
        grad_rows, products = torch.empty_like(rows), torch.empty_like(weights)
        # On the CPU in blocks: what lies between three passes stays in the cache.
        size = _BLOCK_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
        sources = order // inverse_TK.shape[1]
        split = (t.split(size) for t in (sources, rows, weights, grad_rows, products))
        for source, row, weight, grad_row, product in zip(*split, strict=True):
            spread = grads[0].index_select(0, source)
            torch.mul(spread, weight[:, None], out=grad_row)
            torch.sum(spread.mul_(row), dim=1, out=product)
        grad_weights = torch.zeros_like(weights_TK).view(-1)
        grad_weights[order] = products
        return grad_rows, grad_weights.view(weights_TK.shape), None, None


class Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        """rows[index]."""
        ctx.save_for_backward(index)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The same rows, back in their old order."""
        (index,) = ctx.saved_tensors
        result = torch.empty_like(grads[0])
        result[index] = grads[0]
        return result, None


def _add_up(rows: Tensor, inverse_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Sum over k of weights[t, k] * rows[inverse[t, k]], without the [T, K, H] between."""
    if rows.shape[0] == 0 or inverse_TK.shape[0] == 0:
        return rows.new_zeros((inverse_TK.shape[0], rows.shape[1]))
    return F.embedding_bag(inverse_TK, rows, mode="sum", per_sample_weights=weights_TK)
