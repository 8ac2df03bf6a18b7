"""Operations of a mixture-of-experts layer: router, dispatch, experts, combine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moesaic.facts.workload.collectives import (
    RESULTS,
    SCALAR_BYTES,
    TOKENS,
    CollectiveCall,
    CollectiveKind,
    all_to_all,
)
from moesaic.facts.workload.loads import Exchange, RoutedTokens, dedup_token_bytes
from moesaic.facts.workload.operation import GROUPED_MM, MatmulShape, Op, Operation
from moesaic.facts.workload.ops import gated_ffn, norm, residual
from moesaic.facts.workload.sizes import INDEX_BYTES, Sizes

EXPERTS = "experts"
"""Name of the op that computes experts, once per chunk of tokens."""

_CHOICE_BYTES = 132
"""Estimated bytes of indices, masks and counts, read and written per token and choice."""
_LOCAL_CHOICE_BYTES = 90
"""Estimated bytes of the same for each chunk of local tokens."""
_DEDUP_CHOICE_BYTES = 150
"""Estimated bytes of weights, slots and masks per choice of a deduplicated token."""


def mixture_of_experts(
    s: Sizes, routed: RoutedTokens, counts: tuple[CollectiveCall, ...]
) -> list[Operation]:
    """Return a layer's routed and shared experts, with its norm and residual.

    `routed` are the tokens that the rank sends and receives, `counts` the collectives that count
    them.
    """
    hidden, has_shared = s.model.hidden, s.shared_width > 0
    choices = s.dispatched_tokens * s.model.top_k
    dispatched_bytes = s.dispatched_tokens * hidden * s.compute_bytes
    has_weight_grad = not s.input_has_no_grad or s.trainable.routers
    trains_experts = s.trainable.experts or s.trainable.rank_of_target("experts") > 0
    # Deduplicated tokens bring back the gradients of routing weights, which only routers need.
    has_token_grad = not s.input_has_no_grad or (routed.is_dedup and s.trainable.routers)
    # Without a gradient of routed experts, recomputation skips them.
    is_unused = s.input_has_no_grad and not (trains_experts or s.trainable.routers)
    tokens = _token_exchanges(s, routed, has_grad=has_token_grad)
    computed = [_experts(s, chunk) for chunk in routed.compute_order()]
    results = [
        _combine(s, routed), _result_exchanges(s, routed, has_grad=has_token_grad or trains_experts)
    ]  # fmt: skip
    shared: list[Operation] = []
    if has_shared:
        shares_input = s.tp == 1 and not s.num_casts  # The router saves it.
        shared = gated_ffn(s, s.shared_width, "shared", shares_input=shares_input)
    if is_unused:
        computed, results = _not_recomputed(computed), _not_recomputed(results)
        *inner, down, scatter = shared
        shared = [*inner, replace(down, recompute="input"), scatter]
    added = Op("shared", (), 3 * s.stream_elements * s.compute_bytes, 1)
    return [
        norm(s, hidden, num_uses=2 + has_shared * (2 if s.tp == 1 else 1), in_residual=True),
        _router(s),
        # Choices and weights of all tokens in the expert TP group.
        _etp_collective(s, "all_gather", choices * SCALAR_BYTES, has_grad=False),
        _etp_collective(s, "all_gather", choices * s.stored_bytes, has_grad=has_weight_grad),
        Operation(forward_calls=counts),
        _etp_collective(s, "all_gather", dispatched_bytes, has_grad=not s.input_has_no_grad),
        _dispatch(s, routed),
        *tokens[:1],
        *shared,
        *tokens[1:],
        *computed,
        *results,
        *_not_recomputed([
            _etp_collective(s, "reduce_scatter", dispatched_bytes),
            _concat_chunks(s, routed),
            *([Operation(added)] if has_shared else []),
            residual(s),
        ]),
    ]  # fmt: skip


def _not_recomputed(operations: Sequence[Operation]) -> list[Operation]:
    return [replace(one, recompute="nothing") for one in operations]


def _router(s: Sizes) -> Operation:
    """Return scores and choices, in stored type, and the auxiliary losses."""
    model, t = s.model, s.shard_tokens
    scores, choices = t * model.experts, t * model.top_k
    forward, backward = 5 * scores + 3 * choices + 4 * t, 17 * scores + choices + 8 * t
    saved = 2 * scores + t + model.experts
    if model.renormalise:
        forward, backward = forward + 3 * choices, backward + 14 * choices
        saved += choices + t
    if model.score_function == "sigmoid":
        forward, backward = forward + 5 * scores, backward + 13 * scores
        saved += t  # Divisor that turns scores into probabilities.
    if model.top_expert_groups < model.expert_groups:
        forward += 3 * scores + 10 * t * model.expert_groups
    index_bytes, num_kernels = choices * INDEX_BYTES, 30 if model.renormalise else 24
    matmuls = s.trainable.routers * (MatmulShape(model.experts, model.hidden, t),)
    matmuls += (not s.input_has_no_grad) * (MatmulShape(t, model.hidden, model.experts),)
    backward_op = Op(
        "router", matmuls, backward * s.stored_bytes + index_bytes, num_kernels, s.stored_dtype
    )
    return Operation(
        Op("router", (MatmulShape(t, model.experts, model.hidden),),
           forward * s.stored_bytes + 2 * index_bytes, num_kernels, s.stored_dtype, 2 * scores),
        backward_op if matmuls else None,
        (s.stream_elements + saved) * s.stored_bytes,
    )  # fmt: skip


def _etp_collective(
    s: Sizes, kind: CollectiveKind, num_bytes: int, *, has_grad: bool = True
) -> Operation:
    """Return a collective of the expert TP group, and its inverse in backward.

    A group of one has none.
    """
    if s.etp == 1:
        return Operation()
    gather = CollectiveCall("gather dispatched tokens", "all_gather", s.etp_ranks, num_bytes)
    scatter = replace(gather, name="reduce-scatter expert results", operation="reduce_scatter")
    forward, backward = (gather, scatter) if kind == "all_gather" else (scatter, gather)
    return Operation(forward_calls=(forward,), backward_calls=has_grad * (backward,))


def _exchange(
    name: str, one: Exchange, token_bytes: int, *, returns: bool = False
) -> tuple[CollectiveCall, ...]:
    send, receive = (
        [n * token_bytes for n in counts] for counts in (one.send_tokens, one.receive_tokens)
    )
    return all_to_all(name, one.group, *((receive, send) if returns else (send, receive)))


def _token_exchanges(s: Sizes, routed: RoutedTokens, *, has_grad: bool) -> list[Operation]:
    """Return the exchanges of tokens to experts, chunk by chunk and hop by hop.

    A deduplicated token carries its weights and slots, and backward returns the gradients of the
    weights.
    """
    forward_bytes = backward_bytes = s.model.hidden * s.compute_bytes
    if routed.is_dedup:
        forward_bytes, _ = dedup_token_bytes(s.model.hidden, s.model.top_k, s.compute_bytes)
        backward_bytes += s.model.top_k * s.compute_bytes
    return [
        Operation(
            forward_calls=_exchange(TOKENS, hop, forward_bytes),
            backward_calls=has_grad * _exchange(TOKENS, hop, backward_bytes, returns=True),
        )
        for chunk in routed.split_chunks()
        for hop in chunk.exchanges
    ]


def _result_exchanges(s: Sizes, routed: RoutedTokens, *, has_grad: bool) -> Operation:
    """Return the exchanges of results back to their tokens' ranks."""
    row = s.model.hidden * s.compute_bytes
    hops = [hop for chunk in routed.split_chunks() for hop in reversed(chunk.exchanges)]
    return Operation(
        forward_calls=tuple(
            one for hop in hops for one in _exchange(RESULTS, hop, row, returns=True)
        ),
        backward_calls=has_grad
        * tuple(one for hop in reversed(hops) for one in _exchange(RESULTS, hop, row)),
    )


