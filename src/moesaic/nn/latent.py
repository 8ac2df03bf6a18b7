"""Latent attention: keys and values of all heads come from one narrow vector a token.

A head has channels that go straight to the scores and channels that are turned by positions first;
the turned key is one for all heads. Only the narrow vector and that key need be remembered of a
token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.facts.job.model import Latent, RopeScaling
from moesaic.nn.attention import INPUTS, Linear, attend
from moesaic.nn.context import Context, Rotary
from moesaic.nn.norm import RMSNorm
from moesaic.nn.rope import mscale
from moesaic.nn.slices import WHOLE, Slices, here

NORM_EPSILON = 1e-6
"""Of the narrow vectors' norms: the family's own, whatever the norms of the stream add."""


class LatentAttention(nn.Module):
    """Attention of one layer. Tensors are [batch, sequence, heads, channels] on the way.

    Of several slices each has heads of its own; the ways down to narrow vectors all have whole, and
    go them with their own tokens, so that only narrow vectors travel.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        heads: int,
        head_dim: int,
        latent: Latent,
        scaling: RopeScaling | None = None,
        slices: Slices = WHOLE,
    ) -> None:
        super().__init__()
        self.slices = slices
        self.layer, self.heads = layer, heads // slices.count
        self.width, self.rotary, self.value = latent.width, latent.rotary, latent.value
        self.straight = head_dim - latent.rotary
        self.scale = score_scale(head_dim, scaling)
        self.q = self.q_down = self.q_norm = self.q_up = None
        if latent.queries is None:
            self.q = Linear(hidden, heads * head_dim, slices)
        else:
            self.q_down = Linear(hidden, latent.queries)
            self.q_norm = RMSNorm(latent.queries, NORM_EPSILON)
            self.q_up = Linear(latent.queries, heads * head_dim, slices)
        self.kv_down = Linear(hidden, self.width + self.rotary)
        self.kv_norm = RMSNorm(self.width, NORM_EPSILON)
        self.kv_up = Linear(self.width, heads * (self.straight + self.value), slices)
        self.o = Linear(heads * self.value, hidden, slices, cut=INPUTS)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Attend."""
        narrow, k_turning = self.kv_down(x).split((self.width, self.rotary), dim=-1)
        asking, narrow, k_turning = self.slices.samples(
            context, self._asking(x), self.kv_norm(narrow), k_turning
        )
        q, q_turning = self._queries(asking).split((self.straight, self.rotary), dim=-1)
        q_turned = turn(q_turning, context.rotary)
        k_turned = turn(k_turning[:, :, None], context.rotary)
        if context.cache is not None:
            new = torch.cat((narrow[:, :, None], *k_turned), dim=-1)
            (seen,) = context.cache.extend(self.layer, new.transpose(1, 2))
            if seen.shape[2] > x.shape[1]:
                return self._over(seen, q, q_turned, context.mask)
        up = self.kv_up(narrow).unflatten(2, (self.heads, -1))
        k, v = up.split((self.straight, self.value), dim=-1)
        k_shared = (part.expand(-1, -1, self.heads, -1) for part in k_turned)
        attended = self._attend(
            torch.cat((q, *q_turned), -1), torch.cat((k, *k_shared), -1), v, context.mask
        )
        return self.slices.sum_runs(self.o(attended.flatten(2)))

    def _asking(self, x: Tensor) -> Tensor:
        """What queries are made from: the stream itself, or a narrow vector a token."""
        if self.q_down is None:
            return x
        assert self.q_norm is not None
        narrow: Tensor = self.q_norm(self.q_down(x))
        return narrow

    def _queries(self, asking: Tensor) -> Tensor:
        way_up = self.q if self.q_up is None else self.q_up
        assert way_up is not None
        heads: Tensor = way_up(asking).unflatten(2, (self.heads, -1))
        return heads

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Narrower values, or queries and keys, get zeros: fused kernels want one width."""
        wide = max(q.shape[-1], v.shape[-1])
        q, k, v = (_widen(part, wide).transpose(1, 2) for part in (q, k, v))
        return attend(q, k, v, mask, self.scale).transpose(1, 2)[..., : self.value]

    def _over(
        self, seen: Tensor, q: Tensor, q_turned: tuple[Tensor, ...], mask: Tensor | None
    ) -> Tensor:
        """Attention to what a cache holds, without keys and values of each head.

        q (W c) = (q W) c: queries go down to the narrow vector's width and meet it there, as the
        one key and value of all heads; what they gather goes up by each head's part of `kv_up`.
        """
        assert mask is not None or q.shape[1] == 1, "several queries over a cache need a mask"
        weight = here(self.kv_up.weight).unflatten(0, (self.heads, -1))
        k_up, v_up = weight.split((self.straight, self.value), dim=1)
        q = torch.cat((torch.einsum("bshc,hcw->bshw", q, k_up), *q_turned), dim=-1)
        # All heads' queries are rows over one key head, which is read once.
        if mask is not None:
            mask = mask.repeat_interleave(self.heads, dim=-2)
        gathered = F.scaled_dot_product_attention(
            q.flatten(1, 2)[:, None], seen, seen, attn_mask=mask, scale=self.scale
        )
        gathered = gathered.view(q.shape)[..., : self.width]
        attended = torch.einsum("bshw,hcw->bshc", gathered, v_up)
        result: Tensor = self.o(attended.flatten(2))
        return result


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def turn(x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Turn neighbouring channels of [batch, sequence, heads, d] by the positions' angles.

    The first of each pair come back together, and so do the second: scores do not ask for order.
    """
    first, second = x.to(rotary.cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rotary.cosine.transpose(1, 2), rotary.sine.transpose(1, 2)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return turned[0].to(x.dtype), turned[1].to(x.dtype)


def score_scale(head_dim: int, scaling: RopeScaling | None) -> float:
    """What scores are multiplied by: stretched angles (yarn) may ask for sharper attention."""
    scale: float = head_dim**-0.5
    if scaling is None or scaling.kind != "yarn" or scaling.mscale_all is None:
        return scale
    return scale * mscale(scaling.factor, scaling.mscale_all) ** 2
