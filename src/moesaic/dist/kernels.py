"""What one program of a GPU does for a tile of a product of slots, in Triton.

Numbers are multiplied in the type of the left factor and added up in fp32.
"""
# Triton's own types stand where annotations would: mypy has none for it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def rows_by_matrices(
    rows, matrices, out, tiles, row_scales, column_scales, width, depth,
    rows_m, rows_k, matrices_s, matrices_k, matrices_n, out_m,
    SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some rows of a slot times some columns of its matrix; both may have a scale each."""
    place = tl.program_id(0) * 3
    slot = tl.load(tiles + place).to(tl.int64)
    m = tl.load(tiles + place + 1) + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own, within = m < tl.load(tiles + place + 2), n < width
    m = m.to(tl.int64)
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for first in range(0, depth, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < depth
        left = tl.load(
            rows + m[:, None] * rows_m + k[None, :] * rows_k,
            mask=own[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            matrices + slot * matrices_s + k[:, None] * matrices_k + n[None, :] * matrices_n,
            mask=inside[:, None] & within[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right.to(left.dtype), total, input_precision="ieee")
    if SCALED:
        total *= tl.load(row_scales + m, mask=own, other=0.0)[:, None]
        total *= tl.load(column_scales + slot * width + n, mask=within, other=0.0)[None, :]
    tl.store(
        out + m[:, None] * out_m + n[None, :], total.to(out.dtype.element_ty),
        mask=own[:, None] & within[None, :],
    )  # fmt: skip


@triton.jit
def rows_by_rows(
    left, right, out, ends, height, width,
    left_r, left_m, right_r, right_n, out_s, out_m, out_n,
    ADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of the sum, over a slot's rows, of a left one times a right one."""
    slot = tl.program_id(0)
    start, stop = tl.load(ends + slot), tl.load(ends + slot + 1)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    high, wide = m < height, n < width
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for first in range(start, stop, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        own, r = r < stop, r.to(tl.int64)
        one = tl.load(
            left + r[None, :] * left_r + m[:, None] * left_m,
            mask=own[None, :] & high[:, None], other=0.0,
        )  # fmt: skip
        other = tl.load(
            right + r[:, None] * right_r + n[None, :] * right_n,
            mask=own[:, None] & wide[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(one, other, total, input_precision="ieee")
    place = out + slot.to(tl.int64) * out_s + m[:, None] * out_m + n[None, :] * out_n
    mask = high[:, None] & wide[None, :]
    if ADDED:
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)
