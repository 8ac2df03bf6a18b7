"""What programs of a GPU do for products of slots and for the passes between them, in Triton.

Numbers are multiplied in the type they come in and added up in fp32, in which passes compute, too;
but units for eight bits may keep fewer bits of a sum.
Programs of products go on from tile to tile, as many as the GPU has processors, so that one tile is
written while the next is read; tiles are read whole, by the GPU's own engine for that.
"""
# Triton's own types stand where annotations would: mypy has none for it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def cut(counts, tiles, ends, slots, ALL: tl.constexpr, HEIGHT: tl.constexpr, STEP: tl.constexpr):
    """A slot's tiles of so many rows, as (slot, first row, end of its rows), after how many there
    are in all; and where its rows end."""
    slot, all_slots = tl.program_id(0), tl.arange(0, ALL)
    numbers = tl.load(counts + all_slots, mask=all_slots < slots, other=0).to(tl.int32)
    heights = (numbers + HEIGHT - 1) // HEIGHT
    first = tl.sum(tl.where(all_slots < slot, numbers, 0))
    end = tl.sum(tl.where(all_slots <= slot, numbers, 0))
    place = tl.sum(tl.where(all_slots < slot, heights, 0))
    own = tl.sum(tl.where(all_slots == slot, heights, 0))
    tl.store(ends + slot + 1, end)
    if slot == 0:
        tl.store(ends, 0)
    if slot == slots - 1:
        tl.store(tiles, place + own)
    for begun in range(0, own, STEP):
        tile = begun + tl.arange(0, STEP)
        line, inside = tiles + 1 + (place + tile) * 3, tile < own
        tl.store(line, slot, mask=inside)
        tl.store(line + 1, first + tile * HEIGHT, mask=inside)
        tl.store(line + 2, end, mask=inside)


