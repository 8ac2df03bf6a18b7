"""Charts as plain JSON for Plotly, and the look they share.

Colours are names of CSS variables, which the page resolves: one figure serves light, dark and
print. Text that comes from the run is escaped, because Plotly reads markup in labels.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SERIES = [f"var(--series-{number})" for number in range(8)]
"""Colours that colour-blind readers can tell apart, dark and light."""
PHASES = {
    "data": SERIES[4], "forward": SERIES[5], "backward": SERIES[0], "pipeline": SERIES[5],
    "reduce": SERIES[1], "clip": SERIES[6], "optimizer": SERIES[2], "log": SERIES[3],
    "other": SERIES[7],
}  # fmt: skip
"""Colours of the phases of a step; `other` is time in none of them."""
FAINT = 0.45
"""Opacity of raw figures under their smoothed curve."""
FEW = 12
"""Curves of fewer points show each of them."""


@dataclass(frozen=True)
class Figure:
    """One chart of the page."""

    name: str
    title: str
    subtitle: str
    """Unit and how to read it."""
    alt: str
    """What the chart shows, in words."""
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    span: int = 6
    """Columns of the page's twelve."""
    height: int = 260
    """Pixels."""

    def to_json(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {"name": self.name, "data": self.data, "layout": self.layout}


def curve(x: Floats, y: Floats, name: str, colour: str, **extra: Any) -> dict[str, Any]:
    """A line over steps; `extra` goes to the trace, `width`, `opacity` to its look."""
    line = {"color": colour, "width": extra.pop("width", 1.75), "simplify": False}
    few = {"mode": "lines+markers", "marker": {"size": 6, "color": colour}}
    return {
        "type": "scatter",
        **(few if len(x) < FEW else {"mode": "lines"}),
        "x": column(x),
        "y": column(y),
        "name": label(name),
        "line": line,
        **extra,
    }


def column(values: Floats) -> list[float | int | None]:
    """Numbers with five digits, integers as such, None where there is none."""
    return [_short(value) for value in values.tolist()]


def label(text: str) -> str:
    """Text from the run as Plotly shows it letter by letter."""
    return html.escape(text, quote=False)


def layout(**parts: Any) -> dict[str, Any]:
    """A layout over steps: `yaxis`, `xaxis` and other keys refine the shared one."""
    axes = {
        "xaxis": {"title": {"text": "step", "standoff": 6}, **parts.pop("xaxis", {})},
        "yaxis": {**parts.pop("yaxis", {})},
    }
    return {**axes, **parts}


def marks(steps: Iterable[int]) -> list[dict[str, Any]]:
    """Dotted lines, at the steps from which a run was resumed."""
    return [
        {
            "type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper",
            "line": {"color": "var(--ink-soft)", "width": 1, "dash": "dot"}, "layer": "below",
        }
        for step in steps
    ]  # fmt: skip


def phase_colour(phase: str, at: int) -> str:
    """The colour of a phase; `at` is its place among those shown, for one that has none."""
    return PHASES.get(phase, SERIES[(at + 7) % len(SERIES)])


def columns(named: Mapping[str, Floats]) -> Floats:
    """Named columns side by side, [rows, names]."""
    return np.stack(list(named.values()), axis=1) if named else np.zeros((0, 0))


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")