def _dispatch(s: Sizes, routed: RoutedTokens) -> Operation:
    """Return the ordering of tokens by slot, and the copies to send.

    A token is copied once per expert, or with deduplication once per destination of each exchange.
    Local tokens are ordered and copied chunk by chunk.
    """
    top_k, row = s.model.top_k, s.model.hidden * s.compute_bytes
    tokens, choices = s.dispatched_tokens, s.dispatched_tokens * top_k
    exchanges, num_local = routed.exchanges, routed.num_local_chunks
    cast = s.cast_bytes(s.stream_elements)
    forward = cast + choices * (_CHOICE_BYTES + _LOCAL_CHOICE_BYTES * num_local)
    backward = cast + 2 * (routed.num_chunks > 1) * tokens * row
    is_weighted = num_local > 0 or not routed.is_all_to_all
    has_grad = not s.input_has_no_grad or (s.trainable.routers and is_weighted)
    if routed.is_dedup:
        received = exchanges[-1].num_received
        forward += 60 * received * top_k
        backward += _sum_bytes(s, received, top_k) + 12 * received * top_k
    else:
        backward += (_result_rows(s, routed) + tokens) * row
    for hop, one in enumerate(exchanges):
        if routed.is_dedup:
            forward += one.num_sent * (2 * row + 64 + _DEDUP_CHOICE_BYTES * top_k)
            forward += 48 * one.num_tokens * len(one.group)
            backward += 2 * one.num_received * (row + top_k * s.compute_bytes)
            backward += _sum_bytes(s, one.num_tokens, len(one.group))
        else:
            forward += one.num_sent * (2 * row + 120)
            backward += bool(hop) * 2 * one.num_sent * row
    backward += num_local * (3 * tokens + choices + tokens) * row
    num_kernels = 15 + routed.num_chunks * (6 + 25 * len(exchanges)) + 15 * num_local
    return Operation(
        Op("dispatch", (), forward, num_kernels),
        Op("dispatch", (), backward, 6 + 3 * routed.num_chunks + 4 * num_local)
        if has_grad
        else None,
        _saved_rows(s, routed) * s.compute_bytes + _saved_index_bytes(s, routed),
    )


