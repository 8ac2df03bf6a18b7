"""Products of many slots: strided weights, places to write to, fake shapes, engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.dist.products import grouped_mm, grouped_outer
from moesaic.nn.grouped import arena_views

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0]]


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
    place = torch.full((sum(counts) + 2, 14), 7.0)
    into = place[1:-1, 2 : 2 + fast.shape[1]]
    grouped_mm(rows, weight, torch.tensor(counts), transposed, out=into)
    assert torch.equal(into, fast)
    into.fill_(7.0)
    assert bool((place == 7.0).all()), "nothing beside its place was written"
    out = torch.full((3, 4, 4), 7.0)
    grouped_outer(rows, rows, torch.tensor(counts), out)
    torch.testing.assert_close(out, torch.stack([p.T @ p for p in rows.split(counts)]))


def test_torch_library_sees_well_formed_ops() -> None:
    rows, counts = torch.randn(5, 4), torch.tensor([3, 0, 2])
    weight = arena_views(torch.randn(3, 60), 5, 4)[0]
    torch.library.opcheck(torch.ops.moesaic.grouped_mm.default, (rows, weight, counts, True))
    torch.library.opcheck(
        torch.ops.moesaic.grouped_outer.default, (rows, rows, counts, torch.empty(3, 4, 4))
    )
    torch.library.opcheck(
        torch.ops.moesaic.grouped_mm_into.default, (rows, weight, counts, True, torch.empty(5, 10))
    )


def test_torch_grouped_mm_is_the_same_function() -> None:
    """What GPUs run in bf16; the CPU has it too, so the way we call it is tested here."""
    rows, counts = torch.randn(24, 16, dtype=torch.bfloat16), torch.tensor([8, 0, 16])
    weight = torch.randn(3, 32, 16, dtype=torch.bfloat16)
    ends = counts.cumsum(0).to(torch.int32)
    theirs = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    torch.testing.assert_close(theirs, grouped_mm(rows, weight, counts, True), rtol=1e-2, atol=1e-1)
