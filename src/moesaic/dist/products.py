"""Matrix products, of one weight and of many slots at once: the one seam for what multiplies.

Rows are sorted by slot; `counts[s]` of them (a tensor on the host) belong to slot s. Weights are
views of an arena: [slots, N, K] with any stride between slots. The products are custom ops, so
that torch's compiler, flop counter and profiler see them as one thing; which engine computes them
is decided here, by device and dtype. (A profiler of one thread does not see those of a crew.)
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.base.errors import ConfigError
from moesaic.dist import device as devices
from moesaic.dist import loops, passes, threads
from moesaic.facts.job.train import GroupedMM

_LEAST_CAPABILITY = {"triton": (8, 0), "fp8": (8, 9)}
"""Smallest compute capability that each kind of Triton kernels runs on."""
_MEASURED_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes in which `auto` takes the Triton kernels on measured GPUs."""
_OPS = torch.library.Library("moesaic", "DEF")
# `torch.library.custom_op` says the same, but its first call imports torch's compiler, which takes
# a second, and every call costs five times as much.
_OPS.define("product(Tensor rows, Tensor weight, bool transposed) -> Tensor")
_OPS.define("product_into(Tensor rows, Tensor weight, bool transposed, Tensor(a!) out) -> ()")
_OPS.define(
    "grouped_mm(Tensor rows, Tensor weight, Tensor counts, bool transposed, str by='torch')"
    " -> Tensor"
)
_OPS.define(
    "grouped_mm_into(Tensor rows, Tensor weight, Tensor counts, bool transposed, Tensor(a!) out,"
    " str by='torch') -> ()"
)
_OPS.define(
    "grouped_gated_into(Tensor rows, Tensor gate_up, Tensor down, Tensor counts, Tensor(a!) out)"
    " -> ()"
)
_OPS.define(
    "grouped_activated(Tensor rows, Tensor gate_up, Tensor counts, Tensor(a!)? inner,"
    " Tensor(b!) activated, str by) -> ()"
)
_OPS.define(
    "grouped_outer(Tensor left, Tensor right, Tensor counts, Tensor(a!) out, bool added,"
    " str by='torch') -> ()"
)


def _product(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    outwards = weight if transposed else weight.T
    return loops.onednn(rows, outwards) if loops.by_onednn(rows, weight) else rows @ outwards.T


def _product_into(rows: Tensor, weight: Tensor, transposed: bool, out: Tensor) -> None:
    if loops.by_onednn(rows, weight) and devices.prefers_copies():
        out.copy_(_product(rows, weight, transposed))
    else:
        torch.mm(rows, weight.T if transposed else weight, out=out)


def _grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, by: str = "torch"
) -> Tensor:
    if by == "torch" and _by_library(rows, weight):
        operand = weight.to(rows.dtype)
        operand = operand.transpose(1, 2) if transposed else operand
        product: Tensor = F.grouped_mm(rows, operand, offs=_ends(counts, rows.device))
        return product
    out = _empty(rows, weight, counts, transposed, by)
    _grouped_mm_into(rows, weight, counts, transposed, out, by)
    return out


def _grouped_mm_into(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor, by: str = "torch"
) -> None:
    if by != "torch" and _in_tiles(rows, weight):
        from moesaic.dist import tiles

        tiles.grouped_mm(rows, weight, counts, transposed, out, eight=by == "fp8")
        return
    if by != "torch" and _by_library(rows, weight):
        out.copy_(_grouped_mm(rows, weight, counts, transposed))
        return
    loops.multiply(rows, weight, counts, transposed, out)


def _grouped_activated(
    rows: Tensor, gate_up: Tensor, counts: Tensor, inner: Tensor | None, activated: Tensor, by: str
) -> None:
    if _in_tiles(rows, gate_up):
        from moesaic.dist import tiles

        tiles.grouped_gated(rows, gate_up, counts, inner, activated, eight=by == "fp8")
        return
    found = _grouped_mm(rows, gate_up, counts, True, by)
    if inner is not None:
        inner.copy_(found)
    gate, up = found.chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=activated)


