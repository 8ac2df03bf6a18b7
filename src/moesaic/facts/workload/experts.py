"""Operations of a mixture-of-experts layer: router, dispatch, experts, combine.

Index tensors, masks and counts are left out: they are small beside rows of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moesaic.facts.workload.collectives import (
    RESULTS,
    TOKENS,
    CollectiveCall,
    CollectiveKind,
    all_to_all,
    collective,
    count_exchange,
)
from moesaic.facts.workload.loads import Exchange, RoutedTokens, dedup_token_bytes
from moesaic.facts.workload.operation import GROUPED_MM, MatmulShape, Op, Operation
from moesaic.facts.workload.ops import adapter_ops, gated_ffn, norm, residual
from moesaic.facts.workload.sizes import INDEX_BYTES, FloatType, Sizes

EXPERTS = "experts"
"""Name of the op that computes experts, once per chunk of tokens."""


def mixture_of_experts(s: Sizes, shared_width: int, routed: RoutedTokens) -> list[Operation]:
    """Return a layer's routed and shared experts, with its norm and residual.

    `routed` are the tokens that the rank sends and receives.
    """
    hidden, has_shared = s.model.hidden, shared_width > 0
    choices = s.dispatched_tokens * s.model.top_k
    dispatched_bytes = s.dispatched_tokens * hidden * s.compute_bytes
    shared = gated_ffn(s, shared_width, "shared") if has_shared else []
    added = Op("shared", (), 3 * s.stream_elements * s.compute_bytes, 1)
    last = [
        _etp_collective(s, "reduce_scatter", dispatched_bytes),
        _concat_chunks(s, routed),
        *([Operation(added)] if has_shared else []),
        residual(s),
    ]
    return [
        norm(s, hidden, num_gradients=3 + has_shared * (2 if s.tp == 1 else 1)),
        _router(s),
        # Choices and weights of all tokens in the expert TP group.
        _etp_collective(s, "all_gather", choices * INDEX_BYTES, has_grad=False),
        _etp_collective(s, "all_gather", choices * s.stored_bytes),
        Operation(forward_calls=count_exchange(s)),
        _etp_collective(s, "all_gather", dispatched_bytes),
        _dispatch(s, routed),
        _exchanges(s, routed, TOKENS),
        *shared,
        *(_experts(s, chunk) for chunk in routed.compute_order()),
        _combine(s, routed),
        _exchanges(s, routed, RESULTS),
        *(replace(one, recompute="nothing") for one in last),
    ]


def _router(s: Sizes) -> Operation:
    """Return scores and choices, in stored type, and the auxiliary losses."""
    model, t = s.model, s.shard_tokens
    scores = t * model.experts * s.stored_bytes
    is_trained = s.job.finetune is None or s.job.finetune.router == "train"
    dtype: FloatType = "fp64" if s.precision == "fp64" else "fp32"
    weight_gradient = MatmulShape(model.experts, model.hidden, t, is_weight_gradient=True)
    matmuls = (*is_trained * (weight_gradient,), MatmulShape(t, model.hidden, model.experts))
    return Operation(
        Op("router", (MatmulShape(t, model.experts, model.hidden),), 8 * scores, 24,
           dtype, 2 * t * model.experts),
        Op("router", matmuls, 24 * scores, 24, dtype),
        s.stream_elements * s.stored_bytes + 2 * scores,
    )  # fmt: skip


def _etp_collective(
    s: Sizes, kind: CollectiveKind, num_bytes: int, *, has_grad: bool = True
) -> Operation:
    """Return a collective of the expert TP group, and its inverse in backward."""
    ranks = s.plan.etp_groups().of(s.rank)
    gather = collective("gather dispatched tokens", "all_gather", ranks, num_bytes)
    scatter = collective("reduce-scatter expert results", "reduce_scatter", ranks, num_bytes)
    forward, backward = (gather, scatter) if kind == "all_gather" else (scatter, gather)
    return Operation(forward_calls=forward, backward_calls=has_grad * backward)


def _exchanges(s: Sizes, routed: RoutedTokens, name: str) -> Operation:
    """Return the exchanges of tokens or results, chunk by chunk and hop by hop.

    Results return on the way of their tokens. A deduplicated token carries its weights and slots,
    and backward returns the gradients of the weights.
    """
    forward_bytes = backward_bytes = s.model.hidden * s.compute_bytes
    returns = name == RESULTS
    if routed.is_dedup and not returns:
        forward_bytes, _ = dedup_token_bytes(s.model.hidden, s.model.top_k, s.compute_bytes)
        backward_bytes += s.model.top_k * s.compute_bytes

    def call(hop: Exchange, token_bytes: int, *, returns: bool) -> tuple[CollectiveCall, ...]:
        counts = (hop.send_tokens, hop.receive_tokens)[:: -1 if returns else 1]
        sent, received = ([number * token_bytes for number in numbers] for numbers in counts)
        return all_to_all(name, hop.group, sent, received)

    hops = [
        hop for chunk in routed.split_chunks() for hop in chunk.exchanges[:: -1 if returns else 1]
    ]
    forward = [call(hop, forward_bytes, returns=returns) for hop in hops]
    backward = [call(hop, backward_bytes, returns=not returns) for hop in reversed(hops)]
    return Operation(forward_calls=sum(forward, ()), backward_calls=sum(backward, ()))


def _dispatch(s: Sizes, routed: RoutedTokens) -> Operation:
    """Return the copies of tokens to send; backward sums their gradients by token.

    A token is copied once per expert, or with deduplication once per destination of each exchange.
    """
    tokens, num_local, exchanges = s.dispatched_tokens, routed.num_local_chunks, routed.exchanges
    choices, row = tokens * s.model.top_k, s.model.hidden * s.compute_bytes
    sent = sum(2 * one.num_sent for one in exchanges)
    summed = num_local * (choices + 4 * tokens) + 2 * (routed.num_chunks > 1) * tokens
    if routed.is_dedup:
        summed += _owner_sums(s, routed)
        summed += sum(2 * one.num_received + _hop_sums(s, one) for one in exchanges)
    else:
        summed += _num_results(s, routed) + tokens + sum(2 * one.num_sent for one in exchanges[1:])
    cast = s.cast_bytes(s.stream_elements)
    num_kernels = 15 + routed.num_chunks * (6 + 25 * len(exchanges)) + 15 * num_local
    return Operation(
        Op("dispatch", (), cast + sent * row, num_kernels),
        Op("dispatch", (), cast + summed * row, 6 + 3 * routed.num_chunks + 4 * num_local),
        _saved_elements(s, routed) * s.compute_bytes,
    )


def _saved_elements(s: Sizes, routed: RoutedTokens) -> int:
    """Return elements of token rows and weights that dispatch and combine save."""
    hidden, top_k, exchanges = s.model.hidden, s.model.top_k, routed.exchanges
    saved = s.dispatched_tokens * top_k * (1 + routed.num_local_chunks)
    if routed.is_dedup:
        saved += exchanges[-1].num_received * (hidden + 2 * top_k)
    elif exchanges:
        saved += (sum(routed.slot_tokens) + routed.num_sent) * hidden
    if (routed.num_local_chunks or not exchanges) and (s.num_casts or s.plan.etp > 1):
        saved += s.dispatched_tokens * hidden  # Otherwise it is the input that the router saves.
    return saved


def _num_results(s: Sizes, routed: RoutedTokens) -> int:
    """Return rows that sums over all choices read; missing results are read too."""
    return s.dispatched_tokens * s.model.top_k if routed.num_local_chunks else routed.num_sent


def _owner_sums(s: Sizes, routed: RoutedTokens) -> int:
    """Return rows that the sums over a received token's experts read and write.

    One row stands for all absent ones, and stays in the cache of a GPU.
    """
    received = routed.exchanges[-1].num_received
    return received + (received * s.model.top_k if s.on_cpu else sum(routed.slot_tokens))


def _hop_sums(s: Sizes, one: Exchange) -> int:
    """Return rows that the sums by token over all destinations of an exchange read and write; see
    `_owner_sums` for absent ones."""
    return one.num_tokens + (one.num_tokens * len(one.group) if s.on_cpu else one.num_sent)


def _experts(s: Sizes, chunk: RoutedTokens) -> Operation:
    """Return the grouped matmuls of all slots, with gate and up in one.

    Rows are copied from tokens or receive buffers as needed. They are weighted here, unless each
    token was sent once per expert.

    A weight gradient has a slot's tokens as `rows`, although it sums over them. The benchmarked
    grid of grouped matmuls has few rows and many columns.
    """
    hidden, ffn, slot_tokens = s.model.hidden, s.expert_width, chunk.slot_tokens
    rows, is_weighted, trains = sum(slot_tokens), not chunk.is_all_to_all, s.trains_weights
    forward, backward = list[MatmulShape](), list[MatmulShape]()
    for count, num in _slots_by_token_count(slot_tokens):
        forward += [MatmulShape(count, 2 * ffn, hidden, num), MatmulShape(count, hidden, ffn, num)]
        backward += [MatmulShape(count, ffn, hidden, num), MatmulShape(count, hidden, 2 * ffn, num)]
        backward += trains * [
            MatmulShape(count, hidden, ffn, num, is_weight_gradient=True),
            MatmulShape(count, 2 * ffn, hidden, num, is_weight_gradient=True),
        ]
    # A CPU casts the matrices of nonempty slots one by one, a GPU those of all slots at once.
    num_cast = sum(count > 0 for count in slot_tokens) if s.on_cpu else len(slot_tokens)
    cast = s.cast_bytes(num_cast * 3 * ffn * hidden)
    copied = 2 * rows * hidden * s.compute_bytes
    inner = rows * ffn * s.compute_bytes
    num_casts = s.num_casts * (num_cast if s.on_cpu else 1)
    forward_op = Op(
        EXPERTS, tuple(forward), cast + 5 * inner + (2 - is_weighted) * copied,
        6 + 2 * num_casts, s.precision, rows * ffn, GROUPED_MM,
    )  # fmt: skip
    rank = s.adapter_rank("experts")
    reads_rows = trains or rank > 0
    moved = cast * (1 + trains) + (14 + (6 + 2 * reads_rows) * is_weighted) * inner
    # Gradients of slots without tokens are filled with zeros.
    moved += trains * list(slot_tokens).count(0) * 3 * ffn * hidden * s.stored_bytes
    backward_op = Op(
        EXPERTS, tuple(backward), moved + (2 + reads_rows - is_weighted) * copied,
        16 + 2 * num_casts * (1 + trains), s.precision, 2 * rows * ffn, GROUPED_MM,
    )  # fmt: skip
    if rank:
        slots = _slots_by_token_count(slot_tokens)
        for columns, width in ((ffn, hidden), (ffn, hidden), (hidden, ffn)):
            added, backward_added = adapter_ops(s, rank, columns, width, slots, is_grouped=True)
            # Backward fills the gradients of A and B with zeros first.
            zeros = len(slot_tokens) * rank * (columns + width) * s.stored_bytes
            forward_op = forward_op.merged(added)
            backward_op = backward_op.merged(backward_added).merged(Op("", (), zeros, 1))
    captured = trains * (2 * inner + chunk.is_all_to_all * rows * hidden * s.compute_bytes)
    return Operation(forward_op, backward_op, 2 * inner, captured)


def _slots_by_token_count(slot_tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return token counts and their number of slots, without empty slots."""
    return sorted(Counter(count for count in slot_tokens if count).items())


