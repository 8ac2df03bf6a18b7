"""Divergences of students from their teacher: of logits, attention, relations and hidden states.

Attention probabilities are computed a few queries at a time, with their gradient in forward. The
probabilities of all queries would need memory that is quadratic in the sequence. A teacher's
probabilities are computed once for all of its students.

Losses are sums over tokens, times a weight of each token, and means over heads. A teacher receives
no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Divergence
from moesaic.nn.reports import AttentionReport


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
    raise NotImplementedError


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
    raise NotImplementedError


def hidden_distance(teacher: Tensor, student: Tensor, token_weights: Tensor) -> Tensor:
    """Return the weighted sum over tokens of the mean square between RMS-normalised states.

    Both states are [batch, sequence, width].
    """
    raise NotImplementedError


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
