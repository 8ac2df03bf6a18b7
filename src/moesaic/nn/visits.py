"""Tokens visit ranks: each goes once to every rank that has experts of it, however many those are,
and comes back as one sum of their results.

A visit travels as one row of bytes: the token, the weights of its choices, and their slots on the
rank it goes to. Between hosts it may go once to each host, to the rank that stands in the same
place there, and from that one to the host's ranks; what these make of it is added up before it goes
home. However it travels, rows of a slot stand in the order of global tokens, as they do when each
travels by itself; sums alone differ, which are first over the experts of a rank, then over the
ranks of a host, and then over hosts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.dist.exchange import Carrier, Flight, Journey
from moesaic.facts.workload.loads import SLOT_BYTES, visit_bytes
from moesaic.nn.routes import add_up
from moesaic.nn.travel import Leaving, Ranks, There, routes, turned

_DROPPED = 1 << 28
"""Added to the slot of a choice that has been dropped, and whose visit takes place all the same:
everybody has been told of it."""


class Visits(NamedTuple):
    """Where tokens stop on the way to experts: G ranks of the group and then, if they go to hosts
    first, those; P stops. Dropped choices count too."""

    slots_TK: Tensor
    """What this rank's tokens asked for, among the slots of all ranks; their number for nothing."""
    asked_TP: Tensor
    """Where this rank's tokens stop."""
    counts_RP: Tensor
    """Of each rank, how many; on the host."""


