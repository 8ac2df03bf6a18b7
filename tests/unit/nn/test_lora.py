"""Adapters against a dense twin, W + scale * B A written out; frozen weights have no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from straight import experts_of, straight, through
from torch import Tensor

from moesaic.nn import shares
from moesaic.nn.attention import Linear
from moesaic.nn.bank import Bank
from moesaic.nn.lora import Adapters, Shape

COUNTS = [[3, 0, 2, 9], [0, 0, 5, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
HIDDEN, FFN, RANK, SCALE = 6, 5, 3, 0.7


def bank_of(dtype: torch.dtype, hidden: int = HIDDEN, ffn: int = FFN) -> tuple[Bank, Adapters]:
    bank = Bank([4, 1, 0, 7], hidden, ffn)
    bank.adapt(RANK, SCALE)
    assert bank.adapters is not None
    for parameter in bank.to(dtype).parameters():
        parameter.data.normal_(0.0, 0.4)
    bank.arena.requires_grad_(False)
    return bank, bank.adapters


def twin(rows: Tensor, bank: Bank, adapters: Adapters, arena: Tensor, counts: list[int]) -> Tensor:
    """Every expert's matrices written out; `arena` stands for that of the adapters."""
    own = {(e, part): view for e, part, view in bank.matrices(bank.arena)}
    thin = {(e, part): view for e, part, view in adapters.matrices(arena)}
    results = []
    for expert, part in zip(bank.experts, rows.split(counts), strict=True):
        gate, up, down = (
            own[expert, name]
            + SCALE * thin[expert, f"{name}.lora_b"] @ thin[expert, f"{name}.lora_a"]
            for name in ("gate", "up", "down")
        )
        results.append((F.silu(part @ gate.T) * (part @ up.T)) @ down.T)
    return torch.cat(results)


@pytest.mark.parametrize("share_rows", [1, 4, 1000])
@pytest.mark.parametrize("counts", COUNTS)
def test_experts_equal_their_twin(
    counts: list[int], share_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_SHARE_BYTES", share_rows * 2 * FFN * 8)
    bank, adapters = bank_of(torch.float64)
    rows = torch.randn(sum(counts), HIDDEN, dtype=torch.float64, requires_grad=True)
    out = through(bank, rows, straight(counts))
    expected = twin(rows, bank, adapters, adapters.arena, counts)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (rows, adapters.arena), cotangent)
    theirs = torch.autograd.grad(expected, (rows, adapters.arena), cotangent)
    for a, b in zip((out, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    grads = {(e, part): view for e, part, view in adapters.matrices(ours[1])}
    for expert, count in zip(bank.experts, counts, strict=True):
        for part in ("gate", "up", "down"):
            for end in ("lora_a", "lora_b"):
                assert bool(grads[expert, f"{part}.{end}"].any()) == (count > 0)


def test_adapters_name_every_element_once() -> None:
    adapters = Adapters([4, 7], Shape(HIDDEN, FFN, RANK, SCALE))
    mark = torch.zeros_like(adapters.arena)
    shapes = {}
    for expert, part, view in adapters.matrices(mark):
        view += 1
        shapes[expert, part] = tuple(view.shape)
    assert bool((mark == 1).all())
    assert (shapes[7, "up.lora_a"], shapes[7, "up.lora_b"]) == ((RANK, HIDDEN), (FFN, RANK))
    assert (shapes[4, "down.lora_a"], shapes[4, "down.lora_b"]) == ((RANK, FFN), (HIDDEN, RANK))


def test_bf16_rows_over_fp32_adapters() -> None:
    bank, adapters = bank_of(torch.float32, 16, 8)
    routes = straight([25, 0, 15, 9])
    rows = torch.randn(49, 16)
    out = through(bank, rows.bfloat16(), routes)
    (grad,) = torch.autograd.grad(out.float().square().sum(), adapters.arena)
    reference = through(bank, rows, routes)
    (exact,) = torch.autograd.grad(reference.square().sum(), adapters.arena)
    assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
    for a, b in ((out.float(), reference), (grad, exact)):
        assert float(((a - b).norm() / b.norm()).detach()) < 0.03


def test_frozen_experts_cost_no_product_of_their_gradient() -> None:
    rows = torch.randn(6, HIDDEN, requires_grad=True)
    arena, counts = torch.randn(3, 3 * FFN * HIDDEN), [4, 0, 2]
    products = []
    for learns in (True, False):
        weights = arena.clone().requires_grad_(learns)
        out = experts_of(rows, weights, counts, FFN)
        with torch.profiler.profile() as seen:
            out.sum().backward()
        names = [event.name for event in seen.events()]
        products.append((names.count("moesaic::grouped_mm"), names.count("moesaic::grouped_outer")))
        assert (weights.grad is not None) == learns
    assert products == [(2, 2), (2, 0)]
    kept = rows.grad
    assert kept is not None
    assert torch.equal(kept / 2, torch.autograd.grad(out_of(rows, arena, counts), rows)[0])


def out_of(rows: Tensor, arena: Tensor, counts: list[int]) -> Tensor:
    return experts_of(rows, arena, counts, FFN).sum()


def test_linear_equals_its_twin() -> None:
    linear = Linear(HIDDEN, FFN)
    linear.adapt(RANK, SCALE)
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
