"""Products of many slots: strided weights, places to write to, fake shapes, engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.dist import device as devices
from moesaic.dist import loops, products
from moesaic.dist.loops import turns
from moesaic.dist.products import grouped_gated, grouped_mm, grouped_outer
from moesaic.nn.grouped import arena_views

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0], [40, 0, 17], [2, 131, 3]]


@pytest.fixture(params=["torch", "onednn", "onednn but into places"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies slots of two rows or more."""
    onednn = request.param != "torch"
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(devices, "prefers_onednn", lambda: onednn)
    monkeypatch.setattr(devices, "prefers_copies", lambda: request.param == "onednn")
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: onednn)
    monkeypatch.setattr(devices, "multiplies_in_tiles", lambda: request.param == "onednn")
    monkeypatch.setattr(loops, "_WORTH", 0)
    monkeypatch.setattr(loops, "_LARGE_MATRIX", 0)
    monkeypatch.setattr(loops, "_SPARE", 0)
    monkeypatch.setattr(loops, "_WIDE", 0)
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
    products = torch.stack([p.T @ p for p in rows.split(counts)])
    grouped_outer(rows, rows, torch.tensor(counts), out)
    torch.testing.assert_close(out, products)
    grouped_outer(rows, rows, torch.tensor(counts), out, added=True)
    torch.testing.assert_close(out, 2 * products)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_types_equal_a_loop_in_fp64(
    counts: list[int], dtype: torch.dtype, engine: str
) -> None:
    """Matrices are wider than rows, and narrowed one by one."""
    rows, others = torch.randn(sum(counts), 48).to(dtype), torch.randn(sum(counts), 32).to(dtype)
    weight, each = torch.randn(3, 32, 48), torch.tensor(counts)
    exact = [w.to(dtype).double() for w in weight]
    of_rows, of_others = (one.double().split(counts) for one in (rows, others))
    outer = torch.empty(3, 32, 48)
    grouped_outer(others, rows, each, outer)
    for found, parts in (
        (
            grouped_mm(rows, weight, each, True),
            [x @ w.T for x, w in zip(of_rows, exact, strict=True)],
        ),
        (
            grouped_mm(others, weight, each, False),
            [x @ w for x, w in zip(of_others, exact, strict=True)],
        ),
        (outer.flatten(0, 1), [y.T @ x for x, y in zip(of_rows, of_others, strict=True)]),
    ):
        whole = torch.cat(parts)
        near = 1e-5 if dtype == torch.float32 else 8e-3
        assert (found.double() - whole).norm() <= near * whole.norm()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dirty", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beside_a_slots_own_leave_no_trace(
    counts: list[int], dirty: int, dtype: torch.dtype, engine: str
) -> None:
    """oneDNN is given more rows than a slot has: others' must not show, whatever they are."""
    rows, weight = (torch.randn(*shape).to(dtype) for shape in ((sum(counts), 4), (3, 6, 4)))
    each = torch.tensor(counts)
    first = sum(counts[:dirty])
    own = slice(first, first + counts[dirty])
    others = torch.ones(len(rows), dtype=torch.bool)
    others[own] = False
    spoilt, outer = rows.clone(), torch.empty(3, 4, 4, dtype=dtype)
    spoilt[own] = torch.nan
    found = grouped_mm(spoilt, weight, each, True)
    assert torch.equal(found[others], grouped_mm(rows, weight, each, True)[others])
    assert bool(found[own].isnan().all())
    grouped_outer(spoilt, spoilt, each, outer)
    assert [bool(one.isnan().any()) for one in outer] == [
        slot == dirty and counts[slot] > 0 for slot in range(3)
    ]