def _saved_rows(s: Sizes, routed: RoutedTokens) -> int:
    """Return elements of token rows and weights that dispatch and combine save."""
    hidden, choices, exchanges = (
        s.model.hidden,
        s.dispatched_tokens * s.model.top_k,
        routed.exchanges,
    )
    saved = choices * (1 + routed.num_local_chunks)
    if routed.is_dedup:
        saved += exchanges[-1].num_received * s.model.top_k - choices
    elif exchanges:
        saved += (sum(routed.slot_tokens) + routed.num_sent) * hidden
    if (routed.num_local_chunks or not exchanges) and (s.num_casts or s.etp > 1):
        saved += s.dispatched_tokens * hidden  # Otherwise it is the input that the router saves.
    return saved


def _saved_index_bytes(s: Sizes, routed: RoutedTokens) -> int:
    """Return bytes of row orders and masks; with deduplication also of received tokens."""
    exchanges, top_k = routed.exchanges, s.model.top_k
    choices = s.dispatched_tokens * top_k
    saved = choices * (INDEX_BYTES + 1)
    if routed.is_dedup:
        received = exchanges[-1].num_received
        token_bytes, _ = dedup_token_bytes(s.model.hidden, top_k, s.compute_bytes)
        saved += received * (token_bytes + top_k * (2 * INDEX_BYTES + 1))
        saved += sum(
            2 * one.num_sent * INDEX_BYTES + one.num_tokens * len(one.group) * (INDEX_BYTES + 1)
            for one in exchanges
        )
    else:
        saved += 2 * choices * INDEX_BYTES + bool(exchanges) * sum(routed.slot_tokens) * INDEX_BYTES
        saved += sum(2 * one.num_received * INDEX_BYTES for one in exchanges[:-1])
    if routed.num_local_chunks:
        saved += choices * (INDEX_BYTES + routed.num_local_chunks * (INDEX_BYTES + 1))
    return saved


