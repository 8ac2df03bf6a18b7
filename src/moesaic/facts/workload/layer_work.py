"""Work of a decoder layer: the blocks of attention, dense FFN and mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from moesaic.facts.job import Job
from moesaic.facts.job.finetune import AdapterTarget
from moesaic.facts.plan import Plan
from moesaic.facts.workload import collectives, expert_ops, latent_attention, ops
from moesaic.facts.workload.block_work import Block, build_block
from moesaic.facts.workload.collectives import (
    RESULTS,
    TOKENS,
    BlockCollectives,
    TensorParallelCollectives,
)
from moesaic.facts.workload.loads import Exchange, RoutedTokens, dedup_token_bytes
from moesaic.facts.workload.ops import Op, OpPair
from moesaic.facts.workload.sizes import Sizes


def attention_block(
    name: str, tp_collectives: TensorParallelCollectives, *, recompute: bool
) -> Block:
    """Return a layer's block of attention, with its norm and residual."""
    s = tp_collectives.sizes
    model, hidden, wide_input = s.model, s.model.hidden, s.tp == 1
    calls = tp_collectives.qk_norms(), tp_collectives.reduce_scatter_sequence(s.compute_bytes)
    if model.latent is not None:
        gathered_collectives = replace(
            tp_collectives, sizes=replace(s, input_has_no_grad=False)
        )  # The gathered tensor comes from projections that have adapters.
        gather = gathered_collectives.gather_sequence(
            latent_attention.gathered_width(s, model.latent)
        )
        return build_block(
            name,
            latent_attention.attention(s, model.latent),
            gather.followed_by(*calls),
            recompute=recompute,
        )
    parts = [
        ops.norm(s, hidden, num_uses=3 if wide_input else 1),
        *ops.gather_sequence(s, hidden, num_uses=3, split=True),
        ops.linear("q", s, s.q_width, hidden, wide_input=wide_input, reads_block_input=True),
        ops.linear("k", s, s.kv_width, hidden, wide_input=wide_input, reads_block_input=True),
        ops.linear("v", s, s.kv_width, hidden, wide_input=wide_input, reads_block_input=True),
        *(ops.qk_norms(s) if model.qk_norm is not None else ()),
        *((ops.clamp(s),) if model.clip_qkv is not None else ()),
        ops.rotary(s, s.q_width),
        ops.rotary(s, s.kv_width),
        ops.attention_kernel(s),
        ops.linear("o", s, hidden, s.q_width, wide_input=False),
        ops.residual(s),
    ]
    return build_block(
        name, parts, tp_collectives.gather_sequence(hidden).followed_by(*calls), recompute=recompute
    )


def dense_block(
    name: str, tp_collectives: TensorParallelCollectives, ffn: int, *, recompute: bool
) -> Block:
    """Return a layer's block of a dense FFN of width `ffn`, with its norm and residual."""
    s = tp_collectives.sizes
    parts = [
        ops.norm(s, s.model.hidden, num_uses=2 if s.tp == 1 else 1),
        *_gated_ffn(s, ffn, "ffn"),
        ops.residual(s),
    ]
    return build_block(
        name,
        parts,
        _ffn_collectives(tp_collectives),
        recompute=recompute,
        ends_with_reduction=s.tp > 1,
    )


def _gated_ffn(s: Sizes, ffn: int, target: AdapterTarget) -> list[OpPair]:
    hidden, prefix = s.model.hidden, "shared " * (target == "shared")
    linear = partial(ops.linear, s=s, target=target)
    input_linear = partial(
        linear, columns=ffn, inner=hidden, wide_input=s.tp == 1, reads_block_input=True
    )
    parts = [
        *ops.gather_sequence(s, hidden, num_uses=2),
        input_linear(f"{prefix}gate"),
        input_linear(f"{prefix}up"),
        ops.gate(s, ffn, f"{prefix}gate"),
        linear(f"{prefix}down", columns=hidden, inner=ffn, wide_input=False),
    ]
    if s.input_has_no_grad and not s.trainable.rank_of_target(
        target
    ):  # Neither the FFN nor its input has a gradient.
        return [(forward, Op(forward.name)) for forward, _ in parts]
    return parts


