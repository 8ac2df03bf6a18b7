"""The expert layer: router, dispatch, experts, combine, and what every token visits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from moesaic.dist.clock import Clock
from moesaic.facts.balance import Balance, Ints
from moesaic.nn.attention import FeedForward
from moesaic.nn.bank import Bank
from moesaic.nn.context import Context, LayerFacts, compute_dtype
from moesaic.nn.dispatch import Counted, Dispatcher, Placed
from moesaic.nn.guests import Guests
from moesaic.nn.router import Router, Routing, balance_share, z_share


class Balancer(Protocol):
    """Says who computes what, the same on each of the ranks that share out experts."""

    early: bool
    """Whether it decides on copies before rows are known."""

    def ahead(self) -> Balance:
        """Those copies, and none of their rows yet."""

    def think(self) -> None:
        """Decide on those of the next time, if it decides early: tokens are under way."""

    def __call__(self, counts: Ints) -> Balance:
        """Who computes what of rows [ranks, experts]; with those copies, if it is early."""

    def rehome(self, homes: Ints) -> None:
        """These are the ranks of all experts from now on."""


class MoE(nn.Module):
    """A feed-forward network of experts, beside one that is `shared` by all tokens.

    Where the experts' matrices are cut, the slices' tokens are joined on their way to them, and
    what comes back are sums over the slices, of each slice's own tokens.
    """

    def __init__(
        self,
        router: Router,
        bank: Bank,
        dispatcher: Dispatcher,
        shared: FeedForward | None = None,
    ) -> None:
        super().__init__()
        self.router, self.bank, self.dispatcher = router, bank, dispatcher
        self.shared = shared
        self.balancer: Balancer | None = None
        """Whom to ask; nobody: every row is computed at its expert's home."""
        self.next: tuple[MoE, ...] = ()
        """The layer, if there is one, whose experts may leave while those of this one compute."""
        self.clock: Clock | None = None
        """What training has experts take, and wait for copies, goes to it."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Each token through its experts."""
        asked = self._asked(context)
        early = asked is not None and asked.early
        if early and self.router.layer not in context.guests:
            self.begin(context, compute_dtype(x))
        guests = context.guests.pop(self.router.layer, None)
        tokens_TH = x.reshape(-1, x.shape[-1])
        routing, slices = self.router(tokens_TH, context), self.bank.slices
        experts_TK, weights_TK = slices.rows(routing.experts_TK), slices.rows(routing.weights_TK)
        whole = routing.whole and asked is None
        by = self.bank.grouped_mm(compute_dtype(x))
        counted = self.dispatcher.count(experts_TK, training=context.training, whole=whole, by=by)
        balance = self._balance(counted, context)
        placed = self.dispatcher.place(counted, balance)
        report = partial(self._report, context, routing, counted, placed, balance)
        if counted.placed is None:
            report()
        tokens_TH = slices.rows(tokens_TH.to(compute_dtype(x)))
        sent = self.dispatcher.start(tokens_TH, weights_TK, placed)
        if balance is not None and not early:  # Behind the tokens, which come first.
            guests = self._invite(balance, tokens_TH.dtype)
        for later in self.next:
            later.begin_ahead(context, tokens_TH.dtype)
        if asked is not None and early:
            asked.think()
        shared = None if self.shared is None else self.shared(x, context)  # While tokens travel.
        clock = self.clock if context.training else None
        with self.bank.at_work(self.dispatcher.computations, guests, clock) as compute:
            combined = slices.sum_runs(sent.through(compute)).view(x.shape)
        if counted.placed is not None:  # Experts compute while the host launches this.
            report()
        return combined if shared is None else combined + shared

    def rehome(self, slots: Sequence[int]) -> None:
        """These are the experts of all slots of the group from now on, between two steps; whoever
        says so has put those of this rank there."""
        self.dispatcher.rehome(slots)
        ranks, homes = self.dispatcher.ranks, self.dispatcher.homes
        first = ranks.group_ranks.index(ranks.rank) * homes.each
        self.bank.rehome(homes.slots[first : first + homes.each])
        if self.balancer is not None:
            self.balancer.rehome(homes.places // homes.each)

    def _asked(self, context: Context) -> Balancer | None:
        """Who says who computes what: in training alone, for what a policy goes by and what is told
        of it are of that."""
        return self.balancer if context.training else None

    def _balance(self, counted: Counted, context: Context) -> Balance | None:
        """Who computes what; where the layer is recomputed, what it was the first time."""
        known = context.layers.get(self.router.layer)
        if known is not None:
            return known.spread
        asked = self._asked(context)
        if asked is None:
            return None
        ranks = list(self.dispatcher.ranks.group_ranks)
        return asked(counted.counts_RE[ranks].numpy())

    def begin(self, context: Context, dtype: torch.dtype) -> None:
        """Launch experts that are to be computed elsewhere, or what has not left of them, if they
        are decided on before rows are known; what is computed until then is computed while they
        travel."""
        layer, asked = self.router.layer, self._asked(context)
        if asked is None or not asked.early:
            return
        known = context.layers.get(layer)
        if known is not None:  # The layer is recomputed.
            assert known.spread is not None
            context.guests[layer] = self._invite(known.spread, dtype)
        elif layer in context.guests:
            self._leave(context.guests[layer])
        else:
            context.guests[layer] = self._invite(asked.ahead(), dtype)

    def begin_ahead(self, context: Context, dtype: torch.dtype) -> None:
        """Launch those of them that leave under experts of the layer before."""
        asked = self._asked(context)
        if asked is not None and asked.early:
            guests = self._awaits(asked.ahead(), dtype)
            if guests is not None:
                guests.leave(ahead=True)
            context.guests[self.router.layer] = guests

    def _invite(self, balance: Balance, dtype: torch.dtype) -> Guests | None:
        """All at once."""
        guests = self._awaits(balance, dtype)
        if guests is not None:
            guests.leave(ahead=True)
        self._leave(guests)
        return guests

    def _awaits(self, balance: Balance, dtype: torch.dtype) -> Guests | None:
        """Those who are to come, if there are any."""
        ranks = self.dispatcher.ranks
        if not len(balance.copies):
            return None
        assert ranks.straight is not None
        mine = ranks.group_ranks.index(ranks.rank)
        arena, homes = self.bank.acquire(), self.dispatcher.homes
        return Guests(arena, balance, homes, mine, ranks.straight, dtype, self.clock)

    @staticmethod
    def _leave(guests: Guests | None) -> None:
        """Launch the rest."""
        if guests is not None:
            guests.leave(ahead=False)

    def _report(
        self,
        context: Context,
        routing: Routing,
        counted: Counted,
        placed: Placed,
        balance: Balance | None,
    ) -> None:
        facts = self._facts(routing, counted, placed, balance)
        # A layer that is recomputed in backward must not leave its second graph here.
        context.layers.setdefault(self.router.layer, facts)

    def _facts(
        self, routing: Routing, counted: Counted, placed: Placed, balance: Balance | None
    ) -> LayerFacts:
        asked_E = counted.asked_E
        first_E = counted.asked_KE[0] if self.router.kind == "gshard" else asked_E
        return LayerFacts(
            balance=balance_share(routing, first_E, counted.num_tokens),
            z=z_share(routing, counted.num_tokens),
            asked=asked_E,
            counts=counted.counts_RE,
            dropped=counted.dropped,
            visits=placed.visits_RP,
            flips=routing.flips,
            spread=balance,
        )
