"""The network of experts over tokens' rows sorted by slot, from and to one arena; after its slots
there may be those of guests, experts of other ranks that are here for a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist import passes
from moesaic.dist.clock import Clock, during
from moesaic.dist.exchange import Flight
from moesaic.dist.loops import turns
from moesaic.facts.job.train import GroupedMM
from moesaic.nn.halves import asked_for, refuse_second_order
from moesaic.nn.routes import Routes
from moesaic.nn.shares import (
    Copies,
    Joined,
    Matrices,
    Returned,
    Share,
    for_both,
    guests_have_rows,
    shares,
    shares_forward,
)

FORWARD, BACKWARD = "experts forward", "experts backward"
"""What a clock calls computing."""


class GatedExperts(torch.autograd.Function):
    """Sums of down(silu(gate(x)) * up(x)) over each token's rows, straight from one arena.

    gate and up are one product. On the CPU a few slots are taken at a time, so that what stands
    between two products never leaves the cache; all of them where they have next to no rows. Rows
    are copied from tokens, and from gradients of tokens, as they are needed, and only what comes of
    gate and up is kept. A row's weight meets what is between the products: its own gradient is
    found there. The gradient of the arena is written once. Slots without rows get zeros.

    Guests come last, when they have arrived; in backward first, so that their gradients are on
    their way while those of the arena are made.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        arena: Tensor,
        guests: Tensor | None,
        weights_NK: Tensor | None,
        ffn: int,
        total: Total,
        *routes: Tensor | None,
    ) -> Tensor:
        """Compute in the dtype of `tokens`, along `Routes.of(routes)`; the gradients of the arena
        and of `guests` go to `total`."""
        way, arenas = Routes.of(routes), _arenas(arena, guests)
        gate_up, down = views(arenas, ffn, tokens.shape[1])
        parts = shares_forward(tokens, way, ffn, down, total.by)
        inners, results = Joined(parts, tokens, 2 * ffn), Returned(parts, tokens, way)
        own = Copies(tokens, way, total.by)

        def compute(place: int) -> None:
            share = parts[place]
            if share.by == "torch":
                inner = inners.multiply(share, own[share], gate_up, transposed=True)
                results.multiply(share, activate(inner), down, transposed=True)
            else:
                activated = inners.activated(share, own[share], gate_up)
                results.multiply(share, activated, down, transposed=True)

        for_both(parts, compute, partial(total.forward, waited_for=guests_have_rows(parts)))
        ctx.save_for_backward(tokens, arena, guests, weights_NK, inners.whole, *routes)
        ctx.ffn, ctx.total, ctx.ahead = ffn, total, None
        return results.add_up(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of tokens and weights, and of the arena; in a backward that comes in halves, of
        the ones or the other.

        The first half keeps the gradients between the products for the second.
        """
        refuse_second_order()
        with during(ctx.total.clock, BACKWARD):
            return GatedExperts._back(ctx, grads)

    @staticmethod
    def _back(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        tokens, arena, guests, weights_NK, inners, *routes = ctx.saved_tensors
        ffn, way, arenas = ctx.ffn, Routes.of(routes), _arenas(arena, guests)
        of_tokens, of_arena = asked_for(ctx, 0), asked_for(ctx, 1)
        of_tokens |= weights_NK is not None and asked_for(ctx, 1 + len(arenas))
        known, ctx.ahead = ahead_of(ctx.ahead, grads[0]), None
        total = ctx.total.begun(arenas, ffn, tokens.shape[1]) if of_arena else None
        gate_up, down = views(arenas, ffn, tokens.shape[1])
        parts = known.parts if known else shares(tokens, way, ffn, len(arena), ctx.total.by)
        made = list[Tensor | None]([None] * len(parts)) if known is None else known.inners
        by, at_once = ctx.total.by, passes.serve(inners, ctx.total.by)
        weighed = Weighed(weights_NK, way, at_once=at_once) if known is None else known.weighed
        own, spread = Copies(tokens, way, by), Copies(grads[0], way, by)
        grad_tokens = Returned(parts, tokens, way) if of_tokens else None
        keeps = ctx.needs_input_grad[1] and not of_arena

        def compute(place: int) -> None:
            share, grad_inner, inner = parts[place], made[place], inners[parts[place].rows]
            grad, weighs = spread[share], True
            if grad_inner is None:
                grad_inner, activated, weighs = back_between(share, grad, inner, down, weighed)
            else:
                activated = activate(inner, by)
            if total is not None:
                if weighs:
                    weighed.scale(share, activated)
                total.of_down(share, grad, activated)
                del grad, activated
                total.of_gate_up(share, grad_inner, own[share])
            if grad_tokens is not None:
                grad_tokens.multiply(share, grad_inner, gate_up, transposed=False)
            made[place] = grad_inner if keeps else None

        for_both(parts, compute, total and total.send_guests_home, guests_first=True)
        if keeps:
            ctx.ahead = Ahead(grads[0], grads[0]._version, parts, made, weighed)
        of_inputs = None if grad_tokens is None else grad_tokens.add_up()
        whole = None if total is None else total.done()
        of_weights = weighed.gradient() if of_tokens else None
        return of_inputs, whole, None, of_weights, *[None] * (2 + len(routes))


def gated_experts(
    tokens: Tensor,
    arena: Tensor,
    guests: Tensor | None,
    weights_NK: Tensor | None,
    ffn: int,
    total: Total,
    *routes: Tensor | None,
) -> Tensor:
    """As `GatedExperts` where no backward follows: nothing of what is between the products stays,
    and where a processor gains by it all of that stands turned."""
    way = Routes.of(routes)
    gate_up, down = views(_arenas(arena, guests), ffn, tokens.shape[1])
    parts = shares_forward(tokens, way, ffn, down, total.by)
    results, own = Returned(parts, tokens, way), Copies(tokens, way, total.by)

    def compute(place: int) -> None:
        share = parts[place]
        rows = own[share]
        if share.by == "torch" and turns(rows, down[share.arena], share.counts):
            results.put(share, share.network(rows, gate_up, down, results.place(share)))
        elif share.by == "torch":
            inner = share.multiply(rows, gate_up, transposed=True)
            del rows
            results.multiply(share, activate(inner), down, transposed=True)
        else:
            activated = share.activated(rows, gate_up, None)
            del rows
            results.multiply(share, activated, down, transposed=True)

    for_both(parts, compute, partial(total.forward, waited_for=guests_have_rows(parts)))
    return results.add_up(weights_NK)


class Total:
    """The gradient of an arena that so many computations have used: the first to come writes what
    it makes of every slot, others add to it, and the last one has all of it.

    Guests come by `flights`, one after another, and their gradients go back by them: what is to
    come from elsewhere for this rank's own experts is added where they have left from.
    """

    def __init__(
        self,
        times: int = 1,
        flights: Sequence[Flight] = (),
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock
        self.by: GroupedMM = "torch"
        self._times, self._gone, self._come, self._flights = times, 0, 0, flights
        self._landed = False

    def forward(self, *, waited_for: bool) -> None:
        """One more computation has come to its guests. They are awaited where they have rows, and
        by the last one in any case: what was sent is held until then, and what is behind a
        computation need not happen where a layer is computed again."""
        self._gone += 1
        due = waited_for or self._gone == self._times
        if due and not self._landed:
            self._landed = True
            for flight in self._flights:
                flight.wait()

    def begun(self, arenas: Sequence[Tensor], ffn: int, hidden: int) -> Total:
        """Itself, for one more of them."""
        if not self._come:
            kind = arenas[0].dtype  # Guests may have come in a narrower one.
            self._wholes = [torch.empty_like(arena, dtype=kind) for arena in arenas]
            self._gate_up, self._down = views(self._wholes, ffn, hidden)
        self._come += 1
        return self

    def of_down(self, share: Share, grad: Tensor, rows: Tensor) -> None:
        """What there is for the share's slots of the last product."""
        self._put(share, grad, rows, self._down)

    def of_gate_up(self, share: Share, grad: Tensor, rows: Tensor) -> None:
        """What there is for those of the first."""
        self._put(share, grad, rows, self._gate_up)

    def _put(self, share: Share, grad: Tensor, rows: Tensor, matrices: Matrices) -> None:
        whole = matrices[share.arena][share.slots]
        share.outer(grad, rows, whole, added=self._come > 1)

    def send_guests_home(self) -> None:
        """Launch the gradients of guests, if all of them are there: those who came last are the
        first to be waited for."""
        if not self._flights or self._come < self._times:
            return
        last = len(self._wholes[1])
        for flight in reversed(self._flights):
            flight.turn_back(self._wholes[1][last - flight.coming : last])
            last -= flight.coming

    def done(self) -> Tensor | None:
        """The whole, if this was the last of them, and then nothing stays here."""
        if self._come < self._times:
            return None
        whole, self._come = self._wholes[0], 0
        del self._wholes, self._gate_up, self._down
        return whole


class Ahead(NamedTuple):
    """What the first half of a backward leaves for the second, if that begins with the same."""

    grad: Tensor
    version: int
    parts: list[Share]
    inners: list[Tensor | None]
    """Gradients between the products, share by share."""
    weighed: Weighed


def ahead_of(ahead: Ahead | None, grad: Tensor) -> Ahead | None:
    """What is ahead of a backward that begins with `grad`."""
    if ahead is None or not ahead.grad.is_set_to(grad) or ahead.version != grad._version:
        return None
    return ahead


def activate(inner: Tensor, by: GroupedMM = "torch") -> Tensor:
    """silu(gate) * up of gate and up side by side, by what multiplies."""
    if passes.serve(inner, by):
        return passes.activate(inner)
    gate, up = inner.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


class Activation(NamedTuple):
    """What backward needs of `activate`."""

    silu: Tensor
    """silu(gate)."""
    activated: Tensor
    """silu(gate) * up."""


def activate_apart(inner: Tensor) -> Activation:
    """As `activate` does, in two tensors."""
    gate, up = inner.chunk(2, dim=1)
    silu = F.silu(gate)
    return Activation(silu, silu * up)


def go_back(
    share: Share, inner: Tensor, activation: Activation, grad: Tensor, weighed: Weighed
) -> Tensor:
    """The gradient of gate and up, side by side as in `inner`.

    `grad` is the gradient of silu(gate) * up as if rows had no weights, and is written over; what
    those weights have for gradients is left with `weighed`.
    """
    gate, up = inner.chunk(2, dim=1)
    weighed.back(share, grad, activation.activated)
    grad_inner = torch.empty_like(inner)
    grad_gate, grad_up = grad_inner.chunk(2, dim=1)
    torch.mul(grad, activation.silu, out=grad_up)
    torch.ops.aten.silu_backward(grad.mul_(up), gate, grad_input=grad_gate)
    return grad_inner


def back_between(
    share: Share, grad: Tensor, inner: Tensor, down: Matrices, weighed: Weighed
) -> tuple[Tensor, Tensor, bool]:
    """The gradient of gate and up, given that of a share's results; silu(gate) * up, and whether
    it is still to be weighed."""
    grad_activated = share.multiply(grad, down, transposed=False)
    if passes.serve(inner, share.by):
        return *weighed.at_once(share, inner, grad_activated), False
    halves = activate_apart(inner)
    return go_back(share, inner, halves, grad_activated, weighed), halves.activated, True


class Weighed:
    """Weights of rows, if they have some, where backward comes to what is between the products."""

    def __init__(self, weights_NK: Tensor | None, way: Routes, *, at_once: bool = False) -> None:
        """They are met `at_once`, or where `back` and `scale` come to them."""
        self._weights_NK, self._order_R = weights_NK, way.order_R
        if weights_NK is not None:
            self._grad_NK = torch.zeros_like(weights_NK) if at_once else None
            self._weights_R = None if at_once else weights_NK.view(-1)[way.order_R]
            self._grads_R = None if at_once else torch.empty_like(self._rows_weights())

    def _rows_weights(self) -> Tensor:
        assert self._weights_NK is not None
        if self._weights_R is None:
            return self._weights_NK.view(-1)[self._order_R]
        return self._weights_R

    def at_once(self, share: Share, inner: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of gate and up, and what comes of them, weighed, in one pass; as `go_back`
        has them."""
        order, weights, grads = self._order_R[share.rows], None, None
        if self._weights_NK is not None:
            assert self._grad_NK is not None
            weights, grads = self._weights_NK.view(-1), self._grad_NK.view(-1)
        return passes.gated_back(inner, grad, weights, order, grads)

    def back(self, share: Share, grad: Tensor, inner: Tensor) -> None:
        """Find the gradients of the share's weights and put the weights into `grad`, the gradient
        that `inner`, without weights, would have."""
        if self._weights_NK is not None:
            assert self._grads_R is not None
            torch.sum(grad * inner, dim=1, out=self._grads_R[share.rows])
            self.scale(share, grad)

    def scale(self, share: Share, rows: Tensor) -> None:
        """Multiply the share's rows by their weights."""
        if self._weights_NK is not None:
            rows.mul_(self._rows_weights()[share.rows, None])

    def scaled(self, share: Share, rows: Tensor) -> Tensor:
        """The share's rows times their weights; themselves, if there are none."""
        return rows if self._weights_NK is None else rows * self._rows_weights()[share.rows, None]

    def gradient(self) -> Tensor | None:
        """That of all weights."""
        if self._weights_NK is None:
            return None
        if self._grad_NK is not None:
            return self._grad_NK
        assert self._grads_R is not None
        grad = torch.zeros_like(self._weights_NK)
        grad.view(-1)[self._order_R] = self._grads_R
        return grad


def arena_views(arena: Tensor, ffn: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(gate and up [slots, 2 * ffn, hidden], down [slots, hidden, ffn]) as views of an arena."""
    slots, split = arena.shape[0], 2 * ffn * hidden
    gate_up = arena[:, :split].view(slots, 2 * ffn, hidden)
    return gate_up, arena[:, split:].view(slots, hidden, ffn)


def _arenas(arena: Tensor, guests: Tensor | None) -> list[Tensor]:
    return [arena] if guests is None else [arena, guests]


def views(arenas: Sequence[Tensor], ffn: int, hidden: int) -> tuple[Matrices, Matrices]:
    """Both kinds of matrices of each arena."""
    gate_up, down = zip(*(arena_views(arena, ffn, hidden) for arena in arenas), strict=True)
    return gate_up, down
