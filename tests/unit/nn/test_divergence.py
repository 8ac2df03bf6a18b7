"""Divergences of attention, relations and hidden states against their whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
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
from moesaic.testing.divergences import (
    attention_by_whole,
    hidden_by_whole,
    relations_by_whole,
    visible_keys,
)
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
    visible = visible_keys(DOCUMENTS, window)
    expected = torch.stack([attention_by_whole(teacher, one, visible, weights) for one in students])
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
    visible = visible_keys(DOCUMENTS)
    expected = torch.stack(
        [relations_by_whole(teacher, one, visible, weights, (4, 2)) for one in students]
    )
    actual = relation_divergence(teacher, students, metadata, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        gradients(actual.sum(), *students), gradients(expected.sum(), *students),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip


def test_hidden_distance() -> None:
    teacher, student = (torch.randn(BATCH, SEQUENCE, 10).double().requires_grad_() for _ in "ab")
    weights = token_weights()
    expected = hidden_by_whole(teacher, student, weights)
    actual = hidden_distance(teacher, student, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert torch.autograd.grad(actual, teacher, allow_unused=True, retain_graph=True) == (None,)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, student) for one in (actual, expected)), rtol=1e-9, atol=1e-9
    )
    assert float(hidden_distance(student, student.detach(), weights)) == 0
