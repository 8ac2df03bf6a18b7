"""Dispatch: tokens to the slots of their experts, wherever those live, and results back.

`count` says how many tokens go where, over all ranks: one all-gather of counts serves the exchange,
the balance loss, capacity and the report. `place` finds the slot of each row, which is that of its
expert, or of a copy. `start` launches the exchange of tokens. However they travel, rows come about
in order of (slot, global token), the same whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import gather
from moesaic.facts.balance import Balance
from moesaic.facts.job.train import GroupedMM
from moesaic.facts.workload.loads import even
from moesaic.nn.bank import Compute
from moesaic.nn.guests import Homes
from moesaic.nn.placement import Placement
from moesaic.nn.router import NOBODY
from moesaic.nn.routes import Routes
from moesaic.nn.travel import (
    ByRows,
    Leaving,
    Ranks,
    RowsByHosts,
    Sent,
    Stay,
    There,
    bounds,
    routes,
    routes_of_all,
)
from moesaic.nn.visits import ByHosts, ByVisits, Visits, stops


@dataclass(frozen=True)
class Counted:
    """Where tokens go; R ranks, K choices, E experts. All tensors but `experts_TK` are on the host,
    or, if rows are placed already, where tokens are."""

    experts_TK: Tensor
    """Choices of this rank's tokens, NOBODY where given up or dropped."""
    asked_KE: Tensor
    """Assignments that routers asked for, over all ranks; [1, E], all choices together, if rows are
    placed already."""
    counts_RCE: Tensor
    """Assignments that are carried out, of each chunk of a rank's tokens."""
    num_tokens: int
    """Tokens over all ranks."""
    dropped: int
    """Assignments dropped for want of capacity, over all ranks."""
    visits: list[Visits]
    """Where tokens go, of each chunk, that travel once to each rank; none: they do not."""
    placed: Placed | None = None
    """Where rows are computed, if counting them has found that too."""

    @property
    def asked_E(self) -> Tensor:
        """Assignments that routers asked for."""
        return self.asked_KE.sum(0) if self.placed is None else self.asked_KE[0]

    @property
    def counts_RE(self) -> Tensor:
        """Assignments that are carried out."""
        return self.counts_RCE.sum(1) if self.placed is None else self.counts_RCE[:, 0]


@dataclass(frozen=True)
class Placed:
    """Where rows are computed; S slots of all ranks of the group."""

    slots_TK: Tensor
    """Of this rank's tokens; S where there is none."""
    counts_RCS: Tensor
    """Rows of each chunk of a rank's tokens, of ranks of the group; on the host, or where tokens
    are if there are `routes`."""
    visits: list[Visits]
    """As above."""
    routes: Routes | None = None
    """From all tokens to rows, of this rank alone, if they are known."""

    @property
    def slots(self) -> int:
        """S."""
        return self.counts_RCS.shape[-1]

    @property
    def visits_RP(self) -> Tensor | None:
        """Visits of all of a rank's tokens, by stop."""
        if not self.visits:
            return None
        return torch.stack([chunk.counts_RP for chunk in self.visits]).sum(0)