def _result_rows(s: Sizes, routed: RoutedTokens) -> int:
    """Return rows that sums over all choices read; missing results are read too."""
    return s.dispatched_tokens * s.model.top_k if routed.num_local_chunks else routed.num_sent


def _sum_bytes(s: Sizes, tokens: int, each: int) -> int:
    """Return bytes of weighted sums over `each` rows per token, some of them missing."""
    row, index = s.model.hidden * s.compute_bytes, INDEX_BYTES + 1 + 2 * s.compute_bytes
    return tokens * (each * (row + index) + row + 2 * INDEX_BYTES)


def _experts(s: Sizes, chunk: RoutedTokens) -> Operation:
    """Return the grouped matmuls of all slots, with gate and up in one.

    Rows are copied from tokens or receive buffers as needed. They are weighted here, unless each
    token was sent once per expert.

    A weight gradient has a slot's tokens as `rows`, although it sums over them. The benchmarked
    grid of grouped matmuls has few rows and many columns.
    """
    hidden, ffn, slot_tokens = s.model.hidden, s.expert_width, chunk.slot_tokens
    rows, num_busy = sum(slot_tokens), sum(count > 0 for count in slot_tokens)
    is_weighted = not chunk.is_all_to_all
    trains, rank = s.trainable.experts, s.trainable.rank_of_target("experts")
    has_token_grad = not s.input_has_no_grad or (s.trainable.routers and is_weighted)
    forward, backward = list[MatmulShape](), list[MatmulShape]()
    for count, num in _slots_by_token_count(slot_tokens):
        forward += [MatmulShape(count, 2 * ffn, hidden, num), MatmulShape(count, hidden, ffn, num)]
        backward += [MatmulShape(count, ffn, hidden, num)]
        backward += trains * [
            MatmulShape(count, hidden, ffn, num, is_weight_gradient=True),
            MatmulShape(count, 2 * ffn, hidden, num, is_weight_gradient=True),
        ]
        backward += has_token_grad * [MatmulShape(count, hidden, 2 * ffn, num)]
    # A CPU casts the matrices of nonempty slots one by one, a GPU those of all slots at once.
    num_cast, expert_elements = num_busy if s.on_cpu else len(slot_tokens), 3 * ffn * hidden
    cast = s.cast_bytes(num_cast * expert_elements)
    gradient_bytes = s.cast_bytes(num_busy * expert_elements)
    gradient_bytes += (len(slot_tokens) - num_busy) * expert_elements * s.stored_bytes
    copied = rows * (2 * hidden * s.compute_bytes + INDEX_BYTES)
    inner = rows * ffn * s.compute_bytes
    num_casts = s.num_casts * (num_busy if s.on_cpu else 1)
    forward_op = Op(
        EXPERTS, tuple(forward), cast + 5 * inner + (2 - is_weighted) * copied,
        6 + 2 * num_casts, s.precision, rows * ffn, GROUPED_MM,
    )  # fmt: skip
    moved = cast * (1 + 2 * has_token_grad) // 3 + trains * gradient_bytes
    moved += (14 + (6 + 2 * trains) * is_weighted) * inner + (2 + trains - is_weighted) * copied
    backward_op = Op(
        EXPERTS, tuple(backward), moved, 16 + 2 * num_casts * (1 + trains),
        s.precision, 2 * rows * ffn, GROUPED_MM,
    )  # fmt: skip
    if rank:
        adapters = _expert_adapters(s, slot_tokens, rank, num_cast, has_token_grad=has_token_grad)
        forward_op, backward_op = map(Op.merged, (forward_op, backward_op), adapters)
    has_backward = trains or rank > 0 or has_token_grad
    # Each chunk of local tokens may have an empty backward on some ranks only.
    return Operation(forward_op, backward_op if has_backward else Op(EXPERTS), 2 * inner)


