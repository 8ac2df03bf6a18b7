"""The decoder language model: a list of named blocks `(x, context) -> x`.

embed, layers.0 ... layers.N-1, head. The names of its parameters are the logical names of
`facts.workload`, but for the experts, which live in the arenas of their banks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.plan import Plan, block_names
from moesaic.nn.attention import Attention, FeedForward
from moesaic.nn.bank import Bank
from moesaic.nn.columns import ALONE, Columns
from moesaic.nn.context import Context, Rotary, compute_dtype
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.latent import LatentAttention
from moesaic.nn.loss import HeadLoss
from moesaic.nn.moe import MoE
from moesaic.nn.norm import RMSNorm, SlicedNorm
from moesaic.nn.router import Router, SigmoidRouter
from moesaic.nn.slices import WHOLE, Slices, here
from moesaic.nn.travel import Ranks


class Embedding(nn.Module):
    """Token ids to vectors; of several slices each has words of its own, or each rank has columns
    of all words."""

    def __init__(
        self, vocab: int, hidden: int, slices: Slices = WHOLE, columns: Columns = ALONE
    ) -> None:
        super().__init__()
        self.slices, self.columns = slices, columns
        self.weight = slices.parameter(vocab, hidden // columns.count, cut=0)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Look up."""
        del context
        if self.slices.group is None:
            return self.columns.look_up(x, self.weight)
        weight = here(self.weight)
        words = weight.shape[0]
        x = x - self.slices.index * words
        absent = (x < 0) | (x >= self.slices.end(words))
        found = F.embedding(x.masked_fill(absent, 0), weight)
        return self.slices.sum_runs(found.masked_fill(absent[..., None], 0.0))


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
        if self.moe is not None:
            self.moe.begin(context, compute_dtype(x))
        x = x + self.attention(self.attention_norm(x), context)
        normed = self.ffn_norm(x)
        inner = self.moe if self.moe is not None else self.ffn
        assert inner is not None
        result: Tensor = x + inner(normed, context)
        return result