def _in_tiles(*numbers: Tensor) -> bool:
    """Whether kernels of our own can read them; a low rank may lie otherwise."""
    from moesaic.dist import tiles

    return tiles.serve(*numbers)


def _grouped_gated_into(
    rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, out: Tensor
) -> None:
    loops.through(rows, gate_up, down, counts, out)


def _grouped_outer(
    left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool, by: str = "torch"
) -> None:
    if by != "torch" and _in_tiles(left, right):
        from moesaic.dist import tiles

        tiles.grouped_outer(left, right, counts, out, added)
        return
    loops.outer(left, right, counts, out, added)


def _empty(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, by: str = "torch"
) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1] if transposed else weight.shape[2]))


def _empty_product(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0 if transposed else 1]))


def _fake_product_into(rows: Tensor, weight: Tensor, transposed: bool, out: Tensor) -> None:
    return None


def _fake_mm_into(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor, by: str = "torch"
) -> None:
    return None


def _fake_gated_into(
    rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, out: Tensor
) -> None:
    return None


def _fake_activated(
    rows: Tensor, gate_up: Tensor, counts: Tensor, inner: Tensor | None, activated: Tensor, by: str
) -> None:
    return None


def _fake_outer(
    left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool, by: str = "torch"
) -> None:
    return None


