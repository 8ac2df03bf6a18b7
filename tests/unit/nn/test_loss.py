"""Fused output projection and loss against `F.cross_entropy` over all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.nn.loss import IGNORE_INDEX, head_loss


@pytest.mark.parametrize("rows", [0, 1, 7, 2500])
def test_equals_cross_entropy(rows: int) -> None:
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (rows,))
    targets[::3] = IGNORE_INDEX
    loss, _ = head_loss(x, weight, targets, (1 / 3))
    expected = (1 / 3) * F.cross_entropy(
        x @ weight.T, targets, reduction="sum", ignore_index=IGNORE_INDEX
    )
    torch.testing.assert_close(loss, expected)
    actual_grads = torch.autograd.grad(3.0 * loss, (x, weight))
    expected_grads = torch.autograd.grad(3.0 * expected, (x, weight))
    torch.testing.assert_close(actual_grads, expected_grads)


def test_split_backward() -> None:
    """Input gradients come first, then weight gradients from the same graph."""
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (5,))
    loss = 3.0 * head_loss(x, weight, targets, 0.5)[0]
    expected = 1.5 * F.cross_entropy(x @ weight.T, targets, reduction="sum")
    (grad_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    grads = (grad_x.clone(), *torch.autograd.grad(loss, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weight)))


def test_without_gradients_only_the_loss_is_computed() -> None:
    x, weight = torch.randn(5, 6), torch.randn(11, 6)
    targets = torch.randint(11, (5,))
    with torch.no_grad():
        loss, _ = head_loss(x, weight, targets, 1.0)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.T, targets, reduction="sum"))


def test_bf16_rows() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.2 * torch.randn(50, 32)).requires_grad_()
    targets = torch.randint(50, (64,))
    head_loss(x, weight, targets, 1 / 64)[0].backward()
    exact = weight.detach().clone().requires_grad_()
    F.cross_entropy(x.detach().float() @ exact.T, targets).backward()
    assert weight.grad.dtype == torch.float32
    assert float((weight.grad - exact.grad).norm() / exact.grad.norm()) < 0.02
