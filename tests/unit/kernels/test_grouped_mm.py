"""Grouped matmuls: strided weights and outputs, fake kernels, libraries of the CPU."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import cpu_gemm, threads
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import (
    describe_backend,
    grouped_mm,
    grouped_wgrad,
)
from moesaic.nn.experts.lease import arena_views

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0], [40, 0, 17], [2, 131, 3]]


@pytest.fixture(params=["torch", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the CPU library for slots with two rows or more."""
    onednn = request.param != "torch"
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(devices, "prefers_onednn", lambda: onednn)
    monkeypatch.setattr(devices, "supports_bf16_matmul", lambda: onednn)
    monkeypatch.setattr(devices, "has_amx", lambda: onednn)
    monkeypatch.setattr(cpu_gemm, "_MIN_ONEDNN_MACS", 0)
    monkeypatch.setattr(cpu_gemm, "_MIN_COPY_COLUMNS", 0)
    return str(request.param)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [True, False])
def test_strided_weights_equal_a_loop(counts: list[int], transposed: bool, library: str) -> None:
    arena = torch.randn(3, 3 * 4 * 5)
    gate_up, down = arena_views(arena, 5)
    weight = gate_up if transposed else down
    assert not weight.is_contiguous()
    rows = torch.randn(sum(counts), 4)
    product = grouped_mm(rows, weight, torch.tensor(counts), transposed)
    parts = [
        block @ (w.T if transposed else w)
        for block, w in zip(rows.split(counts), weight, strict=True)
    ]
    torch.testing.assert_close(product, torch.cat(parts))
    buffer = torch.full((sum(counts) + 2, 14), 7.0)
    into = buffer[1:-1, 2 : 2 + product.shape[1]]
    grouped_mm(rows, weight, torch.tensor(counts), transposed, out=into)
    assert torch.equal(into, product)
    into.fill_(7.0)
    assert bool((buffer == 7.0).all()), "only `into` was written"
    out = torch.full((3, 4, 4), 7.0)
    products = torch.stack([p.T @ p for p in rows.split(counts)])
    grouped_wgrad(rows, rows, torch.tensor(counts), out)
    torch.testing.assert_close(out, products)
    grouped_wgrad(rows, rows, torch.tensor(counts), out, accumulate=True)
    torch.testing.assert_close(out, 2 * products)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_dtypes_equal_fp64(counts: list[int], dtype: torch.dtype, library: str) -> None:
    """fp32 weights are cast to the dtype of the rows."""
    rows, others = torch.randn(sum(counts), 48).to(dtype), torch.randn(sum(counts), 32).to(dtype)
    weight, each = torch.randn(3, 32, 48), torch.tensor(counts)
    exact = [w.to(dtype).double() for w in weight]
    rows_by_slot, others_by_slot = (values.double().split(counts) for values in (rows, others))
    outer = torch.empty(3, 32, 48)
    grouped_wgrad(others, rows, each, outer)
    for found, parts in (
        (
            grouped_mm(rows, weight, each, True),
            [x @ w.T for x, w in zip(rows_by_slot, exact, strict=True)],
        ),
        (
            grouped_mm(others, weight, each, False),
            [x @ w for x, w in zip(others_by_slot, exact, strict=True)],
        ),
        (outer.flatten(0, 1), [y.T @ x for x, y in zip(rows_by_slot, others_by_slot, strict=True)]),
    ):
        expected = torch.cat(parts)
        limit = 1e-5 if dtype == torch.float32 else 8e-3
        assert (found.double() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("nan_slot", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_of_other_slots_do_not_leak(
    counts: list[int], nan_slot: int, dtype: torch.dtype, library: str
) -> None:
    """oneDNN gets rows of other slots as padding, here NaN."""
    rows, weight = (torch.randn(*shape).to(dtype) for shape in ((sum(counts), 4), (3, 6, 4)))
    each = torch.tensor(counts)
    first = sum(counts[:nan_slot])
    own = slice(first, first + counts[nan_slot])
    others = torch.ones(len(rows), dtype=torch.bool)
    others[own] = False
    with_nan, outer = rows.clone(), torch.empty(3, 4, 4, dtype=dtype)
    with_nan[own] = torch.nan
    found = grouped_mm(with_nan, weight, each, True)
    assert torch.equal(found[others], grouped_mm(rows, weight, each, True)[others])
    assert bool(found[own].isnan().all())
    grouped_wgrad(with_nan, with_nan, each, outer)
    assert [bool(one.isnan().any()) for one in outer] == [
        slot == nan_slot and counts[slot] > 0 for slot in range(3)
    ]


def test_slots_with_more_rows_than_one_matmul(library: str) -> None:
    counts = [300, 0, 531]
    rows, weight = torch.randn(831, 24), torch.randn(3, 288, 24)
    found = grouped_mm(rows, weight, torch.tensor(counts), True)
    parts = [x @ w.T for x, w in zip(rows.split(counts), weight, strict=True)]
    torch.testing.assert_close(found, torch.cat(parts))
    outer = torch.empty(3, 288, 24)
    grouped_wgrad(found, rows, torch.tensor(counts), outer)
    expected = [y.T @ x for x, y in zip(rows.split(counts), found.split(counts), strict=True)]
    torch.testing.assert_close(outer, torch.stack(expected), rtol=1e-4, atol=1e-3)


def test_autograd_is_rejected() -> None:
    rows, weight = torch.randn(5, 4, requires_grad=True), torch.randn(1, 6, 4)
    with pytest.raises(NotImplementedError, match="record no gradients"):
        grouped_mm(rows, weight, torch.tensor([5]), True)
    with pytest.raises(NotImplementedError, match="record no gradients"):
        grouped_wgrad(rows, rows, torch.tensor([5]), torch.empty(1, 4, 4))


def test_padded_row_counts_are_few() -> None:
    """Padding is at most 7 rows or an eighth."""
    padded = {count: cpu_gemm._round_up_rows(count) for count in range(1, 5000)}
    assert len(set(padded.values())) < 70
    for count, size in padded.items():
        assert count <= size <= max(count + 7, 1.125 * count)


def test_custom_ops_pass_opcheck() -> None:
    rows, counts = torch.randn(5, 4), torch.tensor([3, 0, 2])
    weight = arena_views(torch.randn(3, 60), 5)[0]
    torch.library.opcheck(torch.ops.moesaic.grouped_mm.default, (rows, weight, counts, True))
    torch.library.opcheck(
        torch.ops.moesaic.grouped_wgrad.default, (rows, rows, counts, torch.empty(3, 4, 4), True)
    )
    torch.library.opcheck(
        torch.ops.moesaic.grouped_mm_into.default, (rows, weight, counts, True, torch.empty(5, 10))
    )


def test_cpu_backend_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "prefers_onednn", lambda: True)
    monkeypatch.setattr(threads, "thread_pool", lambda: None)
    text = describe_backend(torch.device("cpu"), torch.float32)
    assert text == "oneDNN (torch.mm for small matmuls) per expert"