def _ffn_collectives(tp_collectives: TensorParallelCollectives) -> BlockCollectives:
    s = tp_collectives.sizes
    return tp_collectives.gather_sequence(s.model.hidden).followed_by(
        tp_collectives.reduce_scatter_sequence(s.compute_bytes)
    )


def moe_block(
    name: str,
    job: Job,
    plan: Plan,
    rank: int,
    tp_collectives: TensorParallelCollectives,
    layer_tokens: RoutedTokens,
) -> Block:
    """Return a layer's block of routed and shared experts, with its norm and residual.

    `layer_tokens` are the tokens that the rank sends and receives in this layer.
    """
    s = tp_collectives.sizes
    shared, trains_experts = (
        s.shared_width > 0,
        s.trainable.experts or s.trainable.rank_of_target("experts") > 0,
    )
    num_uses = 2 + shared * (2 if s.tp == 1 else 1)
    parts = [
        ops.norm(s, s.model.hidden, num_uses=num_uses),
        expert_ops.router(s),
        expert_ops.dispatch(s, layer_tokens),
        *(_gated_ffn(s, s.shared_width, "shared") if shared else ()),
        *(
            expert_ops.experts(s, chunk.slot_tokens, is_all_to_all=chunk.is_all_to_all)
            for chunk in layer_tokens.compute_order()
        ),
        expert_ops.combine(s, layer_tokens),
        expert_ops.concat_chunks(s, layer_tokens),
        *((expert_ops.add_shared_experts(s),) if shared else ()),
        ops.residual(s),
    ]
    tokens, results = _exchange_collectives(s, layer_tokens)
    # Deduplicated tokens bring back the gradients of routing weights, which only routers need.
    has_weight_grad = layer_tokens.is_dedup and s.trainable.routers
    has_no_input_grad = s.input_has_no_grad and not has_weight_grad
    calls = tp_collectives.gather_routing().followed_by(
        collectives.count_exchange(job, plan, rank),
        tp_collectives.gather_dispatched(),
        *(calls.without_backward(has_no_input_grad) for calls in tokens[:1]),
        _ffn_collectives(tp_collectives) if shared else BlockCollectives(),
        *(calls.without_backward(has_no_input_grad) for calls in tokens[1:]),
        results.without_backward(has_no_input_grad and not trains_experts),
        tp_collectives.reduce_scatter_results(),
    )
    # If only shared experts have gradients, recomputation skips the routed experts.
    unused_ops = (
        (expert_ops.EXPERTS, "combine")
        if s.input_has_no_grad and not (trains_experts or s.trainable.routers)
        else ()
    )
    return build_block(
        name,
        parts,
        calls,
        recompute=job.train.recompute,
        ends_with_reduction=s.etp > 1,
        unused_ops=unused_ops,
    )


def _exchange_collectives(
    s: Sizes, layer_tokens: RoutedTokens
) -> tuple[list[BlockCollectives], BlockCollectives]:
    """Return the exchanges of tokens to experts, one by one, and those of results back.

    A deduplicated token carries its weights and slots, and backward returns the gradients of the
    weights.
    """
    row, top_k = s.model.hidden * s.compute_bytes, s.model.top_k
    forward_bytes = (
        dedup_token_bytes(s.model.hidden, top_k, s.compute_bytes)[0]
        if layer_tokens.is_dedup
        else row
    )
    backward_bytes = row + layer_tokens.is_dedup * top_k * s.compute_bytes

    def exchange(
        name: str, one_exchange: Exchange, token_bytes: int, *, returns: bool = False
    ) -> BlockCollectives:
        send, receive = (
            [n * token_bytes for n in one_exchange.send_tokens],
            [n * token_bytes for n in one_exchange.receive_tokens],
        )
        return collectives.all_to_all(
            name, one_exchange.group, *((receive, send) if returns else (send, receive))
        )

    tokens, results = list[BlockCollectives](), list[BlockCollectives]()
    for chunk in layer_tokens.split_chunks():
        tokens += [
            BlockCollectives(
                exchange(TOKENS, hop, forward_bytes).forward,
                exchange(TOKENS, hop, backward_bytes).backward,
            )
            for hop in chunk.exchanges
        ]
        results += [exchange(RESULTS, hop, row, returns=True) for hop in reversed(chunk.exchanges)]
    return tokens, BlockCollectives().followed_by(*results)
