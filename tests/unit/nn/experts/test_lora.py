"""LoRA experts against dense weights W + scale * B A; frozen weights get no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sorted_rows import identity_permutation, run_bank, run_experts
from torch import Tensor

from moesaic.nn.attention import Linear
from moesaic.nn.experts import tiles
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.lora import Adapters, AdapterShape

COUNTS = [[3, 0, 2, 9], [0, 0, 5, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
HIDDEN, FFN, RANK, SCALE = 6, 5, 3, 0.7


def make_bank(
    dtype: torch.dtype, hidden: int = HIDDEN, ffn: int = FFN
) -> tuple[ExpertBank, Adapters]:
    bank = ExpertBank([4, 1, 0, 7], hidden, ffn)
    bank.add_adapters(RANK, SCALE)
    assert bank.adapters is not None
    for parameter in bank.to(dtype).parameters():
        parameter.data.normal_(0.0, 0.4)
    bank.arena.requires_grad_(False)
    return bank, bank.adapters


def dense_experts(
    rows: Tensor, bank: ExpertBank, adapters: Adapters, arena: Tensor, counts: list[int]
) -> Tensor:
    """Compute with the full matrices; `arena` replaces the adapters' arena."""
    own = {(e, matrix): view for e, matrix, view in bank.matrices(bank.arena)}
    lora = {(e, matrix): view for e, matrix, view in adapters.matrices(arena)}
    results = []
    for expert, expert_rows in zip(bank.experts, rows.split(counts), strict=True):
        gate, up, down = (
            own[expert, name]
            + SCALE * lora[expert, f"{name}.lora_b"] @ lora[expert, f"{name}.lora_a"]
            for name in ("gate", "up", "down")
        )
        results.append((F.silu(expert_rows @ gate.T) * (expert_rows @ up.T)) @ down.T)
    return torch.cat(results)


@pytest.mark.parametrize("range_rows", [1, 4, 1000])
@pytest.mark.parametrize("counts", COUNTS)
def test_experts_equal_their_twin(
    counts: list[int], range_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_RANGE_BYTES", range_rows * 2 * FFN * 8)
    bank, adapters = make_bank(torch.float64)
    rows = torch.randn(sum(counts), HIDDEN, dtype=torch.float64, requires_grad=True)
    out = run_bank(bank, rows, identity_permutation(counts))
    expected = dense_experts(rows, bank, adapters, adapters.arena, counts)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (rows, adapters.arena), cotangent)
    theirs = torch.autograd.grad(expected, (rows, adapters.arena), cotangent)
    for a, b in zip((out, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    grads = {(e, matrix): view for e, matrix, view in adapters.matrices(ours[1])}
    for expert, count in zip(bank.experts, counts, strict=True):
        for matrix in ("gate", "up", "down"):
            for end in ("lora_a", "lora_b"):
                assert bool(grads[expert, f"{matrix}.{end}"].any()) == (count > 0)


def test_adapter_matrices_cover_every_element_once() -> None:
    adapters = Adapters([4, 7], AdapterShape(HIDDEN, FFN, RANK, SCALE))
    mark = torch.zeros_like(adapters.arena)
    shapes = {}
    for expert, matrix, view in adapters.matrices(mark):
        view += 1
        shapes[expert, matrix] = tuple(view.shape)
    assert bool((mark == 1).all())
    assert (shapes[7, "up.lora_a"], shapes[7, "up.lora_b"]) == ((RANK, HIDDEN), (FFN, RANK))
    assert (shapes[4, "down.lora_a"], shapes[4, "down.lora_b"]) == ((RANK, FFN), (HIDDEN, RANK))


def test_bf16_rows_over_fp32_adapters() -> None:
    bank, adapters = make_bank(torch.float32, 16, 8)
    permutation = identity_permutation([25, 0, 15, 9])
    rows = torch.randn(49, 16)
    out = run_bank(bank, rows.bfloat16(), permutation)
    (grad,) = torch.autograd.grad(out.float().square().sum(), adapters.arena)
    reference = run_bank(bank, rows, permutation)
    (exact,) = torch.autograd.grad(reference.square().sum(), adapters.arena)
    assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
    for a, b in ((out.float(), reference), (grad, exact)):
        assert float(((a - b).norm() / b.norm()).detach()) < 0.03


def test_frozen_experts_skip_weight_gradients() -> None:
    rows = torch.randn(6, HIDDEN, requires_grad=True)
    arena, counts = torch.randn(3, 3 * FFN * HIDDEN), [4, 0, 2]
    products = []
    for trainable in (True, False):
        weights = arena.clone().requires_grad_(trainable)
        out = run_experts(rows, weights, counts, FFN)
        with torch.profiler.profile() as profile:
            out.sum().backward()
        names = [event.name for event in profile.events()]
        products.append((names.count("moesaic::grouped_mm"), names.count("moesaic::grouped_wgrad")))
        assert (weights.grad is not None) == trainable
    assert products == [(2, 2), (2, 0)]
    grad_rows = rows.grad
    assert grad_rows is not None
    assert torch.equal(
        grad_rows / 2, torch.autograd.grad(summed_output(rows, arena, counts), rows)[0]
    )


def summed_output(rows: Tensor, arena: Tensor, counts: list[int]) -> Tensor:
    return run_experts(rows, arena, counts, FFN).sum()


def test_linear_equals_dense_weight() -> None:
    linear = Linear(HIDDEN, FFN)
    linear.add_adapters(RANK, SCALE)
    for parameter in linear.double().parameters():
        parameter.data.normal_()
    linear.weight.requires_grad_(False)
    x = torch.randn(2, 7, HIDDEN, dtype=torch.float64, requires_grad=True)
    a, b = linear.lora_a, linear.lora_b
    assert a is not None
    assert b is not None
    out, expected = linear(x), F.linear(x, linear.weight + SCALE * b @ a)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, a, b), cotangent)
    theirs = torch.autograd.grad(expected, (x, a, b), cotangent)
    for left, right in zip((out, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
