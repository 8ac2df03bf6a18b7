"""What a policy of balance made of each layer over the steps, read part by part so that memory does
not grow with the run.

Figures are summed into a bounded number of columns of neighbouring steps, as loads are, and a step
that was recorded twice counts as in its later part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moesaic.report.loads import Recorded

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIGURES = (
    "busiest_before", "busiest_after", "std_before", "std_after", "copies", "bytes_moved",
    "planning_s", "landing_s", "return_s", "forward_s", "backward_s", "modelled_experts_s",
    "modelled_travel_s", "modelled_exposed_s", "modelled_s", "modelled_home_s",
)  # fmt: skip
COLUMNS = {"step": pa.int64(), "layer": pa.int64(), **dict.fromkeys(FIGURES, pa.float64())}
MAX_COLUMNS = 200
"""Columns of a heat map over steps."""
MAX_CELLS = 20_000
"""Cells of one heat map; many layers get fewer columns."""


@dataclass(frozen=True)
class Spreads:
    """Sums of figures by columns and layers; NaN where a figure is not known."""

    steps: Ints
    """Recorded steps."""
    layers: Ints
    first_step: Ints
    """First step of each column."""
    last_step: Ints
    """Last step of each column."""
    number: Floats
    """[columns, layers]: recorded steps."""
    sums: dict[str, Floats]
    """[columns, layers] of each figure, over them."""

    def over(self, *names: str) -> Floats:
        """[columns, layers]: the figures' sum, a mean step's; NaN where nothing was recorded."""
        return _parts(self._sum(names), self.number)

    def by_layer(self, *names: str) -> Floats:
        """[layers]: the same over all steps."""
        return _parts(self._sum(names).sum(axis=0), self.number.sum(axis=0))

    def by_step(self, *names: str) -> Floats:
        """[columns]: the same of all layers together."""
        total: Floats = self.over(*names).sum(axis=1)
        return total

    def ratio(
        self, above: tuple[str, ...], below: tuple[str, ...], axis: int | None = None
    ) -> Floats:
        """Some figures over others, [columns, layers], or along `axis` their sums; NaN where the
        others are zero."""
        one, other = self._sum(above), self._sum(below)
        return _parts(one, other) if axis is None else _parts(one.sum(axis), other.sum(axis))

    def _sum(self, names: tuple[str, ...]) -> Floats:
        total: Floats = np.sum([self.sums[name] for name in names], axis=0)
        return total


def _parts(one: Floats, other: Floats) -> Floats:
    parts: Floats = np.divide(one, other, out=np.full(one.shape, np.nan), where=other != 0)
    return parts


def read_spreads(directory: Path, last_step: int, max_columns: int = MAX_COLUMNS) -> Spreads | None:
    """What `directory` has up to `last_step`; None if that is nothing."""
    recorded = Recorded(directory, COLUMNS, last_step)
    if not len(recorded.steps):
        return None
    found = _empty(recorded.steps, recorded.layers, max_columns)
    for step, layer, chosen, table in recorded.parts():
        column = np.searchsorted(found.first_step, step[chosen], side="right") - 1
        at = (column, np.searchsorted(found.layers, layer[chosen]))
        np.add.at(found.number, at, 1)
        for name, sums in found.sums.items():
            np.add.at(sums, at, table.column(name).to_numpy()[chosen])
    return found


def _empty(steps: Ints, layers: Ints, max_columns: int) -> Spreads:
    num_columns = min(len(steps), max_columns, max(MAX_CELLS // len(layers), 40))
    edges = np.arange(num_columns + 1) * len(steps) // num_columns
    shape = (num_columns, len(layers))
    return Spreads(
        steps=steps,
        layers=layers,
        first_step=steps[edges[:-1]],
        last_step=steps[edges[1:] - 1],
        number=np.zeros(shape),
        sums={name: np.zeros(shape) for name in FIGURES},
    )
