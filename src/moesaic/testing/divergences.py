"""Divergences of attention, relations and hidden states by whole tensors, for comparison."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.nn.reports import AttentionReport


def visible_keys(documents: Tensor, window: int | None = None) -> Tensor:
    """Return true for the keys that each query attends to, [batch, queries, keys].

    `documents` has the document of each token, [batch, sequence].
    """
    position = torch.arange(documents.shape[1])
    distance = position[:, None] - position
    near = (distance >= 0) & (distance < (window or len(position)))
    return near & (documents[:, :, None] == documents[:, None])


def attention_by_whole(
    teacher: AttentionReport, student: AttentionReport, visible: Tensor, weights: Tensor
) -> Tensor:
    """Return KL(teacher's attention || student's), differentiable in the student.

    Args:
        teacher: queries and keys with as many query heads as the student has.
        student: queries and keys of the same tokens.
        visible: keys that each query attends to, [batch, queries, keys].
        weights: factor of each query's divergence, [batch, sequence].
    """
    p, q = _probabilities(teacher, visible).detach(), _probabilities(student, visible)
    values = F.kl_div(q.clamp(min=1e-300).log(), p, reduction="none").sum(dim=-1).mean(dim=1)
    return (values * weights).sum()


def relations_by_whole(
    teacher: AttentionReport,
    student: AttentionReport,
    visible: Tensor,
    weights: Tensor,
    heads: tuple[int, int],
) -> Tensor:
    """Return the mean divergence of query-query and key-key relations; the arguments are those of
    `attention_by_whole`, and the relation heads of queries and of keys."""
    relations = []
    for first, second, number in zip(teacher[:2], student[:2], heads, strict=True):
        assert first is not None
        assert second is not None
        p, q = (
            x.transpose(1, 2).flatten(2).unflatten(2, (number, -1)).transpose(1, 2)
            for x in (first, second)
        )
        both = AttentionReport(p, p), AttentionReport(q, q)
        relations.append(attention_by_whole(*both, visible, weights))
    return torch.stack(relations).mean()


def hidden_by_whole(teacher: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over tokens of the mean square between normalised states."""
    normed = [
        x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        for x in (teacher.detach(), student)
    ]
    return (weights * (normed[1] - normed[0]).square().mean(dim=-1)).sum()


def _probabilities(one: AttentionReport, visible: Tensor) -> Tensor:
    """Return the attention of whole sequences, [batch, heads, queries, keys]."""
    assert one.queries is not None
    assert one.keys is not None
    q, k = one.queries, one.keys
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if one.scale is None else one.scale
    scores = q @ k.transpose(2, 3) * scale
    return scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
