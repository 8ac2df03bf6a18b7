"""Temporary memory in backward of a layer's larger half: a gated FFN or routed experts."""

from __future__ import annotations

from moesaic.facts.workload.loads import RoutedTokens
from moesaic.facts.workload.sizes import EXPERT_CHUNK_BYTES, INDEX_BYTES, Sizes


def gated_ffn_bytes(s: Sizes, inner: int, *, gradient_stays: bool) -> int:
    """Return peak bytes in backward of a gated FFN of width `inner`, without the gradient of the
    residual stream.

    Three gradients around a matmul exist, but not its result. The next weight's gradient stays, or
    has been accumulated. With TP, the gradient of all sequence shards comes first, with gloo's
    copy.
    """
    inner_bytes, weight = s.tokens * inner * s.compute_bytes, inner * s.model.hidden
    peak = gradient_stays * weight * s.stored_bytes + 2 * inner_bytes
    if s.tp == 1:
        return peak
    gathered = s.gathered_elements * s.compute_bytes
    cast = s.num_casts * s.stream_elements * s.compute_bytes
    return max(peak, gathered + cast + max(gathered, inner_bytes + weight * s.compute_bytes))


def expert_backward_bytes(s: Sizes, routed: RoutedTokens) -> int:
    """Return peak bytes beside the gradient of the experts, less freed activations."""
    hidden, chunk = s.model.hidden, routed.split_chunks()[0]
    num_tokens, index_bytes = sum(chunk.slot_tokens), 0
    if routed.is_all_to_all:
        elements = (num_tokens - chunk.num_sent) * hidden
    else:  # Gradients for the tokens of all expert TP ranks; token and weight of each row.
        num_received = chunk.exchanges[-1].num_received if chunk.is_dedup else s.dispatched_tokens
        elements = (s.etp > 1 or chunk.is_dedup) * num_received * hidden + 2 * num_tokens
        index_bytes = 2 * num_tokens * INDEX_BYTES
    if routed.num_chunks > 1:  # Gradients of the next chunk arrive.
        exchange = chunk.exchanges[0]
        elements += (exchange.num_received + chunk.is_dedup * exchange.num_sent) * hidden
    elements += expert_elements(s, chunk)
    if routed.num_local_chunks:  # The last local chunk is done.
        freed = 2 * s.expert_width * routed.local_chunks()[-1].num_sent
        elements -= freed - s.dispatched_tokens * hidden
    return elements * s.compute_bytes + index_bytes


def expert_elements(s: Sizes, routed: RoutedTokens, *, gradients_stay: bool = False) -> int:
    """Return peak elements of the experts' tokens in backward, beside the gradients of results.

    A CPU computes slots in chunks that fit the cache. With `gradients_stay`, gradients between the
    matmuls remain.
    """
    hidden, ffn, rows = s.model.hidden, s.expert_width, sum(routed.slot_tokens)
    largest, at_once = max(*routed.slot_tokens, 1), rows
    if s.on_cpu:
        limit = EXPERT_CHUNK_BYTES // (2 * ffn * s.compute_bytes)
        at_once = min(rows, max(limit // largest, 1) * largest)
    inner, copied, results = at_once * ffn, at_once * hidden, rows * hidden
    kept = gradients_stay * 2 * ffn * rows
    # A slot's matrix or its gradient may be cast beside them; on a GPU the matrices of all slots.
    matrix = s.num_casts * 2 * ffn * hidden
    weights = matrix if s.on_cpu else len(routed.slot_tokens) * matrix
    before = (routed.is_all_to_all or at_once < rows) * results + copied + 4 * inner
    after = results + kept + routed.is_all_to_all * copied
    after += weights + (not gradients_stay) * 2 * inner
    peak = max(before + max(inner, matrix), after)
    if not routed.is_all_to_all:  # Last are the sums by token.
        num_sums = routed.exchanges[-1].num_received if routed.is_dedup else s.dispatched_tokens
        peak = max(peak, results + kept + num_sums * hidden)
    return peak
