"""Grouped-query attention with rotary positions, and the dense feed-forward network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moesaic.kernels.cpu_gemm import inference_linear, uses_onednn
from moesaic.kernels.grouped_mm import matmul
from moesaic.nn.attention_backends import attend
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.norm import RMSNorm
from moesaic.nn.reports import AttentionReport
from moesaic.nn.split_backward import needs_grad
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel, to_local

OUTPUT_DIM, INPUT_DIM = 0, 1
"""Dimensions of a weight."""


class Linear(nn.Module):
    """x @ weight.T, without bias; with LoRA, x @ (weight + scale * B A).T."""

    def __init__(
        self, inputs: int, outputs: int, tp: TensorParallel = NO_TP, *, shard_dim: int = OUTPUT_DIM
    ) -> None:
        """Create the weight; TP ranks shard its outputs or inputs, as `shard_dim` says."""
        super().__init__()
        self.weight_shape, self._tp, self._shard_dim = (outputs, inputs), tp, shard_dim
        self.weight = tp.parameter(outputs, inputs, shard_dim=shard_dim)
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.scale = 0.0

    def add_adapters(self, rank: int, scale: float) -> None:
        """Add a LoRA pair, A [rank, inputs] and B [outputs, rank]."""
        outputs, inputs = self.weight_shape
        sharded, replicated = self._tp, NO_TP
        by_inputs, by_outputs = (
            (sharded, replicated) if self._shard_dim == INPUT_DIM else (replicated, sharded)
        )
        self.lora_a = by_inputs.parameter(rank, inputs, shard_dim=INPUT_DIM)
        self.lora_b = by_outputs.parameter(outputs, rank, shard_dim=OUTPUT_DIM)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, [..., outputs]."""
        result = linear(x, to_local(self.weight))
        if self.lora_a is None or self.lora_b is None:
            return result
        narrow = F.linear(x, to_local(self.lora_a)) * self.scale
        return result + F.linear(narrow, to_local(self.lora_b))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T over the last dimension.

    oneDNN is used where autograd records, since training repeats its sizes, and in inference mode.
    Without either, as in validation, the last digits may differ.
    """
    if torch.is_inference_mode_enabled() and not torch.is_autocast_enabled(x.device.type):
        return inference_linear(x, weight)
    records_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not records_grad or torch.is_autocast_enabled(x.device.type) or not uses_onednn(x, weight):
        return F.linear(x, weight)
    result: Tensor = _OneDNNLinear.apply(x.reshape(-1, x.shape[-1]), weight)
    return result.view(*x.shape[:-1], weight.shape[0])


class _OneDNNLinear(torch.autograd.Function):
    """Matmul by oneDNN, for sizes that recur in every step."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        """Return rows @ weight.T."""
        ctx.save_for_backward(rows, weight)
        return matmul(rows, weight, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of rows and weight; split backward requests one at a time."""
        rows, weight = ctx.saved_tensors
        grad_rows = matmul(grads[0], weight, transposed=False) if needs_grad(ctx, 0) else None
        return grad_rows, grads[0].T @ rows if needs_grad(ctx, 1) else None


class QueriesKeys(nn.Module):
    """Queries and keys of one layer, as the attention probabilities need them."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        clip: float | None = None,
        tp: TensorParallel = NO_TP,
    ) -> None:
        super().__init__()
        self.head_dim, self.clip = head_dim, clip
        self.q = Linear(hidden, heads * head_dim, tp)
        self.k = Linear(hidden, kv_heads * head_dim, tp)

    def add_norms(self, norms: tuple[RMSNorm, RMSNorm] | None) -> None:
        """Set the norms of queries and keys, over all their channels or those of each head."""
        self.q_norm: RMSNorm | None
        self.k_norm: RMSNorm | None
        self.q_norm, self.k_norm = norms or (None, None)

    def queries_and_keys(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys, [batch, heads, sequence, channels]."""
        q, k = self.q(x), self.k(x)
        dtype = q.dtype
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm_heads(q, self.q_norm), _norm_heads(k, self.k_norm)
        q, k = self._split(q), self._split(k)
        return rotate(q, rotary).to(dtype), rotate(k, rotary).to(dtype)

    def _split(self, x: Tensor) -> Tensor:
        """Return `x`, clipped, by heads."""
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        heads: Tensor = x.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)


