"""Divergences of students from their teacher: of logits, attention, relations and hidden states.

Attention probabilities are computed a few queries at a time, with their gradient in forward. The
probabilities of all queries would need memory that is quadratic in the sequence. A teacher's
attention probabilities are computed once for all of its students.

Losses are sums over tokens, times a weight of each token, and means over heads. A teacher receives
no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.facts.job.distill import Divergence
from moesaic.facts.workload.parts import relation_heads
from moesaic.facts.workload.sizes import divergence_queries, divergence_rows
from moesaic.kernels.threads import thread_pool
from moesaic.nn.attention_backends import AttentionMetadata, QueryBlock
from moesaic.nn.reports import AttentionReport

T = TypeVar("T")

_HIDDEN_SCORE = -1e30
"""Score of a key that a query does not attend to: finite, but its probability is exactly 0."""

_EPSILON = 1e-6
"""Epsilon of the norm of hidden states."""


def attention_divergence(
    teacher: AttentionReport,
    students: Sequence[AttentionReport],
    metadata: AttentionMetadata,
    token_weights: Tensor,
) -> Tensor:
    """Return KL(teacher's attention || student's) of each student, [students], differentiable.

    Args:
        teacher: queries and keys with as many query heads as each student has.
        students: queries and keys of the same tokens, with any numbers of channels and KV heads.
        metadata: keys that each query attends to.
        token_weights: factor of each query's divergence, [batch, sequence].
    """
    tensors, scales = list[Tensor](), list[float]()
    for report in (teacher, *students):
        assert report.queries is not None, "attention was to keep queries and keys"
        assert report.keys is not None
        tensors += (report.queries, report.keys)
        width = report.queries.shape[-1]
        scales.append(width**-0.5 if report.scale is None else report.scale)
    tensors[:2] = (tensor.detach() for tensor in tensors[:2])
    with torch.autocast(token_weights.device.type, enabled=False):
        result: Tensor = _AttentionDivergence.apply(metadata, token_weights, scales, *tensors)
    return result


class _AttentionDivergence(torch.autograd.Function):
    """Divergence of the attention of several students from that of one teacher."""

    @staticmethod
    def forward(
        ctx: Any,
        metadata: AttentionMetadata,
        token_weights: Tensor,
        scales: Sequence[float],
        *tensors: Tensor,
    ) -> Tensor:
        """Return the students' sums; `tensors` are queries and keys of teacher and students."""
        needs = ctx.needs_input_grad[3:]
        models = [
            _Scores(q, k, scale, needs_grad=any(needs[2 * index : 2 * index + 2]))
            for index, (q, k, scale) in enumerate(
                zip(tensors[::2], tensors[1::2], scales, strict=True)
            )
        ]
        teacher, *students = models
        weights = (token_weights / teacher.q.shape[1]).to(teacher.q.dtype)
        values = weights.new_zeros((len(students), *weights.shape))

        def add_blocks(blocks: Sequence[QueryBlock]) -> None:
            for block in blocks:
                _add_block(block, teacher, students, weights, values)

        run_blocks(add_blocks, list(_groups(metadata, teacher.q)), weights.device)
        ctx.save_for_backward(*(x for one in students for x in (one.grad_q, one.grad_k)))
        return (values * weights).sum(dim=(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that forward computed, times the factors of the sums."""
        saved = ctx.saved_tensors
        results = [
            None if one is None else (one * grads[0][index // 2]) for index, one in enumerate(saved)
        ]
        return None, None, None, None, None, *results


class _Scores:
    """Attention scores of one model, and the gradients of its queries and keys so far."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, *, needs_grad: bool) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k = (q.to(wide) * scale).contiguous(), k.to(wide).contiguous()
        self.needs_grad, self._scale = needs_grad, scale
        self.grad_q = torch.zeros_like(self.q) if needs_grad else None
        self.grad_k = torch.zeros_like(self.k) if needs_grad else None

    def log_probabilities(self, block: QueryBlock, mask: Tensor) -> Tensor:
        """Return the logarithms of the attention, [rows * heads, queries, keys].

        Hidden keys have a finite one, so that differences between models do.
        """
        q, k = self._operands(block)
        scores = torch.bmm(q, k.transpose(1, 2)).view(-1, *mask.shape)
        return F.log_softmax(scores.add_(mask), dim=-1)

    def _operands(self, block: QueryBlock) -> tuple[Tensor, Tensor]:
        """Return queries and keys of a block as batches of matrices, one for each KV head.

        The query heads that share a KV head are rows of one matrix.
        """
        k = self.k[_slice(block.rows), :, _slice(block.keys)].flatten(0, 1)
        q = self.q[_slice(block.rows), :, _slice(block.queries)]
        return q.reshape(len(k), -1, q.shape[-1]), k

    def add_grad(self, block: QueryBlock, grad: Tensor, weights: Tensor) -> None:
        """Add the gradients that follow from the gradient of a block's scores.

        `weights` of the queries are multiplied into the results, which are smaller.
        """
        assert self.grad_q is not None
        assert self.grad_k is not None
        q, k = self._operands(block)
        rows, queries, keys = _slice(block.rows), _slice(block.queries), _slice(block.keys)
        grad = grad.view(*q.shape[:2], -1)
        part = self.grad_q[rows, :, queries]
        torch.mul(torch.bmm(grad, k).view(part.shape), weights * self._scale, out=part)
        weighted = (q.view(part.shape) * weights).view(q.shape)
        part = self.grad_k[rows, :, keys]
        part += torch.bmm(grad.transpose(1, 2), weighted).view(part.shape)


def _add_block(
    block: QueryBlock,
    teacher: _Scores,
    students: Sequence[_Scores],
    weights: Tensor,
    values: Tensor,
) -> None:
    """Store the students' divergences of a block of queries, summed over heads, and add their
    gradients times `weights`."""
    mask = block.mask(teacher.q, _HIDDEN_SCORE)
    assert mask is not None
    rows, queries = _slice(block.rows), _slice(block.queries)
    log_p = teacher.log_probabilities(block, mask)
    p = log_p.exp()
    for student, value in zip(students, values, strict=True):
        log_q = student.log_probabilities(block, mask)
        by_head = (log_p - log_q).mul_(p).sum(dim=-1)
        value[rows, queries] = by_head.unflatten(0, (len(block.rows), -1)).sum(dim=1)
        if student.needs_grad:
            student.add_grad(block, log_q.exp_().sub_(p), weights[rows, None, queries, None])


def _groups(metadata: AttentionMetadata, q: Tensor) -> Iterator[list[QueryBlock]]:
    """Yield groups of blocks that share no queries or keys.

    The scores of a block have a limit: on a CPU its cache, and on every device a size.
    """
    queries = divergence_queries(q.shape[1], q.shape[2], metadata.window, q.itemsize)
    for blocks in metadata.banded_blocks(queries):
        scores = max(len(block.queries) * len(block.keys) for block in blocks)
        rows = blocks[0].rows
        row_bytes = q.shape[1] * scores * q.itemsize
        size = divergence_rows(row_bytes, len(rows), on_cpu=q.device.type == "cpu")
        for start in rows[::size]:
            part = range(start, min(start + size, rows.stop))
            yield [block._replace(rows=part) for block in blocks]


def run_blocks(work: Callable[[T], None], blocks: Sequence[T], device: torch.device) -> None:
    """Run `work` on all blocks; on a CPU, each thread runs others.

    Threads would wait for each other after every operation on a small block.
    """
    pool = thread_pool() if device.type == "cpu" and len(blocks) > 1 else None
    if pool is not None:
        pool.run_each(lambda index: work(blocks[index]), range(len(blocks)))
        return
    for block in blocks:
        work(block)


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def relation_divergence(
    teacher: AttentionReport,
    students: Sequence[AttentionReport],
    metadata: AttentionMetadata,
    token_weights: Tensor,
) -> Tensor:
    """Return the divergence of query-query and key-key relations of each student, [students].

    The arguments are those of `attention_divergence`, but heads may differ. The heads' channels are
    concatenated and split again into relation heads: as many as divide both widths, and at most as
    many as the teacher has heads. The result is the mean of both relations.
    """
    totals = []
    for student in students:
        relations = [
            attention_divergence(*_relations(*both), metadata, token_weights)
            for both in zip(teacher[:2], student[:2], strict=True)
        ]
        totals.append(torch.cat(relations).mean())
    return torch.stack(totals)


def _relations(
    teacher: Tensor | None, student: Tensor | None
) -> tuple[AttentionReport, list[AttentionReport]]:
    """Return queries or keys, [batch, heads, sequence, channels], as both sides of relations."""
    assert teacher is not None, "attention was to keep queries and keys"
    assert student is not None
    both = [x.transpose(1, 2).flatten(2) for x in (teacher, student)]
    heads = relation_heads(both[1].shape[2], both[0].shape[2], teacher.shape[1])
    first, second = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in both)
    return AttentionReport(first, first), [AttentionReport(second, second)]


def hidden_distance(teacher: Tensor, student: Tensor, token_weights: Tensor) -> Tensor:
    """Return the weighted sum over tokens of the mean square between RMS-normalised states.

    Both states are [batch, sequence, width].
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    target, state = (
        F.rms_norm(x.to(wide), x.shape[-1:], eps=_EPSILON) for x in (teacher.detach(), student)
    )
    return ((state - target).square().mean(dim=-1) * token_weights).sum()


def logits_divergence(
    log_p: Tensor, log_q: Tensor, kind: Divergence, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token, and its gradient in the student's logits.

    Args:
        log_p: log-probabilities of the teacher, [tokens, vocab].
        log_q: log-probabilities of the student, [tokens, vocab].
        kind: divergence.
        temperature: divisor of both logits before the softmax.
    """
    log_p, log_q = _tempered(log_p, temperature), _tempered(log_q, temperature)
    if kind == "forward":
        p, ratio = log_p.exp(), log_p - log_q
        values = torch.linalg.vecdot(p, ratio)
        grad = torch.exp(log_q, out=ratio).sub_(p)
    elif kind == "reverse":
        q, ratio = log_q.exp(), log_q - log_p
        values = torch.linalg.vecdot(q, ratio)
        grad = ratio.sub_(values[:, None]).mul_(q)
    else:
        p, q = log_p.exp(), log_q.exp()
        log_mean = torch.logaddexp(log_p, log_q).sub_(math.log(2))
        to_mean = log_q - log_mean
        reverse = torch.linalg.vecdot(q, to_mean)
        values = (torch.linalg.vecdot(p, log_p - log_mean) + reverse) / 2
        grad = to_mean.sub_(reverse[:, None]).mul_(q).div_(2)
    return values, grad if temperature == 1.0 else grad.div_(temperature)


def _tempered(log_p: Tensor, temperature: float) -> Tensor:
    return log_p if temperature == 1.0 else F.log_softmax(log_p / temperature, dim=-1)
