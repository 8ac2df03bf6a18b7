"""Triton kernels: grouped matmul, weight gradients, SwiGLU, permutation, sorting.

Matmuls multiply in the dtype of their inputs and accumulate in fp32. Elementwise kernels compute in
fp32. Matmul programs are persistent, one per multiprocessor, so that a tile is written while the
next is read. Tiles are read through tensor descriptors (TMA).
"""
# Annotations hold Triton's types, which mypy does not know.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def make_tiles(
    counts, tiles, ends, slots, ALL: tl.constexpr, TILE_ROWS: tl.constexpr, STEP: tl.constexpr
):
    """Write the number of tiles, then the (slot, first row, end of the slot's rows) of each tile;
    and the row offsets of the slots."""
    slot, all_slots = tl.program_id(0), tl.arange(0, ALL)
    sizes = tl.load(counts + all_slots, mask=all_slots < slots, other=0).to(tl.int32)
    num_tiles = (sizes + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(all_slots < slot, sizes, 0))
    end = tl.sum(tl.where(all_slots <= slot, sizes, 0))
    first_tile = tl.sum(tl.where(all_slots < slot, num_tiles, 0))
    own = tl.sum(tl.where(all_slots == slot, num_tiles, 0))
    tl.store(ends + slot + 1, end)
    if slot == 0:
        tl.store(ends, 0)
    if slot == slots - 1:
        tl.store(tiles, first_tile + own)
    for begin in range(0, own, STEP):
        tile = begin + tl.arange(0, STEP)
        line, inside = tiles + 1 + (first_tile + tile) * 3, tile < own
        tl.store(line, slot, mask=inside)
        tl.store(line + 1, first + tile * TILE_ROWS, mask=inside)
        tl.store(line + 2, end, mask=inside)


