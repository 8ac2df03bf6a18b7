"""Grouped products: finite differences, strided weights, fake shapes, flops, engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from moesaic.nn import grouped
from moesaic.nn.bank import Bank
from moesaic.nn.grouped import GatedExperts, arena_views, grouped_mm, grouped_outer

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
def test_gradcheck(counts: list[int]) -> None:
    rows = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    arena = torch.randn(3, 3 * 4 * 5, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor(counts)
    assert torch.autograd.gradcheck(lambda r, a: GatedExperts.apply(r, a, sizes, 5), (rows, arena))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [True, False])
def test_strided_slots_equal_a_loop(counts: list[int], transposed: bool) -> None:
    arena = torch.randn(3, 3 * 4 * 5)
    gate_up, down = arena_views(arena, 5, 4)
    weight = gate_up if transposed else down
    assert not weight.is_contiguous()
    rows = torch.randn(sum(counts), 4)
    fast = grouped_mm(rows, weight, torch.tensor(counts), transposed)
    parts = [
        part @ (w.T if transposed else w)
        for part, w in zip(rows.split(counts), weight, strict=True)
    ]
    torch.testing.assert_close(fast, torch.cat(parts))
    out = torch.full((3, 4, 4), 7.0)
    grouped_outer(rows, rows, torch.tensor(counts), out)
    torch.testing.assert_close(out, torch.stack([p.T @ p for p in rows.split(counts)]))


@pytest.mark.parametrize("counts", [[3, 0, 2, 9, 0, 1], [0, 0, 0, 0, 0, 4], [0] * 6])
def test_shares_change_no_bit(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of whole cache lines: elsewhere a kernel's last digit depends on the alignment it meets.
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    arena = torch.randn(6, 3 * 16 * 16, requires_grad=True)
    cotangent = torch.randn(sum(counts), 16)
    results = []
    for num_rows in (1, 4, 1000):
        monkeypatch.setattr(grouped, "_SHARE_BYTES", num_rows * 2 * 16 * 4)
        out = GatedExperts.apply(rows, arena, torch.tensor(counts), 16)
        results.append((out, *torch.autograd.grad(out, (rows, arena), cotangent)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_torch_library_sees_well_formed_ops() -> None:
    rows, counts = torch.randn(5, 4), torch.tensor([3, 0, 2])
    weight = arena_views(torch.randn(3, 60), 5, 4)[0]
    torch.library.opcheck(torch.ops.moesaic.grouped_mm.default, (rows, weight, counts, True))
    torch.library.opcheck(
        torch.ops.moesaic.grouped_outer.default, (rows, rows, counts, torch.empty(3, 4, 4))
    )


def test_flops_are_counted() -> None:
    counts = torch.tensor([3, 0, 2])
    rows = torch.randn(5, 4, requires_grad=True)
    arena = torch.randn(3, 60, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        GatedExperts.apply(rows, arena, counts, 5).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * 5 * 4 * 10 + 2 * 5 * 5 * 4)


def test_bf16_rows_over_fp32_weights() -> None:
    torch.manual_seed(1)
    rows = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    arena = (0.2 * torch.randn(2, 3 * 16 * 8)).requires_grad_()
    counts = torch.tensor([25, 15])
    out = GatedExperts.apply(rows, arena, counts, 8)
    out.float().square().sum().backward()
    assert (out.dtype, arena.grad.dtype) == (torch.bfloat16, torch.float32)
    wide = rows.detach().float().requires_grad_()
    exact = arena.detach().clone().requires_grad_()
    reference = GatedExperts.apply(wide, exact, counts, 8)
    reference.square().sum().backward()
    for a, b in ((out.float(), reference), (arena.grad, exact.grad), (rows.grad, wide.grad)):
        assert float(((a.float() - b).norm() / b.norm()).detach()) < 0.02


def test_torch_grouped_mm_is_the_same_function() -> None:
    """What GPUs run in bf16; the CPU has it too, so the way we call it is tested here."""
    rows, counts = torch.randn(24, 16, dtype=torch.bfloat16), torch.tensor([8, 0, 16])
    weight = torch.randn(3, 32, 16, dtype=torch.bfloat16)
    ends = counts.cumsum(0).to(torch.int32)
    theirs = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    torch.testing.assert_close(theirs, grouped_mm(rows, weight, counts, True), rtol=1e-2, atol=1e-1)


def test_the_bank_names_every_element_once() -> None:
    bank = Bank([4, 7], hidden=3, ffn=5)
    mark = torch.zeros_like(bank.arena)
    for _, _, view in bank.matrices(mark):
        view += 1
    assert bool((mark == 1).all())
    shapes = [(e, part, tuple(v.shape)) for e, part, v in bank.matrices(bank.acquire())]
    assert shapes[:3] == [(4, "gate", (5, 3)), (4, "up", (5, 3)), (4, "down", (3, 5))]
    assert {e for e, _, _ in shapes} == {4, 7}
    bank.release()
