"""What a policy of balance made of each layer over the steps, read part by part so that memory does
not grow with the run.

Figures are summed into a bounded number of columns of neighbouring steps, as loads are, and a step
that was recorded twice counts as in its later part. A run that went on in another layout may have
more ranks in one part than in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moesaic.base.errors import StoreError
from moesaic.report.loads import Recorded, side_by_side

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIGURES = (
    "busiest_before", "busiest_after", "std_before", "std_after", "copies", "bytes_moved",
    "planning_s", "landing_s", "return_s", "forward_s", "backward_s", "modelled_experts_s",
    "modelled_travel_s", "modelled_exposed_s", "modelled_s", "modelled_home_s",
)  # fmt: skip
BY_RANK = ("rows_before", "rows_after")
EVEN = "rows_even"
"""Rows of a rank if all had the same."""
COLUMNS = {
    "step": pa.int64(), "layer": pa.int64(), **dict.fromkeys(FIGURES, pa.float64()),
    **dict.fromkeys(BY_RANK, pa.list_(pa.int64())),
}  # fmt: skip
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
    rows: dict[str, Floats]
    """[columns, layers, ranks] of `BY_RANK` and `EVEN`; 0 where there was no such rank."""

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

    def by_rank(self, name: str, layer: Ints, rank: Ints) -> Floats:
        """[columns, places]: rows of ranks, which have these places among layers and ranks, over
        the mean of their layer; NaN where there was no such rank, or no rows."""
        return _parts(self.rows[name][:, layer, rank], self.rows[EVEN][:, layer, rank])

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
        if chosen.any():
            words = ("rows", "ranks")
            rows = [side_by_side(table, name, directory, words)[chosen] for name in BY_RANK]
            _add_rows(found.rows, at, rows, directory)
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
        rows={name: np.zeros((*shape, 0)) for name in (*BY_RANK, EVEN)},
    )


def _add_rows(
    found: dict[str, Floats], at: tuple[Ints, Ints], rows: list[Floats], directory: Path
) -> None:
    """Add the lists of `BY_RANK` at these columns and layers; there may be more ranks than ever."""
    before, after = rows
    if before.shape != after.shape:
        raise StoreError(
            f"'{directory}' holds rows of {before.shape[1]} ranks before copies and of "
            f"{after.shape[1]} after: they are damaged, remove it"
        )
    ranks, even = before.shape[1], before.mean(axis=1, keepdims=True)
    for name, one in zip((*BY_RANK, EVEN), (before, after, even), strict=True):
        more = ranks - found[name].shape[2]
        if more > 0:
            found[name] = np.pad(found[name], ((0, 0), (0, 0), (0, more)))
        np.add.at(found[name][..., :ranks], at, one)