def stops(slots_NK: Tensor, slots: int, places: int) -> Tensor:
    """Which of so many places, each with an equal run of so many `slots`, have some of `slots_NK`;
    those at the end of all are of none."""
    asked_NP = slots_NK.new_zeros((len(slots_NK), places + 1), dtype=torch.bool)
    return asked_NP.scatter_(1, slots_NK // (slots // places), True)[:, :places]


class Way(NamedTuple):
    """From T tokens of a rank to its V visits, those to one place after those to another."""

    tokens_V: Tensor
    visits_TP: Tensor
    """Which visit it is; 0 where there is none."""
    present_TP: Tensor
    """Where there is one."""


class Trip(NamedTuple):
    """Between which ranks visits go, and how."""

    carrier: Carrier
    send: list[int]
    receive: list[int]


class Hop:
    """Tokens that go once to each of several places, and sums that come back from there."""

    def __init__(
        self,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        slots_TK: Tensor,
        asked_TP: Tensor,
        each: int,
        trip: Trip,
    ) -> None:
        """Launch them to the places that they asked for, each of which has so many slots."""
        asked_PT = asked_TP.T.contiguous()
        places_V, tokens_V = asked_PT.nonzero(as_tuple=True)
        numbers_PT = asked_PT.view(-1).cumsum(0).sub_(1).view(asked_PT.shape)
        self._way = Way(tokens_V, numbers_PT.T.where(asked_TP, 0), asked_TP)
        self._trip, self._flight = trip, Flight(*trip)
        slots_VK = slots_TK[tokens_V] - each * places_V[:, None]
        self._visits: tuple[Tensor, Tensor, Tensor] = Visit.apply(
            tokens_TH, weights_TK, slots_VK, each, self._way, self._flight
        )

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait; tokens, weights, and slots of this place: as many as it has, or more, for none."""
        rows, weights_NK, slots_NK = Called.apply(*self._visits, self._flight)
        del self._visits
        return rows, weights_NK, slots_NK

    def go_back(self, results: Tensor) -> None:
        """Launch each visit's sum."""
        carrier, send, receive = self._trip
        self._back = Journey(results, carrier, receive, send)

    def come_home(self) -> Tensor:
        """Wait; each token's, over its visits."""
        combined: Tensor = Sum.apply(self._back.end(), *self._way)
        return combined


class ByVisits:
    """Each token once to every rank that it visits."""

    def __init__(self, leaving: Leaving, ranks: Ranks, visits: Visits) -> None:
        """Launch them."""
        own_RS, places = ranks.own_slots(leaving.counts_RS), list(ranks.group_ranks)
        self._counts_S = own_RS.sum(0)
        (carrier,) = ranks.carriers
        trip = Trip(
            carrier,
            visits.counts_RP[ranks.rank].tolist(),
            visits.counts_RP[places, places.index(ranks.rank)].tolist(),
        )
        self._hop = Hop(*leaving[:3], visits.asked_TP, own_RS.shape[1], trip)

    def arrive(self) -> There:
        """Visits, of one or more experts each."""
        rows, weights_NK, slots_NK = self._hop.arrive()
        return rows, routes(slots_NK, slots_NK < len(self._counts_S), self._counts_S), weights_NK

    def go_back(self, results: Tensor) -> None:
        """Each visit's sum."""
        self._hop.go_back(results)

    def come_home(self) -> Tensor:
        """They are added to those of the token's other visits."""
        return self._hop.come_home()


class ByHosts:
    """Each token once to every host that it visits, and there once to every rank."""

    def __init__(self, leaving: Leaving, ranks: Ranks, visits: Visits) -> None:
        """Launch them to the hosts."""
        own_RS, places = ranks.own_slots(leaving.counts_RS), list(ranks.group_ranks)
        self._counts_S, self._across, self._within = own_RS.sum(0), *ranks.carriers
        hosts, own = self._across.group.size(), self._within.group.size()
        host, place = divmod(places.index(ranks.rank), own)
        to_ranks, to_hosts = visits.counts_RP[places].split((len(places), hosts), dim=1)
        # From (host, place) to (host, place), and to host.
        to_ranks, to_hosts = to_ranks.view(hosts, own, hosts, own), to_hosts.view(hosts, own, hosts)
        self._passing_HP = to_ranks[:, place, host]
        self._coming_PH = to_ranks[:, :, host, place].T
        trip = Trip(self._across, to_hosts[host, place].tolist(), to_hosts[:, place, host].tolist())
        tokens_TH, weights_TK, slots_TK = leaving[:3]
        slots_TK = torch.where(leaving.present_TK, slots_TK, visits.slots_TK + _DROPPED)
        asked_TH = visits.asked_TP[:, len(places) :]
        self._outer = Hop(tokens_TH, weights_TK, slots_TK, asked_TH, own * own_RS.shape[1], trip)

    def arrive(self) -> There:
        """Visits, of one or more experts each; they have gone on from the rank that they came to.

        They stand in the order of places and then hosts, and rows in that of hosts and then places.
        """
        rows, weights_NK, slots_NK = self._outer.arrive()
        each, places = len(self._counts_S), self._within.group.size()
        asked_NP = stops(slots_NK & (_DROPPED - 1), each * places, places)
        trip = Trip(self._within, self._passing_HP.sum(0).tolist(), self._coming_PH.sum(1).tolist())
        self._inner = Hop(rows, weights_NK, slots_NK, asked_NP, each, trip)
        rows, weights_NK, slots_NK = self._inner.arrive()
        turn_N = turned(self._coming_PH, 1, 0).to(rows.device)
        found = routes(slots_NK, slots_NK < each, self._counts_S, turn_N)
        return rows, found, weights_NK

    def go_back(self, results: Tensor) -> None:
        """Each visit's sum, to be added to those of the same host."""
        self._inner.go_back(results)
        self._outer.go_back(self._inner.come_home())

    def come_home(self) -> Tensor:
        """They are added to those of the token's other hosts."""
        return self._outer.come_home()


class _Shape(NamedTuple):
    """A visit in bytes."""

    hidden: int
    choices: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tokens_TH: Tensor, weights_TK: Tensor) -> _Shape:
        """Of these tokens."""
        return cls(tokens_TH.shape[1], weights_TK.shape[1], tokens_TH.dtype)

    @property
    def _sizes(self) -> tuple[int, int]:
        return visit_bytes(self.hidden, self.choices, self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self._sizes[0]

    def parts(self, visits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the tokens, weights and slots in some visits."""
        each = self.dtype.itemsize
        middle, end = self.hidden * each, (self.hidden + self.choices) * each
        slots_at = self._sizes[1]
        slots = visits[:, slots_at : slots_at + self.choices * SLOT_BYTES]
        return (
            visits[:, :middle].view(self.dtype),
            visits[:, middle:end].view(self.dtype),
            slots.view(torch.int32),
        )


class Visit(torch.autograd.Function):
    """Launch visits: tokens and the weights of their choices, each where its expert is."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        slots_VK: Tensor,
        each: int,
        way: Way,
        flight: Flight,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What arrives, once waited for: rows, weights, and slots, `each` or more for none."""
        ctx.save_for_backward(*way)
        ctx.flight, ctx.hidden = flight, tokens_TH.shape[1]
        bare_VK = slots_VK & (_DROPPED - 1)
        here_VK = (bare_VK >= 0) & (bare_VK < each)
        shape = _Shape.of(tokens_TH, weights_TK)
        leaving = tokens_TH.new_empty((len(slots_VK), shape.num_bytes), dtype=torch.uint8)
        rows, weights, slots = shape.parts(leaving)
        torch.index_select(tokens_TH, 0, way.tokens_V, out=rows)
        weights.copy_(torch.where(here_VK, weights_TK[way.tokens_V], 0.0))
        slots.copy_(torch.where(here_VK, slots_VK, each))
        rows, weights, slots = shape.parts(flight.leave(leaving))
        ctx.mark_non_differentiable(slots)
        return rows, weights, slots

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of tokens and weights, which come back with each other."""
        both, (_, visits_TP, present_TP) = ctx.flight.back(), ctx.saved_tensors
        summed = add_up(both, visits_TP, present_TP.to(both.dtype))
        return summed[:, : ctx.hidden], summed[:, ctx.hidden :], *[None] * 4


class Called(torch.autograd.Function):
    """Wait for visits that were launched."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, slots: Tensor, flight: Flight
    ) -> tuple[Tensor, Tensor, Tensor]:
        """They are there."""
        ctx.flight = flight
        flight.wait()
        ctx.mark_non_differentiable(slots)
        return rows.view_as(rows), weights.contiguous(), slots.long()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Launch gradients of tokens and weights, with each other; `Visit` waits for them."""
        grads_NH, grads_NK, _ = grads
        ctx.flight.turn_back(torch.cat((grads_NH, grads_NK), dim=1))
        return grads_NH, grads_NK, None, None


class Sum(torch.autograd.Function):
    """Sums of what comes back of each token's visits, in the order of places."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, tokens_V: Tensor, visits_TP: Tensor, present_TP: Tensor
    ) -> Tensor:
        """Tokens from visits."""
        ctx.save_for_backward(tokens_V)
        return add_up(results, visits_TP, present_TP.to(results.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of a sum is that of each of its terms."""
        (tokens_V,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens_V), None, None, None
