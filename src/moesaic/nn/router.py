"""Routers: which experts a token visits, with what weight, and the losses that keep them even.

top-k: the best by softmax. switch: top-1 (Fedus et al.), scores optionally multiplied by noise.
gshard: top-2 (Lepikhin et al.), the second expert kept at random in proportion to its weight.
balanced: experts in turn. Routing is computed in fp32 or better, whatever the layer computes in.

`SigmoidRouter` (DeepSeek-AI, DeepSeek-V3) takes sigmoids for softmax, chooses within a few groups
of experts, and has a bias by expert that evens out loads where a loss would bend the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.facts.job.model import BEST_OF_GROUP
from moesaic.nn.context import Context
from moesaic.nn.randomness import uniform

NOBODY = -1
"""Stands where a token visits no expert."""
_LEAST = 1e-20
"""Added to a sum of sigmoids, which may all be zero."""


@dataclass(frozen=True)
class Routing:
    """What one router said of one micro-batch; T tokens, K choices, E experts."""

    experts_TK: Tensor
    """Chosen experts; NOBODY where a choice was given up."""
    weights_TK: Tensor
    """Their weights; carries gradient."""
    probabilities_TE: Tensor
    """The odds of each expert, which add up to one; carries gradient."""
    scores_TE: Tensor
    """What softmax or sigmoid are taken of; carries gradient."""
    flips: int
    """Replayed choices that the router would not have made."""
    whole: bool = False
    """No choice was given up, and no loss tells first choices from others."""


class Router(nn.Module):
    """A linear router over one layer's experts."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        kind: Literal["top-k", "switch", "gshard", "balanced"] = "top-k",
        renormalise: bool = False,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer, self.experts, self.top_k = layer, experts, top_k
        self.kind, self.noise = kind, noise
        self.renormalise = renormalise or kind == "gshard"
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    @property
    def keeps_all(self) -> bool:
        """Whether it gives up no choice, and no loss tells first choices from others."""
        return self.kind != "gshard"

    def forward(self, tokens_TH: Tensor, context: Context) -> Routing:
        """Route tokens."""
        wide = torch.promote_types(tokens_TH.dtype, torch.float32)
        with torch.autocast(tokens_TH.device.type, enabled=False):
            scores_TE = F.linear(tokens_TH.to(wide), self.weight.to(wide))
        if self.noise and context.training:
            scores_TE = scores_TE * self._noise(scores_TE, context)
        affinities_TE, probabilities_TE = self._judge(scores_TE)
        own_TK = self._choose(affinities_TE, context)
        chosen_TK, given_up_TK, flips = own_TK, None, 0
        if context.replay:
            recorded_TK = context.replay[self.layer]
            given_up_TK = recorded_TK < 0
            chosen_TK = torch.where(given_up_TK, -1 - recorded_TK, recorded_TK)
            kept = (chosen_TK[:, :, None] == own_TK[:, None, :]).any(-1)
            flips = int((~kept).sum())
        weights_TK = self._weigh(affinities_TE.gather(1, chosen_TK))
        if given_up_TK is None and self.kind == "gshard" and context.training:
            given_up_TK = self._give_up_second(weights_TK, context)
        experts_TK = chosen_TK
        if given_up_TK is not None:
            experts_TK = chosen_TK.masked_fill(given_up_TK, NOBODY)
        if context.keep_choices:
            context.choices[self.layer] = torch.where(
                experts_TK == NOBODY, -1 - chosen_TK, chosen_TK
            )
        whole = given_up_TK is None and self.keeps_all
        return Routing(experts_TK, weights_TK, probabilities_TE, scores_TE, flips, whole)

    def _judge(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """What experts are chosen and weighed by, and the same as odds."""
        probabilities_TE = scores_TE.softmax(dim=-1)
        return probabilities_TE, probabilities_TE

    def _choose(self, affinities_TE: Tensor, context: Context) -> Tensor:
        if self.kind == "balanced":
            sample, position = _places(affinities_TE, context)
            first = (sample + position) * self.top_k
            return (first[:, None] + torch.arange(self.top_k, device=first.device)) % self.experts
        return self._best(affinities_TE)

    def _best(self, affinities_TE: Tensor) -> Tensor:
        return affinities_TE.topk(self.top_k, dim=-1).indices

    def _weigh(self, weights_TK: Tensor) -> Tensor:
        return weights_TK / weights_TK.sum(-1, keepdim=True) if self.renormalise else weights_TK

    def _noise(self, scores_TE: Tensor, context: Context) -> Tensor:
        sample, position = _places(scores_TE, context)
        channel = torch.arange(self.experts, device=scores_TE.device)
        draws = uniform(
            context.seed, f"router noise {self.layer}", context.step,
            sample[:, None], position[:, None] * self.experts + channel,
        )  # fmt: skip
        return (1.0 + self.noise * (2.0 * draws - 1.0)).to(scores_TE.dtype)

    def _give_up_second(self, weights_TK: Tensor, context: Context) -> Tensor:
        """Which choices are given up: a second one with the odds of 1 - 2 * its weight."""
        sample, position = _places(weights_TK, context)
        draws = uniform(context.seed, f"second expert {self.layer}", context.step, sample, position)
        lost = 2.0 * weights_TK[:, 1].detach() <= draws
        return torch.stack((torch.zeros_like(lost), lost), dim=1)


class SigmoidRouter(Router):
    """A router by sigmoids, with groups of experts and a bias that balances their loads."""

    bias: Tensor
    """Added to affinities where experts are chosen, not where they are weighed, [experts]."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        kind: Literal["top-k", "balanced"] = "top-k",
        renormalise: bool = False,
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
    ) -> None:
        """With so many `groups`, of which a token's experts come from so many."""
        super().__init__(layer, hidden, experts, top_k, kind=kind, renormalise=renormalise)
        (self.groups, self.top_groups), self.scale = groups, scale
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SigmoidRouter:
        """Have everything but the bias in another type, where its small steps could be lost."""
        exact = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != exact.dtype:
            self.bias = exact.to(self.bias.device)
        return self

    def _judge(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        affinities_TE = scores_TE.sigmoid()
        return affinities_TE, affinities_TE / (affinities_TE.sum(-1, keepdim=True) + _LEAST)

    def _best(self, affinities_TE: Tensor) -> Tensor:
        """The best within the groups whose best two are best together, all by biased affinities."""
        biased_TE = affinities_TE.detach() + self.bias
        if self.top_groups < self.groups:
            by_group = biased_TE.unflatten(1, (self.groups, -1))
            offers = by_group.topk(BEST_OF_GROUP, dim=-1).values.sum(dim=-1)
            taken = offers.topk(self.top_groups, dim=-1).indices
            left_out = torch.ones_like(offers, dtype=torch.bool).scatter_(1, taken, False)
            biased_TE = by_group.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)
        return super()._best(biased_TE)

    def _weigh(self, weights_TK: Tensor) -> Tensor:
        if self.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _LEAST)
        return weights_TK * self.scale

    @torch.no_grad()
    def rebalance(self, asked_E: Tensor, step: float) -> None:
        """Move the bias by `step`: up where fewer assignments than the mean were asked, or down."""
        behind_E = asked_E.sum() - self.experts * asked_E
        self.bias.add_(behind_E.sign().to(self.bias), alpha=step)


