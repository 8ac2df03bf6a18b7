"""Fused output projection and cross-entropy, in chunks of tokens.

The gradient of the summed cross-entropy is computed in forward, while a chunk's logits exist.
Backward only scales it. A vocabulary of 50,000 over 8,000 tokens would otherwise need 1.6 GB for
fp32 logits, and as much for their gradient.

With tensor parallelism each rank has the logits of its vocabulary shard for all tokens. Ranks
gather one number per token, the log of its sum of exponentials. A target counts on the rank that
has its word, so losses and gradients of tokens are partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import all_gather
from moesaic.facts.workload.sizes import LOSS_CHUNK_TOKENS
from moesaic.kernels.grouped_mm import matmul
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel

IGNORE_INDEX = -100


class HeadLoss(torch.autograd.Function):
    """scale * sum over tokens of -log softmax(x @ weight.T)[target]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        scale: float,
        tp: TensorParallel = NO_TP,
    ) -> Tensor:
        """Return the loss, and compute the gradients that autograd needs."""
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        operand = weight_VH.to(x_TH.dtype)
        grad_x = torch.empty_like(x_TH) if wants_x else None
        grad_weight = torch.zeros_like(weight_VH) if wants_weight else None
        dtype = torch.promote_types(x_TH.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=x_TH.device)
        for start in range(0, x_TH.shape[0], LOSS_CHUNK_TOKENS):
            rows, targets = (
                x_TH[start : start + LOSS_CHUNK_TOKENS],
                targets_T[start : start + LOSS_CHUNK_TOKENS],
            )
            present = targets != IGNORE_INDEX
            is_local, target = _local_targets(targets, present, weight_VH.shape[0], tp)
            log_p = _log_softmax(matmul(rows, operand, transposed=True).to(dtype), tp)
            target_log_p = log_p.gather(1, target).squeeze(1)
            total -= torch.where(is_local, target_log_p, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            grad = log_p.exp_()
            target_grad = torch.full_like(target_log_p, -1.0)
            if is_local is not present:
                target_grad *= is_local
            grad.scatter_add_(1, target, target_grad[:, None])
            grad *= present.to(dtype)[:, None] * scale
            grad = grad.to(x_TH.dtype)
            if grad_x is not None:
                out = grad_x[start : start + LOSS_CHUNK_TOKENS]
                matmul(grad, operand, transposed=False, out=out)
            if grad_weight is not None:
                _add_outer(grad_weight, grad, rows)
            del log_p, grad  # Frees memory before the next chunk.
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.factor = None
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients that forward computed, scaled in place.

        Split backward calls this twice, for inputs and for weights. The second call divides out the
        first factor. `.data` hides the write from autograd's version check.
        """
        grad_x, grad_weight = ctx.saved_tensors
        (grad,) = grads
        factor = grad if ctx.factor is None else grad / ctx.factor
        ctx.factor = grad
        for gradient in (grad_x, grad_weight):
            if gradient is not None:
                gradient.data.mul_(factor.to(gradient.dtype))
        return grad_x, grad_weight, None, None, None


def _local_targets(
    targets: Tensor, present: Tensor, vocab_size: int, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """Return the mask of targets in this rank's vocabulary shard, and local indices, [rows, 1].

    A target outside the whole vocabulary keeps an invalid index, so that the lookup fails.
    """
    if tp.group is None:
        return present, targets.clamp(min=0)[:, None]
    targets, end = targets - tp.rank * vocab_size, tp.vocab_end(vocab_size)
    return (targets >= 0) & (targets < end), targets.clamp(0, end - 1)[:, None]


def _log_softmax(logits: Tensor, tp: TensorParallel) -> Tensor:
    """Return the log softmax over the full vocabulary, for this rank's shard."""
    if tp.group is None:
        return F.log_softmax(logits, dim=-1)
    log_sum = all_gather(logits.logsumexp(dim=-1), tp.group).logsumexp(dim=0)
    return logits.sub_(log_sum[:, None])


def _add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
