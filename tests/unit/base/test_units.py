"""Numbers with units as text."""

from __future__ import annotations

import pytest

from moesaic.base.units import format_bytes, format_clock, format_larger_bytes, parse_bytes


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01"), (3723, "1:02:03")]
)
def test_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


@pytest.mark.parametrize(
    "num_bytes", [1, 1023, 1024, 104857 * 10, (1 << 20) - 1, 2726297, 3 << 20, 17 << 30]
)
def test_a_larger_size_reads_back_as_enough(num_bytes: int) -> None:
    text = format_larger_bytes(num_bytes)
    assert num_bytes <= parse_bytes(text) <= 1.11 * num_bytes + 1
    assert num_bytes < 1024 or text != format_bytes(num_bytes)
