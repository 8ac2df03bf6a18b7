"""Conversion between the number formats of weight files, by numpy and with the bits of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_DTYPES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1",
}  # fmt: skip
"""numpy dtypes of stored numbers, by safetensors name; bits where numpy lacks the format."""

FP8_BLOCK = 128
"""Rows and columns of the block that one fp8 scale is for."""


def _fp8_values() -> NDArray[np.float32]:
    """Return the values of all 256 numbers of fp8 with 4 bits of exponent, without infinities."""
    bits = np.arange(256)
    sign, exponent, mantissa = 1.0 - 2.0 * (bits >> 7), (bits >> 3) & 15, bits & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = sign * np.where(exponent == 0, mantissa * 2.0**-9, normal)
    values[(bits & 127) == 127] = np.nan
    return values.astype(np.float32)


_FP8_VALUES = _fp8_values()


def to_floats(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return stored numbers as fp32, or as fp64 if they are that; fp8 without its scales."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E4M3":
        return _FP8_VALUES.take(stored)
    return stored if dtype in ("F32", "F64") else stored.astype(np.float32)


def from_floats(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return fp32 or fp64 numbers as they are stored in `dtype`, rounded to the nearest, then to
    even. Numbers that are too large become infinite."""
    if dtype == "F64":
        return values.astype(np.float64)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        if dtype == "F32":
            return single
        if dtype == "F16":
            return single.astype(np.float16)
    bits = single.view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def apply_scales(
    values: NDArray[np.float32], scales: NDArray[np.float32], first_row: int
) -> NDArray[np.float32]:
    """Return fp8 `values`, [rows, columns], times the scales of their blocks.

    `first_row` is the row of the first value, counted from the first row of scales."""
    rows = (first_row + np.arange(values.shape[0])) // FP8_BLOCK
    factors = scales.repeat(FP8_BLOCK, axis=1)[:, : values.shape[1]]
    return values * factors[rows]