def _combine(s: Sizes, routed: RoutedTokens) -> Operation:
    """Return the sums of weighted results by token.

    Deduplicated results are summed on the rank of the experts, and again on the source rank. Local
    results are summed chunk by chunk.
    """
    row, tokens, exchanges = s.model.hidden * s.compute_bytes, s.dispatched_tokens, routed.exchanges
    forward = routed.num_local_chunks * tokens * (s.model.top_k + 1)
    if routed.is_dedup:
        forward += _owner_sums(s, routed)
        forward += sum(_hop_sums(s, one) for one in exchanges)
        backward = sum(2 * one.num_sent for one in exchanges)
    else:
        moved = sum(2 * one.num_received for one in exchanges[:-1])
        forward += _num_results(s, routed) + tokens + moved
        backward = 8 * routed.is_all_to_all * routed.num_sent + moved
    kernels = 2 + 6 * routed.num_chunks * max(len(exchanges), 1)
    summed = exchanges[-1].num_received if routed.is_dedup else tokens
    return Operation(
        Op("combine", (), forward * row, kernels),
        Op("combine", (), backward * row, kernels),
        captured_bytes=s.trains_weights * (not routed.is_all_to_all) * summed * row,
    )


def _concat_chunks(s: Sizes, routed: RoutedTokens) -> Operation:
    """Return the concatenation of chunks of results, and the sum with local ones."""
    num_passes = 2 * (routed.num_chunks > 1) + 3 * routed.num_local_chunks
    moved = num_passes * s.dispatched_tokens * s.model.hidden * s.compute_bytes
    return Operation(Op("concat chunks", (), moved, num_passes)) if num_passes else Operation()
