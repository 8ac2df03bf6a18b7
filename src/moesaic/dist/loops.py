"""Products of slots one after another, by the libraries of a CPU, or by torch where there is no
kernel for all of them: which library, in which numbers of rows, and which factor stands left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist import vectors

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
_WIDE = 768
"""Columns of a right factor from which on a left one that stands turned is copied for units that
multiply in tiles."""


def multiply(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor) -> None:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`."""
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


def through(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, out: Tensor) -> None:
    """Rows of every slot through its network."""
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            matrices = gate_up[slot].to(rows.dtype), down[slot].to(rows.dtype)
            for first in range(start, stop, _MOST):
                _turned(rows, slice(first, min(first + _MOST, stop)), *matrices, out)
            start = stop


def outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
    """left[s].T @ right[s] for every slot s, into out[s] or `added` to it."""
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            _outer(left[start:stop], right[start:stop], out[slot], added)
            start = stop
        elif not added:
            out[slot].zero_()


def onednn(rows: Tensor, outwards: Tensor) -> Tensor:
    """Rows @ outwards.T."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, outwards, None, "none", [], "")
    return product


def _even_rows(rows: Tensor, own: slice, outwards: Tensor, out: Tensor) -> None:
    """A slot's own rows @ outwards.T into their place in `out`, with others beside them, so that
    their number is one of a few; what stands behind them in `out` is still to be written."""
    rows, first = _with_others(rows, own)
    size = len(rows)
    fits = first == own.start and first + size <= len(out)
    if _on_the_left(rows.dtype, size, outwards):
        wide = rows.dtype == torch.float32
        found = (onednn(outwards, rows) if wide else torch.mm(outwards, rows.T)).T
    elif rows.dtype == torch.float32:
        found = onednn(rows, outwards)
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
    return size >= _FEW if dtype == torch.float32 else devices.multiplies_in_tiles()


def _even(count: int) -> int:
    """So many rows or a few more: oneDNN takes a millisecond or more to get ready for a number of
    rows that it has not met, and remembers a few hundred."""
    if count < _STEP:
        return 1 << (count - 1).bit_length()
    step = max(_STEP, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


def _padded(rows: Tensor, size: int) -> Tensor:
    return rows if size == len(rows) else F.pad(rows, (0, 0, 0, size - len(rows)))


def _turned(rows: Tensor, own: slice, gate_up: Tensor, down: Tensor, out: Tensor) -> None:
    """A slot's own rows through its network into their place in `out`. All stands turned on the
    way, so that both matrices are left factors and are read as they lie."""
    rows, first = _with_others(rows, own)
    gate, up = (gate_up @ rows.T).chunk(2)
    results = down @ F.silu(gate).mul_(up)
    out[own] = results.T[own.start - first : own.stop - first]


def _outer(left: Tensor, right: Tensor, out: Tensor, added: bool) -> None:
    """left.T @ right into `out`, or added to it; zeros at the end of their rows add nothing."""
    even = _evenly(left, len(left), out, transposed=False)
    if left.dtype == torch.float32:
        even = even and devices.prefers_copies()
    if even and left.dtype == torch.float32:
        right = _padded(right, _even(len(right)))
        for first in range(0, left.shape[1], _MOST):
            columns = slice(first, first + _MOST)
            block = _padded(left[:, columns], len(right))
            _put(out[columns], onednn(block.T, right.T), added)
        return
    if even:
        left, right = (_padded(rows, _even(len(rows))) for rows in (left, right))
    turned = left.T
    if even and right.shape[1] >= _WIDE and devices.multiplies_in_tiles():
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


def only_reads(rows: Tensor, weight: Tensor, most: int) -> bool:
    """Whether so few rows a slot, at most, go through `weight`, [slots, outputs, inputs], that
    reading it is all there is to wait for: then all slots are one product, by all threads."""
    return vectors.serves(rows, weight, most)


def by_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these."""
    kinds = {(t.dtype, t.device.type) for t in (rows, weight)}
    return kinds == {(torch.float32, "cpu")} and rows.numel() > 0 and devices.prefers_onednn()


def _evenly(rows: Tensor, count: int, matrix: Tensor, *, transposed: bool) -> bool:
    """Whether oneDNN multiplies so many rows and a matrix of a slot, in even numbers of rows; in
    bf16 it would do so in any case where the processor has such products. Where it gains little, it
    does large matrices alone, and numbers of rows that are nearly even as they are."""
    single = count == 1 and not transposed  # The other library is quicker at that.
    if rows.device.type != "cpu" or single or count * matrix.numel() < _WORTH:
        return False
    if rows.dtype == torch.float32 and devices.prefers_onednn() and not devices.prefers_copies():
        return matrix.numel() >= _LARGE_MATRIX and _beside(count) * _SPARE <= count
    return has_onednn(rows.dtype)


def _beside(count: int) -> int:
    """Rows that are multiplied beside so many of a slot's own."""
    last = count % _MOST
    return _even(last) - last if last else 0


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether it multiplies such numbers of experts on this CPU, unless there are too few."""
    if dtype == torch.float32:
        return devices.prefers_onednn()
    return dtype == torch.bfloat16 and devices.multiplies_bf16()


def turns(rows: Tensor, matrices: Tensor, counts: Tensor) -> bool:
    """Whether `grouped_gated` is the faster way to take `rows` through slots whose matrices are as
    large as these: not if most have so few that reading is all there is to wait for."""
    worth = matrices.shape[1] * matrices.shape[2] * _FEW >= _WORTH
    if not worth or not devices.multiplies_in_tiles():
        return False
    if rows.device.type != "cpu" or rows.dtype != torch.bfloat16:
        return False
    busy = int(counts.count_nonzero())
    return busy > 0 and not only_reads(rows, matrices, len(rows) // busy)
