"""Grouped-query attention with rotary positions, and the dense feed-forward network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moesaic.dist.loops import by_onednn
from moesaic.dist.products import product
from moesaic.nn.context import Context, Rotary
from moesaic.nn.halves import asked_for
from moesaic.nn.norm import RMSNorm
from moesaic.nn.slices import WHOLE, Slices, here

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a weight."""


class Linear(nn.Module):
    """x @ weight.T, without bias; adapted, x @ (weight + scale * B A).T with A and B to learn."""

    def __init__(
        self, inputs: int, outputs: int, slices: Slices = WHOLE, *, cut: int = OUTPUTS
    ) -> None:
        """Of several slices each has outputs of its own, or inputs if those are `cut`."""
        super().__init__()
        self.extents, self._slices, self._cut = (outputs, inputs), slices, cut
        self.weight = slices.parameter(outputs, inputs, cut=cut)
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.scale = 0.0

    def adapt(self, rank: int, scale: float) -> None:
        """Put the low-rank pair A [rank, inputs] and B [outputs, rank] beside the weight."""
        outputs, inputs = self.extents
        cut, whole = self._slices, WHOLE
        by_inputs, by_outputs = (cut, whole) if self._cut == INPUTS else (whole, cut)
        self.lora_a = by_inputs.parameter(rank, inputs, cut=INPUTS)
        self.lora_b = by_outputs.parameter(outputs, rank, cut=OUTPUTS)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        result = multiply(x, here(self.weight))
        if self.lora_a is None or self.lora_b is None:
            return result
        narrow = F.linear(x, here(self.lora_a)) * self.scale
        return result + F.linear(narrow, here(self.lora_b))


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by weight.T over the last dimension.

    The engine for recurring sizes does it only where autograd records, as those of training are, so
    that last digits may be others where it does not.
    """
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not learning or torch.is_autocast_enabled(x.device.type) or not by_onednn(x, weight):
        return F.linear(x, weight)
    result: Tensor = _Multiplied.apply(x.reshape(-1, x.shape[-1]), weight)
    return result.view(*x.shape[:-1], weight.shape[0])


class _Multiplied(torch.autograd.Function):
    """Products of sizes that are the same in every step, by what multiplies those fastest."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply by weight.T."""
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of rows and weight; in a backward that comes in halves, of one of them."""
        rows, weight = ctx.saved_tensors
        of_rows = product(grads[0], weight, transposed=False) if asked_for(ctx, 0) else None
        return of_rows, grads[0].T @ rows if asked_for(ctx, 1) else None


class Attention(nn.Module):
    """Attention of one layer; of several slices each has heads of its own."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        clip: float | None = None,
        slices: Slices = WHOLE,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.groups, self.clip = layer, head_dim, heads // kv_heads, clip
        self.slices = slices
        self.q = Linear(hidden, heads * head_dim, slices)
        self.k = Linear(hidden, kv_heads * head_dim, slices)
        self.v = Linear(hidden, kv_heads * head_dim, slices)
        self.o = Linear(heads * head_dim, hidden, slices, cut=INPUTS)
        # Over all channels of queries and of keys, or over those of each head.
        self.q_norm: RMSNorm | None
        self.k_norm: RMSNorm | None
        self.q_norm, self.k_norm = norms or (None, None)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Attend."""
        (x,) = self.slices.samples(context, x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normed(q, self.q_norm), _normed(k, self.k_norm)
        if self.clip is not None:
            q, k, v = (t.clamp(-self.clip, self.clip) for t in (q, k, v))
        q, k, v = (self._split(t) for t in (q, k, v))
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        dtype = v.dtype
        q, k = q.to(dtype), k.to(dtype)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        attended = attend(q, self._repeat(k), self._repeat(v), context.mask)
        return self.slices.sum_runs(self.o(attended.transpose(1, 2).flatten(2)))

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        return x if self.groups == 1 else x.repeat_interleave(self.groups, dim=1)


def _normed(x: Tensor, norm: RMSNorm) -> Tensor:
    """Every run of as many channels as the norm is wide, on its own."""
    normed: Tensor = norm(x.unflatten(2, (-1, here(norm.weight).shape[0])))
    return normed.flatten(2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v, causal where there is no mask; scale: 1 / sqrt(d) if not given."""
    if q.shape[0] == 0:
        # Nothing to attend to, yet gradients of this rank must exist (as zeros).
        return q + k[:, :, : q.shape[2]] * 0 + v[:, :, : q.shape[2]] * 0
    causal = mask is None and q.shape[2] > 1
    assert not causal or q.shape[2] == k.shape[2], "several queries over a cache need a mask"
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn channel pairs (i, i + d/2) of [batch, heads, sequence, d] by the positions' angles."""
    turned: Tensor = _Turned.apply(x, rotary.cosine, rotary.sine)
    return turned


class _Turned(torch.autograd.Function):
    """Backward turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Turn; the result lies in memory as `x` does."""
        ctx.save_for_backward(cosine, sine)
        ctx.dtype = x.dtype
        return _turn(x, cosine, sine, 1.0, torch.promote_types(x.dtype, cosine.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, turned back."""
        cosine, sine = ctx.saved_tensors
        return _turn(grads[0], cosine, sine, -1.0, ctx.dtype), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, sign: float, dtype: torch.dtype) -> Tensor:
    wide = x.to(cosine.dtype)
    turned = torch.empty_like(wide)
    (left, right), (first, second) = wide.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    torch.mul(left, cosine, out=first).addcmul_(right, sine, value=-sign)
    torch.mul(right, cosine, out=second).addcmul_(left, sine, value=sign)
    return turned.to(dtype)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)); of several slices each has inner channels of its own."""

    def __init__(self, hidden: int, ffn: int, slices: Slices = WHOLE) -> None:
        super().__init__()
        self.slices = slices
        self.gate, self.up = Linear(hidden, ffn, slices), Linear(hidden, ffn, slices)
        self.down = Linear(ffn, hidden, slices, cut=INPUTS)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Compute; the context is the same as an expert layer's and not used."""
        del context
        x = self.slices.join(x)
        return self.slices.sum_runs(self.down(F.silu(self.gate(x)) * self.up(x)))
