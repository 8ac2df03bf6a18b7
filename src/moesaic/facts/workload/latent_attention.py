"""Operations of multi-head latent attention, forward and backward, in the style of `ops`."""

from __future__ import annotations

from dataclasses import replace

from moesaic.facts.job.model import LatentConfig
from moesaic.facts.workload import ops
from moesaic.facts.workload.ops import Op, OpPair
from moesaic.facts.workload.sizes import Sizes


def attention(s: Sizes, latent: LatentConfig) -> list[OpPair]:
    """Return the ops of a layer's attention, in order."""
    hidden, width, values = s.model.hidden, latent.kv_lora_rank, s.heads * latent.v_head_dim
    wide_input = s.tp == 1
    query_down: list[OpPair] = []
    if latent.q_lora_rank is not None:
        query_down = [
            ops.linear(
                "q_down",
                s,
                latent.q_lora_rank,
                hidden,
                wide_input=True,
                rows=s.shard_tokens,
                reads_block_input=True,
            ),
            _norm(s, latent.q_lora_rank),
        ]
    query_name = "q" if latent.q_lora_rank is None else "q_up"
    down = width + latent.qk_rope_head_dim
    return [
        ops.norm(s, hidden, num_uses=2),
        ops.linear(
            "kv_down", s, down, hidden, wide_input=True, rows=s.shard_tokens, reads_block_input=True
        ),
        (Op("split"), Op("split", (), 2 * s.shard_tokens * down * s.compute_bytes, 1)),
        *query_down,
        _norm(s, width),
        *_gather_sequence(s, latent),
        ops.linear(
            query_name,
            s,
            s.q_width,
            query_input_width(s, latent),
            wide_input=wide_input,
            reads_block_input=query_name == "q",
        ),
        _rotary(s, s.heads * latent.qk_rope_head_dim),
        _rotary(s, latent.qk_rope_head_dim),
        ops.linear("kv_up", s, unrotated_width(s) + values, width, wide_input=wide_input),
        _concat_qk(s, latent),
        *_attention_kernel(s, latent),
        ops.linear("o", s, hidden, values, wide_input=False),
        ops.residual(s),
    ]


def query_input_width(s: Sizes, latent: LatentConfig) -> int:
    """Return the input width of the query projection."""
    return s.model.hidden if latent.q_lora_rank is None else latent.q_lora_rank


def gathered_width(s: Sizes, latent: LatentConfig) -> int:
    """Return channels per token that TP ranks gather, the inputs of all head projections."""
    return query_input_width(s, latent) + latent.kv_lora_rank + latent.qk_rope_head_dim


def unrotated_width(s: Sizes) -> int:
    """Return the width of all unrotated channels in this TP rank's query heads."""
    return s.q_width - s.heads * s.model.rotary_dim


def attention_head_width(s: Sizes, latent: LatentConfig) -> int:
    """Return the padded width of a head in attention, the larger of key and value width."""
    return max(s.model.head_dim, latent.v_head_dim)


def _norm(s: Sizes, width: int) -> OpPair:
    """Return the ops of a norm over a matmul result in the sequence shard, with its casts."""
    forward, backward = ops.norm(s, width, in_residual=False)
    casts = s.cast_bytes(s.shard_tokens * width)
    return (
        Op("norm", (), forward.moved_bytes + casts, forward.num_kernels + s.num_casts),
        Op("norm", (), backward.moved_bytes + casts, backward.num_kernels + s.num_casts),
    )


def _gather_sequence(s: Sizes, latent: LatentConfig) -> list[OpPair]:
    """Return the ops of one gather for all inputs; the rotary channels are cast first."""
    if s.tp == 1:
        return []
    widened = s.cast_bytes(s.shard_tokens * latent.qk_rope_head_dim)
    return [
        (Op("widen", (), widened, s.num_casts), Op("widen", (), widened, s.num_casts)),
        *ops.gather_sequence(
            replace(s, input_has_no_grad=False), gathered_width(s, latent), split=True
        ),
    ]


def _rotary(s: Sizes, width: int) -> OpPair:
    """Return the ops that rotate adjacent channels, in the stored type."""
    n, angles = s.tokens * width, s.tokens * s.model.rotary_dim // 2
    return (
        Op(
            "rotary",
            (),
            (7 * n + 4 * angles) * s.stored_bytes + 2 * s.cast_bytes(n),
            6 + 3 * s.num_casts,
        ),
        Op(
            "rotary",
            (),
            (10 * n + 4 * angles) * s.stored_bytes + 2 * s.cast_bytes(n),
            8 + 3 * s.num_casts,
        ),
    )


def _concat_qk(s: Sizes, latent: LatentConfig) -> OpPair:
    """Return the ops that concatenate rotated and unrotated channels of queries and keys.

    All heads share one rotated key.
    """
    q, rotated = s.tokens * s.q_width, s.tokens * latent.qk_rope_head_dim
    unrotated, all_rotated = s.tokens * unrotated_width(s), rotated * s.heads
    values = s.tokens * s.heads * latent.v_head_dim
    forward = 2 * q + (unrotated + rotated + q)
    backward = 2 * q + (all_rotated + rotated) + 2 * (unrotated + values)
    return Op("join", (), forward * s.compute_bytes, 2), Op(
        "join", (), backward * s.compute_bytes, 4
    )


def _attention_kernel(s: Sizes, latent: LatentConfig) -> list[OpPair]:
    """Return the ops of attention over padded heads, in the style of `ops.attention_kernel`."""
    head, width, heads = s.model.head_dim, attention_head_width(s, latent), s.tokens * s.heads
    # Either values are padded and results cut, or queries and keys are padded.
    num_padded = (latent.v_head_dim < width) + 2 * (head < width)
    padded_bytes = num_padded * heads * (min(head, latent.v_head_dim) + width) * s.compute_bytes
    is_cut = int(latent.v_head_dim < width)
    moved = (
        is_cut * 2 * heads * latent.v_head_dim * s.compute_bytes,
        is_cut * heads * (latent.v_head_dim + width) * s.compute_bytes,
    )
    return [
        (Op("pad heads", (), padded_bytes, num_padded),
         Op("pad heads", (), padded_bytes, num_padded)),
        ops.attend_heads(s, width, moved),
    ]  # fmt: skip
