"""A few rows through a matrix each equal plain products, however many threads take part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from moesaic.dist import vectors
from moesaic.dist.products import grouped_mm

KINDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 5), (3, 64), (4, 1), (6, 33), (1025, 513)])
def test_a_product_is_the_plain_one(
    num_threads: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    """Of any extents, and where matrices and results lie amid others."""
    several = torch.randn(3, outputs * inputs + 5, dtype=dtype)
    matrix = several[1, : outputs * inputs].view(outputs, inputs)
    left = torch.randn(rows, inputs + 3, dtype=dtype)[:, :inputs]
    around = torch.full((rows + 2, outputs), 7.0, dtype=dtype)
    vectors.multiply(left, matrix[None], [rows], around[1:-1])
    assert error(around[1:-1], left.double() @ matrix.double().T) < KINDS[dtype]
    assert torch.equal(around[:: rows + 1], torch.full((2, outputs), 7.0, dtype=dtype))
    apart = torch.empty(outputs, rows, dtype=dtype).T
    vectors.multiply(left, matrix[None], [rows], apart)
    assert torch.equal(apart, around[1:-1])


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_no_number_or_too_large_shows(dtype: torch.dtype) -> None:
    matrix = torch.randn(9, 40, dtype=dtype)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        left, out = torch.zeros(2, 40, dtype=dtype), torch.empty(2, 9, dtype=dtype)
        left[0, 17] = wrong
        vectors.multiply(left, matrix[None], [2], out)
        torch.testing.assert_close(out, left @ matrix.T, equal_nan=True)
        spoilt = matrix.clone()
        spoilt[5, 3] = wrong
        vectors.multiply(torch.ones(1, 40, dtype=dtype), spoilt[None], [1], out[:1])
        assert out[0].isfinite().tolist() == [at != 5 for at in range(9)]


def test_every_bf16_number_is_read_as_it_is() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    finite = numbers[numbers.isfinite()][:, None].contiguous()
    out = torch.empty(1, len(finite))
    vectors.multiply(torch.ones(1, 1, dtype=torch.bfloat16), finite[None], [1], out)
    assert torch.equal(out[0], finite[:, 0].float())


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("counts", [[0, 2, 0, 1, 3, 0], [1], [0, 0, 3], [1, 1, 1]])
def test_all_slots_at_once_are_what_each_is(
    num_threads: int, dtype: torch.dtype, counts: list[int]
) -> None:
    """Where matrices lie amid others, as gate and up do in an arena, and many slots have none."""
    outputs, inputs, slots = 37, 29, len(counts)
    arena = torch.randn(slots, 11 + outputs * inputs + 5, dtype=dtype)
    matrices = arena[:, 11:-5].view(slots, outputs, inputs)
    rows = torch.randn(sum(counts), inputs, dtype=dtype)
    found = torch.full((sum(counts), outputs), torch.nan, dtype=dtype)
    vectors.multiply(rows, matrices, counts, found)
    alone = torch.empty_like(found)
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    for slot, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            own = rows[start:stop], matrices[slot, None], [stop - start], alone[start:stop]
            vectors.multiply(*own)
    assert torch.equal(found, alone)
    each = torch.arange(slots).repeat_interleave(torch.tensor(counts))
    expected = (matrices.double()[each] @ rows.double()[:, :, None])[..., 0]
    assert error(found, expected) < KINDS[dtype]


@pytest.mark.parametrize("dtype", KINDS)
def test_slots_with_few_rows_take_this_way_and_others_do_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seam of experts' products, with slots that have none, few and many rows."""
    taken, multiply = list[list[int]](), vectors.multiply

    def seen(
        rows: torch.Tensor, matrices: torch.Tensor, counts: list[int], out: torch.Tensor
    ) -> None:
        taken.append(counts)
        multiply(rows, matrices, counts, out)

    monkeypatch.setattr(vectors, "multiply", seen)
    most = vectors._MOST_ROWS[dtype]
    counts = [1, 0, most, most + 1, 1]
    rows = torch.randn(sum(counts), 1024, dtype=dtype)
    weight = torch.randn(len(counts), 512, 1024, dtype=dtype)
    found = grouped_mm(rows, weight, torch.tensor(counts), transposed=True)
    assert taken == [[1], [most], [1]]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    for slot, count in enumerate(counts):
        own = slice(starts[slot], starts[slot] + count)
        if count:
            expected = rows[own].double() @ weight[slot].double().T
            assert error(found[own], expected) < KINDS[dtype]
    taken.clear()
    few = [1, 0, most, most, 1]
    grouped_mm(rows[: sum(few)], weight, torch.tensor(few), transposed=True)
    assert taken == [few]
    taken.clear()
    grouped_mm(rows, weight.transpose(1, 2), torch.tensor(counts), transposed=False)
    grouped_mm(rows.double(), weight.double(), torch.tensor(counts), transposed=True)
    grouped_mm(
        rows[:, :512].contiguous(), weight[:, :, :512], torch.tensor(counts), transposed=True
    )
    assert taken == []
