"""Low-rank adapters of a layer's experts, in an arena of their own beside the bank's.

A slot holds, for gate, up and down in turn, A [rank, inputs] and B [outputs, rank]; the matrix W
then counts as W + scale * B A, which is never written out. W itself does not learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moesaic.facts.job.train import GroupedMM
from moesaic.nn.grouped import Weighed, activate, activate_apart, go_back, views
from moesaic.nn.halves import asked_for, refuse_second_order
from moesaic.nn.routes import Routes
from moesaic.nn.shares import Copies, Joined, Returned, Share, for_both, shares


class Adapters(nn.Module):
    """The adapters of one layer's home slots on this rank."""

    def __init__(self, experts: Sequence[int], shape: Shape) -> None:
        super().__init__()
        self.experts, self.shape = list(experts), shape
        width = 3 * shape.rank * (shape.hidden + shape.ffn)
        self.arena = nn.Parameter(torch.empty(len(self.experts), width))

    def matrices(self, arena: Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """(expert, gate.lora_a and so on, view) of all of `arena`, a tensor of its shape."""
        pairs = dict(zip(("gate", "up", "down"), self.shape.pairs(arena), strict=True))
        for slot, expert in enumerate(self.experts):
            for name, pair in pairs.items():
                yield expert, f"{name}.lora_a", pair.a[slot]
                yield expert, f"{name}.lora_b", pair.b[slot]

    def place(self, part: str, view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a whole matrix, and where in it the `view` of this rank begins."""
        del part
        return tuple(view.shape), (0, 0)


class Pair(NamedTuple):
    """A and B of one matrix of every slot: [slots, rank, inputs] and [slots, outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def add(self, share: Share, rows: Tensor, out: Tensor) -> None:
        """Add scale * B A rows to `out`."""
        out += share.whole.multiply(self._thin(share, rows), (self.b,), transposed=True)

    def back(self, share: Share, rows: Tensor, grad: Tensor, grads: Pair | None) -> Tensor:
        """What `grad`, the gradient of `out`, brings to `rows`; those of A and B go to `grads`, if
        they are asked for."""
        grad_thin = share.whole.multiply(grad, (self.b,), transposed=False).mul_(self.scale)
        if grads is not None:
            share.outer(grad, self._thin(share, rows), grads.b[share.slots])
            share.outer(grad_thin, rows, grads.a[share.slots])
        return share.whole.multiply(grad_thin, (self.a,), transposed=False)

    def _thin(self, share: Share, rows: Tensor) -> Tensor:
        return share.whole.multiply(rows, (self.a,), transposed=True).mul_(self.scale)


class Shape(NamedTuple):
    """What an arena of adapters is made of."""

    hidden: int
    ffn: int
    rank: int
    scale: float
    by: GroupedMM = "torch"
    """What multiplies on a GPU."""

    def pairs(self, arena: Tensor) -> tuple[Pair, Pair, Pair]:
        """gate, up and down as views of an arena."""
        slots, start, found = arena.shape[0], 0, []
        inner = (self.ffn, self.hidden)
        for outputs, inputs in (inner, inner, inner[::-1]):
            sizes = (self.rank * inputs, outputs * self.rank)
            a, b = arena[:, start : start + sum(sizes)].split(sizes, dim=1)
            start += sum(sizes)
            whole = (a.view(slots, self.rank, inputs), b.view(slots, outputs, self.rank))
            found.append(Pair(*whole, self.scale))
        gate, up, down = found
        return gate, up, down


class AdaptedExperts(torch.autograd.Function):
    """As `GatedExperts`, with an adapter beside each matrix; the bank's arena has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        arena: Tensor,
        adapters: Tensor,
        weights_NK: Tensor | None,
        shape: Shape,
        *routes: Tensor | None,
    ) -> Tensor:
        """Compute in the dtype of `tokens`, along `Routes.of(routes)`."""
        way, (gate_pair, up_pair, down_pair) = Routes.of(routes), shape.pairs(adapters)
        gate_up, down = views([arena], shape.ffn, shape.hidden)
        parts = shares(tokens, way, shape.ffn, by=shape.by)
        inners, results = Joined(parts, tokens, 2 * shape.ffn), Returned(parts, tokens, way)
        own = Copies(tokens, way, shape.by)

        def compute(place: int) -> None:
            share, rows = parts[place], own[parts[place]]
            inner = inners.multiply(share, rows, gate_up, transposed=True)
            gate, up = inner.chunk(2, dim=1)
            gate_pair.add(share, rows, gate)
            up_pair.add(share, rows, up)
            del rows
            activated = activate(inner, shape.by)
            result = share.multiply(activated, down, transposed=True, out=results.place(share))
            down_pair.add(share, activated, result)
            results.put(share, result)

        for_both(parts, compute)
        ctx.save_for_backward(tokens, arena, adapters, weights_NK, inners.whole, *routes)
        ctx.shape = shape
        return results.add_up(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of tokens and weights, and of adapters; in a backward that comes in halves, of
        the ones or the other."""
        refuse_second_order()
        tokens, arena, adapters, weights_NK, inners, *routes = ctx.saved_tensors
        shape, way = ctx.shape, Routes.of(routes)
        of_tokens, of_adapters = asked_for(ctx, 0), asked_for(ctx, 2)
        of_tokens |= weights_NK is not None and asked_for(ctx, 3)
        grad_adapters = torch.empty_like(adapters) if of_adapters else None
        gate_pair, up_pair, down_pair = shape.pairs(adapters)
        grad_gate_pair, grad_up_pair, grad_down_pair = (
            (None, None, None) if grad_adapters is None else shape.pairs(grad_adapters)
        )
        gate_up, down = views([arena], shape.ffn, shape.hidden)
        parts = shares(tokens, way, shape.ffn, by=shape.by)
        own, spread = Copies(tokens, way, shape.by), Copies(grads[0], way, shape.by)
        weighed = Weighed(weights_NK, way)
        grad_tokens = Returned(parts, tokens, way) if of_tokens else None

        def compute(number: int) -> None:
            share = parts[number]
            inner, grad = inners[share.rows], spread[share]
            activation = activate_apart(inner)
            weighted = weighed.scaled(share, activation.activated)
            grad_activated = share.multiply(grad, down, transposed=False)
            grad_activated += down_pair.back(share, weighted, grad, grad_down_pair)
            del weighted, grad
            grad_inner = go_back(share, inner, activation, grad_activated, weighed)
            del activation, grad_activated
            rows, (grad_gate, grad_up) = own[share], grad_inner.chunk(2, dim=1)
            thin = gate_pair.back(share, rows, grad_gate, grad_gate_pair)
            thin += up_pair.back(share, rows, grad_up, grad_up_pair)
            if grad_tokens is not None:
                place = grad_tokens.place(share)
                result = share.multiply(grad_inner, gate_up, transposed=False, out=place)
                result += thin
                grad_tokens.put(share, result)

        for_both(parts, compute)
        of_inputs = None if grad_tokens is None else grad_tokens.add_up()
        of_weights = weighed.gradient() if of_tokens else None
        return of_inputs, None, grad_adapters, of_weights, None, *[None] * len(routes)
