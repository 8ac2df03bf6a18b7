"""Conversions by numpy have the bits of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.store.number_formats import NUMPY_DTYPES, apply_scales, from_floats, to_floats

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


def numbers(dtype: torch.dtype) -> Tensor:
    """Return all numbers of two bytes, or many of more: halfway between others, huge and tiny."""
    if dtype.itemsize == 2:
        found = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        draws = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), dtype=torch.int64)
        halfway = (torch.arange(1 << 16) << 16 | 0x8000).to(torch.int32).view(torch.float32)
        found = torch.cat((draws.to(torch.int32).view(torch.float32), halfway)).to(dtype)
        if dtype == torch.float64:
            found = torch.cat((found, found * (1 + 1e-9), torch.tensor([1e300, -1e-300])))
    return found[~found.isnan()]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_conversions_have_the_bits_of_torch(source: str, target: str) -> None:
    values = numbers(DTYPES[source])
    stored = values.view(torch.uint8).numpy().view(NUMPY_DTYPES[source])
    found = from_floats(to_floats(stored, source), target)
    assert found.dtype == np.dtype(NUMPY_DTYPES[target])
    expected = values.to(DTYPES[target]).view(torch.uint8).numpy()
    assert np.array_equal(found.view(np.uint8), expected)


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_nan_stays_nan(target: str) -> None:
    found = from_floats(np.array([np.nan], np.float32), target)
    assert np.isnan(to_floats(found, target)).all()


def test_fp8_has_the_values_of_torch() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(to_floats(bits.numpy(), "F8_E4M3"), expected, equal_nan=True)


def test_scales_belong_to_blocks_of_rows_and_columns() -> None:
    values = np.ones((200, 150), np.float32)
    scales = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = apply_scales(values, scales, first_row=100)
    for row, column in ((0, 0), (27, 127), (28, 128), (155, 149), (156, 0), (199, 149)):
        assert found[row, column] == scales[(100 + row) // 128, column // 128]
