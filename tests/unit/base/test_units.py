"""Numbers with units as text."""

from __future__ import annotations

import pytest

from moesaic.base.units import (
    about_range,
    format_bytes,
    format_clock,
    format_larger_bytes,
    format_used_bytes,
    parse_bytes,
)


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


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [
        (12.1 * 2**30, 24 * 2**30, "12.1 of 24 GiB"),
        (1.55 * 2**20, 22.8 * 2**30, "1.55 MiB of 22.8 GiB"),
        (0.01 * 22.8 * 2**30, 22.8 * 2**30, "0.228 of 22.8 GiB"),
        (0.0099 * 22.8 * 2**30, 22.8 * 2**30, "231 MiB of 22.8 GiB"),
        (3.5 * 2**40, 354 * 2**20, "3.5 TiB of 354 MiB"),
        (35_400 * 2**20, 354 * 2**20, "35,400 of 354 MiB"),
        (964 * 2**30, 1.38 * 2**40, "0.941 of 1.38 TiB"),
        (0, 100, "0 of 100 B"),
    ],
)
def test_used_bytes_have_the_unit_of_the_room_if_both_read_well(
    used: float, total: float, text: str
) -> None:
    assert format_used_bytes(used, total) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7140.0, "83 to 150 minutes"),
        (1.3, "0.91 to 1.7 s"),
        (0.96, "670 to 1,200 ms"),
        (14.25, "10 to 18 s"),
    ],
)
def test_a_range_of_seconds_has_one_unit(seconds: float, text: str) -> None:
    assert about_range(seconds, (0.7, 1.28)) == text
