"""Operations of a layer, forward and backward: matmuls, and the elementwise kernels between them.

Every function returns one forward and one backward op, or a list of such pairs. Matmuls are those
of the layers. Elementwise kernels are counted as torch runs them on a CPU, unfused: each reads and
writes whole tensors. On a GPU a norm is one forward kernel; other fusions there are unknown here.
`num_kernels` is an estimate.

With TP, each rank counts its own part of a layer. Norms, routers and the residual stream cover its
sequence shard. Heads, inner channels and vocabulary cover all tokens, with matrices as narrow as
its shard. Copies within collectives belong to the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.facts.job.finetune import AdapterTarget
from moesaic.facts.workload.sizes import INDEX_BYTES, NORM_CHUNK_BYTES, FloatType, Sizes

TRAFFIC_FACTOR = {"norm": 1, "scale": 2, "adamw": 7}
"""Bytes read and written by an elementwise kernel, as a multiple of its tensor. AdamW reads values,
gradient and two moments, and writes all but the gradient."""
LOW_BIT_TRAFFIC = {"bf16": (225, 34), "8bit": (612, 80)}
"""Bytes per element and kernels per matrix chunk of an update with low-bit moments, by
`optimizer.moments`. The numbers are those of a CPU, whose cache holds most intermediates."""


@dataclass(frozen=True)
class MatmulShape:
    """`count` matmuls of [rows, inner] and [inner, columns]."""

    rows: int
    columns: int
    inner: int
    count: int = 1
    is_weight_gradient: bool = False
    """True if a grouped matmul computes weight gradients, which sum over `rows`."""

    @property
    def flops(self) -> int:
        """FLOPs, two per multiplication."""
        return 2 * self.rows * self.columns * self.inner * self.count

    @property
    def elements(self) -> int:
        """Elements of both operands and the result."""
        rows, columns, inner = self.rows, self.columns, self.inner
        return (rows * inner + inner * columns + rows * columns) * self.count


GROUPED_MM = "slots"
"""Kind of an op that runs the matmuls of many experts together."""


@dataclass(frozen=True)
class Op:
    """One part of a block, forward or backward."""

    name: str
    matmuls: tuple[MatmulShape, ...] = ()
    """Matmuls in full, as torch counts them."""
    moved_bytes: int = 0
    """Bytes read and written by elementwise kernels; matmuls do not count."""
    num_kernels: int = 0
    """Estimated kernel launches."""
    dtype: FloatType = "fp32"
    """Data type of the matmul operands."""
    num_transcendentals: int = 0
    """Elements of exponentials and the like."""
    kind: str = ""
    """Kind of kernels with measured times of their own: attention, grouped matmuls, or one of
    `Device.elementwise`."""
    causal_fraction: float = 1.0
    """Fraction of `matmuls` that remains if a kernel skips causally masked scores."""

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls, in full."""
        return sum(product.flops for product in self.matmuls)


OpPair = tuple[Op, Op]
"""Forward and backward op."""


def embedding(s: Sizes, *, tied: bool) -> OpPair:
    """Return the ops of the embedding lookup.

    Backward sums into a zeroed table, and adds that to the gradient of a `tied` head. With TP, each
    rank writes zeros for words of other ranks. With column shards, each rank looks up the tokens of
    all ranks, and reorders columns after the exchange and before its backward.
    """
    table, ids = s.table_elements, s.tokens * INDEX_BYTES
    if s.embedding_shards > 1:
        lookup_ids = s.lookup_tokens * INDEX_BYTES
        forward = (
            2 * (s.lookup_elements + s.gathered_elements) * s.stored_bytes
            + lookup_ids
            + (s.embedding_shards + 1) * ids
        )
        backward = (
            table * (1 + 3 * tied) + 3 * s.lookup_elements + 2 * s.gathered_elements
        ) * s.stored_bytes + lookup_ids
        backward_op = Op("lookup", (), backward, 2 + tied) if s.trainable.weights else Op("lookup")
        return Op("lookup", (), forward, 3), backward_op
    forward = 2 * s.gathered_elements * s.stored_bytes + ids
    backward = (table * (1 + 3 * tied) + 3 * s.gathered_elements) * s.stored_bytes + ids
    kernels = [1, 1 + tied]
    if s.tp > 1:
        zeros = 2 * s.gathered_elements * s.stored_bytes + s.tokens
        forward, backward = forward + zeros + 6 * (ids + s.tokens), backward + zeros
        kernels = [kernels[0] + 6, kernels[1] + 1]
    backward_op = Op("lookup", (), backward, kernels[1]) if s.trainable.weights else Op("lookup")
    return Op("lookup", (), forward, kernels[0]), backward_op