def test_slots_of_more_rows_than_a_product_takes(engine: str) -> None:
    counts = [300, 0, 531]
    rows, weight = torch.randn(831, 24), torch.randn(3, 288, 24)
    found = grouped_mm(rows, weight, torch.tensor(counts), True)
    parts = [x @ w.T for x, w in zip(rows.split(counts), weight, strict=True)]
    torch.testing.assert_close(found, torch.cat(parts))
    outer = torch.empty(3, 288, 24)
    grouped_outer(found, rows, torch.tensor(counts), outer)
    expected = [y.T @ x for x, y in zip(rows.split(counts), found.split(counts), strict=True)]
    torch.testing.assert_close(outer, torch.stack(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("counts", [*COUNTS, [300, 0, 17]])
def test_networks_of_slots_equal_a_loop(counts: list[int]) -> None:
    """In fp64, and nothing beside the place of the results is written."""
    gate_up, down = arena_views(torch.randn(3, 3 * 4 * 5, dtype=torch.float64), 5, 4)
    rows, place = (
        torch.randn(sum(counts), 4, dtype=torch.float64),
        torch.full((sum(counts), 6), 7.0),
    )
    into = place.double()[:, 1:5]
    grouped_gated(rows, gate_up, down, torch.tensor(counts), into)
    parts = []
    for part, first, second in zip(rows.split(counts), gate_up, down, strict=True):
        gate, up = (part @ first.T).chunk(2, dim=1)
        parts.append((F.silu(gate) * up) @ second.T)
    torch.testing.assert_close(into, torch.cat(parts))
    into.fill_(7.0)
    assert bool((place == 7.0).all())


def test_what_stands_turned_between_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in bf16 where tiles are multiplied, unless matrices are small or rows few."""
    large, small = torch.empty(3, 1024, 512).bfloat16(), torch.empty(3, 32, 32).bfloat16()
    rows, counts = torch.empty(8, 512).bfloat16(), torch.tensor([7, 0, 1])
    monkeypatch.setattr(devices, "multiplies_in_tiles", lambda: True)
    assert turns(rows, large, counts)
    assert not turns(rows[:7], large, torch.tensor([6, 0, 1])), "three a slot are few"
    assert not turns(rows[:0], large, torch.zeros(3, dtype=torch.int64))
    assert not turns(rows, small, counts)
    assert not turns(rows.float(), large.float(), counts)
    monkeypatch.setattr(devices, "multiplies_in_tiles", lambda: False)
    assert not turns(rows, large, counts)


def test_what_onednn_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is the quicker, for all but small products and a single row from the left."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: True)
    monkeypatch.setattr(devices, "prefers_copies", lambda: True)
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: False)

    def asked(count: int, columns: int, dtype: torch.dtype, transposed: bool = True) -> bool:
        rows, matrix = torch.empty(count, 512, dtype=dtype), torch.empty(columns, 512)
        return loops._evenly(rows, count, matrix, transposed=transposed)

    assert asked(2, 1024, torch.float32)
    assert not asked(2, 1023, torch.float32)
    assert asked(1, 4096, torch.float32)
    assert not asked(1, 4096, torch.float32, transposed=False)
    assert not asked(64, 1024, torch.bfloat16)
    assert not asked(64, 1024, torch.float64)
    monkeypatch.setattr(devices, "prefers_copies", lambda: False)
    assert asked(64, 1024, torch.float32)
    assert asked(2, 1024, torch.float32)
    assert asked(512, 1024, torch.float32)
    assert not asked(64, 1023, torch.float32)
    assert asked(256 + 63, 1024, torch.float32)
    assert asked(56, 1024, torch.float32)
    assert not asked(57, 1024, torch.float32), "7 rows of others beside 57"
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: True)
    assert asked(64, 1024, torch.bfloat16)
    monkeypatch.setattr(devices, "prefers_onednn", lambda: False)
    assert not asked(64, 1024, torch.float32)


def test_which_factor_a_matrix_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the left one of few rows, of more of them where a processor copies it less dearly."""
    matrix = torch.empty(512, 128)

    def left(size: int, dtype: torch.dtype, given: torch.Tensor = matrix) -> bool:
        return loops._on_the_left(dtype, size, given)

    for tiles in (True, False):
        monkeypatch.setattr(devices, "multiplies_in_tiles", lambda tiles=tiles: tiles)
        assert [left(size, torch.float32) for size in (8, 16, 64, 80)] == [False, True, True, False]
        assert [left(size, torch.bfloat16) for size in (8, 64, 80)] == [tiles, tiles, False]
    assert not left(16, torch.float32, matrix.T)


def test_no_gradient_is_lost_without_a_word() -> None:
    rows, weight = torch.randn(5, 4, requires_grad=True), torch.randn(1, 6, 4)
    with pytest.raises(NotImplementedError, match="record no gradients"):
        grouped_mm(rows, weight, torch.tensor([5]), True)
    with pytest.raises(NotImplementedError, match="record no gradients"):
        grouped_gated(rows, weight, torch.empty(1, 4, 3), torch.tensor([5]), torch.empty(5, 4))
    with pytest.raises(NotImplementedError, match="record no gradients"):
        grouped_outer(rows, rows, torch.tensor([5]), torch.empty(1, 4, 4))


def test_few_numbers_of_rows_are_met() -> None:
    """Never fewer than there are, and what is added to them stays small."""
    even = {count: loops._even(count) for count in range(1, 5000)}
    assert len(set(even.values())) < 70
    for count, size in even.items():
        assert count <= size <= max(count + 7, 1.125 * count)


def test_torch_library_sees_well_formed_ops() -> None:
    rows, counts = torch.randn(5, 4), torch.tensor([3, 0, 2])
    weight = arena_views(torch.randn(3, 60), 5, 4)[0]
    torch.library.opcheck(torch.ops.moesaic.grouped_mm.default, (rows, weight, counts, True))
    torch.library.opcheck(
        torch.ops.moesaic.grouped_outer.default, (rows, rows, counts, torch.empty(3, 4, 4), True)
    )
    torch.library.opcheck(
        torch.ops.moesaic.grouped_gated_into.default,
        (rows, weight, torch.randn(3, 4, 5), counts, torch.empty(5, 4)),
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


@pytest.mark.parametrize("rarely", [False, True])
def test_what_is_said_of_the_engine_has_no_numbers(
    monkeypatch: pytest.MonkeyPatch, rarely: bool
) -> None:
    """Which products are whose is a matter of sizes, and of cores: no one number says it."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: True)
    monkeypatch.setattr(devices, "prefers_copies", lambda: not rarely)
    monkeypatch.setattr(products.threads, "crew", lambda: None)
    said = products.engine(torch.device("cpu"), torch.float32)
    where = "matrices are small or rows few or uneven" if rarely else "they are small"
    assert said == f"oneDNN (torch.mm where {where}), one by one"
