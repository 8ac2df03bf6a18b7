"""Routers: choice and weights of each token's experts.

- top-k: the best experts by softmax.
- switch: top-1 (Fedus et al.), with optional multiplicative noise on the scores.
- gshard: top-2 (Lepikhin et al.); the second expert is kept at random, with probability 2 * weight.
- balanced: experts in turn, for benchmarks.

`SigmoidRouter` (DeepSeek-V3) uses sigmoids, chooses within a few groups of experts, and balances
loads by a bias per expert instead of a loss. Routing is computed in fp32 or wider, whatever the
dtype of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.facts.job.model import GROUP_TOP_K
from moesaic.kernels.randomness import uniform
from moesaic.nn.inputs import Inputs

NO_EXPERT = -1
"""Stands for a choice without an expert."""
_EPSILON = 1e-20
"""Added to a sum of sigmoids, which may be zero."""


@dataclass(frozen=True)
class Routing:
    """Router output for one micro-batch; T tokens, K choices, E experts."""

    experts_TK: Tensor
    """Chosen experts; NO_EXPERT where a choice was dropped."""
    chosen_TK: Tensor
    """Chosen experts, dropped ones too."""
    weights_TK: Tensor
    """Weights of the chosen experts; with gradient."""
    probabilities_TE: Tensor
    """Probability of each expert; rows sum to one; with gradient."""
    scores_TE: Tensor
    """Logits before softmax or sigmoid; with gradient."""
    num_replay_mismatches: int
    """Replayed choices that differ from the router's own."""
    is_complete: bool = False
    """True if no choice was dropped, and no loss distinguishes first choices from others."""

    @property
    def recorded_TK(self) -> Tensor:
        """Choices as a recording holds them: -1 - e where the router dropped expert e."""
        return torch.where(self.experts_TK == NO_EXPERT, -1 - self.chosen_TK, self.chosen_TK)


class Router(nn.Module):
    """Linear router over the experts of one layer."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        kind: Literal["top-k", "switch", "gshard", "balanced"] = "top-k",
        renormalise: bool = False,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer, self.num_experts, self.top_k = layer, num_experts, top_k
        self.kind, self.noise = kind, noise
        self.renormalise = renormalise or kind == "gshard"
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))

    @property
    def keeps_all_choices(self) -> bool:
        """True if the router drops no choice, and no loss distinguishes first choices."""
        return self.kind != "gshard"

    def forward(self, tokens_TH: Tensor, inputs: Inputs) -> Routing:
        """Return the routing of `tokens_TH`, or the replayed one of `inputs`."""
        dtype = torch.promote_types(tokens_TH.dtype, torch.float32)
        with torch.autocast(tokens_TH.device.type, enabled=False):
            scores_TE = F.linear(tokens_TH.to(dtype), self.weight.to(dtype))
        if self.noise and inputs.training:
            scores_TE = scores_TE * self._noise_factors(scores_TE, inputs)
        affinities_TE, probabilities_TE = self._affinities(scores_TE)
        own_TK = self._choose(affinities_TE, inputs)
        chosen_TK, dropped_TK, num_mismatches = own_TK, None, 0
        if inputs.routing_replay:
            recorded_TK = inputs.routing_replay[self.layer]
            dropped_TK = recorded_TK < 0
            chosen_TK = torch.where(dropped_TK, -1 - recorded_TK, recorded_TK)
            kept = (chosen_TK[:, :, None] == own_TK[:, None, :]).any(-1)
            num_mismatches = int((~kept).sum())
        weights_TK = self._scale_weights(affinities_TE.gather(1, chosen_TK))
        if dropped_TK is None and self.kind == "gshard" and inputs.training:
            dropped_TK = self._drop_second(weights_TK, inputs)
        experts_TK = chosen_TK
        if dropped_TK is not None:
            experts_TK = chosen_TK.masked_fill(dropped_TK, NO_EXPERT)
        is_complete = dropped_TK is None and self.keeps_all_choices
        return Routing(
            experts_TK,
            chosen_TK,
            weights_TK,
            probabilities_TE,
            scores_TE,
            num_mismatches,
            is_complete,
        )

    def _affinities(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values that choose and weigh experts, and probabilities, both [T, E]."""
        probabilities_TE = scores_TE.softmax(dim=-1)
        return probabilities_TE, probabilities_TE

    def _choose(self, affinities_TE: Tensor, inputs: Inputs) -> Tensor:
        if self.kind == "balanced":
            sample, position = _token_ids(affinities_TE, inputs)
            first = (sample + position) * self.top_k
            return (
                first[:, None] + torch.arange(self.top_k, device=first.device)
            ) % self.num_experts
        return self._select_top_k(affinities_TE)

    def _select_top_k(self, affinities_TE: Tensor) -> Tensor:
        return affinities_TE.topk(self.top_k, dim=-1).indices

    def _scale_weights(self, weights_TK: Tensor) -> Tensor:
        return weights_TK / weights_TK.sum(-1, keepdim=True) if self.renormalise else weights_TK

    def _noise_factors(self, scores_TE: Tensor, inputs: Inputs) -> Tensor:
        sample, position = _token_ids(scores_TE, inputs)
        channel = torch.arange(self.num_experts, device=scores_TE.device)
        draws = uniform(
            inputs.seed, f"router noise {self.layer}", inputs.step,
            sample[:, None], position[:, None] * self.num_experts + channel,
        )  # fmt: skip
        return (1.0 + self.noise * (2.0 * draws - 1.0)).to(scores_TE.dtype)

    def _drop_second(self, weights_TK: Tensor, inputs: Inputs) -> Tensor:
        """Return the mask of dropped choices: a second one with probability 1 - 2 * weight."""
        sample, position = _token_ids(weights_TK, inputs)
        draws = uniform(inputs.seed, f"second expert {self.layer}", inputs.step, sample, position)
        is_dropped = 2.0 * weights_TK[:, 1].detach() <= draws
        return torch.stack((torch.zeros_like(is_dropped), is_dropped), dim=1)


