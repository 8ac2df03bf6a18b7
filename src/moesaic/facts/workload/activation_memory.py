"""Activation memory: bytes that autograd saves for one micro-batch, per block.

Exact for torch's CPU kernels, and for a GPU with the same kernels. Routing matters only by the
number of received tokens. With TP, norms and routers save a sequence shard, matmuls the gathered
tokens in compute type.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.job.model import LatentConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload.latent_attention import attention_head_width
from moesaic.facts.workload.loads import RoutedTokens, dedup_token_bytes, routed_by_layer
from moesaic.facts.workload.parameter_placement import blocks_of_rank
from moesaic.facts.workload.sizes import INDEX_BYTES, LOSS_CHUNK_TOKENS, Sizes


def activation_bytes(
    job: Job, plan: Plan, rank: int, loads: Sequence[ArrayLike] | None = None
) -> dict[str, int]:
    """Return bytes that autograd saves for one micro-batch, by block of the rank, and for
    `context`.

    Parameters do not count. Recomputation (`train.recompute`) is ignored: with it, each layer saves
    its input, and backward restores one layer at a time.
    """
    s = Sizes.of_rank(job, plan, rank)
    expert_layers = job.model.expert_layers
    ffn_bytes = [_dense_bytes(s, index) for index in range(job.model.layers - len(expert_layers))]
    if expert_layers:
        ffn_bytes += [
            _moe_bytes(s, plan, layer_bytes)
            for layer_bytes in routed_by_layer(job, plan, rank, loads)
        ]
    by_block = {
        "embed": _embedding_bytes(s),
        **{
            f"layers.{index}": _attention_bytes(s) + layer_bytes
            for index, layer_bytes in enumerate(ffn_bytes)
        },
        "head": _head_bytes(s),
    }
    angles = s.tokens * job.model.rotary_dim * s.stored_bytes
    local = {name: by_block[name] for name in blocks_of_rank(job.model, plan, rank)}
    return {"context": angles, **local}


def _embedding_bytes(s: Sizes) -> int:
    """Return bytes of token ids: with TP also a mask, with column shards the ids of all ranks."""
    if s.embedding_shards > 1:
        return s.lookup_tokens * INDEX_BYTES
    return s.tokens * (INDEX_BYTES + (s.tp > 1))


def _norm_bytes(s: Sizes) -> int:
    """Return bytes of a norm's input, and of one factor per row."""
    return (s.stream_elements + s.shard_tokens) * s.stored_bytes


def gathered_bytes(s: Sizes) -> int:
    """Return bytes of the residual stream over all sequence shards, in compute type."""
    return s.gathered_elements * s.compute_bytes


def _inputs_bytes(s: Sizes, num: int, weights: int) -> int:
    """Return bytes of the shared input of `num` matmuls, and of casts of `weights` elements."""
    cast = s.num_casts * weights * s.compute_bytes
    if s.tp > 1:
        return gathered_bytes(s) + cast
    return (
        num * s.stream_elements * s.compute_bytes
        if s.num_casts
        else s.stream_elements * s.stored_bytes
    ) + cast


def _attention_bytes(s: Sizes) -> int:
    q, k, model = s.tokens * s.q_width, s.tokens * s.kv_width, s.model
    if model.latent is not None:
        return _latent_bytes(s, model.latent)
    saved = _norm_bytes(s) + _inputs_bytes(s, 3, 2 * (s.q_width + s.kv_width) * model.hidden)
    if model.qk_norm is not None:
        rows = s.heads + s.kv_heads if model.qk_norm == "heads" else 2
        is_tp_norm = model.qk_norm == "whole" and s.tp > 1  # A TP norm also saves its result.
        saved += ((1 + is_tp_norm) * (q + k) + rows * s.tokens) * s.stored_bytes
    if model.clip_qkv is not None:
        saved += (q + k) * s.stored_bytes + k * s.compute_bytes
    # Rotated queries, keys and values; the result.
    return saved + 2 * (q + k) * s.compute_bytes + s.tokens * s.heads * s.stored_bytes


