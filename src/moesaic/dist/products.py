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

from moesaic.base.errors import ConfigError
from moesaic.dist import threads, vectors
from moesaic.dist.device import (
    generation,
    multiplies_bf16,
    multiplies_in_tiles,
    prefers_copies,
    prefers_onednn,
)
from moesaic.facts.job.train import Products

_WORTH = 1 << 20
"""Multiplications of a slot from which on oneDNN makes up for what each call of it takes."""
_LARGE_MATRIX = 1 << 19
"""Numbers of a matrix from which on oneDNN makes up for a copy of its result on cores that have
little to gain by it."""
_SPARE = 16
"""One row beside so many is what such cores make up for as well."""
_STEP = 8
_FEW, _MANY = 16, 64
_MOST = 256
"""Rows of a product from which on more of them make it no faster; results stand beside the place
where they belong, and this many are few."""
_MULTIPLIES_EIGHT = (8, 9)
"""Compute capability of GPUs from which on they multiply eight bits."""
_WIDE = 768
"""Columns of a right factor from which on a left one that stands turned is copied for units that
multiply in tiles."""
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
    "grouped_outer(Tensor left, Tensor right, Tensor counts, Tensor(a!) out, bool added,"
    " str by='torch') -> ()"
)


def _product(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    outwards = weight if transposed else weight.T
    return _onednn(rows, outwards) if by_onednn(rows, weight) else rows @ outwards.T


def _onednn(rows: Tensor, outwards: Tensor) -> Tensor:
    """Rows @ outwards.T."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, outwards, None, "none", [], "")
    return product


def _product_into(rows: Tensor, weight: Tensor, transposed: bool, out: Tensor) -> None:
    if by_onednn(rows, weight) and prefers_copies():
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
    if by != "torch":
        from moesaic.dist import tiles

        tiles.grouped_mm(rows, weight, counts, transposed, out, eight=by == "fp8")
        return
    start, numbers = 0, counts.tolist()
    if transposed and only_reads(rows, weight, max(numbers, default=0)):
        vectors.multiply(rows, weight, numbers, out)
        return
    if rows.device.type != "cpu":
        weight = weight.to(rows.dtype)
    for slot, count in enumerate(numbers):
        if count:
            stop, matrix = start + count, weight[slot].to(rows.dtype)
            outwards = matrix if transposed else matrix.T
            if transposed and only_reads(rows, matrix[None], count):
                vectors.multiply(rows[start:stop], matrix[None], [count], out[start:stop])
            elif _evenly(rows, count, matrix, transposed=transposed):
                for first in range(start, stop, _MOST):
                    _even_rows(rows, slice(first, min(first + _MOST, stop)), outwards, out)
            else:
                torch.mm(rows[start:stop], outwards.T, out=out[start:stop])
            start = stop


def _even_rows(rows: Tensor, own: slice, outwards: Tensor, out: Tensor) -> None:
    """A slot's own rows @ outwards.T into their place in `out`, with others beside them, so that
    their number is one of a few; what stands behind them in `out` is still to be written."""
    rows, first = _with_others(rows, own)
    size = len(rows)
    fits = first == own.start and first + size <= len(out)
    if _on_the_left(rows.dtype, size, outwards):
        wide = rows.dtype == torch.float32
        found = (_onednn(outwards, rows) if wide else torch.mm(outwards, rows.T)).T
    elif rows.dtype == torch.float32:
        found = _onednn(rows, outwards)
    else:  # torch asks oneDNN for these itself, and it writes to a place.
        found = torch.mm(rows, outwards.T, out=out[first : first + size] if fits else None)
        if fits:
            return
    out[own] = found[own.start - first : own.stop - first]


def _with_others(rows: Tensor, own: slice) -> tuple[Tensor, int]:
    """An even number of rows, `own` among them, and the place of the first."""
    size, first = _even(own.stop - own.start), own.start
    if size > len(rows):
        return _padded(rows[own], size), first
    first = min(first, len(rows) - size)
    return rows[first : first + size], first


def _on_the_left(dtype: torch.dtype, size: int, outwards: Tensor) -> bool:
    """Whether a matrix had better be the left factor, and the result turned: many times its rows,
    it is read as it lies, where the right factor is rearranged first."""
    if size > _MANY or not outwards.is_contiguous():
        return False
    return size >= _FEW if dtype == torch.float32 else multiplies_in_tiles()


def _even(count: int) -> int:
    """So many rows or a few more: oneDNN takes a millisecond or more to get ready for a number of
    rows that it has not met, and remembers a few hundred."""
    if count < _STEP:
        return 1 << (count - 1).bit_length()
    step = max(_STEP, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


def _padded(rows: Tensor, size: int) -> Tensor:
    return rows if size == len(rows) else F.pad(rows, (0, 0, 0, size - len(rows)))


def _grouped_gated_into(
    rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, out: Tensor
) -> None:
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            matrices = gate_up[slot].to(rows.dtype), down[slot].to(rows.dtype)
            for first in range(start, stop, _MOST):
                _turned(rows, slice(first, min(first + _MOST, stop)), *matrices, out)
            start = stop


def _turned(rows: Tensor, own: slice, gate_up: Tensor, down: Tensor, out: Tensor) -> None:
    """A slot's own rows through its network into their place in `out`. All stands turned on the
    way, so that both matrices are left factors and are read as they lie."""
    rows, first = _with_others(rows, own)
    gate, up = (gate_up @ rows.T).chunk(2)
    results = down @ F.silu(gate).mul_(up)
    out[own] = results.T[own.start - first : own.stop - first]


def _grouped_outer(
    left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool, by: str = "torch"
) -> None:
    if by != "torch":
        from moesaic.dist import tiles

        tiles.grouped_outer(left, right, counts, out, added)
        return
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            _outer(left[start:stop], right[start:stop], out[slot], added)
            start = stop
        elif not added:
            out[slot].zero_()


def _outer(left: Tensor, right: Tensor, out: Tensor, added: bool) -> None:
    """left.T @ right into `out`, or added to it; zeros at the end of their rows add nothing."""
    even = _evenly(left, len(left), out, transposed=False)
    if left.dtype == torch.float32:
        even = even and prefers_copies()
    if even and left.dtype == torch.float32:
        right = _padded(right, _even(len(right)))
        for first in range(0, left.shape[1], _MOST):
            columns = slice(first, first + _MOST)
            block = _padded(left[:, columns], len(right))
            _put(out[columns], _onednn(block.T, right.T), added)
        return
    if even:
        left, right = (_padded(rows, _even(len(rows))) for rows in (left, right))
    turned = left.T
    if even and right.shape[1] >= _WIDE and multiplies_in_tiles():
        turned = turned.contiguous()  # Which is quicker than to multiply by it as it lies.
    if out.dtype != left.dtype:
        _put(out, turned @ right, added)
    elif added:
        out.addmm_(turned, right)
    else:
        torch.mm(turned, right, out=out)


def _put(place: Tensor, values: Tensor, added: bool) -> None:
    if added:
        place.add_(values)
    else:
        place.copy_(values)


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


def _fake_outer(
    left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool, by: str = "torch"
) -> None:
    return None


_OPS.impl("product", _product, "CompositeExplicitAutograd")
_OPS.impl("product_into", _product_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_OPS.impl("grouped_mm_into", _grouped_mm_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_gated_into", _grouped_gated_into, "CompositeExplicitAutograd")
_OPS.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")
torch.library.register_fake("moesaic::product", _empty_product, lib=_OPS)
torch.library.register_fake("moesaic::product_into", _fake_product_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_mm", _empty, lib=_OPS)
torch.library.register_fake("moesaic::grouped_mm_into", _fake_mm_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_gated_into", _fake_gated_into, lib=_OPS)
torch.library.register_fake("moesaic::grouped_outer", _fake_outer, lib=_OPS)


def product(rows: Tensor, weight: Tensor, *, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Rows @ weight, or rows @ weight.T if `transposed`; for sizes that come again and again."""
    _refuse_graph(rows, weight)
    if out is None:
        out = torch.ops.moesaic.product.default(rows, weight, transposed)
    else:
        torch.ops.moesaic.product_into.default(rows, weight, transposed, out)
    return out


def only_reads(rows: Tensor, weight: Tensor, most: int) -> bool:
    """Whether so few rows a slot, at most, go through `weight`, [slots, outputs, inputs], that
    reading it is all there is to wait for: then all slots are one product, by all threads."""
    return vectors.serves(rows, weight, most)


def by_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these."""
    kinds = {(t.dtype, t.device.type) for t in (rows, weight)}
    return kinds == {(torch.float32, "cpu")} and rows.numel() > 0 and prefers_onednn()


def _evenly(rows: Tensor, count: int, matrix: Tensor, *, transposed: bool) -> bool:
    """Whether oneDNN multiplies so many rows and a matrix of a slot, in even numbers of rows; in
    bf16 it would do so in any case where the processor has such products. Where it gains little, it
    does large matrices alone, and numbers of rows that are nearly even as they are."""
    single = count == 1 and not transposed  # The other library is quicker at that.
    if rows.device.type != "cpu" or single or count * matrix.numel() < _WORTH:
        return False
    if rows.dtype == torch.float32 and prefers_onednn() and not prefers_copies():
        return matrix.numel() >= _LARGE_MATRIX and _beside(count) * _SPARE <= count
    return _has_onednn(rows.dtype)


def _beside(count: int) -> int:
    """Rows that are multiplied beside so many of a slot's own."""
    last = count % _MOST
    return _even(last) - last if last else 0


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether it multiplies such numbers of experts on this CPU, unless there are too few."""
    if dtype == torch.float32:
        return prefers_onednn()
    return dtype == torch.bfloat16 and multiplies_bf16()


def check(products: Products, device: torch.device) -> None:
    """Raise unless `products` multiply on `device`."""
    if products == "torch":
        return
    if device.type == "cpu":
        raise ConfigError(
            f'layout.products = "{products}" is for GPUs, and this run computes on the CPU: leave '
            "it out"
        )
    least, has = (".".join(map(str, one)) for one in (_MULTIPLIES_EIGHT, generation(device)))
    if products == "fp8" and generation(device) < _MULTIPLIES_EIGHT:
        raise ConfigError(
            f'layout.products = "fp8" needs a GPU of compute capability {least} or more, and this '
            f'one has {has}: set it to "triton" or "torch"'
        )
    try:
        from moesaic.dist import tiles  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'layout.products = "{products}" needs Triton, which is not there ({error}): '
            'install it (pip install triton), or set layout.products to "torch"'
        ) from None


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    transposed: bool,
    out: Tensor | None = None,
    by: Products = "torch",
) -> Tensor:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`."""
    _refuse_graph(rows, weight)
    if out is None:
        out = torch.ops.moesaic.grouped_mm.default(rows, weight, counts, transposed, by)
    else:
        torch.ops.moesaic.grouped_mm_into.default(rows, weight, counts, transposed, out, by)
    return out


def turns(rows: Tensor, matrices: Tensor, counts: Tensor) -> bool:
    """Whether `grouped_gated` is the faster way to take `rows` through slots whose matrices are as
    large as these: not if most have so few that reading is all there is to wait for."""
    worth = matrices.shape[1] * matrices.shape[2] * _FEW >= _WORTH
    if not worth or not multiplies_in_tiles():
        return False
    if rows.device.type != "cpu" or rows.dtype != torch.bfloat16:
        return False
    busy = int(counts.count_nonzero())
    return busy > 0 and not only_reads(rows, matrices, len(rows) // busy)


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
    by: Products = "torch",
) -> None:
    """left[s].T @ right[s] for every slot s, into out[s] or `added` to it; zero for a slot without
    rows."""
    _refuse_graph(left, right)
    torch.ops.moesaic.grouped_outer.default(left, right, counts, out, added, by)


def _refuse_graph(*tensors: Tensor) -> None:
    """These have no gradients of their own: whoever calls them inside a function has written it."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise NotImplementedError("products of slots record no gradients: call them without")


def engine(device: torch.device, dtype: torch.dtype, products: Products = "torch") -> str:
    """What multiplies rows of experts there, for a person."""
    if products != "torch":
        narrow = ", in eight bits but for gradients of matrices"
        return "kernels of our own" + narrow * (products == "fp8")
    if device.type != "cpu":
        return "torch's grouped product" if dtype == torch.bfloat16 else "torch.mm, one by one"
    by = "torch.mm"
    if _has_onednn(dtype):
        rarely = dtype == torch.float32 and not prefers_copies()
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


@register_flop_formula(torch.ops.moesaic.grouped_gated_into)
def _grouped_gated_flops(
    rows: tuple[int, ...], gate_up: tuple[int, ...], down: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * rows[0] * (gate_up[1] * gate_up[2] + down[1] * down[2])


@register_flop_formula(torch.ops.moesaic.grouped_outer)
def _grouped_outer_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
