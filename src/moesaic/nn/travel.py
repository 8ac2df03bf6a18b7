"""How tokens get to the slots of their experts, and results back: row by row.

Tokens that stay on their rank are neither copied nor brought back: experts read and add up by
themselves. Else each token travels once for every expert that it has, straight to its rank, or
first to the rank of this one's place on the expert's host, and from there to its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.dist import passes
from moesaic.dist.exchange import Carrier, Journey
from moesaic.dist.world import Group
from moesaic.facts.job.train import GroupedMM
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
    carriers: tuple[Carrier, ...] = ()
    """Take rows to the ranks that share out the experts, trip after trip; none: there is one."""
    group_ranks: tuple[int, ...] = (0,)
    straight: Carrier | None = None
    """Takes experts from one of those ranks to another, where some are computed elsewhere."""
    slices: Slices = WHOLE
    """Ranks that share out the matrices of the same experts."""

    def own_slots(self, counts_RS: Tensor) -> Tensor:
        """Of rows of all ranks for all slots, those of the group's ranks for slots of this one."""
        own = self.slots(counts_RS.shape[1])
        return counts_RS[list(self.group_ranks), own.start : own.stop]

    def slots(self, total: int) -> range:
        """This rank's, of so many of the group."""
        return self._slots_of(self.rank, total)

    def _slots_of(self, rank: int, total: int) -> range:
        share = total // len(self.group_ranks)
        place = self.group_ranks.index(rank)
        return range(place * share, (place + 1) * share)

    def has(self, slots_TK: Tensor, total: int) -> Tensor:
        """Which of them, of so many of the group, are this rank's."""
        own = self.slots(total)
        return (slots_TK >= own.start) & (slots_TK < own.stop)

    def of_others(self, counts_RCS: Tensor) -> Tensor:
        """Without what ranks of the group have for slots of their own."""
        counts_RCS = counts_RCS.clone()
        for rank in self.group_ranks:
            own = self._slots_of(rank, counts_RCS.shape[-1])
            counts_RCS[rank, :, own.start : own.stop] = 0
        return counts_RCS


class Leaving(NamedTuple):
    """Tokens of a rank and where they are to go; T tokens, K choices, R ranks, S slots."""

    tokens_TH: Tensor
    weights_TK: Tensor
    slots_TK: Tensor
    """Among those of all ranks of the group; their number where there is none."""
    present_TK: Tensor
    """Where there is one."""
    counts_RS: Tensor
    """Rows of each rank for each slot, on the host."""

    def home(self, rank: int) -> Routes:
        """From tokens to their rows, sorted by slot."""
        counts_S = self.counts_RS[rank]
        return routes(self.slots_TK, self.present_TK, counts_S)


