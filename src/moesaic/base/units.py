"""Bytes, seconds, rates and counts as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_MINUTES_S, _LONG_S = 180.0, 2 * 3600.0
_ONE_UNIT = 100
"""Ratio of two sizes up to which both are given in the unit of one."""


def format_bytes(num_bytes: float) -> str:
    """Return bytes as text: 3.2 GiB."""
    value, unit = _scale_bytes(num_bytes)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def about_bytes(num_bytes: float) -> str:
    """Return bytes as text with three significant digits: 454 GiB."""
    value, unit = _scale_bytes(num_bytes)
    return f"{round_text(value, 3)} {unit}"


def format_used_bytes(used: float, total: float) -> str:
    """Return used and available bytes as text: 12.1 of 24 GiB. Sizes that differ more than
    `_ONE_UNIT` times have units of their own: 1.55 MiB of 22.8 GiB."""
    limit, unit = _scale_bytes(total)
    if used and not total / _ONE_UNIT <= used <= total * _ONE_UNIT:
        return f"{about_bytes(used)} of {about_bytes(total)}"
    some = used * limit / total if total else used
    return f"{round_text(some, 3)} of {round_text(limit, 3)} {unit}"


def _scale_bytes(num_bytes: float) -> tuple[float, str]:
    """Return bytes in the largest unit of which they are one or more, and the unit."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return value, unit


def round_text(value: float, digits: int = 2) -> str:
    """Return a value with as many significant digits: 0.015, 1.3, 4,700."""
    if not value:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.96 becomes 10, which has no decimal.
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    text = f"{rounded:,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and digits > 2 else text


def about_seconds(seconds: float, digits: int = 2) -> str:
    """Return seconds as text with as many significant digits, two for predictions: 12 ms, 3.5
    hours."""
    unit_s, unit = _unit_of_seconds(seconds)
    return f"{round_text(seconds / unit_s, digits)} {unit}"


def about_range(seconds: float, ratios: Sequence[float]) -> str:
    """Return predicted seconds times each of two ratios, in the unit that `about_seconds` takes for
    them: 83 to 150 minutes."""
    unit_s, unit = _unit_of_seconds(seconds)
    least, most = (round_text(ratio * seconds / unit_s) for ratio in ratios)
    return f"{least} to {most} {unit}"


def _unit_of_seconds(seconds: float) -> tuple[float, str]:
    """Return the unit in which seconds read well, in seconds, and its name."""
    for least, unit_s, unit in (
        (_LONG_S, 3600.0, "hours"), (_MINUTES_S, 60.0, "minutes"), (1.0, 1.0, "s"),
    ):  # fmt: skip
        if seconds >= least:
            return unit_s, unit
    return 1e-3, "ms"


def format_larger_bytes(num_bytes: int) -> str:
    """Return bytes as text that is not below them, and differs from `format_bytes` of them."""
    unit = 1
    while num_bytes >= 1024 * unit:
        unit *= 1024
    return format_bytes(num_bytes + unit / 10)


def format_quantity(value: float, unit: str) -> str:
    """Return a value with a metric prefix: 12.3 GB/s."""
    scales = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
    prefix = next((name for name, scale in scales.items() if value >= scale), "n" if value else "")
    return f"{value / scales[prefix]:.3g} {prefix}{unit}"


def format_seconds(seconds: float) -> str:
    """Return seconds as text: 12.30 ms, 3.5 hours."""
    if seconds >= _LONG_S:
        return f"{seconds / 3600:,.1f} hours"
    if seconds >= _MINUTES_S:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def format_clock(seconds: float) -> str:
    """Return seconds as a clock shows them: 1:02:03, 2:03 or 3 s."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plural(number: int, noun: str) -> str:
    """Format `1 step` or `1,200 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "2GB" or "1.5 GiB"; raise ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f'"{text}" is not a size: write one such as "2GB" or "1500MiB"')
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if not num_bytes:
        raise ValueError(f'"{text}" is nothing: give a size above zero')
    return num_bytes
