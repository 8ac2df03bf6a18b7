"""Bytes, seconds and rates as text."""

from __future__ import annotations

_MINUTES_S, _LONG_S = 180.0, 2 * 3600.0


def format_bytes(num_bytes: float) -> str:
    """Return bytes as text: 3.2 GiB."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


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
