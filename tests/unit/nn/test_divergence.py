"""Divergences of attention, relations and hidden states against their whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.facts.workload import sizes
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.divergence import (
    _groups,
    attention_divergence,
    hidden_distance,
    relation_divergence,
)
from moesaic.nn.reports import AttentionReport
from moesaic.testing.memory import peak_allocated

BATCH, SEQUENCE = 3, 150
DOCUMENTS = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
DOCUMENTS[1, 20:], DOCUMENTS[1, 149:], DOCUMENTS[2, 133:] = 1, 2, 1


class Heads(NamedTuple):
    """Numbers of heads and channels of a model."""

    queries: int = 4
    keys: int = 4
    channels: int = 6


TEACHER = Heads(4, 2, 6)


def report(heads: Heads, seed: int, scale: float | None = None) -> AttentionReport:
    """Return random queries and keys, in token order in memory as layers have them."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(BATCH, SEQUENCE, number, heads.channels, generator=generator).double()
        for number in heads[:2]
    )
    return AttentionReport(*(x.transpose(1, 2).requires_grad_() for x in (q, k)), scale)


def probabilities(one: AttentionReport, seen: Tensor) -> Tensor:
    """Return the attention of whole sequences, [batch, heads, queries, keys]."""
    assert one.queries is not None
    assert one.keys is not None
    q, k = one.queries, one.keys
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if one.scale is None else one.scale
    scores = q @ k.transpose(2, 3) * scale
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)


def divergence(
    teacher: AttentionReport, student: AttentionReport, seen: Tensor, weights: Tensor
) -> Tensor:
    """Return the divergence by the whole attention of both."""
    p, q = probabilities(teacher, seen).detach(), probabilities(student, seen)
    values = F.kl_div(q.clamp(min=1e-300).log(), p, reduction="none").sum(dim=-1).mean(dim=1)
    return (values * weights).sum()


def seen_keys(window: int | None) -> Tensor:
    position = torch.arange(SEQUENCE)
    distance = position[:, None] - position
    near = (distance >= 0) & (distance < (window or SEQUENCE))
    return near & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])


def token_weights() -> Tensor:
    weights = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(9)).double()
    weights[:, ::7] = 0
    return weights