def _slots_by_token_count(slot_tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return token counts and their number of slots, without empty slots."""
    return sorted(Counter(count for count in slot_tokens if count).items())


def _expert_adapters(
    s: Sizes, slot_tokens: Sequence[int], rank: int, num_cast: int, *, has_token_grad: bool
) -> tuple[Op, Op]:
    """Return the work that adapters of expert matrices add, forward and backward."""
    hidden, ffn, rows = s.model.hidden, s.expert_width, sum(slot_tokens)
    forward, backward = list[MatmulShape](), list[MatmulShape]()
    for columns, inner in ((ffn, hidden), (ffn, hidden), (hidden, ffn)):
        for count, num in _slots_by_token_count(slot_tokens):
            thin = MatmulShape(count, rank, inner, num)
            forward += [thin, MatmulShape(count, columns, rank, num)]
            backward += [
                thin, MatmulShape(count, rank, columns, num),
                MatmulShape(count, columns, rank, num, is_weight_gradient=True),
                MatmulShape(count, rank, inner, num, is_weight_gradient=True),
                MatmulShape(count, inner, rank, num),
            ]  # fmt: skip
    casts = s.cast_bytes(3 * num_cast * rank * (hidden + ffn))
    outputs = 3 * rows * (2 * rank + 2 * ffn + hidden)
    # The adapters copy the rows again, and weight the intermediate in a new tensor.
    inputs = rows * (12 * rank + 2 * (hidden + ffn) + 3 * (ffn + hidden * (1 + has_token_grad)))
    kernels = 12 + 6 * s.num_casts * num_cast
    return (
        Op("", tuple(forward), casts + outputs * s.compute_bytes, kernels),
        Op("", tuple(backward), 3 * casts + inputs * s.compute_bytes, 2 * kernels),
    )


def _combine(s: Sizes, routed: RoutedTokens) -> Operation:
    """Return the sums of weighted results by token.

    Deduplicated results are summed on the rank of the experts, and again on the source rank. Local
    results are summed chunk by chunk.
    """
    row, tokens = s.model.hidden * s.compute_bytes, s.dispatched_tokens
    choices, chunks, exchanges = tokens * s.model.top_k, routed.num_chunks, routed.exchanges
    weights = choices * (2 * s.stored_bytes + 2 * s.compute_bytes + 3 * INDEX_BYTES)
    num_local, forward, backward = routed.num_local_chunks, 0, 0
    if routed.is_dedup:
        forward += _sum_bytes(s, exchanges[-1].num_received, s.model.top_k)
        forward += sum(_sum_bytes(s, one.num_tokens, len(one.group)) for one in exchanges)
        backward += sum(one.num_sent * (2 * row + INDEX_BYTES) for one in exchanges)
    else:
        moved = sum(2 * one.num_received * row for one in exchanges[:-1])
        forward += (_result_rows(s, routed) + tokens) * row + weights + moved
        backward += 8 * routed.is_all_to_all * routed.num_sent * row + 2 * weights + moved
    if num_local:
        forward += num_local * (choices + tokens) * row + weights
        backward += 2 * weights
    has_grad = not s.input_has_no_grad or bool(exchanges) or s.trainable.routers
    kernels = 2 + 6 * chunks * max(len(exchanges), 1)
    return Operation(
        Op("combine", (), forward, kernels),
        Op("combine", (), backward, kernels) if has_grad else None,
    )


def _concat_chunks(s: Sizes, routed: RoutedTokens) -> Operation:
    """Return the concatenation of chunks of results, and the sum with local ones."""
    num_passes = 2 * (routed.num_chunks > 1) + 3 * routed.num_local_chunks
    moved = num_passes * s.dispatched_tokens * s.model.hidden * s.compute_bytes
    return Operation(Op("concat chunks", (), moved, num_passes)) if num_passes else Operation()
