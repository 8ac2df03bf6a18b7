"""Head and cross-entropy in one: logits exist a few rows at a time, and never twice.

The gradient of a sum of cross-entropies is known as soon as its logits are, so it is formed while
they are there; backward only hands it on. A vocabulary of 50,000 over 8,000 tokens would otherwise
hold 1.6 GB of logits and as much again for their gradient.

Where slices share out the vocabulary, each has the logits of its own words for all tokens. Then one
number a token goes around, the logarithm of its sum of exponentials; a target counts where its word
is, so that losses are shares, and so are gradients of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import gather
from moesaic.dist.products import product
from moesaic.facts.workload.sizes import HEAD_ROWS
from moesaic.nn.slices import WHOLE, Slices

IGNORED = -100


class HeadLoss(torch.autograd.Function):
    """scale * sum over tokens of -log softmax(x @ weight.T)[target]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        scale: float,
        slices: Slices = WHOLE,
    ) -> Tensor:
        """Loss, and at once its gradients where they are wanted."""
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        operand = weight_VH.to(x_TH.dtype)
        grad_x = torch.empty_like(x_TH) if wants_x else None
        grad_weight = torch.zeros_like(weight_VH) if wants_weight else None
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x_TH.device)
        for start in range(0, x_TH.shape[0], HEAD_ROWS):
            rows, targets = x_TH[start : start + HEAD_ROWS], targets_T[start : start + HEAD_ROWS]
            present = targets != IGNORED
            here, target = _own(targets, present, weight_VH.shape[0], slices)
            log_p = _log_softmax(product(rows, operand, transposed=True).to(wide), slices)
            picked = log_p.gather(1, target).squeeze(1)
            total -= torch.where(here, picked, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            grad = log_p.exp_()
            once = torch.full_like(picked, -1.0)
            if here is not present:
                once *= here
            grad.scatter_add_(1, target, once[:, None])
            grad *= present.to(wide)[:, None] * scale
            grad = grad.to(x_TH.dtype)
            if grad_x is not None:
                out = grad_x[start : start + HEAD_ROWS]
                product(grad, operand, transposed=False, out=out)
            if grad_weight is not None:
                _add_outer(grad_weight, grad, rows)
            del log_p, grad  # Or they would be there while the next ones are made.
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.factor = None
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Hand on what forward formed, scaled in place.

        A backward pass in two halves, inputs first and weights later, comes twice: what the first
        one scaled is there still, and autograd must not take its writing for a mistake.
        """
        grad_x, grad_weight = ctx.saved_tensors
        (grad,) = grads
        factor = grad if ctx.factor is None else grad / ctx.factor
        ctx.factor = grad
        for formed in (grad_x, grad_weight):
            if formed is not None:
                formed.data.mul_(factor.to(formed.dtype))
        return grad_x, grad_weight, None, None, None


def _own(targets: Tensor, present: Tensor, words: int, slices: Slices) -> tuple[Tensor, Tensor]:
    """Which targets are among this slice's words, and each as one of them, [rows, 1]; one that is
    no word of any slice stays what it is, for whoever looks it up to fail."""
    if slices.group is None:
        return present, targets.clamp(min=0)[:, None]
    targets, end = targets - slices.index * words, slices.end(words)
    return (targets >= 0) & (targets < end), targets.clamp(0, end - 1)[:, None]


def _log_softmax(logits: Tensor, slices: Slices) -> Tensor:
    """Over the words of all slices, of which each has logits of its own."""
    if slices.group is None:
        return F.log_softmax(logits, dim=-1)
    whole = gather(logits.logsumexp(dim=-1), slices.group).logsumexp(dim=0)
    return logits.sub_(whole[:, None])


def _add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