def routes(
    slots_NK: Tensor, present_NK: Tensor, counts_S: Tensor, turn_N: Tensor | None = None
) -> Routes:
    """From tokens to rows sorted by slot, and in the order of tokens there; of `turn_N`, if those
    stand in another one."""
    ranked_NK = slots_NK if turn_N is None else slots_NK[turn_N]
    order = ranked_NK.reshape(-1).argsort(stable=True)[: int(counts_S.sum())]
    if turn_N is not None:
        choices = slots_NK.shape[1]
        order = turn_N[order // choices] * choices + order % choices
    rows_NK = inverse(order, slots_NK.numel()).view(slots_NK.shape)
    return Routes(counts_S, order, rows_NK, present_NK)


def routes_of_all(slots_NK: Tensor, bounds_S: Tensor, by: GroupedMM = "torch") -> Routes:
    """As `routes`, where each choice has a slot: rows are counted where tokens are, and all of it
    is as few launches as can be, none of which the host waits for. `bounds_S` are as of `bounds`.
    """
    if by != "torch" and len(bounds_S) - 1 <= passes.MOST_SLOTS:
        counts_S, order, rows = passes.sort(slots_NK.reshape(-1), len(bounds_S) - 1)
        return Routes(counts_S, order, rows.view(slots_NK.shape))
    sorted_R, order = slots_NK.reshape(-1).to(bounds_S.dtype).sort(stable=True)
    counts_S = torch.searchsorted(sorted_R, bounds_S).diff()
    rows = torch.empty_like(order)
    rows.scatter_(0, order, torch.arange(len(order), device=order.device))
    return Routes(counts_S, order, rows.view(slots_NK.shape))


def bounds(slots: int, device: torch.device) -> Tensor:
    """All of so many slots and their number, in the narrowest type that has them: a GPU sorts some
    bits at a time."""
    kinds = (torch.uint8, torch.int16, torch.int32)
    kind = next(one for one in kinds if slots <= torch.iinfo(one).max)
    return torch.arange(slots + 1, dtype=kind, device=device)


There = tuple[Tensor, Routes, Tensor | None]
"""What is there for experts, how they take it, and weights if they are to add up."""


class Sent(Protocol):
    """Tokens on their way to their experts."""

    def arrive(self) -> There:
        """Wait."""

    def go_back(self, results: Tensor) -> None:
        """Launch results of what has arrived."""

    def come_home(self) -> Tensor:
        """Wait; those results, added up, weighted, by token of this rank."""


class Stay:
    """All experts are on this rank."""

    def __init__(self, there: There) -> None:
        """Nothing leaves."""
        self._there = there

    def arrive(self) -> There:
        """Tokens themselves."""
        return self._there

    def go_back(self, results: Tensor) -> None:
        """Experts have added up."""
        self._results = results

    def come_home(self) -> Tensor:
        """They are here."""
        return self._results


class ByRows:
    """Each token once for every expert that it visits."""

    def __init__(self, leaving: Leaving, ranks: Ranks) -> None:
        """Launch them."""
        (self._carrier,), self._weights_TK = ranks.carriers, leaving.weights_TK
        self._home, mine_RS = leaving.home(ranks.rank), ranks.own_slots(leaving.counts_RS)
        self._send = self._home.counts.view(-1, mine_RS.shape[1]).sum(1).tolist()
        self._receive = mine_RS.sum(1).tolist()
        rows = Gather.apply(leaving.tokens_TH, *self._home[1:])
        self._there = Journey(rows, self._carrier, self._send, self._receive)
        arrival = turned(mine_RS, 1, 0).to(leaving.tokens_TH.device)
        self._arrived = Routes(mine_RS.sum(0), arrival)

    def arrive(self) -> There:
        """Rows, which are of one expert each."""
        return self._there.end(), self._arrived, None

    def go_back(self, results: Tensor) -> None:
        """Each row's result."""
        self._back = Journey(results, self._carrier, self._receive, self._send)

    def come_home(self) -> Tensor:
        """They are added up here."""
        results = self._back.end()
        combined: Tensor = Combine.apply(results, self._weights_TK, *self._home[1:3])
        return combined


class RowsByHosts:
    """Each token once for every expert that it visits, by the rank of the same place on its host.

    Between two hosts there is one message for each place instead of one for each pair of ranks.
    """

    def __init__(self, leaving: Leaving, ranks: Ranks) -> None:
        """Launch them to the hosts."""
        self._across, self._within = ranks.carriers
        self._weights_TK, self._home = leaving.weights_TK, leaving.home(ranks.rank)
        hosts, own = self._across.group.size(), self._within.group.size()
        host, place = divmod(ranks.group_ranks.index(ranks.rank), own)
        # From (host, place) to (host, place, slot).
        counts = leaving.counts_RS[list(ranks.group_ranks)].view(hosts, own, hosts, own, -1)
        passing_HP = counts[:, place, host].sum(2)
        self._coming_PHS = counts[:, :, host, place].transpose(0, 1)
        self._there = counts[host, place].sum((1, 2)).tolist(), passing_HP.sum(1).tolist()
        self._on = passing_HP.sum(0).tolist(), self._coming_PHS.sum((1, 2)).tolist()
        device = leaving.tokens_TH.device
        self._order = turned(passing_HP, 1, 0).to(device), turned(passing_HP.T, 1, 0).to(device)
        rows = Gather.apply(leaving.tokens_TH, *self._home[1:])
        self._first = Journey(rows, self._across, *self._there)

    def arrive(self) -> There:
        """Rows, which are of one expert each; they have gone on from the rank that they came to."""
        rows = Turn.apply(self._first.end(), *self._order)
        rows = Journey(rows, self._within, *self._on).end()
        arrival = turned(self._coming_PHS, 2, 1, 0).to(rows.device)
        return rows, Routes(self._coming_PHS.sum((0, 1)), arrival), None

    def go_back(self, results: Tensor) -> None:
        """Each row's result, by the way that the row came."""
        results = Journey(results, self._within, *self._on[::-1]).end()
        results = Turn.apply(results, *self._order[::-1])
        self._back = Journey(results, self._across, *self._there[::-1])

    def come_home(self) -> Tensor:
        """They are added up here."""
        results = self._back.end()
        combined: Tensor = Combine.apply(results, self._weights_TK, *self._home[1:3])
        return combined


def turned(sizes: Tensor, *dims: int) -> Tensor:
    """Index that takes rows from blocks of these sizes, one after another, to blocks in the order
    that the `sizes` have with their dimensions permuted; on the host."""
    flat = sizes.reshape(-1)
    starts = (flat.cumsum(0) - flat).view(sizes.shape)
    then, starts = sizes.permute(dims).reshape(-1), starts.permute(dims).reshape(-1)
    offset = starts - (then.cumsum(0) - then)
    return torch.arange(int(flat.sum())) + offset.repeat_interleave(then)


class Turn(torch.autograd.Function):
    """Rows in another order, and gradients back in the first."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        """In the order of `there`, which `back` undoes."""
        ctx.save_for_backward(back)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """As they were."""
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


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
