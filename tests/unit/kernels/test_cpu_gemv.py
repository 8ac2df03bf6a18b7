"""Grouped matrix-vector products equal plain matmuls, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from moesaic.kernels import cpu_gemv
from moesaic.kernels.grouped_mm import grouped_mm

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 5), (3, 64), (4, 1), (6, 33), (1025, 513)])
def test_one_matrix_equals_torch(
    num_threads: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    """Any shape, and views inside larger tensors."""
    arena = torch.randn(3, outputs * inputs + 5, dtype=dtype)
    matrix = arena[1, : outputs * inputs].view(outputs, inputs)
    left = torch.randn(rows, inputs + 3, dtype=dtype)[:, :inputs]
    buffer = torch.full((rows + 2, outputs), 7.0, dtype=dtype)
    cpu_gemv.grouped_gemv(left, matrix[None], [rows], buffer[1:-1])
    assert relative_error(buffer[1:-1], left.double() @ matrix.double().T) < TOLERANCES[dtype]
    assert torch.equal(buffer[:: rows + 1], torch.full((2, outputs), 7.0, dtype=dtype))
    strided_out = torch.empty(outputs, rows, dtype=dtype).T
    cpu_gemv.grouped_gemv(left, matrix[None], [rows], strided_out)
    assert torch.equal(strided_out, buffer[1:-1])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nan_and_infinity_propagate(dtype: torch.dtype) -> None:
    matrix = torch.randn(9, 40, dtype=dtype)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        left, out = torch.zeros(2, 40, dtype=dtype), torch.empty(2, 9, dtype=dtype)
        left[0, 17] = wrong
        cpu_gemv.grouped_gemv(left, matrix[None], [2], out)
        torch.testing.assert_close(out, left @ matrix.T, equal_nan=True)
        damaged = matrix.clone()
        damaged[5, 3] = wrong
        cpu_gemv.grouped_gemv(torch.ones(1, 40, dtype=dtype), damaged[None], [1], out[:1])
        assert out[0].isfinite().tolist() == [output != 5 for output in range(9)]


def test_bf16_is_widened_exactly() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    finite = values[values.isfinite()][:, None].contiguous()
    out = torch.empty(1, len(finite))
    cpu_gemv.grouped_gemv(torch.ones(1, 1, dtype=torch.bfloat16), finite[None], [1], out)
    assert torch.equal(out[0], finite[:, 0].float())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("counts", [[0, 2, 0, 1, 3, 0], [1], [0, 0, 3], [1, 1, 1]])
def test_all_slots_at_once_equal_single_slots(
    num_threads: int, dtype: torch.dtype, counts: list[int]
) -> None:
    """Matrices are views of an arena, and some slots have no rows."""
    outputs, inputs, slots = 37, 29, len(counts)
    arena = torch.randn(slots, 11 + outputs * inputs + 5, dtype=dtype)
    matrices = arena[:, 11:-5].view(slots, outputs, inputs)
    rows = torch.randn(sum(counts), inputs, dtype=dtype)
    together = torch.full((sum(counts), outputs), torch.nan, dtype=dtype)
    cpu_gemv.grouped_gemv(rows, matrices, counts, together)
    alone = torch.empty_like(together)
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    for slot, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            own = rows[start:stop], matrices[slot, None], [stop - start], alone[start:stop]
            cpu_gemv.grouped_gemv(*own)
    assert torch.equal(together, alone)
    each = torch.arange(slots).repeat_interleave(torch.tensor(counts))
    expected = (matrices.double()[each] @ rows.double()[:, :, None])[..., 0]
    assert relative_error(together, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_grouped_mm_uses_gemv_for_slots_with_few_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv_counts, grouped_gemv = list[list[int]](), cpu_gemv.grouped_gemv

    def record(
        rows: torch.Tensor, matrices: torch.Tensor, counts: list[int], out: torch.Tensor
    ) -> None:
        gemv_counts.append(counts)
        grouped_gemv(rows, matrices, counts, out)

    monkeypatch.setattr(cpu_gemv, "grouped_gemv", record)
    most = cpu_gemv._MAX_ROWS[dtype]
    counts = [1, 0, most, most + 1, 1]
    rows = torch.randn(sum(counts), 1024, dtype=dtype)
    weight = torch.randn(len(counts), 512, 1024, dtype=dtype)
    found = grouped_mm(rows, weight, torch.tensor(counts), transposed=True)
    assert gemv_counts == [[1], [most], [1]]
    each = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expected = (weight.double()[each] @ rows.double()[:, :, None])[..., 0]
    assert relative_error(found, expected) < TOLERANCES[dtype]
    gemv_counts.clear()
    few = [1, 0, most, most, 1]
    grouped_mm(rows[: sum(few)], weight, torch.tensor(few), transposed=True)
    assert gemv_counts == [few]
    gemv_counts.clear()
    grouped_mm(rows, weight.transpose(1, 2), torch.tensor(counts), transposed=False)
    grouped_mm(rows.double(), weight.double(), torch.tensor(counts), transposed=True)
    grouped_mm(
        rows[:, :512].contiguous(), weight[:, :, :512], torch.tensor(counts), transposed=True
    )
    assert gemv_counts == []
