"""The decoder language model: a list of named blocks `(x, context) -> x`.

embed, layers.0 ... layers.N-1, head. The names of its parameters are the logical names of
`facts.workload`, but for the experts, which live in the arenas of their banks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.plan import Plan
from moesaic.nn.attention import Attention, FeedForward, RMSNorm
from moesaic.nn.bank import Bank
from moesaic.nn.context import Context, Rotary
from moesaic.nn.dispatch import Dispatcher, Ranks
from moesaic.nn.latent import LatentAttention
from moesaic.nn.loss import HeadLoss
from moesaic.nn.moe import MoE, compute_dtype
from moesaic.nn.router import Router, SigmoidRouter


class Embedding(nn.Module):
    """Token ids to vectors."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Look up."""
        del context
        return F.embedding(x, self.weight)


class Layer(nn.Module):
    """Attention and feed-forward network, each behind a norm and added to the stream."""

    def __init__(
        self,
        attention: Attention | LatentAttention,
        ffn: FeedForward | MoE,
        width: int,
        epsilon: float,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, epsilon)
        self.attention = attention
        self.ffn_norm = RMSNorm(width, epsilon)
        self.moe = ffn if isinstance(ffn, MoE) else None
        self.ffn = ffn if isinstance(ffn, FeedForward) else None
        self.recompute = False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Compute, or with `recompute` keep only the input and compute again in backward."""
        if self.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(
                self._compute, x, context, use_reentrant=False, preserve_rng_state=False
            )
            return result
        return self._compute(x, context)

    def _compute(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        normed = self.ffn_norm(x)
        inner = self.moe if self.moe is not None else self.ffn
        assert inner is not None
        result: Tensor = x + inner(normed, context)
        return result


class Head(nn.Module):
    """The last norm and the projection onto the vocabulary; with targets, the loss instead."""

    def __init__(self, weight: nn.Parameter, width: int, epsilon: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, epsilon)
        self.weight = weight

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Logits [batch, sequence, vocab], or the scaled sum of the targets' losses."""
        x = self.norm(x)
        if context.targets is None:
            return F.linear(x, self.weight)
        rows = x.flatten(0, 1).to(compute_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            targets = context.targets.flatten()
            weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
            loss: Tensor = HeadLoss.apply(rows, weight, targets, context.loss_scale)
        return loss


class LanguageModel(nn.Module):
    """A decoder of any family."""

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig | None = None,
        plan: Plan | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        routing = routing or RoutingConfig()
        plan = plan or Plan(ranks=1, ep=1, shard=1, experts=config.experts)
        ranks = ranks or Ranks()
        self.embed = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            self._layer(index, routing, plan, ranks) for index in range(config.layers)
        )
        weight = self.embed.weight
        if not config.tied:
            weight = nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.head = Head(weight, config.hidden, config.norm_epsilon)

    def _attention(self, index: int) -> Attention | LatentAttention:
        config = self.config
        if config.latent is not None:
            return LatentAttention(
                index, config.hidden, config.heads, config.head_dim, config.latent,
                config.rope_scaling,
            )  # fmt: skip
        return Attention(
            index, config.hidden, config.heads, config.kv_heads, config.head_dim,
            norms=_head_norms(config), clip=config.clip_qkv,
        )  # fmt: skip

    def _layer(self, index: int, routing: RoutingConfig, plan: Plan, ranks: Ranks) -> Layer:
        config = self.config
        ffn: FeedForward | MoE
        if index in config.expert_layers:
            bank = Bank(plan.homes(ranks.rank), config.hidden, config.ffn)
            dispatcher = Dispatcher(config.experts, ranks, routing.capacity, plan.slots())
            beside = config.shared * config.ffn
            shared = FeedForward(config.hidden, beside) if beside else None
            ffn = MoE(self._router(index, routing), bank, dispatcher, shared)
        else:
            ffn = FeedForward(config.hidden, config.inner(index))
        return Layer(self._attention(index), ffn, config.hidden, config.norm_epsilon)

    def _router(self, index: int, routing: RoutingConfig) -> Router:
        config, kind = self.config, routing.router
        sizes = (index, config.hidden, config.experts, config.top_k)
        if config.score == "softmax":
            return Router(*sizes, kind=kind, renormalise=config.renormalise, noise=routing.noise)
        assert kind in ("top-k", "balanced"), "the job refuses others"
        return SigmoidRouter(
            *sizes, kind=kind, renormalise=config.renormalise,
            groups=(config.groups, config.top_groups), scale=config.scale,
        )  # fmt: skip

    def tie(self) -> None:
        """Make the head use the embedding's weight, if the model is tied."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def materialise(self, device: torch.device) -> None:
        """Give every parameter and buffer memory on `device`, its values to be filled in.

        `to_empty` does so too, but for a model on `meta` it first imports half of torch's compiler.
        """
        memory: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                if id(old) not in memory:
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)
                    memory[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
                setattr(module, name, memory[id(old)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device=device))

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The named blocks, in order."""
        yield "embed", self.embed
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}", layer
        yield "head", self.head

    def expert_layers(self) -> Iterator[tuple[int, MoE]]:
        """The networks of experts by layer."""
        for index, layer in enumerate(self.decoder_layers()):
            if layer.moe is not None:
                yield index, layer.moe

    def banks(self) -> Iterator[tuple[int, Bank]]:
        """The expert banks by layer."""
        for index, moe in self.expert_layers():
            yield index, moe.bank

    def sigmoid_routers(self) -> Iterator[tuple[int, SigmoidRouter]]:
        """The routers that have a bias, by layer."""
        for index, moe in self.expert_layers():
            if isinstance(moe.router, SigmoidRouter):
                yield index, moe.router

    def decoder_layers(self) -> Iterator[Layer]:
        """The layers between embedding and head."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def rotary(self, positions: Tensor) -> Rotary:
        """Rotary angles at `positions` [batch, sequence], in the model's dtype."""
        config, dtype = self.config, self.embed.weight.dtype
        return Rotary.at(positions, config.turned, config.rope_theta, dtype, config.rope_scaling)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """All blocks in turn."""
        x = tokens
        for _, block in self.blocks():
            x = block(x, context)
        return x


def _head_norms(config: ModelConfig) -> tuple[RMSNorm, RMSNorm] | None:
    if config.normed is None:
        return None
    heads = (1, 1) if config.normed == "heads" else (config.heads, config.kv_heads)
    query, key = (RMSNorm(count * config.head_dim, config.norm_epsilon) for count in heads)
    return query, key
