"""Pictures on results pages, from records alone: what each contender makes of each case, as points
on a line, with the least and the most that could be."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Row

_LEFT, _WIDTH, _LINE, _TOP = 330, 520, 34, 66
_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0e7490", "#a16207", "#be185d", "#475569")


class Case(NamedTuple):
    """A line."""

    name: str
    points: dict[str, float]
    """By contender."""
    ceiling: float


def of_balance(rows: Sequence[Row]) -> str | None:
    """Policies over no policy, case by case, as an SVG; None: nothing has been measured yet."""
    cases = list[Case]()
    known = {row.name: row.value for row in rows if not row.simulated and row.value is not None}
    over, ceiling = " over none", ": computing alone over none, the ceiling"
    for name, limit in known.items():
        if not name.endswith(ceiling):
            continue
        case = name.removesuffix(ceiling)
        found = {
            other.removeprefix(f"{case}: ").removesuffix(over): value
            for other, value in known.items()
            if other.startswith(f"{case}: ") and other.endswith(over)
        }
        cases.append(Case(case, found, limit))
    return _drawn("Times as fast as without a policy", cases) if cases else None


def _drawn(title: str, cases: Sequence[Case]) -> str:
    names = list(cases[0].points)
    most = max(max(*case.points.values(), case.ceiling) for case in cases) * 1.05
    least = min(0.9, *(min(case.points.values()) for case in cases)) * 0.98
    bottom = _TOP + _LINE * len(cases)

    def x(value: float) -> float:
        return _LEFT + (value - least) / (most - least) * _WIDTH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 30} {bottom + 40}"'
        f' font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(title)}, by case and policy">',
        f'<rect width="100%" height="{bottom + 40}" fill="#fff"/>',
        _text(12, 22, title, 'font-size="15" font-weight="600"'),
        *_legend(names),
    ]
    for tick in np.arange(np.ceil(5 * least) / 5, most, 0.2).tolist():
        colour = "#94a3b8" if abs(tick - 1) < 1e-9 else "#e2e8f0"
        parts.append(_line(x(tick), x(tick), _TOP - 6, bottom + 14, colour, 1))
        parts.append(_text(x(tick), bottom + 30, f"{tick:.1f}", 'text-anchor="middle"'))
    for at, case in enumerate(cases):
        y = _TOP + _LINE * (at + 0.5)
        parts.append(_text(_LEFT - 12, y + 4, case.name, 'text-anchor="end"'))
        parts.append(_line(x(1), x(case.ceiling), y, y, "#cbd5e1", 6))
        parts.append(_line(x(case.ceiling), x(case.ceiling), y - 9, y + 9, "#111", 2))
        for number in reversed(range(len(names))):
            if names[number] in case.points:
                parts.append(_dot(x(case.points[names[number]]), y, number))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(names: Sequence[str]) -> list[str]:
    parts, left = list[str](), 12.0
    for number, name in enumerate(names):
        parts += [_dot(left + 5, 42, number), _text(left + 14, 46, name)]
        left += 26 + 7 * len(name)
    limit = _text(left + 14, 46, "computing alone, the ceiling")
    return [*parts, _line(left + 5, left + 5, 34, 50, "#111", 2), limit]


def _line(x: float, to_x: float, y: float, to_y: float, colour: str, width: int) -> str:
    ends = f'x1="{x:.1f}" x2="{to_x:.1f}" y1="{y:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _dot(x: float, y: float, number: int) -> str:
    """Of the contender with that number; ours is the first."""
    size, colour = (6 if number == 0 else 4.5), _COLOURS[number % len(_COLOURS)]
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}" fill-opacity="0.85"/>'