def _latent_bytes(s: Sizes, latent: LatentConfig) -> int:
    model, t, width = s.model, s.tokens, attention_head_width(s, latent)
    values_width, down_width = (
        s.heads * latent.v_head_dim,
        latent.kv_lora_rank + latent.qk_rope_head_dim,
    )
    up_width = s.q_width - s.heads * latent.qk_rope_head_dim + values_width
    weights = (
        down_width * model.hidden + latent.kv_lora_rank * up_width + values_width * model.hidden
    )
    # A norm saves its input and one factor per row. A norm over part of an uncast result saves all
    # of it.
    norm_bytes = (
        latent.kv_lora_rank + 1 + (1 - s.num_casts) * latent.qk_rope_head_dim
    ) * s.stored_bytes
    if latent.q_lora_rank is None:
        weights += s.q_width * model.hidden
        query_input_width = model.hidden
    else:
        weights += latent.q_lora_rank * (model.hidden + s.q_width)
        norm_bytes += (latent.q_lora_rank + 1) * s.stored_bytes
        query_input_width = latent.q_lora_rank
    if s.tp > 1:  # One gathered tensor holds the inputs of all up projections.
        num_inputs = 1 + (latent.q_lora_rank is not None)
        saved = (
            (num_inputs * s.stream_elements * s.compute_bytes)
            if s.num_casts
            else s.stream_elements * s.stored_bytes
        )
        saved += (
            s.num_casts * weights * s.compute_bytes
            + t * (query_input_width + down_width) * s.compute_bytes
        )
    else:
        saved = _inputs_bytes(s, 2, weights)
        saved += t * (latent.kv_lora_rank + (latent.q_lora_rank or 0)) * s.compute_bytes
    # Queries, keys and result; then padded values and the cut result, or the whole up projection.
    is_cut = latent.v_head_dim < width
    head_elements = 3 * s.heads * width + (s.heads * width + values_width if is_cut else up_width)
    saved += _norm_bytes(s) + s.shard_tokens * norm_bytes
    return saved + t * head_elements * s.compute_bytes + t * s.heads * s.stored_bytes


def _dense_bytes(s: Sizes, layer: int) -> int:
    ffn = s.ffn_width(layer)
    return _norm_bytes(s) + _inputs_bytes(s, 2, 3 * ffn * s.model.hidden) + _gated_bytes(s, ffn)


def _gated_bytes(s: Sizes, ffn: int) -> int:
    """Return bytes of gate, up, silu(gate), and the input of the down projection."""
    return 4 * s.tokens * ffn * s.compute_bytes


def _moe_bytes(s: Sizes, plan: Plan, layer_tokens: RoutedTokens) -> int:
    model, exchanges = s.model, layer_tokens.exchanges
    dispatched_choices = s.dispatched_tokens * model.top_k
    num_received, local = sum(layer_tokens.slot_tokens), layer_tokens.local_slot_tokens
    rows = 2 * num_received * s.expert_width
    if layer_tokens.is_dedup:
        rows += exchanges[-1].num_received * model.top_k - dispatched_choices
    elif exchanges:
        rows += (num_received + layer_tokens.num_sent) * model.hidden
    if local:
        rows += 2 * sum(local) * s.expert_width + layer_tokens.num_local_chunks * dispatched_choices
    if (local or not exchanges) and (s.num_casts or s.etp > 1):
        # Otherwise it is the stream, which the router saves.
        rows += s.dispatched_tokens * model.hidden
    saved = (
        _norm_bytes(s)
        + s.stream_elements * s.stored_bytes
        + _router_bytes(s)
        + _dispatch_index_bytes(s, plan, layer_tokens)
        + (rows + dispatched_choices) * s.compute_bytes
    )
    if model.shared_experts:
        weights = 3 * s.shared_width * model.hidden
        if s.tp > 1 or s.num_casts:  # Otherwise it is the stream, which the router saves.
            saved += _inputs_bytes(s, 2, weights)
        saved += _gated_bytes(s, s.shared_width)
    return saved


def _router_bytes(s: Sizes) -> int:
    """Return bytes of scores and routing weights, without the router's input."""
    model, t = s.model, s.shard_tokens
    elements = 2 * t * model.experts + t + model.experts
    if model.score_function == "sigmoid":  # Divisor that turns scores into probabilities.
        elements += t
    if model.renormalise:
        elements += t * model.top_k + t
    return elements * s.stored_bytes


def _dispatch_index_bytes(s: Sizes, plan: Plan, layer_tokens: RoutedTokens) -> int:
    """Return bytes of row orders, counts and masks; with deduplication also received tokens."""
    exchanges, num_slots = layer_tokens.exchanges, len(layer_tokens.slot_tokens)
    dispatched_choices = s.dispatched_tokens * s.model.top_k
    # With ep = 1, slot counts are a view of the counts of all ranks, and its whole storage is
    # saved.
    num_ranks = plan.ranks_per_stage // plan.etp if plan.ep == 1 else 1
    counts = layer_tokens.num_chunks * num_slots * num_ranks
    if layer_tokens.is_dedup:
        saved = _dedup_index_bytes(s, plan, layer_tokens) + counts * INDEX_BYTES
    else:  # The row order covers all choices; dropped ones come last.
        saved = (3 * dispatched_choices + counts) * INDEX_BYTES + dispatched_choices
        if exchanges:
            num_forwarded = 2 * sum(exchange.num_received for exchange in exchanges[:-1])
            saved += (sum(layer_tokens.slot_tokens) + num_forwarded) * INDEX_BYTES
    if layer_tokens.local_slot_tokens:
        # Each local chunk selects its rows from one order, and weights them.
        num_chunks = layer_tokens.num_local_chunks
        saved += (dispatched_choices + num_chunks * (dispatched_choices + num_slots)) * INDEX_BYTES
        saved += num_chunks * dispatched_choices
    return saved


