"""Numbers with units as text."""

from __future__ import annotations

import pytest

from moesaic.base.units import format_clock


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01"), (3723, "1:02:03")]
)
def test_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text
