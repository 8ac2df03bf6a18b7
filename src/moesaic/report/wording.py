"""Numbers in words: counts, bytes, times and lists."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

UNKNOWN = "\N{EN DASH}"


def count(value: float) -> str:
    """Format a count: in full up to five digits, then as 12.3 M."""
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:,.0f}"


def digits(value: float) -> str:
    """Format a number with about three digits; only very small ones use powers of ten."""
    if not math.isfinite(value):
        return UNKNOWN
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(decimals, 4)}f}"


def loss(value: float) -> str:
    """Format a loss."""
    return f"{value:.4f}" if math.isfinite(value) else UNKNOWN


def size(num_bytes: float) -> str:
    """Format bytes in binary units."""
    if not math.isfinite(num_bytes):
        return UNKNOWN
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{digits(num_bytes / 1024**power)} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a time with three digits, or from a minute on in its two largest units."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{digits(seconds * 1000)} ms"
    if seconds < 59.95:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(time_s: float) -> str:
    """Format a point in time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def percent(share: float) -> str:
    """Format a share as a percentage; a small one does not round to zero."""
    if not math.isfinite(share):
        return UNKNOWN
    value = 100 * share
    if abs(value) < 0.1:
        return "under 0.1%" if value else "0%"
    return f"{value:.1f}%" if abs(value) < 10 else f"{value:.0f}%"


def listing(items: Sequence[str], limit: int = 6) -> str:
    """Join items as `a, b and c`, or the first few `and 12 more`."""
    shown = list(items[:limit])
    more = len(items) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more:,} more"
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def plural(number: int, noun: str) -> str:
    """Format `1 step` or `1,200 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def step_range(first: int, last: int) -> str:
    """Format `step 4` or `steps 4 to 9`."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
