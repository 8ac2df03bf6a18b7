"""Products of many slots: strided weights, places to write to, fake shapes, engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.dist import products
from moesaic.dist.products import grouped_mm, grouped_outer
from moesaic.nn.grouped import arena_views

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0], [40, 0, 17], [2, 131, 3]]


@pytest.fixture(params=["torch", "onednn"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies slots of two rows or more."""
    onednn = request.param == "onednn"
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: onednn)
    monkeypatch.setattr(products, "_WORTH", 0)
    return str(request.param)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [True, False])
def test_strided_slots_equal_a_loop(counts: list[int], transposed: bool, engine: str) -> None:
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


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_beside_a_slots_own_leave_no_trace(counts: list[int], engine: str) -> None:
    """oneDNN is given more rows than a slot has: others' must not show, whatever they are."""
    rows, weight = torch.randn(sum(counts), 4), torch.randn(3, 6, 4)
    clean = grouped_mm(rows, weight, torch.tensor(counts), True)
    spoilt, outer = rows.clone(), torch.empty(3, 4, 4)
    spoilt[sum(counts[:2]) :] = torch.nan
    found = grouped_mm(spoilt, weight, torch.tensor(counts), True)
    first = sum(counts[:2])
    assert torch.equal(found[:first], clean[:first])
    assert bool(found[first:].isnan().all())
    grouped_outer(spoilt, spoilt, torch.tensor(counts), outer)
    assert not bool(outer[:2].isnan().any())


@pytest.mark.parametrize("transposed", [True, False])
def test_matrices_are_narrowed_to_the_type_of_rows(transposed: bool, engine: str) -> None:
    counts, rows = torch.tensor([5, 0, 20]), torch.randn(25, 16).bfloat16()
    weight = torch.randn(3, 16, 16)
    narrow = grouped_mm(rows, weight.bfloat16(), counts, transposed)
    assert torch.equal(grouped_mm(rows, weight, counts, transposed), narrow)
    assert narrow.dtype == torch.bfloat16


def test_few_numbers_of_rows_are_met() -> None:
    """Never fewer than there are, and what is added to them stays small."""
    even = {count: products._even(count) for count in range(1, 5000)}
    assert len(set(even.values())) < 60
    for count, size in even.items():
        assert count <= size <= max(count + 15, 1.125 * count)


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
