"""Temporary memory of a layer's backward and of the loss, beside what autograd saves."""

from __future__ import annotations

from moesaic.facts.workload.loads import RoutedTokens
from moesaic.facts.workload.sizes import EXPERT_CHUNK_BYTES, INDEX_BYTES, LOSS_CHUNK_TOKENS, Sizes


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


def logits_bytes(s: Sizes) -> int:
    """Return peak bytes of the loss beside what it saves.

    These are its input, and logits and log-probabilities of a chunk. Low precision adds a cast
    weight, the cast gradient of the logits, and an addend of the weight's gradient. A tied weight
    may be gathered from column shards.
    """
    inputs = s.gathered_elements * s.compute_bytes
    if s.tp == 1:
        inputs = s.stream_elements * (s.stored_bytes + s.num_casts * s.compute_bytes)
    weight = s.num_casts * s.vocab * s.model.hidden * s.compute_bytes
    logits = min(s.tokens, LOSS_CHUNK_TOKENS) * s.vocab
    chunk = max(2 * logits * s.stored_bytes, logits * (s.stored_bytes + s.compute_bytes) + weight)
    table = s.gathers_tied_embedding * s.vocab * s.model.hidden * s.stored_bytes
    return inputs + weight + chunk + table


def captured_bytes(
    s: Sizes, layer: int, routed: RoutedTokens | None, *, trains_experts: bool
) -> int:
    """Return bytes of a layer's gradients of results, which a split backward keeps for its weights.

    `routed` are the tokens of its experts; None for a dense layer.
    """
    model, latent, stream = s.model, s.model.latent, s.stream_elements * s.stored_bytes
    gathered = s.gathered_elements * s.compute_bytes
    attention = s.tokens * (s.q_width + 2 * s.kv_width) * s.compute_bytes
    if latent is not None:
        ranks = latent.kv_lora_rank + (latent.q_lora_rank or 0)
        up_width = s.q_width + s.heads * (latent.v_head_dim + model.head_dim - model.rotary_dim)
        attention = s.tokens * up_width * s.compute_bytes
        attention += s.shard_tokens * ranks * (s.stored_bytes + s.compute_bytes)
    elif model.qk_norm is not None:
        attention += s.tokens * (s.q_width + s.kv_width) * s.stored_bytes
    captured = 2 * stream + gathered + attention
    if routed is None:
        return captured + gathered + 2 * s.tokens * s.ffn_width(layer) * s.compute_bytes
    num_rows = sum(routed.slot_tokens) if routed.is_all_to_all else s.dispatched_tokens
    if routed.is_dedup:
        num_rows = routed.exchanges[-1].num_received
    num_rows += bool(routed.num_local_chunks) * s.dispatched_tokens
    elements = num_rows * model.hidden + 2 * s.expert_width * routed.num_tokens
    captured += s.shard_tokens * model.experts * s.stored_bytes
    captured += trains_experts * elements * s.compute_bytes
    if model.shared_experts:
        captured += gathered + 2 * s.tokens * s.shared_width * s.compute_bytes
    return captured
