"""Numbers in words; a value that is None or not finite is unknown."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TypeGuard

from moesaic.base.units import format_bytes, format_seconds

UNKNOWN = "\N{EN DASH}"


def is_known(value: float | None) -> TypeGuard[float]:
    """Return whether `value` is a finite number."""
    return value is not None and math.isfinite(value)


def count(value: float | None) -> str:
    """Format a count: in full up to five digits, then as 12.3 M."""
    if not is_known(value):
        return UNKNOWN
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= max(scale, 1e5):
            return f"{digits(value / scale)} {unit}"
    return f"{value:,.0f}"


def digits(value: float | None) -> str:
    """Format a number with about three digits; only very small ones use powers of ten."""
    if not is_known(value):
        return UNKNOWN
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(decimals, 4)}f}"


def loss(value: float | None) -> str:
    """Format a loss."""
    return f"{value:.4f}" if is_known(value) else UNKNOWN


def size(num_bytes: float | None) -> str:
    """Format bytes."""
    return format_bytes(num_bytes) if is_known(num_bytes) else UNKNOWN


def duration(seconds: float | None) -> str:
    """Format a time."""
    return format_seconds(seconds) if is_known(seconds) else UNKNOWN


def moment(time_s: float) -> str:
    """Format a point in time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def listing(items: Sequence[str], limit: int = 6) -> str:
    """Join items as `a, b and c`, or the first few `and 12 more`."""
    shown = list(items[:limit])
    if len(items) > limit:
        shown.append(f"{len(items) - limit:,} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def step_range(first: int, last: int) -> str:
    """Format `step 4` or `steps 4 to 9`."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