class Dispatcher:
    """Carries the tokens of one layer; it holds no parameters.

    `slots` are the experts of all slots of the group, rank by rank; absent: in turn. A token
    travels once for each of its experts, or in `visits`, once to each rank that has some. A rank's
    tokens go in so many `chunks`, one after another: experts compute with one while others travel.
    Where it is `local_first`, what tokens have for experts of their own rank stays out of that:
    experts take it piece by piece, before, between and after what comes from others.
    """

    def __init__(
        self,
        experts: int,
        ranks: Ranks,
        capacity: float | None = None,
        slots: Sequence[int] | None = None,
        *,
        visits: bool = False,
        chunks: int = 1,
        local_first: bool = False,
    ) -> None:
        self.chunks, self._pieces = chunks, (chunks + 1) * local_first
        self.experts, self.ranks, self.capacity = experts, ranks, capacity
        self._alone = not ranks.carriers and ranks.everyone is None and self.computations == 1
        self._bounds_S: Tensor | None = None
        self.rehome(slots or range(experts))
        self._stops = _stops(ranks) if visits else []

    def rehome(self, slots: Sequence[int]) -> None:
        """These are the experts of all slots of the group from now on."""
        self._slots = None if list(slots) == list(range(self.experts)) else list(slots)
        self.homes = Homes(tuple(slots), len(self.ranks.group_ranks))
        self._places_E: Tensor | None = None

    def waits_for_none(self, *, training: bool) -> bool:
        """Whether numbers of rows may stay on the device, if all that routers ask for is whole."""
        return self._alone and not (training and self.capacity is not None)

    @property
    def by_visits(self) -> bool:
        """Whether tokens travel once to each rank that has some of their experts."""
        return bool(self._stops)

    @property
    def computations(self) -> int:
        """How often the experts compute in a pass."""
        return self.chunks + self._pieces

    def count(
        self, experts_TK: Tensor, *, training: bool, whole: bool = False, by: GroupedMM = "torch"
    ) -> Counted:
        """Count assignments over all ranks and drop those beyond capacity (while training).

        They are `whole` if none is NOBODY's, nobody asks for them choice by choice, and no row is
        to be balanced: a rank alone then leaves numbers on its device, and waits for none, if what
        multiplies, `by`, needs none on the host."""
        if whole and by != "torch" and self.waits_for_none(training=training):
            return self.count_there(experts_TK, by)
        num_tokens, top_k = experts_TK.shape
        known_TK = torch.where(experts_TK == NOBODY, self.experts, experts_TK)
        ids = known_TK + torch.arange(top_k, device=known_TK.device) * (self.experts + 1)
        each = top_k * (self.experts + 1)
        local = [torch.bincount(one.reshape(-1), minlength=each) for one in self._cut(ids)]
        going = self._going(self._to_slots(known_TK), self.experts)
        said = torch.cat((*local, local[0].new_tensor([num_tokens]), *going.said))
        everywhere = gather(said, self.ranks.everyone).cpu()
        sizes = [self.chunks * each, 1, going.size]
        asked_R, tokens_R, visits_R = everywhere.split(sizes, dim=1)
        asked_RCKE = asked_R.view(-1, self.chunks, top_k, self.experts + 1)[..., : self.experts]
        visits = going.visits(visits_R)
        tokens, asked_KE = int(tokens_R.sum()), asked_RCKE.sum((0, 1))
        if self.capacity is None or not training:
            return Counted(experts_TK, asked_KE, asked_RCKE.sum(2), tokens, 0, visits)
        share = round(self.capacity * tokens * top_k / self.experts, 9)
        limit = math.ceil(min(share, tokens * top_k))
        kept_RCKE = _within(asked_RCKE.flatten(0, 1), limit).view(asked_RCKE.shape)
        kept_TK = _keep_first(experts_TK, kept_RCKE[self.ranks.rank].sum(0), self.experts)
        dropped = int(asked_RCKE.sum() - kept_RCKE.sum())
        return Counted(kept_TK, asked_KE, kept_RCKE.sum(2), tokens, dropped, visits)

    def count_there(self, experts_TK: Tensor, by: GroupedMM = "torch") -> Counted:
        """Count assignments, all of which are carried out, of a rank alone, and place rows, with
        nothing that the host would have to wait for."""
        device = experts_TK.device
        if self._bounds_S is None or self._bounds_S.device != device:
            self._bounds_S = bounds(self.experts, device)
        slots_TK = self._to_slots(experts_TK)
        way = routes_of_all(slots_TK, self._bounds_S, by)
        counts_E = way.counts if self._places_E is None else way.counts[self._places_E[:-1]]
        asked_KE, counts_RCE = counts_E.view(1, -1), counts_E.view(1, 1, -1)
        placed = Placed(slots_TK, way.counts.view(1, 1, -1), [], way)
        return Counted(experts_TK, asked_KE, counts_RCE, len(experts_TK), 0, [], placed)

    def place(self, counted: Counted, balance: Balance | None = None) -> Placed:
        """Every row at home, or where `balance` has it."""
        if counted.placed is not None:
            assert balance is None, "rows are to be balanced, and have been placed"
            return counted.placed
        experts_TK = counted.experts_TK
        experts_TK = torch.where(experts_TK == NOBODY, self.experts, experts_TK)
        if balance is None or not len(balance.copies):
            counts_RCS = counted.counts_RCE
            if self._slots is not None:
                counts_RCS = counts_RCS[..., self._slots]
            return Placed(self._to_slots(experts_TK), counts_RCS, counted.visits)
        ranks = list(self.ranks.group_ranks)
        placement = Placement(self.homes, balance, counted.counts_RCE[ranks].numpy())
        counts_GCS = torch.from_numpy(placement.counts())
        counts_RCS = counts_GCS.new_zeros((len(counted.counts_RCE), *counts_GCS.shape[1:]))
        counts_RCS[ranks] = counts_GCS
        mine, chunks = ranks.index(self.ranks.rank), enumerate(self._cut(experts_TK))
        slots_TK = torch.cat([placement.slots(part, mine, chunk) for chunk, part in chunks])
        going = self._going(slots_TK, counts_RCS.shape[-1])
        said_R = counts_RCS.new_zeros((len(counts_RCS), going.size))
        if going.size:  # Other groups may have no copies, and nothing to say.
            assert self.ranks.straight is not None
            said_R[ranks] = gather(torch.cat(going.said), self.ranks.straight.group).cpu()
        return Placed(slots_TK, counts_RCS, going.visits(said_R))

    def _going(self, slots_TK: Tensor, slots: int) -> _Going:
        """Where tokens stop on the way to these of so many slots, in all chunks."""
        if self._stops and self._pieces:
            slots_TK = slots_TK.masked_fill(self.ranks.has(slots_TK, slots), slots)
        asked_TP = [stops(slots_TK, slots, places) for places in self._stops]
        return _Going(
            said=[part.sum(0) for one in asked_TP for part in self._cut(one)],
            slots=self._cut(slots_TK),
            asked=self._cut(torch.cat(asked_TP, dim=1)) if asked_TP else (),
            sizes=[self.chunks * places for places in self._stops],
            chunks=self.chunks,
        )

    def start(self, tokens_TH: Tensor, weights_TK: Tensor, placed: Placed) -> Underway:
        """Launch the exchange of tokens."""
        if placed.routes is not None:
            there = tokens_TH, placed.routes, weights_TK.to(tokens_TH.dtype)
            return Underway([partial(Stay, there)])
        slots_TK, counts_RCS, slots = placed.slots_TK, placed.counts_RCS, placed.slots
        present_TK = slots_TK < slots
        stays: Iterator[There] = iter(())
        if self._pieces:
            here_TK = self.ranks.has(slots_TK, slots)
            stays = self._stay(tokens_TH, weights_TK, slots_TK, here_TK, slots)
            slots_TK = slots_TK.masked_fill(here_TK, slots)
            present_TK = present_TK & ~here_TK
            counts_RCS = self.ranks.of_others(counts_RCS)
        columns = tokens_TH, _weighed(weights_TK, present_TK, tokens_TH), slots_TK, present_TK
        cut = zip(*(self._cut(column) for column in columns), counts_RCS.unbind(1), strict=True)
        visits: Sequence[Visits | None] = placed.visits or [None] * self.chunks
        departures = [
            partial(self._depart, Leaving(*chunk), going)
            for chunk, going in zip(cut, visits, strict=True)
        ]
        return Underway(departures, stays)

    def _stay(
        self,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        slots_TK: Tensor,
        here_TK: Tensor,
        slots: int,
    ) -> Iterator[There]:
        """What is for experts of this rank, for them to add up, in equal pieces of rows: most slots
        are in one piece. It is worked out when the first piece is asked for."""
        own = self.ranks.slots(slots)
        slots_TK = torch.where(here_TK, slots_TK - own.start, len(own))
        counts_S = torch.bincount(slots_TK.reshape(-1), minlength=len(own) + 1)[:-1].cpu()
        whole, first = routes(slots_TK, here_TK, counts_S), 0
        for number in even(int(counts_S.sum()), self._pieces):
            piece = whole.piece(first, first + number)
            assert piece.present_NK is not None
            yield tokens_TH, piece, _weighed(weights_TK, piece.present_NK, tokens_TH)
            first += number

    def _depart(self, leaving: Leaving, visits: Visits | None) -> Sent:
        if not self.ranks.carriers:
            return Stay((leaving.tokens_TH, leaving.home(self.ranks.rank), leaving.weights_TK))
        straight = len(self.ranks.carriers) == 1
        if visits is None:
            return (ByRows if straight else RowsByHosts)(leaving, self.ranks)
        return (ByVisits if straight else ByHosts)(leaving, self.ranks, visits)

    def _cut(self, tokens: Tensor) -> Sequence[Tensor]:
        """What is of each chunk of this rank's tokens."""
        return (tokens,) if self.chunks == 1 else tokens.split(even(len(tokens), self.chunks))

    def _to_slots(self, experts: Tensor) -> Tensor:
        """The slot of each expert, of all slots of the group, and after them that of nobody."""
        if self._slots is None:
            return experts
        if self._places_E is None or self._places_E.device != experts.device:
            slots = torch.tensor([*self._slots, self.experts], device=experts.device)
            self._places_E = slots.argsort()
        return self._places_E[experts]


