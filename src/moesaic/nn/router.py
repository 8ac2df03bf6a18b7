"""Routers: which experts a token visits, with what weight, and the losses that keep them even.

top-k: the best by softmax. switch: top-1 (Fedus et al.), scores optionally multiplied by noise.
gshard: top-2 (Lepikhin et al.), the second expert kept at random in proportion to its weight.
balanced: experts in turn. Routing is computed in fp32 or better, whatever the layer computes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.nn.context import Context
from moesaic.nn.randomness import uniform

NOBODY = -1
"""Stands where a token visits no expert."""


@dataclass(frozen=True)
class Routing:
    """What one router said of one micro-batch; T tokens, K choices, E experts."""

    experts_TK: Tensor
    """Chosen experts; NOBODY where a choice was given up."""
    weights_TK: Tensor
    """Their weights; carries gradient."""
    probabilities_TE: Tensor
    """Softmax of the scores; carries gradient."""
    scores_TE: Tensor
    """Scores before the softmax; carries gradient."""
    flips: int
    """Replayed choices that the router would not have made."""


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

    def forward(self, tokens_TH: Tensor, context: Context) -> Routing:
        """Route tokens."""
        wide = torch.promote_types(tokens_TH.dtype, torch.float32)
        with torch.autocast(tokens_TH.device.type, enabled=False):
            scores_TE = F.linear(tokens_TH.to(wide), self.weight.to(wide))
        if self.noise and context.training:
            scores_TE = scores_TE * self._noise(scores_TE, context)
        probabilities_TE = scores_TE.softmax(dim=-1)
        own_TK = self._choose(probabilities_TE, context)
        chosen_TK, given_up_TK, flips = own_TK, None, 0
        if context.replay:
            recorded_TK = context.replay[self.layer]
            given_up_TK = recorded_TK < 0
            chosen_TK = torch.where(given_up_TK, -1 - recorded_TK, recorded_TK)
            kept = (chosen_TK[:, :, None] == own_TK[:, None, :]).any(-1)
            flips = int((~kept).sum())
        weights_TK = probabilities_TE.gather(1, chosen_TK)
        if self.renormalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if given_up_TK is None and self.kind == "gshard" and context.training:
            given_up_TK = self._give_up_second(weights_TK, context)
        experts_TK = chosen_TK
        if given_up_TK is not None:
            experts_TK = chosen_TK.masked_fill(given_up_TK, NOBODY)
        if context.keep_choices:
            context.choices[self.layer] = torch.where(
                experts_TK == NOBODY, -1 - chosen_TK, chosen_TK
            )
        return Routing(experts_TK, weights_TK, probabilities_TE, scores_TE, flips)

    def _choose(self, probabilities_TE: Tensor, context: Context) -> Tensor:
        if self.kind == "balanced":
            sample, position = _places(probabilities_TE, context)
            first = (sample + position) * self.top_k
            return (first[:, None] + torch.arange(self.top_k, device=first.device)) % self.experts
        return probabilities_TE.topk(self.top_k, dim=-1).indices

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


def _places(tokens: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """(global sample, position) of every token, which names it whatever the layout."""
    if context.samples is None or context.positions is None:
        flat = torch.arange(tokens.shape[0], device=tokens.device)
        return torch.zeros_like(flat), flat
    sample = context.samples[:, None].expand(-1, context.positions.shape[0])
    return sample.reshape(-1), context.positions.expand(sample.shape).reshape(-1)


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
