"""Losses of a head's followers, and divergences of logits, against whole logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.nn.divergence import logits_divergence
from moesaic.nn.inputs import Divergence, HeadFollower
from moesaic.nn.loss import IGNORE_INDEX, follower_losses, head_loss
from moesaic.testing.memory import peak_allocated

VOCAB, TOKENS = 200, 700
"""Several chunks of followers."""


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def whole_divergence(
    teacher: Tensor, student: Tensor, kind: Divergence, temperature: float
) -> Tensor:
    """Return the divergence of each row of logits, by autograd's means."""
    log_p, log_q = ((x / temperature).log_softmax(dim=-1) for x in (teacher, student))
    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    log_mean = ((log_p.exp() + log_q.exp()) / 2).log()
    return (kl(log_p, log_mean) + kl(log_q, log_mean)) / 2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])
def test_divergence_of_logits(kind: Divergence, temperature: float) -> None:
    teacher, student = (3 * torch.randn(20, 50).double().requires_grad_() for _ in "ab")
    teacher = teacher.detach()
    expected = whole_divergence(teacher, student, kind, temperature)
    log_p, log_q = (x.detach().log_softmax(dim=-1) for x in (teacher, student))
    actual, grad = logits_divergence(log_p, log_q, kind, temperature)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    (expected_grad,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)
    values, grad = logits_divergence(log_p, log_p, kind, temperature)
    torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)