@triton.jit
def rows_by_matrices(
    rows, matrices, out, activated, tiles, row_scales, column_scales, width, depth, out_m,
    TURNED: tl.constexpr, GATED: tl.constexpr, KEPT: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAMS: tl.constexpr, TOGETHER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Some rows of a slot times some columns of its matrix; both may have a scale each. Of a matrix
    of gates above ups, `width` of each, a tile has some of both, and silu(gate) * up is written,
    with gates and ups, which may be `KEPT`.

    Tiles of a few runs of rows are taken together, so that what they read is read once.
    """
    columns: tl.constexpr = N // 2 if GATED else N
    across = tl.cdiv(width, columns)
    heights = tl.load(tiles)
    for number in tl.range(tl.program_id(0), heights * across, PROGRAMS, flatten=True):
        begun = number // (TOGETHER * across) * TOGETHER
        beside = min(heights - begun, TOGETHER)
        within = number % (TOGETHER * across)
        line = tiles + 1 + (begun + within % beside) * 3
        slot, first, end = tl.load(line), tl.load(line + 1), tl.load(line + 2)
        column = within // beside * columns
        total = tl.full((M, N), 0.0, tl.float32)
        for k in range(0, depth, K):
            left = rows.load([first, k])
            if GATED:
                right = matrices.load([slot, 0, column, k]).reshape(N, K).T
            elif TURNED:
                right = matrices.load([slot, column, k]).reshape(N, K).T
            else:
                right = matrices.load([slot, k, column]).reshape(K, N)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        m, n = first + tl.arange(0, M), column + tl.arange(0, columns)
        own = (m < end)[:, None] & (n < width)[None, :]
        high = m.to(tl.int64)[:, None]
        if SCALED:
            total *= tl.load(row_scales + m, mask=m < end, other=0.0)[:, None]
            if GATED:
                both = slot * 2 * width + tl.arange(0, 2)[:, None] * width + n[None, :]
                inside = (tl.arange(0, 2)[:, None] < 2) & (n < width)[None, :]
                by_column = tl.load(column_scales + both, mask=inside, other=0.0).reshape(N)
            else:
                by_column = tl.load(column_scales + slot * width + n, mask=n < width, other=0.0)
            total *= by_column[None, :]
        found = total.to(out.dtype.element_ty)
        if GATED:
            gate, up = found.reshape(M, 2, columns).permute(0, 2, 1).split()
            if KEPT:
                place = out + high * out_m + n[None, :]
                tl.store(place, gate, mask=own)
                tl.store(place + width, up, mask=own)
            product = _silu_times(gate.to(tl.float32), up.to(tl.float32))
            place = activated + high * width + n[None, :]
            tl.store(place, product.to(activated.dtype.element_ty), mask=own)
        else:
            tl.store(out + high * out_m + n[None, :], found, mask=own)


@triton.jit
def _silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def rows_by_rows(
    left, right, out, ends, height, width, out_s, out_m,
    ADDED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile of the sum, over a slot's rows, of a left one times a right one."""
    down, across = tl.cdiv(height, M), tl.cdiv(width, N)
    slot, place = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    row, column = place % down * M, place // down * N
    start, stop = tl.load(ends + slot), tl.load(ends + slot + 1)
    whole = start + (stop - start) // R * R
    total = tl.full((M, N), 0.0, tl.float32)
    for r in range(start, whole, R):
        one, other = left.load([r, row]), right.load([r, column])
        total = tl.dot(one.T, other, total, input_precision=PRECISION)
    if whole < stop:  # What stands behind them are rows of others, which count for nothing.
        own = (whole + tl.arange(0, R) < stop)[:, None]
        one, other = left.load([whole, row]), right.load([whole, column])
        one, other = tl.where(own, one, 0.0).to(one.dtype), tl.where(own, other, 0.0).to(one.dtype)
        total = tl.dot(one.T, other, total, input_precision=PRECISION)
    m, n = row + tl.arange(0, M), column + tl.arange(0, N)
    inside = (m < height)[:, None] & (n < width)[None, :]
    into = out + slot.to(tl.int64) * out_s + m[:, None] * out_m + n[None, :]
    if ADDED:
        total += tl.load(into, mask=inside, other=0.0).to(tl.float32)
    tl.store(into, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(inner, activated, ffn, inner_r, WIDE: tl.constexpr):
    """silu(gate) * up of a row of gates and ups."""
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    gates, inside = inner + row * inner_r + f, f < ffn
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + ffn, mask=inside, other=0.0).to(tl.float32)
    product = _silu_times(gate, up).to(activated.dtype.element_ty)
    tl.store(activated + row * ffn + f, product, mask=inside)


@triton.jit
def gated_back(
    inner, grad, weights, order, grad_inner, activated, grad_weights, ffn, inner_r, grad_r,
    WEIGHED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of a row of gates and ups and of its weight, given that of what comes of them
    without one; and what comes of them, weighed."""
    row, weight, total = tl.program_id(0).to(tl.int64), 1.0, 0.0
    if WEIGHED:
        weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    for first in range(0, ffn, WIDE):
        f = first + tl.arange(0, WIDE)
        inside = f < ffn
        gates, own = inner + row * inner_r + f, row * (2 * ffn) + f
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + ffn, mask=inside, other=0.0).to(tl.float32)
        of_both = tl.load(grad + row * grad_r + f, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        total += tl.sum(of_both * silu * up)
        of_both *= weight
        kind = grad_inner.dtype.element_ty
        of_gate = of_both * up * (share + silu * (1.0 - share))
        tl.store(grad_inner + own, of_gate.to(kind), mask=inside)
        tl.store(grad_inner + own + ffn, (of_both * silu).to(kind), mask=inside)
        tl.store(activated + row * ffn + f, (silu * up * weight).to(kind), mask=inside)
    if WEIGHED:
        tl.store(grad_weights + tl.load(order + row), total)


@triton.jit
def copies(
    tokens, order, out, rows, choices, hidden, tokens_t, HIGH: tl.constexpr, WIDE: tl.constexpr
):
    """A few rows, each of the token that has a choice."""
    row = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    h = (tl.program_id(1) * WIDE + tl.arange(0, WIDE))[None, :]
    there = row < rows
    token = (tl.load(order + row, mask=there, other=0) // choices).to(tl.int64)[:, None]
    inside = there[:, None] & (h < hidden)
    found = tl.load(tokens + token * tokens_t + h, mask=inside)
    tl.store(out + row.to(tl.int64)[:, None] * hidden + h, found, mask=inside)


@triton.jit
def add_up(
    rows, places, weights, out, choices, hidden, rows_r,
    WEIGHED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A token's rows, each times its weight, in the order of its choices."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = h < hidden
    total = tl.full((WIDE,), 0.0, tl.float32)
    for choice in range(0, choices):
        place = tl.load(places + token * choices + choice).to(tl.int64)
        row = tl.load(rows + place * rows_r + h, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            row *= tl.load(weights + token * choices + choice).to(tl.float32)
        total += row
    tl.store(out + token * hidden + h, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def narrowed(
    numbers, out, scales, lines, width, numbers_s, numbers_l, out_l, largest, least,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A line of numbers in eight bits, by a scale of its own."""
    # What is no number makes the scale none.
    line, nothing = tl.program_id(0).to(tl.int64), 0.0
    apart = line // lines * numbers_s + line % lines * numbers_l
    most = 0.0
    for first in range(0, width, WIDE):
        w = first + tl.arange(0, WIDE)
        found = tl.load(numbers + apart + w, mask=w < width, other=0.0).to(tl.float32)
        most = max(most, tl.max(tl.abs(found)))
        nothing += tl.sum(found * 0.0)
    scale = max(most / largest, least) + nothing
    for first in range(0, width, WIDE):
        w = first + tl.arange(0, WIDE)
        found = tl.load(numbers + apart + w, mask=w < width, other=0.0).to(tl.float32)
        place = out + line * out_l + w
        tl.store(place, (found / scale).to(out.dtype.element_ty), mask=w < width)
    tl.store(scales + line, scale)


@triton.jit
def turned(
    numbers, out, scales, height, width, numbers_s, numbers_m, out_n, largest, least,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Some columns of a matrix in eight bits, by a scale of each, as rows."""
    slot, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    matrix, wide = numbers + slot * numbers_s + n[None, :], (n < width)[None, :]
    most, nothing = tl.full((N,), 0.0, tl.float32), tl.full((N,), 0.0, tl.float32)
    for first in range(0, height, M):
        m = first + tl.arange(0, M)[:, None]
        found = tl.load(matrix + m * numbers_m, mask=(m < height) & wide, other=0.0)
        most = tl.maximum(most, tl.max(tl.abs(found.to(tl.float32)), 0))
        nothing += tl.sum(found.to(tl.float32) * 0.0, 0)
    scale = tl.maximum(most / largest, least) + nothing
    tl.store(scales + slot * width + n, scale, mask=n < width)
    place = out + (slot * width + n[None, :]) * out_n
    for first in range(0, height, M):
        m = first + tl.arange(0, M)[:, None]
        inside = (m < height) & wide
        found = tl.load(matrix + m * numbers_m, mask=inside, other=0.0)
        eight = (found.to(tl.float32) / scale[None, :]).to(out.dtype.element_ty)
        tl.store(place + m, eight, mask=inside)


@triton.jit
def count(slots, numbers, length, num_slots, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """How many of a block are of each slot."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(slots + place, mask=place < length, other=num_slots)
    for first in range(0, num_slots, WIDE):
        slot = first + tl.arange(0, WIDE)
        same = (found[:, None] == slot[None, :]).to(tl.int32)
        own = numbers + tl.program_id(0) * num_slots + slot
        tl.store(own, tl.sum(same, 0), mask=slot < num_slots)


@triton.jit
def pile(numbers, counts, blocks, num_slots, STEP: tl.constexpr):
    """How many of a slot are in blocks before each, and in all of them."""
    slot = tl.program_id(0)
    total = slot * 0
    for first in range(0, blocks, STEP):
        block = first + tl.arange(0, STEP)
        place, there = numbers + block * num_slots + slot, block < blocks
        own = tl.load(place, mask=there, other=0)
        tl.store(place, tl.cumsum(own, 0) - own + total, mask=there)
        total += tl.sum(own)
    tl.store(counts + slot, total)


@triton.jit
def sort(
    slots, numbers, counts, order, rows, length, num_slots,
    ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row of each of a block, rows being sorted by slot, and whose each row is."""
    here, slot = tl.arange(0, BLOCK), tl.arange(0, ALL)
    place = tl.program_id(0) * BLOCK + here
    inside = place < length
    found = tl.load(slots + place, mask=inside, other=num_slots).to(tl.int32)
    again = tl.load(slots + place, mask=inside, other=num_slots).to(tl.int32)
    sizes = tl.load(counts + slot, mask=slot < num_slots, other=0).to(tl.int32)
    there = inside & (found < num_slots)
    row = tl.sum(tl.where(slot[None, :] < found[:, None], sizes[None, :], 0), 1)
    row += tl.load(numbers + tl.program_id(0) * num_slots + found, mask=there, other=0)
    same = (again[None, :] == found[:, None]) & (here[None, :] < here[:, None])
    row += tl.sum(same.to(tl.int32), 1)
    tl.store(order + row, place.to(tl.int64), mask=there)
    tl.store(rows + place, tl.where(there, row, 0).to(tl.int64), mask=inside)
