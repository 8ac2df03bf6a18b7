"""Fused output projections and losses of a model and its students, in chunks of tokens.

The gradient of the summed losses is computed in forward, while a chunk's logits exist. Backward
only scales it. A vocabulary of 50,000 over 8,000 tokens would otherwise need 1.6 GB for fp32
logits, and as much for their gradient.

Followers are students in distillation. Each chunk of the model's log-probabilities serves all of
them before it becomes the model's gradient. The model computes the same with and without them.

With tensor parallelism each rank has the logits of its vocabulary shard for all tokens. Ranks
gather one number per token, the log of its sum of exponentials. A target counts on the rank that
has its word, so losses and gradients of tokens are partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import all_gather
from moesaic.facts.workload.sizes import (
    FOLLOWER_CHUNK_TOKENS,
    LOSS_CHUNK_TOKENS,
    divergence_rows,
)
from moesaic.kernels.grouped_mm import matmul
from moesaic.nn.divergence import logits_divergence, run_blocks
from moesaic.nn.inputs import HeadFollower, compute_dtype
from moesaic.nn.reports import FollowerLosses
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel, to_local

IGNORE_INDEX = -100


def head_loss(
    x_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    scale: float,
    tp: TensorParallel = NO_TP,
    followers: Sequence[HeadFollower] = (),
) -> tuple[Tensor, FollowerLosses | None]:
    """Return scale * sum over tokens of -log softmax(x @ weight.T)[target], and the followers'
    losses.

    Followers whose hidden states have gradients get theirs even where autograd is off, as for a
    frozen model. They need whole vocabularies, without tensor parallelism.
    """
    assert not followers or tp.group is None, "the job refuses students beside layout.tp"
    with _gradients_of(followers):
        tensors = list[Tensor]()
        for one in followers:
            tensors += (one.hidden.to(x_TH.dtype), to_local(one.weight))
        loss, follower_loss, sums = _HeadLoss.apply(
            x_TH, weight_VH, targets_T, scale, tp, followers, *tensors
        )
    return loss, FollowerLosses(follower_loss, sums) if followers else None


def follower_losses(targets_T: Tensor, followers: Sequence[HeadFollower]) -> FollowerLosses:
    """Return the losses of followers of which none learns from a model, with the bits that they
    have beside one."""
    hidden = followers[0].hidden
    dtype = compute_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        tensors = [x for one in followers for x in (one.hidden.to(dtype), to_local(one.weight))]
        return FollowerLosses(*_FollowerLoss.apply(targets_T, followers, *tensors))


def _gradients_of(followers: Sequence[HeadFollower]) -> AbstractContextManager[object]:
    wanted = any(one.hidden.requires_grad for one in followers)
    return torch.enable_grad() if wanted else nullcontext()


class _Projection:
    """Output projection of one model, and the gradients of its input and weight so far."""

    def __init__(self, x_TH: Tensor, weight_VH: Tensor, needs: Sequence[bool]) -> None:
        self._x, self._operand = x_TH, weight_VH.to(x_TH.dtype)
        self.grad_x = torch.empty_like(x_TH) if needs[0] else None
        self.grad_weight = torch.zeros_like(weight_VH) if needs[1] else None

    @property
    def needs_grad(self) -> bool:
        """True if input or weight needs a gradient."""
        return self.grad_x is not None or self.grad_weight is not None

    def logits(self, tokens: slice) -> Tensor:
        """Return the logits of some tokens in fp32 or wider."""
        logits = matmul(self._x[tokens], self._operand, transposed=True)
        return logits.to(_wide(logits))

    def add_grad(self, tokens: slice, grad: Tensor) -> None:
        """Add the gradients that follow from the gradient of some tokens' logits."""
        grad = grad.to(self._x.dtype)
        if self.grad_x is not None:
            matmul(grad, self._operand, transposed=False, out=self.grad_x[tokens])
        if self.grad_weight is not None:
            _add_outer(self.grad_weight, grad, self._x[tokens])


