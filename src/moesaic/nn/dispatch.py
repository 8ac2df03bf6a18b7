"""Dispatch: tokens to the slots of their experts, wherever those live, and results back.

`count` says how many tokens go where, over all ranks: one all-gather of counts serves the exchange,
the balance loss, capacity and the report. `start` launches the exchange, `finish` waits for it and
says how rows come about in order of (slot, global token), the same whatever the layout. `combine`
brings results back and adds them up, weighted, in the order of each token's choices. Tokens that
stay on their rank are neither copied nor brought back: experts read and add up by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import gather
from moesaic.dist.exchange import Carrier, Exchange, Work
from moesaic.dist.world import Group
from moesaic.nn.router import NOBODY
from moesaic.nn.routes import Routes, add_up, inverse
from moesaic.nn.slices import WHOLE, Slices

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Ranks:
    """Who takes part: this rank, everyone, and those that share out the experts.

    Where slices of several ranks make up an expert, tokens of all of them go to each, and those
    ranks are one place; `everyone` are then the ranks of all places with the same slice.
    """

    rank: int = 0
    everyone: Group | None = None
    carrier: Carrier | None = None
    """Takes rows to the ranks that share out the experts."""
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
    """Those that arrive; tokens themselves where all experts are on this rank."""
    weights_TK: Tensor
    home: Routes
    """From this rank's tokens to the rows that leave it."""
    arrived: Routes | None = None
    """From the rows that arrive to those of this rank's experts; None where none travels."""
    works: list[Work] = field(default_factory=list)
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)


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

    def start(self, tokens_TH: Tensor, weights_TK: Tensor, counted: Counted) -> Sent:
        """Launch the exchange of tokens."""
        present_TK = counted.experts_TK != NOBODY
        flat = torch.where(present_TK, counted.experts_TK, self.experts).reshape(-1)
        counts_RE = counted.counts_RE
        if self._slots is not None:  # From here on slots stand where experts did.
            flat, counts_RE = self._places(flat.device)[flat], counts_RE[:, self._slots]
        counts_E = counts_RE[self.ranks.rank]
        order = flat.argsort(stable=True)[: int(counts_E.sum())]
        rows_TK = inverse(order, len(flat)).view(present_TK.shape)
        home = Routes(counts_E, order, rows_TK, present_TK)
        weights_TK = torch.where(present_TK, weights_TK, 0.0).to(tokens_TH.dtype)
        carrier = self.ranks.carrier
        if carrier is None:
            return Sent(tokens_TH, weights_TK, home)
        share = self.experts // len(self.ranks.group_ranks)
        me = self.ranks.group_ranks.index(self.ranks.rank)
        mine_RS = counts_RE[list(self.ranks.group_ranks), me * share : (me + 1) * share]
        sent = Sent(tokens_TH, weights_TK, home)
        sent.send = counts_E.view(-1, share).sum(1).tolist()
        sent.receive = mine_RS.sum(1).tolist()
        rows = Gather.apply(tokens_TH, *home[1:])
        sent.rows = Exchange.apply(rows, sent.send, sent.receive, carrier, sent.works)
        arrival = _slot_order(mine_RS).to(tokens_TH.device)
        sent.arrived = Routes(mine_RS.sum(0), arrival)
        return sent

    def _places(self, device: torch.device) -> Tensor:
        """The slot of each expert, of all slots of the group, and after them that of nobody."""
        if self._places_E is None or self._places_E.device != device:
            assert self._slots is not None
            slots = torch.tensor([*self._slots, self.experts], device=device)
            self._places_E = slots.argsort()
        return self._places_E

    def finish(self, sent: Sent) -> tuple[Tensor, Routes, Tensor | None]:
        """Wait; what has arrived, how experts take it, and weights if they are to add up."""
        _wait(sent.works)
        if sent.arrived is None:
            return sent.rows, sent.home, sent.weights_TK
        return sent.rows, sent.arrived, None

    def combine(self, results: Tensor, sent: Sent) -> Tensor:
        """Bring results of what has arrived back to their tokens and add them up, weighted."""
        if sent.arrived is None:
            return results
        works: list[Work] = []
        results = Exchange.apply(results, sent.receive, sent.send, self.ranks.carrier, works)
        _wait(works)
        combined: Tensor = Combine.apply(results, sent.weights_TK, *sent.home[1:3])
        return combined


def _wait(works: list[Work]) -> None:
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
        ctx: Any, tokens_TH: Tensor, order: Tensor, rows_TK: Tensor, present_TK: Tensor
    ) -> Tensor:
        """Rows sorted by slot."""
        ctx.save_for_backward(rows_TK, present_TK)
        return tokens_TH.index_select(0, order // rows_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add up the gradients of a token's copies, in the order of its choices."""
        rows_TK, present_TK = ctx.saved_tensors
        return add_up(grads[0], rows_TK, present_TK.to(grads[0].dtype)), None, None, None


class Combine(torch.autograd.Function):
    """The weighted sum of a token's results, in the order of its choices."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights_TK: Tensor, order: Tensor, rows_TK: Tensor
    ) -> Tensor:
        """Tokens from rows."""
        ctx.save_for_backward(rows, weights_TK, order)
        return add_up(rows, rows_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of rows and weights."""
        rows, weights_TK, order = ctx.saved_tensors
        weights = weights_TK.view(-1)[order]
        grad_rows, products = torch.empty_like(rows), torch.empty_like(weights)
        # On the CPU in blocks: what lies between three passes stays in the cache.
        size = _BLOCK_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
        sources = order // weights_TK.shape[1]
        split = (t.split(size) for t in (sources, rows, weights, grad_rows, products))
        for source, row, weight, grad_row, product in zip(*split, strict=True):
            spread = grads[0].index_select(0, source)
            torch.mul(spread, weight[:, None], out=grad_row)
            torch.sum(spread.mul_(row), dim=1, out=product)
        grad_weights = torch.zeros_like(weights_TK).view(-1)
        grad_weights[order] = products
        return grad_rows, grad_weights.view(weights_TK.shape), None, None
