"""Operations of attention: of queries, keys and values from the stream, or from latent vectors."""

from __future__ import annotations

from moesaic.facts.job.model import LatentConfig
from moesaic.facts.workload.collectives import collective
from moesaic.facts.workload.operation import MatmulShape, Op, Operation
from moesaic.facts.workload.ops import (
    gather_sequence,
    linear,
    norm,
    residual,
    scatter_sequence,
)
from moesaic.facts.workload.sizes import ATTENTION_QUERY_BLOCK, Sizes


def attention(s: Sizes) -> list[Operation]:
    """Return a layer's attention, with its norm and residual."""
    projections = _projections(s) if s.model.latent is None else _latent(s, s.model.latent)
    values = s.q_width if s.model.latent is None else s.heads * s.model.latent.v_head_dim
    output = linear("o", s, s.model.hidden, values)
    return [*projections, output, scatter_sequence(s), residual(s)]


def _projections(s: Sizes) -> list[Operation]:
    """Return all operations before the output projection."""
    model, hidden, widths = s.model, s.model.hidden, (s.q_width, s.kv_width, s.kv_width)
    norms = [_qk_norm(s, width) for width in (s.q_width, s.kv_width) if model.qk_norm is not None]
    return [
        norm(s, hidden, num_gradients=4 if s.tp == 1 else 2, saves_result=s.tp == 1),
        gather_sequence(s, hidden, num_uses=3, split=True),
        *(
            linear(name, s, width, hidden, casts_input=s.tp == 1)
            for name, width in zip("qkv", widths, strict=True)
        ),
        *norms,
        *([_clamp(s)] if model.clip_qkv is not None else []),
        _rotary(s, s.tokens * (s.q_width + s.kv_width), 5, 5),
        # It saves rotated queries and keys, values and result.
        _attention_kernel(s, model.head_dim, 2 * s.tokens * (s.q_width + s.kv_width)),
    ]  # fmt: skip


