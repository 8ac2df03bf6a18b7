"""Charts as plain JSON for Plotly, with a shared look.

Colours are names of CSS variables, which the page resolves for light, dark and print. Text from
the run is escaped, because Plotly renders markup in labels.
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
"""Colours that colour-blind readers can distinguish."""
PHASES = {
    "data": SERIES[4], "forward": SERIES[5], "backward": SERIES[0], "pipeline": SERIES[5],
    "reduce": SERIES[1], "clip": SERIES[6], "optimizer": SERIES[2], "log": SERIES[3],
    "other": SERIES[7],
}  # fmt: skip
"""Colours of the phases of a step; `other` is time outside of phases."""
FAINT = 0.45
"""Opacity of raw values under their smoothed curve."""
FEW = 12
"""Curves with fewer points show a marker for each."""


@dataclass(frozen=True)
class Figure:
    """One chart of the page."""

    name: str
    """Id of the element."""
    title: str
    """Heading of the card."""
    guide: str
    """Line under the title: what the chart shows and what a reader should look for."""
    alt: str
    """Text alternative with the main numbers."""
    data: list[dict[str, Any]]
    """Plotly traces."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Plotly layout."""
    span: int = 6
    """Width in the twelve columns of the page."""
    height: int = 260
    """Height in pixels."""

    def to_json(self) -> dict[str, Any]:
        """Return what `page.js` draws."""
        return {"name": self.name, "data": self.data, "layout": self.layout}


def curve(x: Floats, y: Floats, name: str, colour: str, **extra: Any) -> dict[str, Any]:
    """Return a line over steps; `extra` refines the trace."""
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
    """Return numbers with five digits, integers as such, None if not finite."""
    return [_short(value) for value in values.tolist()]


def label(text: str) -> str:
    """Escape text from the run for Plotly."""
    return html.escape(text, quote=False)


def layout(**parts: Any) -> dict[str, Any]:
    """Return a layout over steps: `yaxis`, `xaxis` and other keys refine the shared one."""
    axes = {
        "xaxis": {"title": {"text": "step", "standoff": 6}, **parts.pop("xaxis", {})},
        "yaxis": {**parts.pop("yaxis", {})},
    }
    return {**axes, **parts}


def marks(steps: Iterable[int]) -> list[dict[str, Any]]:
    """Return dotted lines at the steps from which the run was resumed."""
    return [
        {
            "type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper",
            "line": {"color": "var(--ink-soft)", "width": 1, "dash": "dot"}, "layer": "below",
        }
        for step in steps
    ]  # fmt: skip


def phase_colour(phase: str, at: int) -> str:
    """Return the colour of a phase; `at` is its index, for a phase without a fixed colour."""
    return PHASES.get(phase, SERIES[(at + 7) % len(SERIES)])


def columns(named: Mapping[str, Floats]) -> Floats:
    """Stack named columns, [steps, names]."""
    return np.stack(list(named.values()), axis=1) if named else np.zeros((0, 0))


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")
