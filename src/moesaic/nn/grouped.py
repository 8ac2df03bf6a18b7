"""Matrix products of many experts at once: the one seam for expert compute.

Rows are sorted by slot; `counts[s]` of them (a tensor on the host) belong to slot s. Weights are
views of an arena: [slots, N, K] with any stride between slots. The products are custom ops, so
that torch's compiler, flop counter and profiler see them as one thing; which engine computes them
is decided here, by device and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_SHARE_BYTES = 2 << 20
"""Between two products of a share of slots, on the CPU."""


_OPS = torch.library.Library("moesaic", "DEF")
# `torch.library.custom_op` says the same, but its first call imports torch's compiler, which takes
# a second, and every call costs five times as much.
_OPS.define("grouped_mm(Tensor rows, Tensor weight, Tensor counts, bool transposed) -> Tensor")
_OPS.define("grouped_outer(Tensor left, Tensor right, Tensor counts, Tensor(a!) out) -> ()")


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    out = rows.new_empty((rows.shape[0], weight.shape[1] if transposed else weight.shape[2]))
    if _by_library(rows, weight):
        operand = weight.transpose(1, 2) if transposed else weight
        product: Tensor = F.grouped_mm(rows, operand, offs=_ends(counts, rows.device))
        return product
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            matrix = weight[slot].T if transposed else weight[slot]
            torch.mm(rows[start:stop], matrix, out=out[start:stop])
            start = stop
    return out


def _grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    direct = out.dtype == left.dtype
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if not count:
            out[slot].zero_()
            continue
        stop = start + count
        if direct:
            torch.mm(left[start:stop].T, right[start:stop], out=out[slot])
        else:
            out[slot].copy_(left[start:stop].T @ right[start:stop])
        start = stop


def _fake_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1] if transposed else weight.shape[2]))


def _fake_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    return None


_OPS.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_OPS.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")
torch.library.register_fake("moesaic::grouped_mm", _fake_mm, lib=_OPS)
torch.library.register_fake("moesaic::grouped_outer", _fake_outer, lib=_OPS)


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`."""
    product: Tensor = torch.ops.moesaic.grouped_mm.default(rows, weight, counts, transposed)
    return product


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    """left[s].T @ right[s] for every slot s, into out[s]; zero for a slot without rows."""
    torch.ops.moesaic.grouped_outer.default(left, right, counts, out)


def _by_library(rows: Tensor, weight: Tensor) -> bool:
    """Torch's own grouped product: a kernel on GPUs in bf16; on the CPU it is a loop like ours."""
    narrow = rows.device.type != "cpu" and rows.dtype == torch.bfloat16 and rows.shape[0] > 0
    # It takes rows of whole 16 bytes; a low rank may have others.
    return narrow and not any(extent % 8 for extent in weight.shape[1:])


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    return counts.cumsum(0).to(torch.int32).to(device, non_blocking=True)


@register_flop_formula(torch.ops.moesaic.grouped_mm)
def _grouped_mm_flops(
    rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, out_shape: tuple[int, ...], **__: Any
) -> int:
    return 2 * rows[0] * rows[1] * out_shape[1]


@register_flop_formula(torch.ops.moesaic.grouped_outer)
def _grouped_outer_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


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
        inners, results = [], []
        for share in shares(rows, counts, ffn):
            inner = share.multiply(rows[share.rows], gate_up, transposed=True)
            gate, up = inner.chunk(2, dim=1)
            results.append(share.multiply(F.silu(gate).mul_(up), down, transposed=True))
            inners.append(inner)
        ctx.save_for_backward(rows, arena, counts, *inners)
        ctx.ffn = ffn
        return join(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Gradients of rows, and of the arena if it learns."""
        rows, arena, counts, *inners = ctx.saved_tensors
        ffn, grad = ctx.ffn, grads[0].contiguous()
        grad_arena = torch.empty_like(arena) if ctx.needs_input_grad[1] else None
        gate_up, down = arena_views(arena, ffn, rows.shape[1])
        grad_rows = []
        for share, inner in zip(shares(rows, counts, ffn), inners, strict=True):
            gate, up = inner.chunk(2, dim=1)
            grad_activated = share.multiply(grad[share.rows], down, transposed=False)
            activated = F.silu(gate)
            grad_inner = torch.empty_like(inner)
            torch.mul(grad_activated, activated, out=grad_inner[:, ffn:])
            grad_inner[:, :ffn] = torch.ops.aten.silu_backward(grad_activated.mul_(up), gate)
            if grad_arena is not None:
                grad_gate_up, grad_down = arena_views(grad_arena, ffn, rows.shape[1])
                activated.mul_(up)
                grouped_outer(grad[share.rows], activated, share.counts, grad_down[share.slots])
                grouped_outer(grad_inner, rows[share.rows], share.counts, grad_gate_up[share.slots])
            grad_rows.append(share.multiply(grad_inner, gate_up, transposed=False))
            del grad_activated, activated, grad_inner  # Or they outlast the next share's.
        return join(grad_rows), grad_arena, None, None


@dataclass(frozen=True)
class Share:
    """Consecutive slots and their rows."""

    slots: slice
    rows: slice
    counts: Tensor

    def multiply(self, rows: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
        """The share's `rows` times its slots of `weight`, in the dtype of `rows`."""
        weight = weight[self.slots].to(rows.dtype)
        return grouped_mm(rows, weight, self.counts, transposed)


def shares(rows: Tensor, counts: Tensor, ffn: int) -> list[Share]:
    """All slots at once on a GPU; on the CPU as many as have few enough rows, or one."""
    limit = rows.shape[0]
    if rows.device.type == "cpu":
        limit = _SHARE_BYTES // (2 * ffn * rows.element_size())
    cuts, first_row, row = [(0, 0)], 0, 0
    for slot, count in enumerate(counts.tolist()):
        if row > first_row and row + count - first_row > limit:
            cuts.append((slot, row))
            first_row = row
        row += count
    cuts.append((len(counts), row))
    return [
        Share(slice(slot, next_slot), slice(row, next_row), counts[slot:next_slot])
        for (slot, row), (next_slot, next_row) in pairwise(cuts)
    ]


def join(parts: list[Tensor]) -> Tensor:
    """What shares gave, in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def arena_views(arena: Tensor, ffn: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(gate and up [slots, 2 * ffn, hidden], down [slots, hidden, ffn]) as views of an arena."""
    slots, split = arena.shape[0], 2 * ffn * hidden
    gate_up = arena[:, :split].view(slots, 2 * ffn, hidden)
    return gate_up, arena[:, split:].view(slots, hidden, ffn)
