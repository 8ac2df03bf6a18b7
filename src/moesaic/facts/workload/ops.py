"""Operations that blocks share: norms, matmuls, gathers of sequence shards, embedding and loss.

With TP, each rank counts its own part of a layer. Norms, routers and the residual stream cover its
sequence shard. Heads, inner channels and vocabulary cover all tokens, with matrices as narrow as
its shard. Copies within collectives belong to the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moesaic.facts.job.finetune import AdapterTarget
from moesaic.facts.workload.collectives import CollectiveCall, collective, embedding_exchanges
from moesaic.facts.workload.operation import MatmulShape, Op, Operation
from moesaic.facts.workload.sizes import (
    INDEX_BYTES,
    LOSS_CHUNK_TOKENS,
    NORM_CHUNK_BYTES,
    Sizes,
    row_batches,
)

TRAFFIC_FACTOR = {"norm": 1, "scale": 2, "adamw": 7}
"""Bytes read and written by an elementwise kernel, as a multiple of its tensor. AdamW reads values,
gradient and two moments, and writes all but the gradient."""
LOW_BIT_TRAFFIC = {"bf16": (225, 34), "8bit": (612, 80)}
"""Bytes per element and kernels per matrix chunk of an update with low-bit moments, by
`optimizer.moments`. The numbers are those of a CPU, whose cache holds most intermediates."""


def embedding(s: Sizes, *, tied: bool) -> list[Operation]:
    """Return the embedding lookup.

    Backward sums into a zeroed table, and adds that to the gradient of a `tied` head. With TP, each
    rank writes zeros for words of other ranks, and sums of all ranks are scattered. With column
    shards, each rank looks up the tokens of all ranks, and reorders columns.
    """
    tokens, saved, trained = s.gathered_elements, s.tokens * INDEX_BYTES, s.trains_weights
    forward, backward = 2 * tokens, s.table_elements * (1 + 3 * tied) + 3 * tokens
    calls, backward_calls = embedding_exchanges(s)
    if s.plan.embedding_shards > 1:
        forward += 2 * s.lookup_elements
        backward += 3 * s.lookup_elements - tokens
        saved = sum(s.lookup_tokens) * INDEX_BYTES
    elif s.tp > 1:
        forward, backward = forward + 2 * tokens, backward + 2 * tokens
        saved += s.tokens
    scatter, gather = sequence_collectives(s, tokens * s.stored_bytes)
    return [
        Operation(
            Op("lookup", (), forward * s.stored_bytes, 2),
            Op("lookup", (), trained * backward * s.stored_bytes, 2 * trained),
            saved,
            forward_calls=(*scatter, *calls),
            backward_calls=(*backward_calls * trained, *gather),
        )
    ]


def sequence_collectives(
    s: Sizes, num_bytes: int
) -> tuple[tuple[CollectiveCall, ...], tuple[CollectiveCall, ...]]:
    """Return the reduce-scatter into sequence shards, and the all-gather of them."""
    return (
        collective("reduce-scatter sequence", "reduce_scatter", s.tp_ranks, num_bytes),
        collective("gather sequence", "all_gather", s.tp_ranks, num_bytes),
    )


def gather_sequence(s: Sizes, width: int, *, num_uses: int = 1, split: bool = False) -> Operation:
    """Return the gather of `width` channels from the sequence shards, in compute type.

    Backward sums the gradients of the result's `num_uses`. `split`: the gathered tensor is
    concatenated from parts and split again.
    """
    if s.tp == 1:
        return Operation()
    shard, num_bytes = s.shard_tokens * width, s.tokens * width * s.compute_bytes
    forward = s.cast_bytes(shard) + split * 2 * shard * s.stored_bytes
    summed = (3 * (num_uses - 1) + 2 * split) * num_bytes
    backward = s.cast_bytes(shard) + 2 * shard * s.stored_bytes + summed
    scatter, gather = sequence_collectives(s, num_bytes)
    return Operation(
        Op("gather sequence", (), forward, 1),
        Op("gather sequence", (), backward, 1 + num_uses),
        num_bytes,
        forward_calls=gather,
        backward_calls=scatter,
    )


def scatter_sequence(s: Sizes) -> Operation:
    """Return the reduce-scatter of a layer's result into sequence shards."""
    scatter, gather = sequence_collectives(s, s.gathered_elements * s.compute_bytes)
    return Operation(forward_calls=scatter, backward_calls=gather)