class SigmoidRouter(Router):
    """Sigmoid router with groups of experts and a bias per expert that balances loads."""

    bias: Tensor
    """Added to affinities for the choice of experts, not for their weights, [experts]; fp32."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        kind: Literal["top-k", "balanced"] = "top-k",
        renormalise: bool = False,
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
    ) -> None:
        """Create a router; `groups` is (number of groups, groups that a token may use)."""
        super().__init__(layer, hidden, num_experts, top_k, kind=kind, renormalise=renormalise)
        (self.groups, self.top_groups), self.scale = groups, scale
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SigmoidRouter:
        """Keep the bias in fp32 when the module changes dtype: its small steps would be lost."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    def _affinities(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        affinities_TE = scores_TE.sigmoid()
        return affinities_TE, affinities_TE / (affinities_TE.sum(-1, keepdim=True) + _EPSILON)

    def _select_top_k(self, affinities_TE: Tensor) -> Tensor:
        """Return the best experts by biased affinity, within the groups with the largest top-2
        sums."""
        biased_TE = affinities_TE.detach() + self.bias
        if self.top_groups < self.groups:
            by_group = biased_TE.unflatten(1, (self.groups, -1))
            group_scores = by_group.topk(GROUP_TOP_K, dim=-1).values.sum(dim=-1)
            kept_groups = group_scores.topk(self.top_groups, dim=-1).indices
            is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(
                1, kept_groups, False
            )
            biased_TE = by_group.masked_fill(is_excluded[:, :, None], -torch.inf).flatten(1)
        return super()._select_top_k(biased_TE)

    def _scale_weights(self, weights_TK: Tensor) -> Tensor:
        if self.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _EPSILON)
        return weights_TK * self.scale

    @torch.no_grad()
    def update_bias(self, requested_E: Tensor, step: float) -> None:
        """Raise the bias of experts with fewer assignments than the mean by `step`, and lower
        others'."""
        deficit_E = requested_E.sum() - self.num_experts * requested_E
        self.bias.add_(deficit_E.sign().to(self.bias), alpha=step)


def _token_ids(tokens: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return (global sample, position) of every token, which identify it in any layout."""
    if inputs.samples is None or inputs.positions is None:
        flat = torch.arange(tokens.shape[0], device=tokens.device)
        return torch.zeros_like(flat), flat
    sample = inputs.samples[:, None].expand(-1, inputs.positions.shape[0])
    position = inputs.positions.expand(sample.shape)
    return sample.reshape(-1)[inputs.token_slice], position.reshape(-1)[inputs.token_slice]