def gradients(result: Tensor, *students: AttentionReport) -> tuple[Tensor, ...]:
    tensors = [x for one in students for x in one[:2] if x is not None]
    return torch.autograd.grad(result, tensors)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let torch use as many threads as the parameter says."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("threads", "window", "block_bytes", "max_bytes"),
    [(1, None, 1 << 14, 1 << 25), (1, 40, 1 << 24, 1 << 25), (2, 40, 1 << 14, 1 << 13)],
    indirect=["threads"],
)  # fmt: skip
def test_attention_equals_whole_probabilities(
    window: int | None, block_bytes: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last case a block has few queries."""
    monkeypatch.setattr(f"{sizes.__name__}.DIVERGENCE_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(f"{sizes.__name__}.DIVERGENCE_MAX_BYTES", max_bytes)
    metadata, weights = AttentionMetadata.packed(DOCUMENTS, window), token_weights()
    teacher = report(TEACHER, 0, scale=0.3)
    students = [report(Heads(4, 4, 3), 1), report(Heads(4, 1, 8), 2, scale=0.5)]
    factors = torch.tensor([2.0, -0.7], dtype=torch.float64)
    actual = attention_divergence(teacher, students, metadata, weights)
    expected = torch.stack(
        [divergence(teacher, one, seen_keys(window), weights) for one in students]
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        gradients((actual * factors).sum(), *students),
        gradients((expected * factors).sum(), *students),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip


def test_equal_attention_has_no_loss() -> None:
    metadata, teacher = AttentionMetadata.packed(DOCUMENTS), report(TEACHER, 0)
    loss = attention_divergence(teacher, [teacher], metadata, token_weights())
    assert loss.tolist() == [0.0]
    same = AttentionReport(
        *(x.detach().clone().requires_grad_() for x in teacher[:2] if x is not None)
    )
    (loss,) = attention_divergence(teacher, [same], metadata, token_weights())
    assert not any(bool(grad.any()) for grad in gradients(loss, same))
    assert teacher.queries is not None
    assert teacher.queries.grad is None


def test_tokens_without_a_document_count_nothing() -> None:
    """Queries outside of all segments attend to nothing."""
    metadata = AttentionMetadata.causal(1, SEQUENCE)
    teacher, student = report(TEACHER, 0), report(Heads(), 1)
    weights = token_weights()
    (first,) = attention_divergence(teacher, [student], metadata, weights)
    (expected,) = attention_divergence(
        teacher, [student], AttentionMetadata.causal(BATCH, SEQUENCE), weights * torch.eye(3)[:, :1]
    )
    torch.testing.assert_close(first, expected)
    grads = gradients(first, student)
    assert not any(bool(grad[1:].any()) for grad in grads)
    assert all(bool(grad[0].any()) for grad in grads)


@pytest.mark.parametrize(
    ("batch", "heads", "length", "window"),
    [(64, 16, 512, None), (4, 32, 1 << 15, None), (2, 64, 1 << 16, 4096)],
)
def test_blocks_have_a_limit_on_every_device(
    batch: int, heads: int, length: int, window: int | None
) -> None:
    """Tensors without memory stand for those of a GPU."""
    q = torch.empty(batch, heads, length, 64, device="meta")
    blocks = [
        block
        for group in _groups(AttentionMetadata.causal(batch, length, window=window), q)
        for block in group
    ]
    largest = max(len(one.rows) * heads * len(one.queries) * len(one.keys) * 4 for one in blocks)
    assert largest <= sizes.DIVERGENCE_MAX_BYTES
    assert largest > sizes.DIVERGENCE_MAX_BYTES / 4
    assert sum(len(one.rows) * len(one.queries) for one in blocks) == batch * length


def test_memory_is_linear_in_the_sequence() -> None:
    def run(length: int) -> None:
        heads = torch.randn(3, 1, 4, length, 8, requires_grad=True)
        teacher, *students = (AttentionReport(x, x) for x in heads)
        metadata = AttentionMetadata.causal(1, length)
        attention_divergence(teacher, students, metadata, torch.ones(1, length)).sum().backward()

    half, whole = peak_allocated(partial(run, 1024), partial(run, 2048))
    assert whole <= 2.1 * half
    assert whole < 4 * 2048**2 * 4 / 4, "a quarter of one model's probabilities"


def test_relations_equal_whole_probabilities() -> None:
    """Heads differ; queries have 4 relation heads, and keys 2."""
    metadata, weights = AttentionMetadata.packed(DOCUMENTS), token_weights()
    teacher, students = report(TEACHER, 0), [report(Heads(2, 1, 8), 1), report(Heads(8, 4, 5), 2)]
    expected = []
    for student in students:
        relations = []
        for first, second, heads in zip(teacher[:2], student[:2], (4, 2), strict=True):
            assert first is not None
            assert second is not None
            sides = (
                x.transpose(1, 2).reshape(BATCH, SEQUENCE, heads, -1).transpose(1, 2)
                for x in (first, second)
            )
            both = [AttentionReport(x, x) for x in sides]
            relations.append(divergence(*both, seen_keys(None), weights))
        expected.append(sum(relations) / 2)
    actual = relation_divergence(teacher, students, metadata, weights)
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        gradients(actual.sum(), *students), gradients(sum(expected), *students),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip


def test_hidden_distance() -> None:
    teacher, student = (torch.randn(BATCH, SEQUENCE, 10).double().requires_grad_() for _ in "ab")
    weights = token_weights()
    normed = [x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() for x in (teacher, student)]
    expected = (weights * (normed[1] - normed[0].detach()).square().mean(dim=-1)).sum()
    actual = hidden_distance(teacher, student, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert torch.autograd.grad(actual, teacher, allow_unused=True, retain_graph=True) == (None,)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, student) for one in (actual, expected)), rtol=1e-9, atol=1e-9
    )
    assert float(hidden_distance(student, student.detach(), weights)) == 0
