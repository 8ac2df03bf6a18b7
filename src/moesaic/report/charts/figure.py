"""Charts as plain JSON for Plotly, with a shared look.

Colours are names of CSS variables, which the page resolves for light, dark and print. Text from
the run is escaped, because Plotly renders markup in labels. An x axis without a title shows steps.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moesaic.report.log import Validation
from moesaic.report.run_stats import RunStats
from moesaic.report.series import MAX_POINTS, Floats, keep_extremes, smooth

SERIES = [f"var(--series-{number})" for number in range(8)]
"""Colours that colour-blind readers can distinguish."""
SOFT = "var(--ink-soft)"
_PHASES = {
    "data": SERIES[4], "forward": SERIES[5], "backward": SERIES[0], "pipeline": SERIES[5],
    "reduce": SERIES[1], "clip": SERIES[6], "optimizer": SERIES[2], "log": SERIES[3],
}  # fmt: skip
_FAINT = 0.45
"""Opacity of raw values under their smoothed curve."""
_FEW = 12
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
    data: list[dict[str, Any]]
    """Plotly traces."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Plotly layout; `page.js` adds the shared one."""
    span: int = 6
    """Width in the twelve columns of the page."""
    height: int = 260
    """Height in pixels."""

    def to_json(self) -> dict[str, Any]:
        """Return what `page.js` draws."""
        return {"name": self.name, "data": self.data, "layout": self.layout}


def curve(
    x: Floats, y: Floats, name: str, colour: str, form: str, width: float = 1.75, **extra: Any
) -> dict[str, Any]:
    """Return a line over steps, thinned; `form` is the tooltip and `extra` refines the trace."""
    x, y = keep_extremes(x, y)
    few = {"mode": "lines+markers", "marker": {"size": 6, "color": colour}}
    return {
        "type": "scatter", "name": label(name), "x": column(x), "y": column(y),
        **(few if len(x) < _FEW else {"mode": "lines"}),
        "line": {"color": colour, "width": width, "simplify": False}, "hovertemplate": form,
        **extra,
    }  # fmt: skip


def raw_and_smooth(step: Floats, y: Floats, name: str, colour: str) -> list[dict[str, Any]]:
    """Return the values, and their smoothed curve if there are enough of them."""
    form = "%{y:.4~g}"
    if len(step) < _FEW:
        return [curve(step, y, name, colour, form)]
    return [
        curve(step, y, name, colour, form, width=1, opacity=_FAINT),
        curve(step, smooth(y), f"{name}, smoothed", colour, form, width=2.25),
    ]


def diamonds(validations: Sequence[Validation], name: str, colour: str) -> dict[str, Any]:
    """Return markers at the losses of the last validations."""
    shown = validations[-MAX_POINTS:]
    return {
        "type": "scatter", "mode": "markers", "name": label(name),
        "x": [one.step for one in shown], "y": column(np.array([one.loss for one in shown])),
        "marker": {"size": 8, "symbol": "diamond", "color": colour},
        "hovertemplate": "%{y:.4f} at step %{x}",
    }  # fmt: skip


def resumes(run: RunStats) -> list[dict[str, Any]]:
    """Return dotted lines at the steps from which the run was resumed."""
    return [
        {
            "type": "line", "x0": launch.step, "x1": launch.step, "y0": 0, "y1": 1,
            "yref": "paper", "line": {"color": SOFT, "width": 1, "dash": "dot"}, "layer": "below",
        }
        for launch in run.launches[1:]
    ]  # fmt: skip


def column(values: Floats) -> list[float | int | None]:
    """Return numbers with five digits, integers as such, None if not finite."""
    return [_short(value) for value in values.tolist()]


def label(text: str) -> str:
    """Escape text from the run for Plotly."""
    return html.escape(text, quote=False)


def phase_colour(phase: str) -> str:
    """Return the colour of a phase."""
    return _PHASES.get(phase, SERIES[7])


def time_unit(seconds: float) -> tuple[float, str]:
    """Return (seconds, name) of the unit that suits an axis up to `seconds`."""
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms")


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")