def norm(
    s: Sizes,
    width: int,
    name: str = "norm",
    *,
    rows: int | None = None,
    num_gradients: int = 1,
    casts: bool = False,
    saves_result: bool = False,
) -> Operation:
    """Return an RMS norm; backward first sums the gradients of its readers.

    Args:
        s: the sizes.
        width: elements per row.
        name: name of the ops.
        rows: number of rows; None for one per token of the sequence shard.
        num_gradients: gradients of the result's readers, and of the input's if it is the residual
            stream.
        casts: whether the input is of compute type.
        saves_result: whether matmuls read the result, which autograd saves unless they cast it.
    """
    t = s.shard_tokens if rows is None else rows
    n, adds, cast = t * width, num_gradients - 1, casts * s.cast_bytes(t * width)
    # A CPU reads and writes each intermediate, in chunks that fit the cache.
    chunks = -(-t // max(1, NORM_CHUNK_BYTES // (width * s.stored_bytes))) if s.on_cpu else 0
    forward = 5 * n + 10 * t if s.on_cpu else 2 * n + t
    backward = 16 * n + 11 * t if s.on_cpu else 3 * n + t
    backward = (backward + 3 * adds * n) * s.stored_bytes + cast
    return Operation(
        Op(name, (), forward * s.stored_bytes + cast, 7 * chunks or 1),
        Op(name, (), backward, 1 + adds + (12 * chunks or 1)),
        (n + t + n * (saves_result and not s.num_casts)) * s.stored_bytes,
        n * s.stored_bytes,
    )


def linear(
    name: str,
    s: Sizes,
    columns: int,
    inner: int,
    *,
    casts_input: bool = False,
    rows: int | None = None,
    target: AdapterTarget = "attention",
) -> Operation:
    """Return tokens times a weight; a weight in stored type is cast first.

    Args:
        name: name of the ops.
        s: the sizes.
        columns: output channels.
        inner: input channels.
        casts_input: whether its input is of stored type, and cast too.
        rows: number of tokens; None for all.
        target: adapter target of the weight.
    """
    t = s.tokens if rows is None else rows
    trained, weight_cast = s.trains_weights, s.cast_bytes(columns * inner)
    cast = casts_input * s.cast_bytes(t * inner)
    forward = Op(name, (MatmulShape(t, columns, inner),), weight_cast + cast, 2, s.precision)
    grads: tuple[MatmulShape, ...] = (MatmulShape(t, inner, columns),)
    grads += trained * (MatmulShape(columns, inner, t, is_weight_gradient=True),)
    backward = Op(name, grads, trained * weight_cast + cast, 2 * len(grads), s.precision)
    saved = s.num_casts * inner * (columns + casts_input * t) * s.compute_bytes
    rank = s.adapter_rank(target)
    if rank:
        added = adapter_ops(s, rank, columns, inner, [(t, 1)])
        input_cast = Op("", (), cast)
        forward, backward = (
            own.merged(one).merged(input_cast)
            for own, one in zip((forward, backward), added, strict=True)
        )
    captured = trained * t * columns * s.compute_bytes
    return Operation(forward, backward, saved, captured)


def adapter_ops(
    s: Sizes,
    rank: int,
    columns: int,
    inner: int,
    slots: Sequence[tuple[int, int]],
    *,
    is_grouped: bool = False,
) -> tuple[Op, Op]:
    """Return the work that adapters A and B add to matmuls, forward and backward.

    `slots` are numbers of tokens, and how many adapters have that many. `is_grouped`: the adapters
    are those of experts.
    """
    forward, backward, tokens, num_adapters = list[MatmulShape](), list[MatmulShape](), 0, 0
    for t, num in slots:
        tokens, num_adapters = tokens + t * num, num_adapters + num
        narrow = MatmulShape(t, rank, inner, num)
        forward += [narrow, MatmulShape(t, columns, rank, num)]
        backward += [MatmulShape(t, rank, columns, num), MatmulShape(t, inner, rank, num)]
        shapes = (columns, rank, t), (rank, inner, t)
        if is_grouped:  # Weight gradients have tokens as rows, and A is applied again.
            shapes = (t, columns, rank), (t, rank, inner)
            backward.append(narrow)
        backward += [MatmulShape(*shape, num, is_weight_gradient=True) for shape in shapes]
    cast = s.cast_bytes(rank * (columns + inner) * num_adapters)
    kernels = 5 + 2 * s.num_casts * num_adapters
    moved, backward_moved = (
        tokens * (2 * rank + 3 * width) * s.compute_bytes for width in (columns, inner)
    )
    return (
        Op("", tuple(forward), moved + cast, kernels),
        Op("", tuple(backward), backward_moved + 2 * cast, 2 + kernels),
    )


def residual(s: Sizes) -> Operation:
    """Return the addition of a layer's result to the residual stream."""
    moved = s.stream_elements * (2 * s.stored_bytes + s.compute_bytes)
    return Operation(
        Op("residual", (), moved, 1), Op("residual", (), s.cast_bytes(s.stream_elements), 1)
    )


def gated_ffn(s: Sizes, ffn: int, target: AdapterTarget) -> list[Operation]:
    """Return a gated FFN of inner width `ffn`, with the collectives of TP around it."""
    hidden, prefix = s.model.hidden, "shared " * (target == "shared")
    inner_bytes = s.tokens * ffn * s.compute_bytes
    gate, up = (
        linear(f"{prefix}{name}", s, ffn, hidden, casts_input=s.tp == 1, target=target)
        for name in ("gate", "up")
    )
    activation = Operation(
        Op(f"{prefix}gate", (), 5 * inner_bytes, 2, num_transcendentals=s.tokens * ffn),
        Op(f"{prefix}gate", (), 9 * inner_bytes, 3, num_transcendentals=s.tokens * ffn),
        4 * inner_bytes,  # Gate, up, silu(gate) and the input of the down projection.
    )
    down = linear(f"{prefix}down", s, hidden, ffn, target=target)
    return [
        gather_sequence(s, hidden, num_uses=2), gate, up, activation, down, scatter_sequence(s)
    ]  # fmt: skip


def head(s: Sizes) -> list[Operation]:
    """Return the head: norm, gathers of tokens and of a column-sharded tied weight, and loss.

    The loss computes logits and both gradients in forward, chunk by chunk; backward scales them.
    With TP, each rank has the logits of its vocabulary shard.
    """
    vocab, hidden, t, trained = s.vocab, s.model.hidden, s.tokens, s.trains_weights
    matmuls, sums = list[MatmulShape](), tuple[CollectiveCall, ...]()
    num_full, rest = divmod(t, LOSS_CHUNK_TOKENS)
    for rows, num in ((LOSS_CHUNK_TOKENS, num_full), (rest, int(rest > 0))):
        matmuls += (num > 0) * [
            MatmulShape(rows, vocab, hidden, num), MatmulShape(rows, hidden, vocab, num),
            *trained * [MatmulShape(vocab, hidden, rows, num)],
        ]  # fmt: skip
        sum_bytes = rows * s.tp * s.stored_bytes
        sums += num * collective("log-sum-exp", "all_gather", s.tp_ranks, sum_bytes)
    num_chunks = num_full + (rest > 0)
    weight, logits, is_tp = vocab * hidden, t * vocab, int(s.tp > 1)
    input_cast = (1 - is_tp) * s.cast_bytes(s.gathered_elements)
    added = num_chunks * s.num_casts * (2 * s.stored_bytes + s.compute_bytes) + s.stored_bytes
    forward = input_cast + s.cast_bytes(weight) + trained * weight * added
    forward += (6 + is_tp) * logits * s.stored_bytes + 2 * s.cast_bytes(logits)
    backward = 2 * s.gathered_elements * s.compute_bytes + input_cast
    backward += trained * 2 * weight * s.stored_bytes
    gradient_bytes = s.gathered_elements * s.compute_bytes + weight * s.stored_bytes
    loss = Operation(
        Op("loss", tuple(matmuls), forward, 4 + 20 * num_chunks, s.precision,
           num_transcendentals=2 * logits),
        Op("loss", (), backward, 2 + trained),
        gradient_bytes,
        forward_calls=sums,
    )  # fmt: skip
    gather = replace(gather_sequence(s, hidden), saved_bytes=0)
    return [norm(s, hidden), gather, *_gather_tied_embedding(s), loss]


def _gather_tied_embedding(s: Sizes) -> list[Operation]:
    """Return the gather of a tied weight's column shards, and the scatter of its gradient."""
    if not s.gathers_tied_embedding:
        return []
    row = s.model.hidden * s.stored_bytes
    sizes, moved = [len(rows) * row for rows in row_batches(s.vocab, row)], 2 * s.vocab * row
    name, trained = "gather tied embedding", s.trains_weights
    gathers = tuple(CollectiveCall(name, "all_gather", s.stage_ranks, size) for size in sizes)
    scatters = tuple(
        replace(one, name="reduce-scatter tied embedding", operation="reduce_scatter")
        for one in gathers
    )
    return [
        Operation(
            Op(name, (), moved, len(sizes)), Op(name, (), trained * moved, trained * len(sizes)),
            forward_calls=gathers, backward_calls=trained * scatters,
        )
    ]  # fmt: skip


def optimizer_update(num_bytes: int, num_tensors: int) -> tuple[Op, ...]:
    """Return gradient norm, clipping and AdamW over `num_tensors` tensors, `num_bytes` in all."""
    return tuple(
        Op(name, (), TRAFFIC_FACTOR[kind] * num_bytes, num_tensors, kind=kind)
        for name, kind in (("norm", "norm"), ("clip", "scale"), ("adamw", "adamw"))
    )
