"""Matrix products of many experts at once: the one seam for expert compute.

Rows are sorted by slot; `counts[s]` of them (a tensor on the host) belong to slot s. Weights are
views of an arena: [slots, N, K] with any stride between slots. The products are custom ops, so
that torch's compiler, flop counter and profiler see them as one thing; which engine computes them
is decided here, by device and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("moesaic::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`."""
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


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1] if transposed else weight.shape[2]))


@torch.library.custom_op("moesaic::grouped_outer", mutates_args=("out",))
def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    """left[s].T @ right[s] for every slot s, into out[s]; zero for a slot without rows."""
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


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    return None


def _by_library(rows: Tensor, weight: Tensor) -> bool:
    """Torch's own grouped product: a kernel on GPUs in bf16; on the CPU it is a loop like ours."""
    return rows.device.type != "cpu" and rows.dtype == torch.bfloat16 and rows.shape[0] > 0


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

    The gradient of the arena is written once, into a tensor of its shape; slots without rows get
    zeros. gate and up are one product.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arena: Tensor, counts: Tensor, ffn: int) -> Tensor:
        """Compute in the dtype of `rows`."""
        gate_up, down = arena_views(arena, ffn, rows.shape[1])
        inner = grouped_mm(rows, gate_up.to(rows.dtype), counts, True)
        gate, up = inner.chunk(2, dim=1)
        activated = F.silu(gate).mul_(up)
        result: Tensor = grouped_mm(activated, down.to(rows.dtype), counts, True)
        ctx.save_for_backward(rows, arena, counts, inner, activated)
        ctx.ffn = ffn
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of rows and arena."""
        rows, arena, counts, inner, activated = ctx.saved_tensors
        grad = grads[0].contiguous()
        gate_up, down = arena_views(arena, ctx.ffn, rows.shape[1])
        grad_arena = torch.empty_like(arena)
        grad_gate_up, grad_down = arena_views(grad_arena, ctx.ffn, rows.shape[1])
        grouped_outer(grad, activated, counts, grad_down)
        grad_activated = grouped_mm(grad, down.to(rows.dtype), counts, False)
        gate, up = inner.chunk(2, dim=1)
        grad_inner = torch.empty_like(inner)
        torch.mul(grad_activated, F.silu(gate), out=grad_inner[:, ctx.ffn :])
        grad_activated.mul_(up)
        grad_inner[:, : ctx.ffn] = torch.ops.aten.silu_backward(grad_activated, gate)
        grouped_outer(grad_inner, rows, counts, grad_gate_up)
        grad_rows = grouped_mm(grad_inner, gate_up.to(rows.dtype), counts, False)
        return grad_rows, grad_arena, None, None


def arena_views(arena: Tensor, ffn: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(gate and up [slots, 2 * ffn, hidden], down [slots, hidden, ffn]) as views of an arena."""
    slots, split = arena.shape[0], 2 * ffn * hidden
    gate_up = arena[:, :split].view(slots, 2 * ffn, hidden)
    return gate_up, arena[:, split:].view(slots, hidden, ffn)