def gather_tied_embedding(s: Sizes) -> list[OpPair]:
    """Return the ops that reorder the gathered column shards of a tied weight, and its gradient."""
    if not s.gathers_tied_embedding:
        return []
    batches, moved = len(s.table_message_bytes), 2 * s.vocab * s.model.hidden * s.stored_bytes
    backward_op = (
        Op("gather tied embedding", (), moved, batches)
        if s.trainable.weights
        else Op("gather tied embedding")
    )
    return [(Op("gather tied embedding", (), moved, batches), backward_op)]


def gather_sequence(
    s: Sizes, width: int, *, num_uses: int = 1, split: bool = False
) -> list[OpPair]:
    """Return the ops around a gather of the sequence shards, in compute type.

    Backward sums the gradients of the result's `num_uses`.

    Args:
        s: the sizes.
        width: channels per token.
        num_uses: number of readers of the result.
        split: whether the gathered tensor is concatenated from parts and split again.
    """
    if s.tp == 1:
        return []
    shard, gathered = s.shard_tokens * width, s.tokens * width
    forward = s.cast_bytes(shard) + split * 2 * shard * s.stored_bytes
    if s.input_has_no_grad:
        return [(Op("gather sequence", (), forward, s.num_casts + split), Op("gather sequence"))]
    backward = (
        s.cast_bytes(shard)
        + 2 * shard * s.stored_bytes
        + (3 * (num_uses - 1) + 2 * split) * gathered * s.compute_bytes
    )
    return [
        (
            Op("gather sequence", (), forward, s.num_casts + split),
            Op("gather sequence", (), backward, s.num_casts + num_uses + split),
        )
    ]