@triton.jit
def grouped_mm(
    rows, matrices, out, activated, tiles, width, depth, out_m,
    TRANSPOSED: tl.constexpr, GATED: tl.constexpr, KEEP_INNER: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAMS: tl.constexpr, GROUP_TILES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of a slot's rows by a tile of its matrix's columns.

    If `GATED`, the matrix stacks gate over up, `width` rows each. A tile then covers columns of
    both, and silu(gate) * up is written to `activated`. `KEEP_INNER` also writes gate and up to
    `out`.

    Tiles of `GROUP_TILES` row blocks are adjacent in the order, so that caches serve repeated
    reads.
    """
    columns: tl.constexpr = N // 2 if GATED else N
    across = tl.cdiv(width, columns)
    num_tiles = tl.load(tiles)
    for number in tl.range(tl.program_id(0), num_tiles * across, PROGRAMS, flatten=True):
        group_start = number // (GROUP_TILES * across) * GROUP_TILES
        group_size = min(num_tiles - group_start, GROUP_TILES)
        within = number % (GROUP_TILES * across)
        line = tiles + 1 + (group_start + within % group_size) * 3
        slot, first, end = tl.load(line), tl.load(line + 1), tl.load(line + 2)
        column = within // group_size * columns
        total = tl.full((M, N), 0.0, tl.float32)
        for k in range(0, depth, K):
            left = rows.load([first, k])
            if GATED:
                right = matrices.load([slot, 0, column, k]).reshape(N, K).T
            elif TRANSPOSED:
                right = matrices.load([slot, column, k]).reshape(N, K).T
            else:
                right = matrices.load([slot, k, column]).reshape(K, N)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        m, n = first + tl.arange(0, M), column + tl.arange(0, columns)
        valid = (m < end)[:, None] & (n < width)[None, :]
        row_offset = m.to(tl.int64)[:, None]
        result = total.to(out.dtype.element_ty)
        if GATED:
            gate, up = result.reshape(M, 2, columns).permute(0, 2, 1).split()
            if KEEP_INNER:
                target = out + row_offset * out_m + n[None, :]
                tl.store(target, gate, mask=valid)
                tl.store(target + width, up, mask=valid)
            product = _silu_times(gate.to(tl.float32), up.to(tl.float32))
            target = activated + row_offset * width + n[None, :]
            tl.store(target, product.to(activated.dtype.element_ty), mask=valid)
        else:
            tl.store(out + row_offset * out_m + n[None, :], result, mask=valid)


@triton.jit
def _silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def grouped_wgrad(
    left, right, out, ends, height, width, out_s, out_m,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sum left[r].T * right[r] over the rows of a slot, for one tile of its weight gradient."""
    down, across = tl.cdiv(height, M), tl.cdiv(width, N)
    slot, block = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    row, column = block % down * M, block // down * N
    start, stop = tl.load(ends + slot), tl.load(ends + slot + 1)
    full_stop = start + (stop - start) // R * R
    total = tl.full((M, N), 0.0, tl.float32)
    for r in range(start, full_stop, R):
        left_block, right_block = left.load([r, row]), right.load([r, column])
        total = tl.dot(left_block.T, right_block, total, input_precision=PRECISION)
    if full_stop < stop:  # The last block reaches into the rows of other slots; mask them.
        valid = (full_stop + tl.arange(0, R) < stop)[:, None]
        left_block, right_block = left.load([full_stop, row]), right.load([full_stop, column])
        left_block, right_block = (
            tl.where(valid, left_block, 0.0).to(left_block.dtype),
            tl.where(valid, right_block, 0.0).to(left_block.dtype),
        )
        total = tl.dot(left_block.T, right_block, total, input_precision=PRECISION)
    m, n = row + tl.arange(0, M), column + tl.arange(0, N)
    inside = (m < height)[:, None] & (n < width)[None, :]
    target = out + slot.to(tl.int64) * out_s + m[:, None] * out_m + n[None, :]
    if ACCUMULATE:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    inner, grad, weights, order, grad_inner, activated, grad_weights, ffn, inner_r, grad_r,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a row of [gate | up] and of its weight, and the weighted activation.
    `grad` is the gradient of the unweighted activation."""
    row, weight, total = tl.program_id(0).to(tl.int64), 1.0, 0.0
    if WEIGHTED:
        weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    for first in range(0, ffn, WIDE):
        f = first + tl.arange(0, WIDE)
        inside = f < ffn
        gates, own = inner + row * inner_r + f, row * (2 * ffn) + f
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + ffn, mask=inside, other=0.0).to(tl.float32)
        grad_row = tl.load(grad + row * grad_r + f, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += tl.sum(grad_row * silu * up)
        grad_row *= weight
        dtype = grad_inner.dtype.element_ty
        grad_gate = grad_row * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(grad_inner + own, grad_gate.to(dtype), mask=inside)
        tl.store(grad_inner + own + ffn, (grad_row * silu).to(dtype), mask=inside)
        tl.store(activated + row * ffn + f, (silu * up * weight).to(dtype), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + tl.load(order + row), total)


@triton.jit
def permute(
    tokens, order, out, rows, top_k, hidden, tokens_t, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """Copy the token of each assignment to its row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = (tl.program_id(1) * WIDE + tl.arange(0, WIDE))[None, :]
    valid = row < rows
    token = (tl.load(order + row, mask=valid, other=0) // top_k).to(tl.int64)[:, None]
    inside = valid[:, None] & (h < hidden)
    value = tl.load(tokens + token * tokens_t + h, mask=inside)
    tl.store(out + row.to(tl.int64)[:, None] * hidden + h, value, mask=inside)


@triton.jit
def unpermute(
    rows, row_indices, weights, out, top_k, hidden, rows_r,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a token, each times its weight, in the order of its top-k choices."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = h < hidden
    total = tl.full((WIDE,), 0.0, tl.float32)
    for k in range(0, top_k):
        row_index = tl.load(row_indices + token * top_k + k).to(tl.int64)
        row = tl.load(rows + row_index * rows_r + h, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * top_k + k).to(tl.float32)
        total += row
    tl.store(out + token * hidden + h, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def count_slots(slots, block_counts, length, num_slots, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Count the assignments of a block per slot."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    assigned = tl.load(slots + index, mask=index < length, other=num_slots)
    for first in range(0, num_slots, WIDE):
        slot = first + tl.arange(0, WIDE)
        same = (assigned[:, None] == slot[None, :]).to(tl.int32)
        own = block_counts + tl.program_id(0) * num_slots + slot
        tl.store(own, tl.sum(same, 0), mask=slot < num_slots)


@triton.jit
def prefix_sum(block_counts, counts, blocks, num_slots, STEP: tl.constexpr):
    """Replace a slot's counts per block by their exclusive prefix sum, and write the total."""
    slot = tl.program_id(0)
    total = slot * 0
    for first in range(0, blocks, STEP):
        block = first + tl.arange(0, STEP)
        entry, valid = block_counts + block * num_slots + slot, block < blocks
        value = tl.load(entry, mask=valid, other=0)
        tl.store(entry, tl.cumsum(value, 0) - value + total, mask=valid)
        total += tl.sum(value)
    tl.store(counts + slot, total)


@triton.jit
def sort_by_slot(
    slots, block_counts, counts, order, rows, length, num_slots,
    ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sorted row of each assignment of a block, and the assignment of each row."""
    lane, slot = tl.arange(0, BLOCK), tl.arange(0, ALL)
    index = tl.program_id(0) * BLOCK + lane
    inside = index < length
    assigned = tl.load(slots + index, mask=inside, other=num_slots).to(tl.int32)
    assigned_too = tl.load(slots + index, mask=inside, other=num_slots).to(tl.int32)
    sizes = tl.load(counts + slot, mask=slot < num_slots, other=0).to(tl.int32)
    valid = inside & (assigned < num_slots)
    row = tl.sum(tl.where(slot[None, :] < assigned[:, None], sizes[None, :], 0), 1)
    row += tl.load(block_counts + tl.program_id(0) * num_slots + assigned, mask=valid, other=0)
    same = (assigned_too[None, :] == assigned[:, None]) & (lane[None, :] < lane[:, None])
    row += tl.sum(same.to(tl.int32), 1)
    tl.store(order + row, index.to(tl.int64), mask=valid)
    tl.store(rows + index, tl.where(valid, row, 0).to(tl.int64), mask=inside)
