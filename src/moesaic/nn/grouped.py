"""The network of experts over tokens' rows sorted by slot, from and to one arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist import threads
from moesaic.dist.products import grouped_mm, grouped_outer
from moesaic.nn.halves import asked_for, refuse_second_order
from moesaic.nn.routes import Routes

_SHARE_BYTES = 1 << 20
"""Between two products of a share of slots, on the CPU."""
_CACHED = 2
"""As many times that, the rows of a single slot, are still for one thread."""
_LARGE = 2
"""Shares for each thread, at least: a larger one is for all threads."""
_LEAST_BYTES = 8 << 20
"""Of rows and matrices: below, waking threads takes longer than they save."""


class GatedExperts(torch.autograd.Function):
    """Sums of down(silu(gate(x)) * up(x)) over each token's rows, straight from one arena.

    gate and up are one product. On the CPU a few slots are taken at a time, so that what stands
    between two products never leaves the cache; rows are copied from tokens, and from gradients of
    tokens, as they are needed, and only what comes of gate and up is kept. A row's weight meets
    what is between the products: its own gradient is found there. The gradient of the arena is
    written once. Slots without rows get zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        arena: Tensor,
        weights_NK: Tensor | None,
        ffn: int,
        total: Total,
        *routes: Tensor | None,
    ) -> Tensor:
        """Compute in the dtype of `tokens`, along `Routes.of(routes)`; the gradient of the arena
        goes to `total`."""
        way = Routes.of(routes)
        gate_up, down = arena_views(arena, ffn, tokens.shape[1])
        parts = shares(tokens, way.counts, ffn)
        inners, results = Joined(parts, tokens, 2 * ffn), Returned(parts, tokens, way)
        own = Copies(tokens, way)

        def compute(place: int) -> None:
            share = parts[place]
            inner = inners.multiply(share, own[share], gate_up, transposed=True)
            results.multiply(share, activate(inner), down, transposed=True)

        for_each(parts, compute)
        ctx.save_for_backward(tokens, arena, weights_NK, inners.whole, *routes)
        ctx.ffn, ctx.total, ctx.ahead = ffn, total, None
        return results.add_up(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of tokens and weights, and of the arena; in a backward that comes in halves, of
        the ones or the other.

        The first half keeps the gradients between the products for the second.
        """
        refuse_second_order()
        tokens, arena, weights_NK, inners, *routes = ctx.saved_tensors
        ffn, way = ctx.ffn, Routes.of(routes)
        of_tokens, of_arena = asked_for(ctx, 0), asked_for(ctx, 1)
        of_tokens |= weights_NK is not None and asked_for(ctx, 2)
        known, ctx.ahead = ahead_of(ctx.ahead, grads[0]), None
        total = ctx.total.begun(arena, ffn, tokens.shape[1]) if of_arena else None
        gate_up, down = arena_views(arena, ffn, tokens.shape[1])
        parts = shares(tokens, way.counts, ffn) if known is None else known.parts
        made = list[Tensor | None]([None] * len(parts)) if known is None else known.inners
        weighed = Weighed(weights_NK, way) if known is None else known.weighed
        own, spread = Copies(tokens, way), Copies(grads[0], way)
        grad_tokens = Returned(parts, tokens, way) if of_tokens else None
        keeps = ctx.needs_input_grad[1] and not of_arena

        def compute(place: int) -> None:
            share, grad_inner, inner = parts[place], made[place], inners[parts[place].rows]
            grad = spread[share]
            if grad_inner is None:
                grad_activated = share.multiply(grad, down, transposed=False)
                halves = activate_apart(inner)
                grad_inner = go_back(share, inner, halves, grad_activated, weighed)
                activated = halves.activated
                del grad_activated, halves
            else:
                activated = activate(inner)
            if total is not None:
                weighed.scale(share, activated)
                total.of_down(share, grad, activated)
                del grad, activated
                total.of_gate_up(share, grad_inner, own[share])
            if grad_tokens is not None:
                grad_tokens.multiply(share, grad_inner, gate_up, transposed=False)
            made[place] = grad_inner if keeps else None

        for_each(parts, compute)
        if keeps:
            ctx.ahead = Ahead(grads[0], grads[0]._version, parts, made, weighed)
        of_inputs = None if grad_tokens is None else grad_tokens.add_up()
        whole = None if total is None else total.done()
        of_weights = weighed.gradient() if of_tokens else None
        return of_inputs, whole, of_weights, *[None] * (2 + len(routes))


class Total:
    """The gradient of an arena that so many computations have used: the first to come writes what
    it makes of every slot, others add to it, and the last one has all of it."""

    def __init__(self, times: int = 1) -> None:
        self._times, self._come = times, 0

    def begun(self, arena: Tensor, ffn: int, hidden: int) -> Total:
        """Itself, for one more of them."""
        if not self._come:
            self._whole = torch.empty_like(arena)
            self._gate_up, self._down = arena_views(self._whole, ffn, hidden)
        self._come += 1
        return self

    def of_down(self, share: Share, grad: Tensor, rows: Tensor) -> None:
        """What there is for the share's slots of the last product."""
        self._put(share, grad, rows, self._down)

    def of_gate_up(self, share: Share, grad: Tensor, rows: Tensor) -> None:
        """What there is for those of the first."""
        self._put(share, grad, rows, self._gate_up)

    def _put(self, share: Share, grad: Tensor, rows: Tensor, matrices: Tensor) -> None:
        grouped_outer(grad, rows, share.counts, matrices[share.slots], self._come > 1)

    def done(self) -> Tensor | None:
        """The whole, if this was the last of them, and then nothing stays here."""
        if self._come < self._times:
            return None
        whole, self._come = self._whole, 0
        del self._whole, self._gate_up, self._down
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


def activate(inner: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side."""
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


@dataclass(frozen=True)
class Share:
    """Consecutive slots and their rows."""

    slots: slice
    rows: slice
    counts: Tensor
    alone: bool
    """Whether one thread takes it: it is no more than half of a thread's part, and the cache of one
    core holds what stands between its products."""

    def multiply(
        self, rows: Tensor, weight: Tensor, *, transposed: bool, out: Tensor | None = None
    ) -> Tensor:
        """The share's `rows` times its slots of `weight`, in the dtype of `rows`."""
        return grouped_mm(rows, weight[self.slots], self.counts, transposed, out)


class Joined:
    """Results of all shares in one tensor, each written where it belongs."""

    whole: Tensor

    def __init__(self, parts: Sequence[Share], like: Tensor, width: int) -> None:
        """For results as wide as `width`, in dtype and place of `like`."""
        self._several = len(parts) > 1
        if self._several:
            self.whole = like.new_empty((parts[-1].rows.stop, width))

    def place(self, share: Share) -> Tensor | None:
        """Where the share's results belong, if there is such a place."""
        return self.whole[share.rows] if self._several else None

    def put(self, share: Share, results: Tensor) -> None:
        """Results that have been written to their place, or have none yet."""
        del share
        if not self._several:
            self.whole = results

    def multiply(self, share: Share, rows: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
        """As the share does; its results are where they belong."""
        results = share.multiply(rows, weight, transposed=transposed, out=self.place(share))
        self.put(share, results)
        return results


class Returned(Joined):
    """Results of all shares, as wide as tokens, for the tokens whose rows they come from."""

    def __init__(self, parts: Sequence[Share], tokens: Tensor, way: Routes) -> None:
        self._way, self._moved = way, way.rows_NK is None
        super().__init__(() if self._moved else parts, tokens, tokens.shape[1])
        if self._moved:  # Each token has one: its results go straight there.
            self.whole = torch.empty_like(tokens)

    def place(self, share: Share) -> Tensor | None:
        """None where results have another order than rows."""
        return None if self._moved else super().place(share)

    def put(self, share: Share, results: Tensor) -> None:
        """Results that have been written to their place, or have none yet."""
        if self._moved:
            self.whole.index_put_((self._way.order_R[share.rows],), results)
        else:
            super().put(share, results)

    def add_up(self, weights_NK: Tensor | None = None) -> Tensor:
        """Sums by token, weighted if there are weights."""
        return self.whole if self._moved else self._way.add_up(self.whole, weights_NK)


class Copies:
    """Rows of shares, copied from tokens when they are asked for."""

    def __init__(self, tokens: Tensor, way: Routes) -> None:
        self._tokens, self._tokens_R = tokens, way.tokens_R

    def __getitem__(self, share: Share) -> Tensor:
        """The rows of one share."""
        return self._tokens.index_select(0, self._tokens_R[share.rows])


class Weighed:
    """Weights of rows, if they have some, where backward comes to what is between the products."""

    def __init__(self, weights_NK: Tensor | None, way: Routes) -> None:
        self._weights_NK, self._order_R = weights_NK, way.order_R
        if weights_NK is not None:
            self._weights_R = weights_NK.view(-1)[way.order_R]
            self._grads_R = torch.empty_like(self._weights_R)

    def back(self, share: Share, grad: Tensor, inner: Tensor) -> None:
        """Find the gradients of the share's weights and put the weights into `grad`, the gradient
        that `inner`, without weights, would have."""
        if self._weights_NK is not None:
            torch.sum(grad * inner, dim=1, out=self._grads_R[share.rows])
            self.scale(share, grad)

    def scale(self, share: Share, rows: Tensor) -> None:
        """Multiply the share's rows by their weights."""
        if self._weights_NK is not None:
            rows.mul_(self._weights_R[share.rows, None])

    def scaled(self, share: Share, rows: Tensor) -> Tensor:
        """The share's rows times their weights; themselves, if there are none."""
        return rows if self._weights_NK is None else rows * self._weights_R[share.rows, None]

    def gradient(self) -> Tensor | None:
        """That of all weights."""
        if self._weights_NK is None:
            return None
        grad = torch.zeros_like(self._weights_NK)
        grad.view(-1)[self._order_R] = self._grads_R
        return grad


def shares(tokens: Tensor, counts: Tensor, ffn: int) -> list[Share]:
    """All slots at once on a GPU; on the CPU as many as have few enough rows, or one."""
    limit, most_alone = int(counts.sum()), 0
    if tokens.device.type == "cpu":
        crew = _crew_for(tokens, counts, ffn)
        fitting = _SHARE_BYTES // (2 * ffn * tokens.element_size())
        if crew is not None:
            limit = max(1, limit // (_LARGE * crew.size))
            most_alone = min(limit, _CACHED * fitting)
        limit = min(limit, fitting)
    cuts, first_row, row = [(0, 0)], 0, 0
    for slot, count in enumerate(counts.tolist()):
        if row > first_row and row + count - first_row > limit:
            cuts.append((slot, row))
            first_row = row
        row += count
    cuts.append((len(counts), row))
    return [
        Share(
            slice(slot, next_slot),
            slice(row, next_row),
            counts[slot:next_slot],
            next_row - row <= most_alone,
        )
        for (slot, row), (next_slot, next_row) in pairwise(cuts)
    ]


def _crew_for(tokens: Tensor, counts: Tensor, ffn: int) -> threads.Crew | None:
    """Threads for the experts, if there is enough to do for them to be woken."""
    busy, num_rows = int(counts.count_nonzero()), int(counts.sum())
    touched = (3 * ffn * busy + num_rows) * tokens.shape[1] * tokens.element_size()
    return threads.crew() if touched >= _LEAST_BYTES else None


def for_each(parts: Sequence[Share], compute: Callable[[int], None]) -> None:
    """Have `compute` take all shares, by their places: those of one thread each, the largest first,
    after those that all threads take."""
    crew, alone = threads.crew(), list[int]()
    for place, share in enumerate(parts):
        if share.alone and crew is not None:
            alone.append(place)
        else:
            compute(place)
    if crew is not None and alone:
        alone.sort(key=lambda place: parts[place].rows.start - parts[place].rows.stop)
        crew.each(compute, alone)


def arena_views(arena: Tensor, ffn: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(gate and up [slots, 2 * ffn, hidden], down [slots, hidden, ffn]) as views of an arena."""
    slots, split = arena.shape[0], 2 * ffn * hidden
    gate_up = arena[:, :split].view(slots, 2 * ffn, hidden)
    return gate_up, arena[:, split:].view(slots, hidden, ffn)