def _qk_norm(s: Sizes, width: int) -> Operation:
    """Return the norm of queries or keys, by head or over the channels of all TP ranks.

    The latter all-reduces one sum of squares per token.
    """
    heads = width // s.model.head_dim if s.model.qk_norm == "heads" else 1
    one = norm(s, width // heads, "head norm", rows=s.tokens * heads, casts=True)
    if s.model.qk_norm == "heads" or s.tp == 1:
        return one
    n, cast = s.tokens * width, s.cast_bytes(s.tokens * width)
    calls = collective("qk norm", "all_reduce", s.tp_ranks, s.tokens * s.stored_bytes)
    return Operation(
        Op("head norm", (), 7 * n * s.stored_bytes + cast, 9),
        Op("head norm", (), 21 * n * s.stored_bytes + cast, 16),
        one.saved_bytes + n * s.stored_bytes,  # It also saves its result.
        n * s.stored_bytes,
        calls,
        calls,
    )


def _clamp(s: Sizes) -> Operation:
    """Return the clamp of queries, keys and values; backward applies a mask."""
    wide, narrow = s.tokens * (s.q_width + s.kv_width), s.tokens * s.kv_width
    num_bytes = wide * s.stored_bytes + narrow * s.compute_bytes
    backward = Op("clamp", (), 4 * num_bytes + 6 * (wide + narrow), 12)
    return Operation(Op("clamp", (), 2 * num_bytes, 3), backward, num_bytes)


def _rotary(s: Sizes, elements: int, forward: int, backward: int) -> Operation:
    """Return rotary embedding, which reads and writes `elements` so many times in stored type."""
    angles = 4 * s.tokens * s.model.rotary_dim * s.stored_bytes
    # Normed queries and keys come in stored type.
    casts = s.cast_bytes(elements) * (2 - (s.model.qk_norm is not None))
    return Operation(
        Op("rotary", (), forward * elements * s.stored_bytes + angles + casts, 10),
        Op("rotary", (), backward * elements * s.stored_bytes + angles + casts, 12),
    )


def _attention_kernel(
    s: Sizes, width: int, saved_elements: int, forward_bytes: int = 0, backward_bytes: int = 0
) -> Operation:
    """Return two batched matmuls forward and five backward, which recomputes the scores.

    Each sample is one document. Backward also needs a number per query and head.
    """
    blocks, length = _query_blocks(s), s.job.data.sequence
    batch = s.tokens // length * s.heads
    window = length if s.model.window is None else min(s.model.window, length)
    num_scores = sum(queries * keys for queries, keys in blocks)
    needs_mask = s.on_cpu and window < length
    used_scores = num_scores if needs_mask else window * length - window * (window - 1) // 2
    scores = tuple(MatmulShape(queries, keys, width, batch) for queries, keys in blocks)
    values = tuple(MatmulShape(queries, width, keys, batch) for queries, keys in blocks)
    mask_bytes = needs_mask * num_scores * (9 + 3 * s.compute_bytes)
    num_kernels = 2 + len(blocks) * (1 + 6 * needs_mask)
    forward, backward = (
        Op("attend", matmuls, moved + mask_bytes, num_kernels, s.precision, batch * used_scores,
           kind, used_scores / num_scores)
        for matmuls, moved, kind in (
            (scores + values, forward_bytes, "attention"),
            (2 * scores + 3 * values, backward_bytes, "attention backward"),
        )
    )  # fmt: skip
    saved = saved_elements * s.compute_bytes + s.tokens * s.heads * s.stored_bytes
    return Operation(forward, backward, saved)


def _query_blocks(s: Sizes) -> list[tuple[int, int]]:
    """Return queries and keys of each kernel call for a sample.

    On a CPU, a sliding window is cut into blocks of queries, each with its keys and a mask. A GPU
    has one kernel that skips other keys; twice the window stands for its causal half.
    """
    length, window = s.job.data.sequence, s.model.window
    if window is None or window >= length:
        return [(length, length)]
    if not s.on_cpu:
        return [(length, min(2 * window, length))]
    return banded_blocks(length, window, ATTENTION_QUERY_BLOCK)


def banded_blocks(length: int, window: int, size: int) -> list[tuple[int, int]]:
    """Return queries and keys of blocks of at most `size` queries of a causal sample."""
    starts = range(0, length, size)
    ends = [min(start + size, length) for start in starts]
    return [
        (end - start, end - max(0, start + 1 - window))
        for start, end in zip(starts, ends, strict=True)
    ]


def _latent(s: Sizes, latent: LatentConfig) -> list[Operation]:
    """Return all operations of latent attention before the output projection."""
    hidden, rank, rope = s.model.hidden, latent.kv_lora_rank, latent.qk_rope_head_dim
    query_input, query_name = hidden, "q"
    kv_up = s.q_width + s.heads * (latent.v_head_dim - rope)
    shard = s.shard_tokens
    down = [
        norm(s, hidden, num_gradients=3, saves_result=True),
        linear("kv_down", s, rank + rope, hidden, casts_input=True, rows=shard),
    ]
    if latent.q_lora_rank is not None:
        query_input, query_name = latent.q_lora_rank, "q_up"
        down += [
            linear("q_down", s, query_input, hidden, casts_input=True, rows=shard),
            norm(s, query_input, casts=True, saves_result=s.tp == 1),
        ]
    rotary_elements = s.tokens * (s.heads + 1) * rope
    return [
        *down,
        norm(s, rank, casts=True, saves_result=s.tp == 1),
        gather_sequence(s, query_input + rank + rope, split=True),
        linear(query_name, s, s.q_width, query_input, casts_input=s.tp == 1),
        _rotary(s, rotary_elements, 7, 10),
        linear("kv_up", s, kv_up, rank, casts_input=s.tp == 1),
        _concat_heads(s, latent),
        _latent_attention(s, latent),
    ]  # fmt: skip


def _concat_heads(s: Sizes, latent: LatentConfig) -> Operation:
    """Return the concatenation of rotated and unrotated channels of queries and keys.

    All heads share one rotated key.
    """
    q, rotated = s.tokens * s.q_width, s.tokens * latent.qk_rope_head_dim
    unrotated, values = q - rotated * s.heads, s.tokens * s.heads * latent.v_head_dim
    forward = 3 * q + unrotated + rotated
    backward = 2 * q + rotated * (s.heads + 1) + 2 * (unrotated + values)
    name = "concat heads"
    return Operation(
        Op(name, (), forward * s.compute_bytes, 2), Op(name, (), backward * s.compute_bytes, 4)
    )


def _latent_attention(s: Sizes, latent: LatentConfig) -> Operation:
    """Return attention over heads that are padded to the wider of keys and values.

    Either values are padded and the result is cut, or queries and keys are padded.
    """
    head, values = s.model.head_dim, latent.v_head_dim
    width, unrotated = max(head, values), s.heads * (head - latent.qk_rope_head_dim)
    heads, is_cut = s.tokens * s.heads, values < width
    num_padded = is_cut + 2 * (head < width)
    padded = num_padded * heads * (min(head, values) + width) * s.compute_bytes
    forward = padded + is_cut * 2 * heads * values * s.compute_bytes
    backward = padded + is_cut * heads * (values + width) * s.compute_bytes
    # Queries, keys and result; then padded values and the cut result, or the whole up projection.
    saved = 3 * heads * width
    saved += heads * (width + values) if is_cut else s.tokens * (unrotated + s.heads * values)
    return _attention_kernel(s, width, saved, forward, backward)