def _places(tokens: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """(global sample, position) of every token, which names it whatever the layout."""
    if context.samples is None or context.positions is None:
        flat = torch.arange(tokens.shape[0], device=tokens.device)
        return torch.zeros_like(flat), flat
    sample = context.samples[:, None].expand(-1, context.positions.shape[0])
    position = context.positions.expand(sample.shape)
    return sample.reshape(-1)[context.run], position.reshape(-1)[context.run]


def balance_share(routing: Routing, asked_E: Tensor, num_tokens: int) -> Tensor:
    """This rank's share of experts * sum(share of assignments * mean probability); 1 when even.

    Args:
        routing: this rank's routing.
        asked_E: assignments by expert over all ranks, before drops.
        num_tokens: tokens over all ranks.
    """
    share_E = asked_E.to(routing.probabilities_TE) / asked_E.sum().clamp(min=1)
    mean_E = routing.probabilities_TE.sum(dim=0) / max(num_tokens, 1)
    return routing.probabilities_TE.shape[1] * (share_E * mean_E).sum()


def z_share(routing: Routing, num_tokens: int) -> Tensor:
    """This rank's share of the mean squared log-sum-exp of the scores."""
    return routing.scores_TE.logsumexp(dim=-1).square().sum() / max(num_tokens, 1)