_OPS.impl("product", _product, "CompositeExplicitAutograd")
_OPS.impl("product_into", _product_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_OPS.impl("grouped_mm_into", _grouped_mm_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_gated_into", _grouped_gated_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_activated", _grouped_activated, "CompositeExplicitAutograd")
_OPS.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")
torch.library.register_fake("moesaic::product", _empty_product, lib=_OPS)
torch.library.register_fake("moesaic::product_into", _fake_product_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_mm", _empty, lib=_OPS)
torch.library.register_fake("moesaic::grouped_mm_into", _fake_mm_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_gated_into", _fake_gated_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_activated", _fake_activated, lib=_OPS)
torch.library.register_fake("moesaic::grouped_outer", _fake_outer, lib=_OPS)


def product(rows: Tensor, weight: Tensor, *, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Rows @ weight, or rows @ weight.T if `transposed`; for sizes that come again and again."""
    _refuse_graph(rows, weight)
    if out is None:
        out = torch.ops.moesaic.product.default(rows, weight, transposed)
    else:
        torch.ops.moesaic.product_into.default(rows, weight, transposed, out)
    return out


def check(
    grouped_mm: Literal["auto"] | GroupedMM, device: torch.device, key: str = "kernels.grouped_mm"
) -> None:
    """Raise unless the kernels `grouped_mm`, the value of the setting `key`, run on `device`."""
    reason = None if grouped_mm == "auto" else obstacle(grouped_mm, device)
    if reason is not None:
        raise ConfigError(f'{key} = "{grouped_mm}" {reason}')


@cache
def choose(
    grouped_mm: Literal["auto"] | GroupedMM, device: torch.device, dtype: torch.dtype
) -> GroupedMM:
    """Return the kernels of the expert matmuls on `device`, for tokens of `dtype`.

    auto: the Triton kernels on GPUs of a measured compute capability, for bf16 and fp16, if nothing
    stands against them there; else torch.
    """
    if grouped_mm != "auto":
        return grouped_mm
    measured = devices.generation(device) in devices.MEASURED and dtype in _MEASURED_DTYPES
    return "triton" if measured and obstacle("triton", device) is None else "torch"


def obstacle(grouped_mm: GroupedMM, device: torch.device) -> str | None:
    """Return why the kernels `grouped_mm` cannot run on `device`, and the remedy, or None."""
    if grouped_mm == "torch":
        return None
    if device.type == "cpu":
        return "is for GPUs, and this run computes on the CPU: leave it out"
    capability, least = devices.generation(device), _LEAST_CAPABILITY[grouped_mm]
    if capability < least:
        others = "torch" if capability < _LEAST_CAPABILITY["triton"] else 'triton" or "torch'
        has = _dotted(capability) if any(capability) else "none"
        return (
            f"needs an NVIDIA GPU of compute capability {_dotted(least)} or more, and this one has "
            f'{has}: set it to "{others}"'
        )
    why = passes.hindrance()
    if why is None:
        return None
    return (
        f"needs Triton, which fails here ({why}): mend that (pip install triton, and a C "
        'compiler), or set it to "torch"'
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    transposed: bool,
    out: Tensor | None = None,
    by: GroupedMM = "torch",
) -> Tensor:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`."""
    _refuse_graph(rows, weight)
    if out is None:
        out = torch.ops.moesaic.grouped_mm.default(rows, weight, counts, transposed, by)
    else:
        torch.ops.moesaic.grouped_mm_into.default(rows, weight, counts, transposed, out, by)
    return out


def grouped_activated(
    rows: Tensor,
    gate_up: Tensor,
    counts: Tensor,
    activated: Tensor,
    inner: Tensor | None,
    by: GroupedMM,
) -> None:
    """silu(gate) * up of rows[s] @ gate_up[s].T for every slot s, into its place; gates and ups
    stay in `inner`, if that is given. By kernels of our own."""
    _refuse_graph(rows, gate_up)
    torch.ops.moesaic.grouped_activated.default(rows, gate_up, counts, inner, activated, by)


def grouped_gated(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, out: Tensor) -> None:
    """down[s] (silu(gate[s] row) * up[s] row) for the rows of every slot s; gate and up lie one
    below the other."""
    _refuse_graph(rows, gate_up, down)
    torch.ops.moesaic.grouped_gated_into.default(rows, gate_up, down, counts, out)


def grouped_outer(
    left: Tensor,
    right: Tensor,
    counts: Tensor,
    out: Tensor,
    added: bool = False,
    by: GroupedMM = "torch",
) -> None:
    """left[s].T @ right[s] for every slot s, into out[s] or `added` to it; zero for a slot without
    rows."""
    _refuse_graph(left, right)
    torch.ops.moesaic.grouped_outer.default(left, right, counts, out, added, by)


def _refuse_graph(*tensors: Tensor) -> None:
    """These have no gradients of their own: whoever calls them inside a function has written it."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise NotImplementedError("products of slots record no gradients: call them without")


def engine(
    device: torch.device, dtype: torch.dtype, grouped_mm: Literal["auto"] | GroupedMM = "auto"
) -> str:
    """Return words for the kernels of the expert matmuls on `device`, for tokens of `dtype`."""
    if device.type != "cpu":
        kind, capability = choose(grouped_mm, device, dtype), devices.generation(device)
        has = f" (capability {_dotted(capability)})" if any(capability) else ""
        if kind != "torch" and dtype in devices.OF_KERNELS:
            kernels = "Triton grouped matmul" + " in fp8" * (kind == "fp8")
        else:
            kernels = "torch.grouped_mm" if dtype == torch.bfloat16 else "torch.mm per expert"
        return f"{kernels} on {device}{has}"
    by = "torch.mm"
    if loops.has_onednn(dtype):
        rarely = dtype == torch.float32 and not devices.prefers_copies()
        others = "matrices are small or rows few or uneven" if rarely else "they are small"
        by = f"oneDNN (torch.mm where {others})"
    crew = threads.crew()
    alone = "" if crew is None else f", some a thread where rows are few ({crew.size} threads)"
    return f"{by}, one by one{alone}"


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


@register_flop_formula(torch.ops.moesaic.grouped_activated)
def _grouped_activated_flops(
    rows: tuple[int, ...], gate_up: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * rows[0] * gate_up[1] * gate_up[2]


@register_flop_formula(torch.ops.moesaic.grouped_gated_into)
def _grouped_gated_flops(
    rows: tuple[int, ...], gate_up: tuple[int, ...], down: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * rows[0] * (gate_up[1] * gate_up[2] + down[1] * down[2])


@register_flop_formula(torch.ops.moesaic.grouped_outer)
def _grouped_outer_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