class AuxiliaryLayer(QueriesKeys):
    """Last layer of a student in distillation, cut down to what its attention probabilities need.

    It reads the last decoder layer's output and is left out of exports. It may have other numbers
    of heads than the student.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        epsilon: float,
        *,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        clip: float | None = None,
    ) -> None:
        super().__init__(hidden, heads, kv_heads, head_dim, clip=clip)
        self.add_norms(norms)
        self.norm = RMSNorm(hidden, epsilon)

    def forward(self, x: Tensor, inputs: Inputs) -> AttentionReport:
        """Return the queries and keys for hidden states `x`, [batch, sequence, hidden]."""
        return AttentionReport(*self.queries_and_keys(self.norm(x), inputs.rotary))


class Attention(QueriesKeys):
    """Attention of one layer; heads are sharded over TP ranks."""

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
        tp: TensorParallel = NO_TP,
    ) -> None:
        super().__init__(hidden, heads, kv_heads, head_dim, clip=clip, tp=tp)
        self.layer, self.tp = layer, tp
        self.v = Linear(hidden, kv_heads * head_dim, tp)
        self.o = Linear(heads * head_dim, hidden, tp, shard_dim=INPUT_DIM)
        self.add_norms(norms)

    def forward(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, AttentionReport]:
        """Return the attention output for this rank's tokens, and the layer's report."""
        (x,) = self.tp.gather_samples(inputs, x)
        (q, k), v = self.queries_and_keys(x, inputs.rotary), self._split(self.v(x))
        keep = inputs.keeps("queries_and_keys", self.layer)
        report = AttentionReport(q, k) if keep else AttentionReport()
        if inputs.cache is not None:
            k, v = inputs.cache.extend(self.layer, k, v)
        attended = attend(q, k, v, inputs.attention)
        return self.tp.reduce_scatter(self.o(attended.transpose(1, 2).flatten(2))), report


def _norm_heads(x: Tensor, norm: RMSNorm) -> Tensor:
    """Normalise consecutive groups of channels, each as wide as the norm."""
    normed: Tensor = norm(x.unflatten(2, (-1, to_local(norm.weight).shape[0])))
    return normed.flatten(2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate channel pairs (i, i + d/2) of [batch, heads, sequence, d] by the positions' angles."""
    rotated: Tensor = _Rotate.apply(x, rotary.cosine, rotary.sine)
    return rotated


class _Rotate(torch.autograd.Function):
    """Rotary rotation; backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the rotated `x`, with its memory layout."""
        ctx.save_for_backward(cosine, sine)
        ctx.dtype = x.dtype
        return _rotate(x, cosine, sine, 1.0, torch.promote_types(x.dtype, cosine.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient, rotated back."""
        cosine, sine = ctx.saved_tensors
        return _rotate(grads[0], cosine, sine, -1.0, ctx.dtype), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, sign: float, dtype: torch.dtype) -> Tensor:
    wide = x.to(cosine.dtype)
    rotated = torch.empty_like(wide)
    (left, right), (first, second) = wide.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    torch.mul(left, cosine, out=first).addcmul_(right, sine, value=-sign)
    torch.mul(right, cosine, out=second).addcmul_(left, sine, value=sign)
    return rotated.to(dtype)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)); FFN channels are sharded over TP ranks."""

    def __init__(self, hidden: int, ffn: int, tp: TensorParallel = NO_TP) -> None:
        super().__init__()
        self.tp = tp
        self.gate, self.up = Linear(hidden, ffn, tp), Linear(hidden, ffn, tp)
        self.down = Linear(ffn, hidden, tp, shard_dim=INPUT_DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for this rank's tokens."""
        x = self.tp.gather_tokens(x)
        return self.tp.reduce_scatter(self.down(F.silu(self.gate(x)) * self.up(x)))