class Head(nn.Module):
    """The last norm and the projection onto the vocabulary; with targets, the loss instead."""

    def __init__(
        self,
        weight: nn.Parameter,
        width: int,
        epsilon: float,
        slices: Slices = WHOLE,
        columns: Columns = ALONE,
    ) -> None:
        """With columns of a tied weight, which come together while they are multiplied by."""
        super().__init__()
        self.norm = RMSNorm(width, epsilon)
        self.weight, self.slices, self.columns = weight, slices, columns

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Logits [batch, sequence, vocab], or the scaled sum of the targets' losses."""
        x = self.slices.join(self.norm(x))
        if context.targets is None:
            return F.linear(x, self.columns.join(here(self.weight)))
        rows = x.flatten(0, 1).to(compute_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            targets = context.targets.flatten()
            weight = here(self.weight if torch.is_grad_enabled() else self.weight.detach())
            # Nobody else holds what has come together: with the loss it goes.
            loss: Tensor = HeadLoss.apply(
                rows, self.columns.join(weight), targets, context.loss_scale, self.slices
            )
        return loss


class LanguageModel(nn.Module):
    """A decoder of any family, or the blocks of one that a part of a pipeline has."""

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig | None = None,
        plan: Plan | None = None,
        ranks: Ranks | None = None,
        slices: Slices = WHOLE,
        names: Sequence[str] | None = None,
        columns: Columns = ALONE,
    ) -> None:
        """With the blocks of such `names`, in the order of the model; absent: all of them."""
        super().__init__()
        self.config, self.slices = config, slices
        self.names = block_names(config) if names is None else list(names)
        routing = routing or RoutingConfig()
        plan = plan or Plan(ranks=1, ep=1, shard=1, experts=config.experts)
        ranks = ranks or Ranks()
        if "embed" in self.names:
            self.embed = Embedding(config.vocab, config.hidden, slices, columns)
        self.indices = [i for i in range(config.layers) if f"layers.{i}" in self.names]
        self.layers = nn.ModuleList(
            self._layer(index, routing, plan, ranks) for index in self.indices
        )
        if "head" in self.names:
            shared_out = columns if config.tied else ALONE
            weight = slices.parameter(config.vocab, config.hidden // shared_out.count, cut=0)
            self.head = Head(weight, config.hidden, config.norm_epsilon, slices, shared_out)
        self.tie()

    def _attention(self, index: int) -> Attention | LatentAttention:
        config = self.config
        if config.latent is not None:
            return LatentAttention(
                index, config.hidden, config.heads, config.head_dim, config.latent,
                config.rope_scaling, self.slices,
            )  # fmt: skip
        return Attention(
            index, config.hidden, config.heads, config.kv_heads, config.head_dim,
            norms=_head_norms(config, self.slices), clip=config.clip_qkv, slices=self.slices,
        )  # fmt: skip

    def _layer(self, index: int, routing: RoutingConfig, plan: Plan, ranks: Ranks) -> Layer:
        config = self.config
        ffn: FeedForward | MoE
        if index in config.expert_layers:
            homes, sizes = plan.homes_at(ranks.rank, index), (config.hidden, config.ffn)
            bank = Bank(homes, *sizes, ranks.slices, plan.grouped_mm)
            dispatcher = Dispatcher(
                config.experts, ranks, routing.capacity, plan.slots(index),
                visits=plan.dispatch == "visits", chunks=plan.chunks,
                local_first=plan.local == "first",
            )  # fmt: skip
            beside = config.shared * config.ffn
            shared = FeedForward(config.hidden, beside, self.slices) if beside else None
            ffn = MoE(self._router(index, routing), bank, dispatcher, shared)
        else:
            ffn = FeedForward(config.hidden, config.inner(index), self.slices)
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
        """Make the head use the embedding's weight, if the model is tied and both are here."""
        if self.config.tied and {"embed", "head"} <= set(self.names):
            self.head.weight = self.embed.weight

    def materialise(self, device: torch.device) -> None:
        """Give every parameter and buffer memory on `device`, its values to be filled in.

        `to_empty` does so too, but for a model on `meta` it first imports half of torch's compiler.
        """
        memory: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                if id(old) not in memory:
                    new = _memory_for(old.detach(), device)
                    memory[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
                setattr(module, name, memory[id(old)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, _memory_for(buffer, device))

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The named blocks, in order."""
        layers = iter(self.layers)
        for name in self.names:
            yield name, next(layers) if name.startswith("layers.") else getattr(self, name)

    def expert_layers(self) -> Iterator[tuple[int, MoE]]:
        """The networks of experts by layer."""
        for index, layer in zip(self.indices, self.decoder_layers(), strict=True):
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
        config, dtype = self.config, next(self.parameters()).dtype
        return Rotary.at(positions, config.turned, config.rope_theta, dtype, config.rope_scaling)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """All blocks in turn."""
        x = tokens
        for _, block in self.blocks():
            x = block(x, context)
        return x


def _head_norms(config: ModelConfig, slices: Slices) -> tuple[RMSNorm, RMSNorm] | None:
    if config.normed is None:
        return None
    width, epsilon = config.head_dim, config.norm_epsilon
    if config.normed == "heads":
        return RMSNorm(width, epsilon), RMSNorm(width, epsilon)
    query, key = config.heads * width, config.kv_heads * width
    if slices.count == 1:
        return RMSNorm(query, epsilon), RMSNorm(key, epsilon)
    return SlicedNorm(query, epsilon, slices), SlicedNorm(key, epsilon, slices)


def _memory_for(one: Tensor, device: torch.device) -> Tensor:
    """As much on `device`; `empty_like`, which slices need, imports as much as `to_empty` does."""
    if type(one) is Tensor:
        return torch.empty(one.shape, dtype=one.dtype, device=device)
    return torch.empty_like(one, device=device)