def make_tensors(
    width: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return hidden states and a projection."""
    hidden, weight = torch.randn(tokens, width), torch.randn(VOCAB, width)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def make_followers(kind: Divergence = "forward") -> list[HeadFollower]:
    """Return an assistant, two students of it, a student of the model, and one of text alone."""
    widths = (7, 3, 4, 5, 6)
    factors = ((0.3, 0.7), (0.0, 1.1), (0.2, 0.1), (0.5, 0.4), (0.6, 0.0))
    teachers, temperatures = (-1, 0, 0, -1, 1), (1.0, 2.0, 1.0, 3.0, 1.0)
    return [
        HeadFollower(*make_tensors(width), *pair, kind, temperature, teacher)
        for width, pair, teacher, temperature in zip(
            widths, factors, teachers, temperatures, strict=True
        )
    ]


def make_targets(tokens: int = TOKENS) -> Tensor:
    targets = torch.randint(VOCAB, (tokens,))
    targets[::3] = IGNORE_INDEX
    return targets


def whole_losses(
    x: Tensor, weight: Tensor, targets: Tensor, followers: Sequence[HeadFollower]
) -> tuple[Tensor, Tensor]:
    """Return the followers' losses and unweighted sums by whole logits."""
    present, losses, sums = targets != IGNORE_INDEX, [], []
    logits = [(x @ weight.T).detach()]
    for one in followers:
        own = one.hidden @ one.weight.T
        logits.append(own.detach())
        text = F.cross_entropy(own, targets, reduction="sum", ignore_index=IGNORE_INDEX)
        teacher = logits[one.teacher + 1]
        values = whole_divergence(teacher, own, one.divergence, one.temperature)
        divergence = values[present].sum() * bool(one.logits)
        losses.append(one.text * text + one.logits * divergence)
        sums.append(torch.stack((text, divergence)).detach())
    return torch.stack(losses), torch.stack(sums)


def leaves(followers: Sequence[HeadFollower]) -> list[Tensor]:
    return [x for one in followers for x in (one.hidden, one.weight)]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let torch use as many threads as the parameter says."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("kind", "threads"), [("forward", 1), ("forward", 2), ("reverse", 1), ("jensen", 1)],
    indirect=["threads"],
)  # fmt: skip
def test_followers_equal_whole_logits(kind: Divergence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.facts.workload.sizes.DIVERGENCE_BLOCK_BYTES", 1 << 16)
    x, weight = make_tensors(9)
    targets, followers = make_targets(), make_followers(kind)
    factors = torch.arange(1.0, 6.0).double()
    loss, results = head_loss(x, weight, targets, 0.25, followers=followers)
    assert results is not None
    expected, sums = whole_losses(x, weight, targets, followers)
    torch.testing.assert_close(results.loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(results.sums, sums, rtol=1e-9, atol=1e-9)
    total = 2 * loss + (factors * results.loss).sum()
    actual = torch.autograd.grad(total, [x, weight, *leaves(followers)])
    plain = 0.5 * F.cross_entropy(x @ weight.T, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    expected_grads = torch.autograd.grad(
        plain + (factors * expected).sum(), [x, weight, *leaves(followers)]
    )
    for first, second in zip(actual, expected_grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_keeps_its_bits_beside_followers(dtype: torch.dtype) -> None:
    x, weight = make_tensors(9, 1500, dtype)
    targets = make_targets(1500)
    followers = [HeadFollower(*make_tensors(width, 1500, dtype), 0.1, 0.2) for width in (3, 8)]
    runs = []
    for number in range(3):
        chosen = followers[:number]
        loss, results = head_loss(x, weight, targets, 0.25, followers=chosen)
        total = loss if results is None else loss + results.loss.sum()
        grads = torch.autograd.grad(total, (x, weight, *leaves(chosen)))
        runs.append((loss, *grads))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for one, other in zip(runs[first], runs[second], strict=False):
            assert torch.equal(one, other)


def test_a_frozen_model_serves_its_followers() -> None:
    x, weight = make_tensors(9)
    targets, followers = make_targets(), make_followers()
    with torch.no_grad():
        loss, results = head_loss(x.detach(), weight.detach(), targets, 1.0, followers=followers)
    assert not loss.requires_grad
    assert results is not None
    expected, _ = whole_losses(x, weight, targets, followers)
    for first, second in zip(
        torch.autograd.grad(results.loss.sum(), leaves(followers)),
        torch.autograd.grad(expected.sum(), leaves(followers)),
        strict=True,
    ):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_followers_keep_their_bits_without_a_model(dtype: torch.dtype) -> None:
    """With a student of text, and one that learns from it."""
    targets = make_targets(1500)
    x, weight = (one.detach() for one in make_tensors(9, 1500, dtype))
    text = HeadFollower(*make_tensors(5, 1500, dtype), 0.3, 0.0)
    followers = [text, HeadFollower(*make_tensors(8, 1500, dtype), 0.1, 0.2, teacher=0)]
    _, beside = head_loss(x, weight, targets, 0.25, followers=followers)
    alone = follower_losses(targets, followers)
    assert beside is not None
    grads = []
    for one in (beside, alone):
        total = one.loss[0] + 2 * one.loss[1]
        grads.append((*one, *torch.autograd.grad(total, leaves(followers))))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_a_follower_that_only_teaches_gets_no_gradient() -> None:
    """Such as an assistant that learns attention alone."""
    x, weight = make_tensors(9)
    assistant = HeadFollower(*make_tensors(7), 0.0, 0.0)
    student = HeadFollower(*make_tensors(3), 0.0, 1.0, teacher=0)
    loss, results = head_loss(x, weight, make_targets(), 1.0, followers=[assistant, student])
    assert results is not None
    total = loss + results.loss.sum()
    grads = torch.autograd.grad(total, leaves([assistant, student]), allow_unused=True)
    assert [grad is None for grad in grads] == [True, True, False, False]


def test_evaluation_keeps_no_gradient() -> None:
    x, weight = make_tensors(9)
    targets = make_targets()
    followers = [replace(one, hidden=one.hidden.detach()) for one in make_followers()]
    with torch.no_grad():
        _, results = head_loss(x, weight, targets, 1.0, followers=followers)
    assert results is not None
    assert not results.loss.requires_grad
    expected, _ = whole_losses(x, weight, targets, followers)
    torch.testing.assert_close(results.loss, expected.detach(), rtol=1e-9, atol=1e-9)


def test_a_student_equal_to_its_teacher_has_no_loss() -> None:
    x, weight = make_tensors(9)
    targets = make_targets()
    same = (one.detach().clone().requires_grad_() for one in (x, weight))
    _, results = head_loss(x, weight, targets, 1.0, followers=[HeadFollower(*same, 0.0, 1.0)])
    assert results is not None
    assert abs(float(results.loss.detach())) < 1e-12


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])
def test_whole_logits_never_exist(kind: Divergence) -> None:
    """More tokens need more memory for their hidden states and gradients alone."""

    def run(tokens: int) -> None:
        x, weight = make_tensors(4, tokens)
        followers = [
            HeadFollower(*make_tensors(4, tokens), 0.5, 0.5, kind, 2.0, teacher)
            for teacher in (-1, 0)
        ]
        loss, results = head_loss(x, weight, make_targets(tokens), 1.0, followers=followers)
        assert results is not None
        (loss + results.loss.sum()).backward()

    few, many = peak_allocated(partial(run, 2048), partial(run, 8192))
    assert many - few < 6144 * VOCAB * 8 / 2, "half of the logits of the other tokens"
