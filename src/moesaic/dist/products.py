"""Matrix products, of one weight and of many slots at once: the one seam for what multiplies.

Rows are sorted by slot; `counts[s]` of them (a tensor on the host) belong to slot s. Weights are
views of an arena: [slots, N, K] with any stride between slots. The products are custom ops, so
that torch's compiler, flop counter and profiler see them as one thing; which engine computes them
is decided here, by device and dtype. (A profiler of one thread does not see those of a crew.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.dist import threads
from moesaic.dist.device import prefers_onednn

_OPS = torch.library.Library("moesaic", "DEF")
# `torch.library.custom_op` says the same, but its first call imports torch's compiler, which takes
# a second, and every call costs five times as much.
_OPS.define("product(Tensor rows, Tensor weight, bool transposed) -> Tensor")
_OPS.define("product_into(Tensor rows, Tensor weight, bool transposed, Tensor(a!) out) -> ()")
_OPS.define("grouped_mm(Tensor rows, Tensor weight, Tensor counts, bool transposed) -> Tensor")
_OPS.define(
    "grouped_mm_into(Tensor rows, Tensor weight, Tensor counts, bool transposed, Tensor(a!) out)"
    " -> ()"
)
_OPS.define("grouped_outer(Tensor left, Tensor right, Tensor counts, Tensor(a!) out) -> ()")


def _product(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    outwards = weight if transposed else weight.T
    if not by_onednn(rows, weight):
        return rows @ outwards.T
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, outwards, None, "none", [], "")
    return product


def _product_into(rows: Tensor, weight: Tensor, transposed: bool, out: Tensor) -> None:
    if by_onednn(rows, weight):
        out.copy_(_product(rows, weight, transposed))
    else:
        torch.mm(rows, weight.T if transposed else weight, out=out)


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    if _by_library(rows, weight):
        operand = weight.transpose(1, 2) if transposed else weight
        product: Tensor = F.grouped_mm(rows, operand, offs=_ends(counts, rows.device))
        return product
    out = _empty(rows, weight, counts, transposed)
    _grouped_mm_into(rows, weight, counts, transposed, out)
    return out


def _grouped_mm_into(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor
) -> None:
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            matrix = weight[slot].T if transposed else weight[slot]
            torch.mm(rows[start:stop], matrix, out=out[start:stop])
            start = stop


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


def _empty(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1] if transposed else weight.shape[2]))


def _empty_product(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0 if transposed else 1]))


def _fake_product_into(rows: Tensor, weight: Tensor, transposed: bool, out: Tensor) -> None:
    return None


def _fake_mm_into(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor
) -> None:
    return None


def _fake_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    return None


_OPS.impl("product", _product, "CompositeExplicitAutograd")
_OPS.impl("product_into", _product_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_OPS.impl("grouped_mm_into", _grouped_mm_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")
torch.library.register_fake("moesaic::product", _empty_product, lib=_OPS)
torch.library.register_fake("moesaic::product_into", _fake_product_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_mm", _empty, lib=_OPS)
torch.library.register_fake("moesaic::grouped_mm_into", _fake_mm_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_outer", _fake_outer, lib=_OPS)


def product(rows: Tensor, weight: Tensor, *, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Rows @ weight, or rows @ weight.T if `transposed`; for sizes that come again and again."""
    if out is None:
        out = torch.ops.moesaic.product.default(rows, weight, transposed)
    else:
        torch.ops.moesaic.product_into.default(rows, weight, transposed, out)
    return out


def by_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these. It takes most of a millisecond to get ready for sizes that
    it has not met, so that experts, whose rows are never the same number, are none of its work."""
    kinds = {(t.dtype, t.device.type) for t in (rows, weight)}
    return kinds == {(torch.float32, "cpu")} and rows.numel() > 0 and prefers_onednn()


def grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`."""
    if out is None:
        out = torch.ops.moesaic.grouped_mm.default(rows, weight, counts, transposed)
    else:
        torch.ops.moesaic.grouped_mm_into.default(rows, weight, counts, transposed, out)
    return out


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor) -> None:
    """left[s].T @ right[s] for every slot s, into out[s]; zero for a slot without rows."""
    torch.ops.moesaic.grouped_outer.default(left, right, counts, out)


def engine(weight: Tensor) -> str:
    """What multiplies rows of experts by such a `weight`, for a person."""
    if weight.device.type != "cpu":
        return "torch's grouped product in bf16, else torch.mm, one after another"
    crew = threads.crew()
    alone = "" if crew is None else f", an expert a thread where rows are few ({crew.size} threads)"
    return f"torch.mm, one after another{alone}"


def _by_library(rows: Tensor, weight: Tensor) -> bool:
    """Torch's own grouped product: a kernel on GPUs in bf16; on the CPU it is a loop like ours."""
    narrow = rows.device.type != "cpu" and rows.dtype == torch.bfloat16 and rows.shape[0] > 0
    # It takes rows of whole 16 bytes; a low rank may have others.
    return narrow and not any(extent % 8 for extent in weight.shape[1:])


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    return counts.cumsum(0).to(torch.int32).to(device, non_blocking=True)


@register_flop_formula([torch.ops.moesaic.product, torch.ops.moesaic.product_into])
def _product_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[0] * weight[1]


@register_flop_formula([torch.ops.moesaic.grouped_mm, torch.ops.moesaic.grouped_mm_into])
def _grouped_mm_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.moesaic.grouped_outer)
def _grouped_outer_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