class _Going(NamedTuple):
    """Where this rank's tokens stop, before it is known where others' do."""

    said: list[Tensor]
    """How many stop where, in each chunk."""
    slots: Sequence[Tensor]
    asked: Sequence[Tensor]
    """Of each chunk, as `Visits` has them."""
    sizes: list[int]
    chunks: int

    @property
    def size(self) -> int:
        """Of what is said."""
        return sum(self.sizes)

    def visits(self, said_R: Tensor) -> list[Visits]:
        """Of each chunk, given what all ranks say; none if tokens do not travel once."""
        if not self.asked:
            return []
        parts = said_R.split(self.sizes, dim=1)
        counts_RCP = torch.cat([one.view(len(one), self.chunks, -1) for one in parts], dim=2)
        chunks = zip(self.slots, self.asked, counts_RCP.unbind(1), strict=True)
        return [Visits(*chunk) for chunk in chunks]


class Underway:
    """The tokens of a layer on their way through its experts, chunk after chunk.

    While experts compute with one chunk, the next one comes and the results of the one before go
    home; backward likewise, the other way round. At most one chunk travels each way at a time, so
    that the one that is waited for has the links to itself. What stays on this rank is computed
    while the first chunk comes, between chunks, and while the last results go home.
    """

    def __init__(
        self, departures: Sequence[Callable[[], Sent]], stays: Iterable[There] = ()
    ) -> None:
        """Launch the first chunk; of what `stays` there is a piece more than chunks, or nothing."""
        first, *self._departures = departures
        self._stays = iter(stays)
        self._coming = first()

    def through(self, compute: Compute) -> Tensor:
        """Wait; each token's results, added up, weighted."""
        home, here, before = list[Tensor](), list[Tensor](), list[Sent]()
        for depart in (*self._departures, None):
            sent = self._coming
            here += self._next_stays(compute)
            there = sent.arrive()
            if depart is not None:
                self._coming = depart()
            results = compute(*there)
            home += [one.come_home() for one in before]
            sent.go_back(results)
            before = [sent]
        here += self._next_stays(compute)
        home.append(sent.come_home())
        joined = home[0] if len(home) == 1 else torch.cat(home)
        return reduce(torch.add, here, joined)

    def _next_stays(self, compute: Compute) -> list[Tensor]:
        """What experts make of the next piece of what stays here, if there is one."""
        return [compute(*piece) for piece in islice(self._stays, 1)]


def _weighed(weights_TK: Tensor, present_TK: Tensor, like: Tensor) -> Tensor:
    """Weights of choices that are there, 0 of others."""
    return torch.where(present_TK, weights_TK, 0.0).to(like.dtype)


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
