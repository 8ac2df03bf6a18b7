"""Operations of a mixture-of-experts layer, forward and backward, in the style of `ops`."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.facts.workload.loads import RoutedTokens
from moesaic.facts.workload.ops import GROUPED_MM, MatmulShape, Op, OpPair, merge_ops
from moesaic.facts.workload.sizes import INDEX_BYTES, Sizes

EXPERTS = "experts"
"""Name of the op that computes experts, once per chunk of tokens."""

_DISPATCH_BYTES = 132
"""Estimated bytes of indices, masks and counts, read and written per token and choice."""
_LOCAL_CHUNK_BYTES = 90
"""Estimated bytes of the same for each chunk of local tokens."""


def router(s: Sizes) -> OpPair:
    """Return the ops of scores and choices, in stored type, and of the auxiliary losses."""
    model, t = s.model, s.shard_tokens
    scores, choices = t * model.experts, t * model.top_k
    forward = (5 * scores + 3 * choices + 4 * t) * s.stored_bytes + 2 * choices * INDEX_BYTES
    backward = (17 * scores + choices + 8 * t) * s.stored_bytes + choices * INDEX_BYTES
    if model.renormalise:
        forward += (3 * choices + 2 * t) * s.stored_bytes
        backward += (14 * choices + 5 * t) * s.stored_bytes
    renormalises = int(model.renormalise)
    kernels = [20 + 2 * renormalises, 16 + 7 * renormalises]
    if (
        model.score_function == "sigmoid"
    ):  # Sigmoid, bias, scale, and the epsilon of the normalization.
        forward += (5 * scores + 2 * choices + (4 + 2 * renormalises) * t) * s.stored_bytes
        backward += (13 * scores + 2 * choices + 5 * t) * s.stored_bytes
        kernels = [kernels[0] + 5 + renormalises, kernels[1] + 8]
    if model.top_expert_groups < model.expert_groups:
        group_scores, group_choices = t * model.expert_groups, t * model.top_expert_groups
        forward += (3 * scores + 6 * group_scores + group_choices) * s.stored_bytes
        forward += 2 * (group_scores + group_choices) * INDEX_BYTES + 4 * group_scores
        kernels[0] += 6
    grad_matmuls = s.trainable.routers * (MatmulShape(model.experts, model.hidden, t),)
    grad_matmuls += (not s.input_has_no_grad) * (MatmulShape(t, model.hidden, model.experts),)
    backward_op = Op(
        "router", grad_matmuls, backward, kernels[1] - 2 + len(grad_matmuls), s.stored_dtype
    )
    return (
        Op("router", (MatmulShape(t, model.experts, model.hidden),), forward, kernels[0],
           s.stored_dtype, num_transcendentals=2 * scores),
        backward_op if grad_matmuls else Op("router"),
    )  # fmt: skip


def dispatch(s: Sizes, routed: RoutedTokens) -> OpPair:
    """Return the ops that order tokens by slot and copy those to send.

    A token is copied once per expert, or with deduplication once per destination of each exchange.
    """
    pair = _dedup_dispatch(s, routed) if routed.is_dedup else _all_to_all_dispatch(s, routed)
    if not routed.local_slot_tokens:
        return pair
    return merge_ops(pair[0], _local_forward(s, routed)), merge_ops(
        pair[1], _local_backward(s, routed)
    )


def _local_forward(s: Sizes, routed: RoutedTokens) -> Op:
    """Return the op that splits local from sent tokens, and orders tokens overall and per chunk."""
    choices, chunks = s.dispatched_tokens * s.model.top_k, routed.num_local_chunks
    bytes_per_choice = _DISPATCH_BYTES + _LOCAL_CHUNK_BYTES * chunks - 20 + 30 * routed.is_dedup
    moved = choices * bytes_per_choice + s.cast_bytes(choices) * chunks
    mask_kernels = 4 + 2 * (len(routed.exchanges) - 1) if routed.is_dedup else 0
    return Op("", (), moved, 19 + 14 * chunks + s.num_casts * (chunks - 1) + mask_kernels)


def _local_backward(s: Sizes, routed: RoutedTokens) -> Op:
    """Return the op that adds the gradients of each local chunk to those of sent tokens."""
    if s.input_has_no_grad and not s.trainable.routers:
        return Op("")
    width = (not s.input_has_no_grad) * s.model.hidden + s.trainable.routers * s.model.top_k
    chunks, choices = routed.num_local_chunks, s.dispatched_tokens * s.model.top_k
    moved = (
        chunks
        * (3 * s.dispatched_tokens * width + (choices + s.dispatched_tokens) * s.model.hidden)
        * s.compute_bytes
    )
    moved += (chunks - 1) * choices * _LOCAL_CHUNK_BYTES // 2
    return Op("", (), moved, 4 * chunks + s.num_casts * (chunks - 1))


def _all_to_all_dispatch(s: Sizes, routed: RoutedTokens) -> OpPair:
    hidden, choices, is_all_to_all = (
        s.model.hidden,
        s.dispatched_tokens * s.model.top_k,
        routed.is_all_to_all,
    )
    rows, num_received = (
        routed.num_sent * hidden * s.compute_bytes,
        is_all_to_all * sum(routed.slot_tokens),
    )
    reorder_bytes, num_reorders = _reorder_bytes(s, routed)
    num_forwarded = sum(exchange.num_received for exchange in routed.exchanges[:-1])
    index_bytes = (13 * num_received + 17 * num_forwarded) * INDEX_BYTES
    sum_bytes = _result_bytes_read(s, routed) + s.dispatched_tokens * hidden * s.compute_bytes
    concat_bytes, num_concats = (
        _concat_bytes(s, routed, hidden + s.model.top_k),
        2 * (routed.num_chunks > 1),
    )
    kernels = 14 + s.num_casts + routed.num_chunks * (6 + 18 * is_all_to_all + 29 * num_reorders)
    return (
        Op("dispatch", (), choices * _DISPATCH_BYTES + s.cast_bytes(s.stream_elements)
           + 2 * is_all_to_all * rows + reorder_bytes + index_bytes, kernels),
        Op("dispatch") if s.input_has_no_grad else
        Op("dispatch", (),
           sum_bytes + reorder_bytes + s.cast_bytes(s.stream_elements) + concat_bytes,
           3 + s.num_casts + routed.num_chunks * num_reorders + num_concats),
    )  # fmt: skip


def _result_bytes_read(s: Sizes, routed: RoutedTokens) -> int:
    """Return bytes of results that sums over all choices read; missing results read a row too."""
    rows = s.dispatched_tokens * s.model.top_k if routed.is_partial else routed.num_sent
    return rows * s.model.hidden * s.compute_bytes


def _concat_bytes(s: Sizes, routed: RoutedTokens, width: int) -> int:
    """Return bytes to concatenate chunks with `width` numbers per token."""
    return 2 * (routed.num_chunks > 1) * s.dispatched_tokens * width * s.compute_bytes


def _reorder_bytes(s: Sizes, routed: RoutedTokens) -> tuple[int, int]:
    """Return bytes of tokens reordered between exchanges, and the number of reorderings."""
    first_exchanges = routed.exchanges[:-1]
    rows = sum(exchange.num_received for exchange in first_exchanges)
    return 2 * rows * s.model.hidden * s.compute_bytes, len(first_exchanges)


def _dedup_dispatch(s: Sizes, routed: RoutedTokens) -> OpPair:
    """Return the ops that copy tokens with weights and slots, once per destination rank.

    The receiver computes the position of each slot's tokens. Backward sums gradients over the
    experts of a destination rank, then over destinations on the source rank.
    """
    chunks, num_forwards = routed.num_chunks, len(routed.exchanges) - 1
    forward_op = Op(
        "dispatch", (), _dedup_forward_bytes(s, routed),
        21 + 3 * num_forwards + s.num_casts + chunks * (34 + 51 * num_forwards),
    )  # fmt: skip
    if s.input_has_no_grad and not s.trainable.routers:
        return forward_op, Op("dispatch")
    backward_op = Op(
        "dispatch", (), _dedup_backward_bytes(s, routed),
        3 + s.num_casts + chunks * (6 + 6 * num_forwards) + 2 * (chunks > 1),
    )  # fmt: skip
    return forward_op, backward_op


def _dedup_forward_bytes(s: Sizes, routed: RoutedTokens) -> int:
    """Return bytes that forward of a deduplicated dispatch reads and writes."""
    exchanges, top_k, element_bytes = routed.exchanges, s.model.top_k, s.compute_bytes
    token_bytes, choices = s.model.hidden * element_bytes, s.dispatched_tokens * top_k
    num_received, num_forwards = exchanges[-1].num_received, len(exchanges) - 1
    moved = s.cast_bytes(s.stream_elements) + s.cast_bytes(choices)
    moved += choices * (77 + 2 * s.stored_bytes + 41 * num_forwards)
    first, last = len(exchanges[0].group), len(exchanges[-1].group)
    for num_destinations in (first, first * last)[: 1 + num_forwards]:
        mask_bytes = 3 * (num_destinations + 1) + 3 * num_destinations
        moved += s.dispatched_tokens * mask_bytes + 24 * choices
    moved += num_received * top_k * 41 + sum(routed.slot_tokens) * (32 + 96 * num_forwards)
    for exchange in exchanges:
        sent_bytes = 64 + (99 + 6 * element_bytes) * top_k + 2 * token_bytes
        moved += 45 * exchange.num_tokens * len(exchange.group) + exchange.num_sent * sent_bytes
        moved += exchange.num_received * top_k * (2 * element_bytes + 12)
    for exchange in exchanges[1:]:
        moved += exchange.num_tokens * (40 * top_k + 3 * (len(exchange.group) + 1))
        moved += exchange.num_received * (48 + 16 * top_k)
    return moved


def _dedup_backward_bytes(s: Sizes, routed: RoutedTokens) -> int:
    """Return bytes that backward of a deduplicated dispatch reads and writes."""
    top_k, element_bytes = s.model.top_k, s.compute_bytes
    token_bytes, num_received = s.model.hidden * element_bytes, routed.exchanges[-1].num_received
    gradient_bytes = token_bytes + top_k * element_bytes
    moved = s.cast_bytes(s.stream_elements) + sum(routed.slot_tokens) * (8 + 2 * element_bytes)
    moved += _sum_bytes(num_received, top_k, token_bytes, element_bytes)
    moved += num_received * top_k * (element_bytes + 12)
    for exchange in routed.exchanges:
        moved += 2 * exchange.num_received * gradient_bytes
        moved += _sum_bytes(exchange.num_tokens, len(exchange.group), gradient_bytes, element_bytes)
    return moved + _concat_bytes(s, routed, s.model.hidden + top_k)


def _sum_bytes(tokens: int, each: int, row: int, weight: int) -> int:
    """Return bytes of sums over `each` rows per token, some of them missing, with masks."""
    return tokens * (each * (1 + 2 * weight + row + INDEX_BYTES) + row + 2 * INDEX_BYTES)


def experts(s: Sizes, slot_tokens: Sequence[int], *, is_all_to_all: bool) -> OpPair:
    """Return the grouped matmuls of all slots, with gate and up in one.

    Rows are copied from tokens or receive buffers as needed. They are weighted here, unless each
    token was sent once per expert.

    A weight gradient has a slot's tokens as `rows`, although it sums over them. The benchmarked
    grid of grouped matmuls has few rows and many columns.
    """
    hidden, ffn = s.model.hidden, s.expert_width
    rows = sum(slot_tokens)
    slots_by_tokens = _slots_by_token_count(slot_tokens)
    num_busy = sum(slots_by_tokens.values())
    expert_elements = 3 * ffn * hidden
    inner_bytes = rows * ffn * s.compute_bytes
    trains_experts, rank = s.trainable.experts, s.trainable.rank_of_target("experts")
    has_token_grad = not s.input_has_no_grad or (s.trainable.routers and not is_all_to_all)
    forward, backward = list[MatmulShape](), list[MatmulShape]()
    for count, num_slots in slots_by_tokens.items():
        forward += [
            MatmulShape(count, 2 * ffn, hidden, num_slots),
            MatmulShape(count, hidden, ffn, num_slots),
        ]
        backward += [MatmulShape(count, ffn, hidden, num_slots)]
        if trains_experts:
            backward += [
                MatmulShape(count, hidden, ffn, num_slots, is_weight_gradient=True),
                MatmulShape(count, 2 * ffn, hidden, num_slots, is_weight_gradient=True),
            ]
        if has_token_grad:
            backward += [MatmulShape(count, hidden, 2 * ffn, num_slots)]
    num_cast, casts = _cast_slots(s, slot_tokens)
    cast = s.cast_bytes(num_cast * expert_elements)
    gradient_bytes = (
        s.cast_bytes(num_busy * expert_elements)
        + (len(slot_tokens) - num_busy) * expert_elements * s.stored_bytes
    )
    copy_bytes = rows * (2 * hidden * s.compute_bytes + INDEX_BYTES)
    index_bytes, is_weighted = 2 * rows * INDEX_BYTES, 1 - is_all_to_all
    forward_op = Op(
        EXPERTS, tuple(forward),
        cast + 5 * inner_bytes + (1 + is_all_to_all) * copy_bytes + is_weighted * index_bytes,
        6 + 2 * casts, s.precision, kind=GROUPED_MM, num_transcendentals=rows * ffn,
    )  # fmt: skip
    backward_op = Op(
        EXPERTS, tuple(backward),
        s.cast_bytes(num_cast * expert_elements * (1 + 2 * has_token_grad) // 3)
        + trains_experts * gradient_bytes
        + (14 + (6 + 2 * trains_experts) * is_weighted) * inner_bytes
        + (1 + trains_experts + is_all_to_all) * copy_bytes
        + 2 * is_weighted * index_bytes,
        11 + 4 * trains_experts + 6 * is_weighted + (1 + has_token_grad) * casts
        + 2 * num_busy * trains_experts * s.num_casts, s.precision,
        kind=GROUPED_MM, num_transcendentals=2 * rows * ffn,
    )  # fmt: skip
    if rank:
        adapter_forward, adapter_backward = _expert_adapters(s, slot_tokens, rank, has_token_grad)
        return merge_ops(forward_op, adapter_forward), merge_ops(backward_op, adapter_backward)
    return forward_op, backward_op if trains_experts or has_token_grad else Op(EXPERTS)


def _slots_by_token_count(slot_tokens: Sequence[int]) -> dict[int, int]:
    """Return the number of slots by token count, without empty slots."""
    return {count: slot_tokens.count(count) for count in sorted(set(slot_tokens)) if count}


def _cast_slots(s: Sizes, slot_tokens: Sequence[int]) -> tuple[int, int]:
    """Return the number of slots whose matrices are cast for a matmul, and of casts.

    A CPU casts nonempty slots one by one, a GPU all slots at once.
    """
    num_busy = sum(_slots_by_token_count(slot_tokens).values())
    return (num_busy, s.num_casts * num_busy) if s.on_cpu else (len(slot_tokens), s.num_casts)


def _expert_adapters(
    s: Sizes, slot_tokens: Sequence[int], rank: int, has_token_grad: bool
) -> OpPair:
    """Return the ops that adapters of expert matrices add, for `slot_tokens` tokens per slot."""
    hidden, ffn, rows, slots_by_tokens = (
        s.model.hidden,
        s.expert_width,
        sum(slot_tokens),
        _slots_by_token_count(slot_tokens),
    )
    forward, backward = list[MatmulShape](), list[MatmulShape]()
    for columns, inner in ((ffn, hidden), (ffn, hidden), (hidden, ffn)):
        for count, num_slots in slots_by_tokens.items():
            thin, wide = (
                MatmulShape(count, rank, inner, num_slots),
                MatmulShape(count, columns, rank, num_slots),
            )
            forward += [thin, wide]
            backward += [
                thin, MatmulShape(count, rank, columns, num_slots),
                MatmulShape(count, columns, rank, num_slots, is_weight_gradient=True),
                MatmulShape(count, rank, inner, num_slots, is_weight_gradient=True),
                MatmulShape(count, inner, rank, num_slots),
            ]  # fmt: skip
    num_busy, (num_cast, casts) = sum(slots_by_tokens.values()), _cast_slots(s, slot_tokens)
    cast_bytes = s.cast_bytes(3 * num_cast * rank * (hidden + ffn))
    recast_bytes = s.cast_bytes(num_cast * rank * (2 * hidden + ffn))  # A is read twice.
    gradient_bytes = s.cast_bytes(3 * num_busy * rank * (hidden + ffn))
    scaled, outputs = 3 * 2 * rows * rank, 3 * rows * (2 * ffn + hidden)
    # The adapters copy the rows again, and weight the intermediate in a new tensor.
    copy_bytes = (
        rows * (2 * hidden * s.compute_bytes + INDEX_BYTES) + 2 * rows * ffn * s.compute_bytes
    )
    inputs = 3 * rows * (ffn + hidden + has_token_grad * hidden)
    return (
        Op("", tuple(forward), cast_bytes + (scaled + outputs) * s.compute_bytes, 12 + 6 * casts),
        Op("", tuple(backward),
           cast_bytes + recast_bytes + gradient_bytes + copy_bytes
           + (2 * scaled + inputs) * s.compute_bytes,
           27 + has_token_grad + 9 * casts + 6 * num_busy * s.num_casts),
    )  # fmt: skip


def combine(s: Sizes, routed: RoutedTokens) -> OpPair:
    """Return the ops that sum weighted results by token.

    Deduplicated results are summed on the rank of the experts, and again on the source rank.
    """
    if routed.local_slot_tokens:
        pair, (local_forward, local_backward) = (
            _combine(s, routed),
            _combine(s, routed.local_only()),
        )
        sum_bytes = (
            (routed.num_local_chunks - 1)
            * (s.model.top_k + 1)
            * s.dispatched_tokens
            * s.model.hidden
            * s.compute_bytes
        )
        local_forward = merge_ops(local_forward, Op("", (), sum_bytes))
        return merge_ops(pair[0], local_forward), merge_ops(pair[1], local_backward)
    return _combine(s, routed)


def _combine(s: Sizes, routed: RoutedTokens) -> OpPair:
    hidden, choices, exchanges = (
        s.model.hidden,
        s.dispatched_tokens * s.model.top_k,
        routed.exchanges,
    )
    chunks = routed.num_chunks
    if routed.is_dedup:
        row, num_received, num_extra = (
            hidden * s.compute_bytes,
            exchanges[-1].num_received,
            len(exchanges) - 1,
        )
        forward_bytes = num_received * (
            s.model.top_k * (row + INDEX_BYTES + s.compute_bytes) + row + 2 * INDEX_BYTES
        )
        forward_bytes += sum(
            _sum_bytes(exchange.num_tokens, len(exchange.group), row, s.compute_bytes)
            for exchange in exchanges
        )
        backward_bytes = sum(exchange.num_sent * (2 * row + INDEX_BYTES) for exchange in exchanges)
        return (
            Op("combine", (), forward_bytes, chunks * (8 + 2 * num_extra)),
            Op("combine", (), backward_bytes, chunks * (6 + num_extra)),
        )  # fmt: skip
    is_all_to_all, (reorder_bytes, num_extra) = routed.is_all_to_all, _reorder_bytes(s, routed)
    rows = routed.num_sent * hidden * s.compute_bytes
    num_weighted = routed.num_sent if routed.is_partial else choices
    weights = (
        choices * 2 * s.stored_bytes
        + num_weighted * (2 * s.compute_bytes + 3 * INDEX_BYTES)
        + s.cast_bytes(choices)
    )
    backward_op = Op(
        "combine", (), 8 * is_all_to_all * rows + reorder_bytes + 2 * weights,
        s.num_casts + chunks * (5 + 6 * is_all_to_all + num_extra),
    )  # fmt: skip
    has_no_grad = s.input_has_no_grad and not is_all_to_all and not s.trainable.routers
    return (
        Op("combine", (), _result_bytes_read(s, routed) + reorder_bytes
           + s.dispatched_tokens * hidden * s.compute_bytes + weights,
           s.num_casts + chunks * (5 + num_extra)),
        Op("combine") if has_no_grad else backward_op,
    )  # fmt: skip


def concat_chunks(s: Sizes, routed: RoutedTokens) -> OpPair:
    """Return the ops that concatenate chunks of results and add local ones; gradients are views."""
    moved, num_adds = _concat_bytes(s, routed, s.model.hidden), routed.num_local_chunks
    moved += 3 * num_adds * s.dispatched_tokens * s.model.hidden * s.compute_bytes
    return Op("concat chunks", (), moved, (routed.num_chunks > 1) + num_adds), Op("concat chunks")


def add_shared_experts(s: Sizes) -> OpPair:
    """Return the ops that add the results of shared experts to those of routed experts."""
    return Op("shared", (), 3 * s.stream_elements * s.compute_bytes, 1), Op("shared")