def _dedup_index_bytes(s: Sizes, plan: Plan, layer_tokens: RoutedTokens) -> int:
    """Return bytes of received deduplicated tokens, and of their row orders and masks."""
    model, exchanges = s.model, layer_tokens.exchanges
    num_received = exchanges[-1].num_received
    dispatched_choices = s.dispatched_tokens * model.top_k
    received_choices = num_received * model.top_k
    mask_elements = sum(exchange.num_tokens * len(exchange.group) for exchange in exchanges)
    sent_rows = sum(exchange.num_sent for exchange in exchanges)
    has_two_levels = len(exchanges) > 1
    order_elements = sum(layer_tokens.slot_tokens) if has_two_levels else received_choices
    order_elements += dispatched_choices + received_choices + 2 * sent_rows + mask_elements
    saved = order_elements * INDEX_BYTES + dispatched_choices + received_choices + mask_elements
    # Saved masks are views of storages with more columns: all ranks, and no destination.
    if has_two_levels:
        saved += exchanges[0].num_tokens * plan.ep + exchanges[1].num_tokens
    token_bytes, _ = dedup_token_bytes(model.hidden, model.top_k, s.compute_bytes)
    return saved + num_received * token_bytes


def _head_bytes(s: Sizes) -> int:
    """Return bytes of the norm, and of the gradients of input and weight that forward computes."""
    return _norm_bytes(s) + gathered_bytes(s) + s.vocab * s.model.hidden * s.stored_bytes


def logits_bytes(s: Sizes) -> int:
    """Return peak bytes of the loss: the head's input, with logits and log-probabilities of a
    chunk.

    Low precision adds a cast weight. Later it also needs the cast gradient of the logits, and an
    addend of the weight gradient.
    """
    input_bytes = (
        s.stream_elements * (s.stored_bytes + s.num_casts * s.compute_bytes)
        if s.tp == 1
        else gathered_bytes(s)
    )
    weight = s.num_casts * s.vocab * s.model.hidden * s.compute_bytes
    logits = min(s.tokens, LOSS_CHUNK_TOKENS) * s.vocab
    return (
        input_bytes
        + weight
        + max(2 * logits * s.stored_bytes, logits * (s.stored_bytes + s.compute_bytes) + weight)
    )


def captured_attention(s: Sizes) -> int:
    """Return bytes of gradients that a split backward keeps for attention weights.

    These are the gradients of all matmul and norm results.
    """
    model, latent = s.model, s.model.latent
    saved = s.stream_elements * s.stored_bytes + gathered_bytes(s)
    if latent is None:
        saved += s.tokens * (s.q_width + 2 * s.kv_width) * s.compute_bytes
        if model.qk_norm is not None:
            saved += s.tokens * (s.q_width + s.kv_width) * s.stored_bytes
        return saved
    up_width = s.q_width + s.heads * (latent.v_head_dim + model.head_dim - latent.qk_rope_head_dim)
    saved += (
        s.tokens * up_width * s.compute_bytes
        + s.shard_tokens * latent.qk_rope_head_dim * s.compute_bytes
    )
    return saved + s.shard_tokens * (latent.kv_lora_rank + (latent.q_lora_rank or 0)) * (
        s.stored_bytes + s.compute_bytes
    )


def captured_ffn(
    s: Sizes, layer: int, layer_tokens: RoutedTokens | None, *, trains_experts: bool
) -> int:
    """Return bytes of gradients that a split backward keeps for the weights of a layer's FFN.

    Args:
        s: the sizes.
        layer: index of the layer.
        layer_tokens: tokens of its experts; None for a dense layer.
        trains_experts: whether its experts are trainable.
    """
    model, gathered = s.model, gathered_bytes(s)
    saved = s.stream_elements * s.stored_bytes
    if layer_tokens is None:
        return saved + gathered + 2 * s.tokens * s.ffn_width(layer) * s.compute_bytes
    saved += s.shard_tokens * model.experts * s.stored_bytes
    num_gradients = (
        sum(layer_tokens.slot_tokens) if layer_tokens.is_all_to_all else s.dispatched_tokens
    )
    if layer_tokens.is_dedup:
        num_gradients = layer_tokens.exchanges[-1].num_received
    num_gradients += bool(layer_tokens.local_slot_tokens) * s.dispatched_tokens
    saved += (
        trains_experts
        * (num_gradients * model.hidden + 2 * s.expert_width * layer_tokens.num_tokens)
        * s.compute_bytes
    )
    if model.shared_experts:
        saved += gathered + 2 * s.tokens * s.shared_width * s.compute_bytes
    return saved