def norm(
    s: Sizes,
    width: int,
    name: str = "norm",
    *,
    rows: int | None = None,
    num_uses: int = 1,
    in_residual: bool = True,
) -> OpPair:
    """Return the ops of an RMS norm; backward first sums the gradients of the result's `num_uses`.

    Args:
        s: the sizes.
        width: elements per row.
        name: name of the ops.
        rows: number of rows; None for one per token of the sequence shard.
        num_uses: number of readers of the result.
        in_residual: whether the input is also the residual stream, whose gradient backward adds.
    """
    t, adds = s.shard_tokens if rows is None else rows, num_uses - 1 + in_residual
    n = t * width
    if in_residual and s.input_has_no_grad:
        forward, _ = norm(
            replace(s, input_has_no_grad=False), width, name, rows=rows, num_uses=num_uses
        )
        return forward, Op(name)
    if not s.on_cpu:
        return (
            Op(name, (), (2 * n + t + width) * s.stored_bytes, 1),
            Op(name, (), ((3 + 3 * adds) * n + t + 2 * width) * s.stored_bytes, 2 + adds),
        )
    num_chunks = -(-t // max(1, NORM_CHUNK_BYTES // (width * s.stored_bytes)))
    return (
        Op(name, (), (5 * n + 10 * t + width * num_chunks) * s.stored_bytes, 7 * num_chunks),
        Op(name, (), ((16 + 3 * adds) * n + 11 * t + (1 + 6 * num_chunks) * width) * s.stored_bytes,
           1 + 12 * num_chunks + adds),
    )  # fmt: skip


def qk_norms(s: Sizes) -> list[OpPair]:
    """Return the ops of the query and key norms, which cast from compute type to stored type."""
    parts = []
    for width in (s.q_width, s.kv_width):
        if s.model.qk_norm == "whole" and s.tp > 1:
            forward, backward = _tp_norm(s, width)
        else:
            rows = width // s.model.head_dim if s.model.qk_norm == "heads" else 1
            forward, backward = norm(s, width // rows, rows=s.tokens * rows, in_residual=False)
        casts = s.cast_bytes(s.tokens * width)
        parts.append(
            (
                Op("head norm", (), forward.moved_bytes + casts, forward.num_kernels + s.num_casts),
                Op(
                    "head norm",
                    (),
                    backward.moved_bytes + casts,
                    backward.num_kernels + s.num_casts,
                ),
            )
        )
    return parts


def _tp_norm(s: Sizes, width: int) -> OpPair:
    """Return the ops of a norm over the channels of all TP ranks, `width` of them on this rank.

    An all-reduce of the squares runs in between.
    """
    t, n = s.tokens, s.tokens * width
    return (
        Op("norm", (), (7 * n + 10 * t + width) * s.stored_bytes, 8),
        Op("norm", (), (21 * n + 14 * t + 2 * width) * s.stored_bytes, 15),
    )


def linear(
    name: str,
    s: Sizes,
    columns: int,
    inner: int,
    *,
    wide_input: bool,
    rows: int | None = None,
    target: AdapterTarget = "attention",
    reads_block_input: bool = False,
) -> OpPair:
    """Return the ops of tokens times a weight; weights and inputs in stored type are cast first.

    Args:
        name: name of the ops.
        s: the sizes.
        columns: output channels.
        inner: input channels.
        wide_input: whether the input has the stored type.
        rows: number of tokens; None for all.
        target: adapter target of the weight.
        reads_block_input: whether the input is that of the block.
    """
    t = s.tokens if rows is None else rows
    has_input_grad, has_weight_grad = (
        not (reads_block_input and s.input_has_no_grad),
        s.trainable.weights,
    )
    cast = s.cast_bytes(t * inner) if wide_input else 0
    moved, kernels = s.cast_bytes(columns * inner) + cast, s.num_casts * (1 + wide_input)
    backward_bytes = has_weight_grad * s.cast_bytes(columns * inner) + has_input_grad * cast
    grad_matmuls = has_input_grad * (MatmulShape(t, inner, columns),)
    grad_matmuls += has_weight_grad * (MatmulShape(columns, inner, t),)
    forward = Op(name, (MatmulShape(t, columns, inner),), moved, 1 + kernels, s.precision)
    casts = s.num_casts * (has_weight_grad + has_input_grad * wide_input)
    backward = Op(name, grad_matmuls, backward_bytes, len(grad_matmuls) + casts, s.precision)
    rank = s.trainable.rank_of_target(target)
    if rank:
        adapter_forward, adapter_backward = _adapter_ops(
            s, t, columns, inner, rank, wide_input, has_input_grad
        )
        forward, backward = (
            merge_ops(forward, adapter_forward),
            merge_ops(backward, adapter_backward),
        )
    return forward, backward


def _adapter_ops(
    s: Sizes,
    t: int,
    columns: int,
    inner: int,
    rank: int,
    wide_input: bool,
    has_token_gradient: bool,
) -> OpPair:
    """Return the ops that an adapter adds to a weight: A, B and their gradients."""
    weight_bytes = s.cast_bytes(rank * inner) + s.cast_bytes(columns * rank)
    cast = s.cast_bytes(t * inner) if wide_input else 0
    thin_bytes, element_bytes = (
        2 * t * rank * s.compute_bytes,
        s.stored_bytes if wide_input else s.compute_bytes,
    )
    forward = (MatmulShape(t, rank, inner), MatmulShape(t, columns, rank))
    backward: tuple[MatmulShape, ...] = (
        MatmulShape(t, rank, columns), MatmulShape(columns, rank, t), MatmulShape(rank, inner, t),
    )  # fmt: skip
    backward += has_token_gradient * (MatmulShape(t, inner, rank),)
    kernels, input_grad_bytes = (
        s.num_casts * (2 + wide_input),
        has_token_gradient * (cast + 3 * t * inner * element_bytes),
    )
    return (
        Op("", forward, weight_bytes + cast + thin_bytes + 3 * t * columns * s.compute_bytes,
           4 + kernels),
        Op("", backward, weight_bytes + thin_bytes + input_grad_bytes,
           len(backward) + 1 + has_token_gradient
           + s.num_casts * (2 + wide_input * has_token_gradient)),
    )  # fmt: skip


def merge_ops(one: Op, other: Op) -> Op:
    """Return one op with the work of both."""
    return replace(
        one,
        matmuls=one.matmuls + other.matmuls,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        num_kernels=one.num_kernels + other.num_kernels,
    )


def rotary(s: Sizes, width: int) -> OpPair:
    """Return the ops of rotary embedding; normed queries and keys come in stored type."""
    n, angles = s.tokens * width, s.tokens * s.model.head_dim // 2
    input_bytes = s.stored_bytes if s.model.qk_norm is not None else s.compute_bytes
    casts = 1 + (input_bytes != s.stored_bytes)
    moved, kernels = (
        (5 * n + 4 * angles) * s.stored_bytes + casts * s.cast_bytes(n),
        4 + casts * s.num_casts,
    )
    return Op("rotary", (), moved, kernels), Op("rotary", (), moved, kernels)


def clamp(s: Sizes) -> OpPair:
    """Return the ops that clamp queries, keys and values; backward applies a mask."""
    wide, narrow = s.tokens * (s.q_width + s.kv_width), s.tokens * s.kv_width
    elements = wide * s.stored_bytes + narrow * s.compute_bytes
    masks = 6 * (wide + narrow)
    return Op("clamp", (), 2 * elements, 3), Op("clamp", (), 4 * elements + masks, 12)


MASK_KERNELS = 6
"""Kernels that make the mask of one block of queries."""


def attention_kernel(s: Sizes) -> OpPair:
    """Return the ops of attention: two batched matmuls forward, five backward.

    Backward recomputes the scores, which are not saved.
    """
    return attend_heads(s, s.model.head_dim)


def attend_heads(s: Sizes, width: int, moved: tuple[int, int] = (0, 0)) -> OpPair:
    """Return the ops of attention over heads of `width`; `moved` adds kernels and bytes that cut
    the result, forward and backward."""
    blocks, batch = s.attention_blocks, s.batch * s.heads
    scores = tuple(MatmulShape(queries, keys, width, batch) for queries, keys in blocks)
    values = tuple(MatmulShape(queries, width, keys, batch) for queries, keys in blocks)
    causal_fraction = 1.0 if s.has_window_mask else (s.sequence + 1) / (2 * s.sequence)
    pairs = sum(queries * keys for queries, keys in blocks)
    transcendentals = round(batch * pairs * causal_fraction)
    mask_bytes = s.has_window_mask * pairs * (9 + 3 * s.compute_bytes)
    kernels = len(blocks) * (1 + MASK_KERNELS * s.has_window_mask)
    forward_bytes, backward_bytes = moved
    return (
        Op("attend", scores + values, forward_bytes + mask_bytes, kernels + (forward_bytes > 0),
           s.precision, transcendentals, "attention", causal_fraction),
        Op("attend", 2 * scores + 3 * values, backward_bytes + mask_bytes,
           kernels + (backward_bytes > 0), s.precision, transcendentals, "attention backward",
           causal_fraction),
    )  # fmt: skip


def residual(s: Sizes) -> OpPair:
    """Return the ops that add a layer's result to the residual stream."""
    return (
        Op("residual", (), s.stream_elements * (2 * s.stored_bytes + s.compute_bytes), 1),
        Op("residual", (), s.cast_bytes(s.stream_elements), s.num_casts),
    )


def gate(s: Sizes, ffn: int, name: str = "gate") -> OpPair:
    """Return the ops of silu(gate) * up in a dense FFN of inner width `ffn`."""
    elements = s.tokens * ffn
    n = elements * s.compute_bytes
    return (
        Op(name, (), 5 * n, 2, num_transcendentals=elements),
        Op(name, (), 9 * n, 3, num_transcendentals=elements),
    )


def loss(s: Sizes) -> OpPair:
    """Return the ops of logits, loss and both gradients, chunk by chunk; backward scales the
    gradients.

    With TP, each rank has the logits of its vocabulary shard. It reads tokens in compute type, and
    masks targets outside its shard.
    """
    vocab, hidden, t, trains_weights = s.vocab, s.model.hidden, s.tokens, s.trainable.weights
    matmuls: list[MatmulShape] = []
    for rows, num in s.loss_chunks:
        matmuls += [
            MatmulShape(rows, vocab, hidden, num),
            MatmulShape(rows, hidden, vocab, num),
        ]
        matmuls += trains_weights * [MatmulShape(vocab, hidden, rows, num)]
    num_chunks = sum(num for _, num in s.loss_chunks)
    weight, logits, is_tp = vocab * hidden, t * vocab, int(s.tp > 1)
    casts, input_casts = s.num_casts * (2 - is_tp), (1 - is_tp) * s.cast_bytes(s.gathered_elements)
    forward = (
        input_casts
        + s.cast_bytes(weight)
        + trains_weights * weight * s.stored_bytes
        + (6 + is_tp) * logits * s.stored_bytes
    )
    forward += 2 * s.cast_bytes(logits) + t * (59 + 12 * s.stored_bytes)
    forward += is_tp * t * (38 + (5 + s.tp) * s.stored_bytes)
    forward += (
        trains_weights * s.num_casts * num_chunks * weight * (2 * s.stored_bytes + s.compute_bytes)
    )
    backward = (
        2 * s.gathered_elements * s.compute_bytes
        + trains_weights * 2 * weight * s.stored_bytes
        + input_casts
    )
    return (
        Op(
            "loss",
            tuple(matmuls),
            forward,
            2
            + trains_weights
            + casts
            + (17 + trains_weights + (2 + trains_weights) * s.num_casts + 7 * is_tp) * num_chunks,
            s.precision,
            num_transcendentals=2 * logits,
        ),
        Op("loss", (), backward, 1 + trains_weights + casts),
    )


def optimizer_update(
    num_bytes: int,
    num_tensors: int,
    *,
    normed_bytes: int | None = None,
    num_flat_tensors: int | None = None,
    clips_gradient: bool = True,
) -> tuple[Op, ...]:
    """Return the ops of gradient norm, clipping and AdamW, once a step.

    Args:
        num_bytes: bytes of all updated parameters.
        num_tensors: number of their tensors.
        normed_bytes: bytes that this rank counts in the norm; None for all.
        num_flat_tensors: number of tensors as the optimizer sees them, some flattened into one;
            None for `num_tensors`.
        clips_gradient: whether the gradient is scaled.
    """
    normed = num_bytes if normed_bytes is None else normed_bytes
    num_flat_tensors = num_tensors if num_flat_tensors is None else num_flat_tensors
    return (
        Op("norm", (), TRAFFIC_FACTOR["norm"] * normed, num_tensors, kind="norm"),
        Op(
            "clip",
            (),
            TRAFFIC_FACTOR["scale"] * clips_gradient * num_bytes,
            clips_gradient * num_flat_tensors,
            kind="scale",
        ),
        adamw(num_bytes, num_flat_tensors),
    )


def adamw(num_bytes: int, num_tensors: int) -> Op:
    """Return AdamW over `num_tensors` tensors, `num_bytes` in all."""
    return Op("adamw", (), TRAFFIC_FACTOR["adamw"] * num_bytes, num_tensors, kind="adamw")


def low_bit_adamw(matrices: Sequence[int], moments: str, chunk: int) -> Op:
    """Return AdamW with low-bit moments over matrices of so many elements, `chunk` at a time."""
    moved, kernels = LOW_BIT_TRAFFIC[moments]
    chunks = sum(-(-size // chunk) for size in matrices)
    return Op("low-bit adamw", (), moved * sum(matrices), kernels * chunks)