class _HeadLoss(torch.autograd.Function):
    """Losses of a model and its followers, and the gradients that autograd needs."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        scale: float,
        tp: TensorParallel,
        followers: Sequence[HeadFollower],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the followers' losses, and their unweighted sums.

        `tensors` are the followers' hidden states and weights in turn, for autograd.
        """
        needs = ctx.needs_input_grad
        model = _Projection(x_TH, weight_VH, needs[:2])
        students = _Students(followers, tensors, needs[6:])
        total = torch.zeros((), dtype=_wide(x_TH), device=x_TH.device)
        for tokens in _chunks(range(x_TH.shape[0]), LOSS_CHUNK_TOKENS):
            targets = targets_T[tokens]
            present = targets != IGNORE_INDEX
            is_local, target = _local_targets(targets, present, weight_VH.shape[0], tp)
            log_p = _log_softmax(model.logits(tokens), tp)
            students.add_chunk(tokens, log_p, targets_T)
            target_log_p = log_p.gather(1, target).squeeze(1)
            total -= torch.where(is_local, target_log_p, 0.0).sum()
            if model.needs_grad:
                grad = log_p.exp_()
                target_grad = torch.full_like(target_log_p, -1.0)
                if is_local is not present:
                    target_grad *= is_local
                grad.scatter_add_(1, target, target_grad[:, None])
                grad *= present.to(total.dtype)[:, None] * scale
                model.add_grad(tokens, grad)
                del grad
            del log_p  # Frees memory before the next chunk.
        projections = [model, *students.projections]
        ctx.save_for_backward(*(x for one in projections for x in (one.grad_x, one.grad_weight)))
        ctx.factors = [None] * len(projections)
        ctx.set_materialize_grads(False)
        loss = total * scale
        ctx.mark_non_differentiable(students.sums, *(() if model.needs_grad else (loss,)))
        return loss, students.losses, students.sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients that forward computed, scaled in place.

        Split backward calls this twice, for inputs and for weights. The second call divides out the
        first factor. `.data` hides the write from autograd's version check.
        """
        grad, follower_grads, _ = grads
        count = len(ctx.factors) - 1
        factors = [grad, *([None] * count if follower_grads is None else follower_grads)]
        results = _scale_saved(ctx, factors)
        return (*results[:2], None, None, None, None, *results[2:])


class _FollowerLoss(torch.autograd.Function):
    """Losses of followers alone, and the gradients that autograd needs."""

    @staticmethod
    def forward(
        ctx: Any, targets_T: Tensor, followers: Sequence[HeadFollower], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the losses and their unweighted sums; `tensors` are those of `_HeadLoss`."""
        students = _Students(followers, tensors, ctx.needs_input_grad[2:])
        students.add_chunk(slice(0, len(targets_T)), None, targets_T)
        projections = students.projections
        ctx.save_for_backward(*(x for one in projections for x in (one.grad_x, one.grad_weight)))
        ctx.factors = [None] * len(projections)
        ctx.mark_non_differentiable(students.sums)
        return students.losses, students.sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that forward computed, scaled in place."""
        return None, None, *_scale_saved(ctx, list(grads[0]))


def _scale_saved(ctx: Any, factors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the saved gradients of input and weight of each model, times its factor."""
    saved, results = ctx.saved_tensors, list[Tensor | None]()
    for index, factor in enumerate(factors):
        for gradient in saved[2 * index : 2 * index + 2]:
            if gradient is not None and factor is not None:
                old = ctx.factors[index]
                ratio = factor if old is None else factor / old
                gradient.data.mul_(ratio.to(gradient.dtype))
            results.append(None if factor is None else gradient)
        ctx.factors[index] = factor
    return results


class _Students:
    """Losses and gradients of the followers, summed over the chunks so far."""

    def __init__(
        self, followers: Sequence[HeadFollower], tensors: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        self._followers = followers
        self._teachers = {one.teacher for one in followers if one.logits}
        self.projections = [
            _Projection(
                tensors[2 * index],
                tensors[2 * index + 1],
                needs[2 * index :] if one.text or one.logits else (False, False),
            )
            for index, one in enumerate(followers)
        ]
        first = tensors[0] if tensors else torch.empty(0)
        self.sums = first.new_zeros((len(followers), 2), dtype=_wide(first))

    @property
    def losses(self) -> Tensor:
        """Weighted sum of each follower's losses, [followers]."""
        factors = [(one.text, one.logits) for one in self._followers]
        return (self.sums * self.sums.new_tensor(factors).view(-1, 2)).sum(dim=1)

    def add_chunk(self, chunk: slice, log_p: Tensor | None, targets_T: Tensor) -> None:
        """Add the losses and gradients of a chunk of tokens with the model's log-probabilities;
        None without a model."""
        if not self._followers:
            return
        for tokens in _chunks(range(chunk.start, chunk.stop), FOLLOWER_CHUNK_TOKENS):
            teachers = dict[int, Tensor]()
            if log_p is not None:
                teachers[-1] = log_p[tokens.start - chunk.start : tokens.stop - chunk.start]
            for index, projection in enumerate(self.projections):
                logits = projection.logits(tokens)
                if index in self._teachers:
                    teachers[index] = torch.empty_like(logits)
                self._add_losses(index, logits, targets_T[tokens], teachers)
                projection.add_grad(tokens, logits)

    def _add_losses(
        self, index: int, logits: Tensor, targets: Tensor, teachers: dict[int, Tensor]
    ) -> None:
        """Add a follower's losses, and overwrite its logits with their gradient.

        Store its log-probabilities, if it teaches.
        """
        one = self._followers[index]
        present = (targets != IGNORE_INDEX)[:, None]
        target = targets.clamp(min=0)[:, None]
        values = self.sums.new_zeros((len(logits), 2))

        def add_rows(rows: slice) -> None:
            log_q = F.log_softmax(logits[rows], dim=-1)
            if index in teachers:
                teachers[index][rows] = log_q
            values[rows, :1] = log_q.gather(1, target[rows]).neg_()
            grad = logits[rows].zero_()
            if one.logits:
                values[rows, 1], of_logits = logits_divergence(
                    teachers[one.teacher][rows], log_q, one.divergence, one.temperature
                )
                grad.add_(of_logits, alpha=one.logits)
            if one.text:
                grad.add_(log_q.exp_(), alpha=one.text)
                grad.scatter_add_(1, target[rows], torch.full_like(log_q[:, :1], -one.text))
            grad *= present[rows]

        on_cpu = logits.device.type == "cpu"
        size = divergence_rows(logits[0].nbytes, len(logits), on_cpu=on_cpu)
        run_blocks(add_rows, list(_chunks(range(len(logits)), size)), logits.device)
        self.sums[index] += torch.where(present, values, 0.0).sum(dim=0)


def _chunks(tokens: range, size: int) -> Iterator[slice]:
    for start in tokens[::size]:
        yield slice(start, min(start + size, tokens.stop))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


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
