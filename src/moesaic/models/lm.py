"""Decoder language model: a list of named blocks `(x, inputs) -> (x, report)`.

The blocks are embed, layers.0 ... layers.N-1 and head. Parameter names are the logical names of
`facts.workload`. Experts are the exception: they are views of their bank's arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload import BlockSpec, block_specs
from moesaic.nn.attention import Attention, AuxiliaryLayer, FeedForward, Linear, linear
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.places import Places
from moesaic.nn.inputs import Inputs, Rotary, compute_dtype
from moesaic.nn.latent_attention import LatentAttention
from moesaic.nn.loss import head_loss
from moesaic.nn.moe import BalancePass, MoE
from moesaic.nn.norm import RMSNorm, TensorParallelRMSNorm
from moesaic.nn.reports import BlockReport, FollowerLosses, Reports
from moesaic.nn.router import Router, SigmoidRouter
from moesaic.nn.sharded_embedding import UNSHARDED, ShardedEmbedding
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel, to_local


class Embedding(nn.Module):
    """Token embedding. Tensor parallelism shards it by vocabulary, `column_shard` by hidden
    dimension."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        tp: TensorParallel = NO_TP,
        column_shard: ShardedEmbedding = UNSHARDED,
    ) -> None:
        super().__init__()
        self.tp, self.column_shard = tp, column_shard
        self.weight = tp.parameter(vocab, hidden // column_shard.num_ranks, shard_dim=0)

    def forward(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, BlockReport]:
        """Return embeddings [batch, sequence, hidden] of the token ids `x`, and an empty report."""
        del inputs
        return self._look_up(x), BlockReport()

    def _look_up(self, x: Tensor) -> Tensor:
        if self.tp.group is None:
            return self.column_shard.look_up(x, self.weight)
        weight = to_local(self.weight)
        vocab_rows = weight.shape[0]
        x = x - self.tp.rank * vocab_rows
        outside = (x < 0) | (x >= self.tp.vocab_end(vocab_rows))
        embeddings = F.embedding(x.masked_fill(outside, 0), weight)
        return self.tp.reduce_scatter(embeddings.masked_fill(outside[..., None], 0.0))


class DecoderLayer(nn.Module):
    """Decoder layer: attention and feed-forward network, each with a pre-norm and a residual."""

    def __init__(
        self,
        attention: nn.Module,
        ffn: nn.Module,
        width: int,
        epsilon: float,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, epsilon)
        assert isinstance(attention, Attention | LatentAttention)
        self.attention = attention
        self.ffn_norm = RMSNorm(width, epsilon)
        self.moe = ffn if isinstance(ffn, MoE) else None
        self.ffn = ffn if isinstance(ffn, FeedForward) else None
        self.recompute = False

    def forward(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, BlockReport]:
        """Return the layer's output and its report; with `recompute`, keep only the input for
        backward."""
        balancing = None if self.moe is None else self.moe.begin_pass()
        if self.recompute and torch.is_grad_enabled():
            result: tuple[Tensor, BlockReport] = checkpoint(
                self._compute, x, inputs, balancing, use_reentrant=False, preserve_rng_state=False
            )
            return result
        return self._compute(x, inputs, balancing)

    def _compute(
        self, x: Tensor, inputs: Inputs, balancing: BalancePass | None
    ) -> tuple[Tensor, BlockReport]:
        if self.moe is not None and balancing is not None:
            self.moe.start_replicas(balancing, inputs, compute_dtype(x))
        attended, attention_report = self.attention(self.attention_norm(x), inputs)
        x = x + attended
        normed, moe_report = self.ffn_norm(x), None
        if self.moe is not None:
            out, moe_report = self.moe(normed, inputs, balancing)
        else:
            assert self.ffn is not None
            out = self.ffn(normed)
        x = x + out
        keep = inputs.keeps("hidden_states", self.attention.layer)
        hidden_states = x if keep else None
        return x, BlockReport(attention_report, moe_report, hidden_states)


class LMHead(nn.Module):
    """Final norm and projection onto the vocabulary; with targets, the loss instead of logits.

    Students that follow have their logits and losses computed with those of the model.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        width: int,
        epsilon: float,
        tp: TensorParallel = NO_TP,
        column_shard: ShardedEmbedding = UNSHARDED,
        labels: int = 0,
    ) -> None:
        """Create the head; a tied column-sharded `weight` is gathered when it is multiplied.

        With `labels`, it also has a classifier of that many classes."""
        super().__init__()
        self.norm = RMSNorm(width, epsilon)
        self.weight, self.tp, self.column_shard = weight, tp, column_shard
        self.score = Linear(width, labels) if labels else None

    def forward(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, BlockReport]:
        """Return logits [batch, sequence, vocab], or the scaled sum of the targets' losses, and a
        report.

        It has the followers' losses, and the classifier's logits if they are kept."""
        x, label_logits = self.norm(x), None
        if self.score is not None and "label_logits" in inputs.keep:
            label_logits = self.score(x)
        report = BlockReport(label_logits=label_logits)
        if not inputs.project:
            return x, report
        x = self.tp.gather_tokens(x)
        if inputs.targets is None:
            multiply = linear if torch.is_inference_mode_enabled() else F.linear
            return multiply(x, self.column_shard.gather_table(to_local(self.weight))), report
        loss, follower_losses = self._losses(x, inputs.targets, inputs)
        return loss, report._replace(follower_losses=follower_losses)

    def _losses(
        self, x: Tensor, targets: Tensor, inputs: Inputs
    ) -> tuple[Tensor, FollowerLosses | None]:
        dtype = compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            weight = to_local(self.weight if torch.is_grad_enabled() else self.weight.detach())
            # Only the loss refers to the gathered table, so it is freed together with the loss.
            return head_loss(
                x.flatten(0, 1).to(dtype), self.column_shard.gather_table(weight),
                targets.flatten(), inputs.loss_scale, self.tp, inputs.followers,
            )  # fmt: skip


class LanguageModel(nn.Module):
    """Decoder of any family, or the blocks of one pipeline rank."""

    def __init__(
        self,
        config: ModelConfig,
        specs: Sequence[BlockSpec] | None = None,
        routing: RoutingConfig | None = None,
        plan: Plan | None = None,
        ranks: DispatchGroups | None = None,
        tp: TensorParallel = NO_TP,
        column_shard: ShardedEmbedding = UNSHARDED,
        places: Mapping[int, Places] | None = None,
    ) -> None:
        """Create the blocks of `specs`, in their order; None creates all, on one rank."""
        super().__init__()
        self.config, self.tp, self._places = config, tp, places or {}
        plan = plan or Plan(ranks=1, ep=1, dp_shard=1, experts=config.experts)
        specs = block_specs(config, plan) if specs is None else specs
        self.block_names = list(dict.fromkeys(spec.model_block for spec in specs))
        routing, ranks = routing or RoutingConfig(), ranks or DispatchGroups()
        halves: dict[int, list[nn.Module]] = {}
        for spec in specs:
            if spec.layer is not None:
                module = self._make_half(spec, spec.layer, routing, plan, ranks)
                halves.setdefault(spec.layer, []).append(module)
                continue
            shard = column_shard if spec.kind == "embed" or config.tied else UNSHARDED
            if spec.kind == "embed":
                self.embed = Embedding(config.vocab, config.hidden, tp, shard)
            else:
                width = config.hidden // shard.num_ranks
                weight = tp.parameter(config.vocab, width, shard_dim=0)
                self.head = LMHead(
                    weight, config.hidden, config.norm_epsilon, tp, shard, config.labels
                )
        self.layer_indices = list(halves)
        self.layers = nn.ModuleList(
            DecoderLayer(attention, ffn, config.hidden, config.norm_epsilon)
            for attention, ffn in halves.values()
        )
        self.tie()

    def _make_attention(self, index: int) -> Attention | LatentAttention:
        config = self.config
        if config.latent is not None:
            return LatentAttention(
                index, config.hidden, config.heads, config.head_dim, config.latent,
                config.rope_scaling, self.tp,
            )  # fmt: skip
        return Attention(
            index, config.hidden, config.heads, config.kv_heads, config.head_dim,
            norms=_qk_norms(config, self.tp), clip=config.clip_qkv, tp=self.tp,
        )  # fmt: skip

    def _make_half(
        self, spec: BlockSpec, layer: int, routing: RoutingConfig, plan: Plan, ranks: DispatchGroups
    ) -> nn.Module:
        config = self.config
        if spec.kind == "attention":
            return self._make_attention(layer)
        if spec.kind == "ffn":
            return FeedForward(config.hidden, spec.inner_width, self.tp)
        bank = ExpertBank(
            spec.experts, config.hidden, config.ffn, ranks.tp, plan.grouped_mm,
            self._places.get(layer),
        )  # fmt: skip
        dispatcher = Dispatcher(
            config.experts, ranks, routing.capacity_factor, plan.slot_experts(layer),
            dedup=plan.dispatch == "dedup", num_chunks=plan.chunks,
            overlap_local=plan.overlap_local,
        )  # fmt: skip
        shared = None
        if spec.inner_width:
            shared = FeedForward(config.hidden, spec.inner_width, self.tp)
        return MoE(self._make_router(layer, routing), bank, dispatcher, shared)

    def _make_router(self, index: int, routing: RoutingConfig) -> Router:
        config, kind = self.config, routing.router
        sizes = (index, config.hidden, config.experts, config.top_k)
        if config.score_function == "softmax":
            return Router(*sizes, kind=kind, renormalise=config.renormalise, noise=routing.noise)
        assert kind in ("top-k", "balanced"), "the job refuses others"
        return SigmoidRouter(
            *sizes, kind=kind, renormalise=config.renormalise,
            groups=(config.expert_groups, config.top_expert_groups),
            scale=config.routed_scaling_factor,
        )  # fmt: skip

    def tie(self) -> None:
        """Share the embedding's weight with the head, if the model is tied and both are present."""
        if self.config.tied and {"embed", "head"} <= set(self.block_names):
            self.head.weight = self.embed.weight

    def materialise(self, device: torch.device) -> None:
        """Allocate every parameter and buffer on `device`, uninitialised.

        `to_empty` does the same, but for a model on `meta` it first imports half of torch's
        compiler.
        """
        memory: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                if id(old) not in memory:
                    new = _allocate_like(old.detach(), device)
                    memory[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
                setattr(module, name, memory[id(old)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, _allocate_like(buffer, device))

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, block) in forward order."""
        layers = iter(self.layers)
        for name in self.block_names:
            yield name, next(layers) if name.startswith("layers.") else getattr(self, name)

    def expert_layers(self) -> Iterator[tuple[int, MoE]]:
        """Yield (layer index, MoE) for every layer with experts."""
        for index, layer in zip(self.layer_indices, self.decoder_layers(), strict=True):
            if layer.moe is not None:
                yield index, layer.moe

    def expert_banks(self) -> Iterator[tuple[int, ExpertBank]]:
        """Yield (layer index, expert bank) for every layer with experts."""
        for index, moe in self.expert_layers():
            yield index, moe.bank

    def sigmoid_routers(self) -> Iterator[tuple[int, SigmoidRouter]]:
        """Yield (layer index, router) for every router with a bias."""
        for index, moe in self.expert_layers():
            if isinstance(moe.router, SigmoidRouter):
                yield index, moe.router

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """Yield the decoder layers."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def rotary(self, positions: Tensor) -> Rotary:
        """Return rotary angles at `positions` [batch, sequence], in the model's dtype."""
        config, dtype = self.config, next(self.parameters()).dtype
        return Rotary.at_positions(
            positions, config.rotary_dim, config.rope_theta, dtype, config.rope_scaling
        )

    def forward(self, tokens: Tensor, inputs: Inputs) -> tuple[Tensor, Reports]:
        """Run all blocks in order; return the last output and the reports of all."""
        x, reports = tokens, Reports()
        for name, block in self.blocks():
            x, reports[name] = block(x, inputs)
        return x, reports


def auxiliary_layer(student: ModelConfig, teacher: ModelConfig) -> AuxiliaryLayer:
    """Return the auxiliary layer of a student, with the teacher's numbers of heads."""
    config = student.model_copy(update={"heads": teacher.heads, "kv_heads": teacher.kv_heads})
    return AuxiliaryLayer(
        config.hidden, config.heads, config.kv_heads, config.head_dim, config.norm_epsilon,
        norms=_qk_norms(config, NO_TP), clip=config.clip_qkv,
    )  # fmt: skip


def _qk_norms(config: ModelConfig, tp: TensorParallel) -> tuple[RMSNorm, RMSNorm] | None:
    if config.qk_norm is None:
        return None
    width, epsilon = config.head_dim, config.norm_epsilon
    if config.qk_norm == "heads":
        return RMSNorm(width, epsilon), RMSNorm(width, epsilon)
    query, key = config.heads * width, config.kv_heads * width
    if tp.size == 1:
        return RMSNorm(query, epsilon), RMSNorm(key, epsilon)
    return TensorParallelRMSNorm(query, epsilon, tp), TensorParallelRMSNorm(key, epsilon, tp)


def _allocate_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return uninitialised memory like `tensor` on `device`.

    DTensors need `empty_like`, which imports as much of torch's compiler as `to_empty` does."""
    if type(tensor) is Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)
