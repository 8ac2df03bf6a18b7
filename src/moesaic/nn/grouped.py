"""The network of experts over rows sorted by slot, from and to one arena.

`counts[s]` rows (a tensor on the host) belong to slot s.
"""

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

_SHARE_BYTES = 1 << 20
"""Between two products of a share of slots, on the CPU."""
_CACHED = 2
"""As many times that, the rows of a single slot, are still for one thread."""
_LARGE = 2
"""Shares for each thread, at least: a larger one is for all threads."""
_LEAST_BYTES = 8 << 20
"""Of rows and matrices: below, waking threads takes longer than they save."""


class GatedExperts(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) for rows sorted by slot, straight from and to one arena.

    gate and up are one product. On the CPU a few slots are taken at a time, so that what stands
    between two products never leaves the cache. The gradient of the arena is written once. Slots
    without rows get zeros.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arena: Tensor, counts: Tensor, ffn: int) -> Tensor:
        """Compute in the dtype of `rows`."""
        gate_up, down = arena_views(arena, ffn, rows.shape[1])
        parts = shares(rows, counts, ffn)
        results, inners = Joined(parts, rows, rows.shape[1]), Joined(parts, rows, 2 * ffn)

        def compute(place: int) -> None:
            share = parts[place]
            inner = inners.multiply(share, rows[share.rows], gate_up, transposed=True)
            gate, up = inner.chunk(2, dim=1)
            results.multiply(share, F.silu(gate).mul_(up), down, transposed=True)

        for_each(parts, compute)
        ctx.save_for_backward(rows, arena, counts, inners.whole)
        ctx.ffn, ctx.ahead = ffn, None
        return results.whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Gradients of rows, and of the arena; in a backward that comes in halves, of one of them.

        The half for rows keeps the gradients between the products for the one for the arena.
        """
        refuse_second_order()
        rows, arena, counts, inners = ctx.saved_tensors
        ffn, grad = ctx.ffn, grads[0].contiguous()
        of_rows, of_arena = asked_for(ctx, 0), asked_for(ctx, 1)
        known, ctx.ahead = ahead_of(ctx.ahead, grads[0]), None
        grad_arena = torch.empty_like(arena) if of_arena else None
        gate_up, down = arena_views(arena, ffn, rows.shape[1])
        parts = shares(rows, counts, ffn) if known is None else known.parts
        made = list[Tensor | None]([None] * len(parts)) if known is None else known.inners
        grad_rows = Joined(parts, rows, rows.shape[1]) if of_rows else None
        keeps = ctx.needs_input_grad[1] and not of_arena

        def compute(place: int) -> None:
            share, grad_inner = parts[place], made[place]
            gate, up = inners[share.rows].chunk(2, dim=1)
            activated = F.silu(gate)
            if grad_inner is None:
                grad_activated = share.multiply(grad[share.rows], down, transposed=False)
                grad_inner = _back_to_inner(grad_activated, gate, up, activated)
                del grad_activated
            if grad_arena is not None:
                grad_gate_up, grad_down = arena_views(grad_arena, ffn, rows.shape[1])
                activated.mul_(up)
                grouped_outer(grad[share.rows], activated, share.counts, grad_down[share.slots])
                grouped_outer(grad_inner, rows[share.rows], share.counts, grad_gate_up[share.slots])
            del activated
            if grad_rows is not None:
                grad_rows.multiply(share, grad_inner, gate_up, transposed=False)
            made[place] = grad_inner if keeps else None

        for_each(parts, compute)
        if keeps:
            ctx.ahead = Ahead(grads[0], grads[0]._version, parts, made)
        return None if grad_rows is None else grad_rows.whole, grad_arena, None, None


def refuse_second_order() -> None:
    """Stop a backward that is to have a graph of its own: in threads that would get lost."""
    if torch.is_grad_enabled():
        raise NotImplementedError("experts have no second derivative: leave out create_graph")


class Ahead(NamedTuple):
    """What the first half of a backward leaves for the second, if that begins with the same."""

    grad: Tensor
    version: int
    parts: list[Share]
    inners: list[Tensor | None]
    """Gradients between the products, share by share."""


def ahead_of(ahead: Ahead | None, grad: Tensor) -> Ahead | None:
    """What is ahead of a backward that begins with `grad`."""
    if ahead is None or not ahead.grad.is_set_to(grad) or ahead.version != grad._version:
        return None
    return ahead


def asked_for(ctx: Any, position: int) -> bool:
    """Whether this backward needs the gradient of an input; torch tells only its own functions."""
    node = ctx.next_functions[position][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # It does not say so of a leaf that `autograd.grad` is to return.
        return True


def _back_to_inner(grad_activated: Tensor, gate: Tensor, up: Tensor, activated: Tensor) -> Tensor:
    """The gradient of gate and up, side by side, where `activated` is silu(gate); writes over
    `grad_activated`."""
    ffn = gate.shape[1]
    grad_inner = gate.new_empty((len(gate), 2 * ffn))
    torch.mul(grad_activated, activated, out=grad_inner[:, ffn:])
    torch.ops.aten.silu_backward(grad_activated.mul_(up), gate, grad_input=grad_inner[:, :ffn])
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
        weight = weight[self.slots].to(rows.dtype)
        return grouped_mm(rows, weight, self.counts, transposed, out)


class Joined:
    """Results of all shares in one tensor, each written where it belongs."""

    whole: Tensor

    def __init__(self, parts: Sequence[Share], rows: Tensor, width: int) -> None:
        """For results as wide as `width`, of all `rows`."""
        self._several = len(parts) > 1
        if self._several:
            self.whole = rows.new_empty((len(rows), width))

    def multiply(self, share: Share, rows: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
        """As the share does; the place of its rows in the whole."""
        if self._several:
            out = self.whole[share.rows]
            return share.multiply(rows, weight, transposed=transposed, out=out)
        self.whole = share.multiply(rows, weight, transposed=transposed)
        return self.whole


def shares(rows: Tensor, counts: Tensor, ffn: int) -> list[Share]:
    """All slots at once on a GPU; on the CPU as many as have few enough rows, or one."""
    limit, most_alone = rows.shape[0], 0
    if rows.device.type == "cpu":
        crew, fitting = (
            _crew_for(rows, counts, ffn),
            _SHARE_BYTES // (2 * ffn * rows.element_size()),
        )
        if crew is not None:
            limit //= _LARGE * crew.size
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


def _crew_for(rows: Tensor, counts: Tensor, ffn: int) -> threads.Crew | None:
    """Threads for the experts, if there is enough to do for them to be woken."""
    hidden, busy = rows.shape[1], int(counts.count_nonzero())
    touched = (3 * ffn * busy + rows.shape[0]) * hidden * rows.element_size()
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
