"""Low-rank adapters of a layer's experts, in an arena of their own beside the bank's.

A slot holds, for gate, up and down in turn, A [rank, inputs] and B [outputs, rank]; the matrix W
then counts as W + scale * B A, which is never written out. W itself does not learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.dist.products import grouped_outer
from moesaic.nn.grouped import (
    Joined,
    Share,
    arena_views,
    asked_for,
    for_each,
    refuse_second_order,
    shares,
)


class Adapters(nn.Module):
    """The adapters of one layer's home slots on this rank."""

    def __init__(
        self, experts: Sequence[int], hidden: int, ffn: int, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.experts = list(experts)
        self.shape = Shape(hidden, ffn, rank, scale)
        width = 3 * rank * (hidden + ffn)
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
        out += share.multiply(self._thin(share, rows), self.b, transposed=True)

    def back(self, share: Share, rows: Tensor, grad: Tensor, grads: Pair | None) -> Tensor:
        """What `grad`, the gradient of `out`, brings to `rows`; those of A and B go to `grads`, if
        they are asked for."""
        grad_thin = share.multiply(grad, self.b, transposed=False).mul_(self.scale)
        if grads is not None:
            grouped_outer(grad, self._thin(share, rows), share.counts, grads.b[share.slots])
            grouped_outer(grad_thin, rows, share.counts, grads.a[share.slots])
        return share.multiply(grad_thin, self.a, transposed=False)

    def _thin(self, share: Share, rows: Tensor) -> Tensor:
        return share.multiply(rows, self.a, transposed=True).mul_(self.scale)


class Shape(NamedTuple):
    """What an arena of adapters is made of."""

    hidden: int
    ffn: int
    rank: int
    scale: float

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
        ctx: Any, rows: Tensor, arena: Tensor, adapters: Tensor, counts: Tensor, shape: Shape
    ) -> Tensor:
        """Compute in the dtype of `rows`."""
        ffn, (gate_pair, up_pair, down_pair) = shape.ffn, shape.pairs(adapters)
        gate_up, down = arena_views(arena, ffn, shape.hidden)
        parts = shares(rows, counts, ffn)
        results = Joined(parts, rows, shape.hidden)
        inners = Joined(parts, rows, 2 * ffn)

        def compute(place: int) -> None:
            share = parts[place]
            own = rows[share.rows]
            inner = inners.multiply(share, own, gate_up, transposed=True)
            gate, up = inner.chunk(2, dim=1)
            gate_pair.add(share, own, gate)
            up_pair.add(share, own, up)
            activated = F.silu(gate).mul_(up)
            result = results.multiply(share, activated, down, transposed=True)
            down_pair.add(share, activated, result)

        for_each(parts, compute)
        ctx.save_for_backward(rows, arena, adapters, counts, inners.whole)
        ctx.shape = shape
        return results.whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Gradients of rows and adapters; in a backward that comes in halves, of one of them."""
        refuse_second_order()
        rows, arena, adapters, counts, inners = ctx.saved_tensors
        shape, grad_out = ctx.shape, grads[0].contiguous()
        of_rows, of_adapters = asked_for(ctx, 0), asked_for(ctx, 2)
        grad_adapters = torch.empty_like(adapters) if of_adapters else None
        gate_pair, up_pair, down_pair = shape.pairs(adapters)
        grad_gate_pair, grad_up_pair, grad_down_pair = (
            (None, None, None) if grad_adapters is None else shape.pairs(grad_adapters)
        )
        gate_up, down = arena_views(arena, shape.ffn, shape.hidden)
        parts = shares(rows, counts, shape.ffn)
        grad_rows = Joined(parts, rows, shape.hidden)

        def compute(place: int) -> None:
            share = parts[place]
            own, grad, inner = (whole[share.rows] for whole in (rows, grad_out, inners))
            gate, up = inner.chunk(2, dim=1)
            activated = F.silu(gate)
            grad_activated = share.multiply(grad, down, transposed=False)
            grad_activated += down_pair.back(share, activated * up, grad, grad_down_pair)
            grad_inner = torch.empty_like(inner)
            grad_gate, grad_up = grad_inner.chunk(2, dim=1)
            torch.mul(grad_activated, activated, out=grad_up)
            grad_gate.copy_(torch.ops.aten.silu_backward(grad_activated.mul_(up), gate))
            thin = gate_pair.back(share, own, grad_gate, grad_gate_pair)
            thin += up_pair.back(share, own, grad_up, grad_up_pair)
            if of_rows:
                grad_own = grad_rows.multiply(share, grad_inner, gate_up, transposed=False)
                grad_own += thin

        for_each(parts, compute)
        return grad_rows.whole if of_rows else None, None, grad_adapters, None, None
