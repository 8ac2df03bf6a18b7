"""Expert loads of a run, read part by part so that memory does not grow with the run.

Counts are summed into a bounded number of columns of neighbouring steps; with fewer recorded steps
than columns a column is a step. A step that was recorded twice counts as in its later part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moesaic.base.errors import StoreError
from moesaic.base.records import read_records

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

COLUMNS = {"step": pa.int64(), "layer": pa.int64(), "counts": pa.list_(pa.int64())}
MAX_COLUMNS = 400
"""Columns of the heat map over steps."""
MAX_CELLS = 400_000
"""Cells of the heat maps of all layers together; many experts get fewer columns."""


@dataclass(frozen=True)
class Loads:
    """Tokens that each expert took."""

    steps: Ints
    """Recorded steps."""
    layers: Ints
    first_step: Ints
    """First step of each column."""
    last_step: Ints
    """Last step of each column."""
    counts: Floats
    """[columns, layers, experts], summed over the steps of a column."""
    recent: Floats
    """[layers, experts], summed over the last quarter of recorded steps."""
    imbalance: Floats
    """[steps, layers]: load of the busiest expert over the mean."""

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.recent.shape[1])

    @property
    def recent_steps(self) -> Ints:
        """The last quarter of recorded steps, at least one."""
        return self.steps[len(self.steps) - -(-len(self.steps) // 4) :]

    def utilisation(self) -> Floats:
        """[columns, layers, experts]: load over the even share; NaN where nothing was recorded."""
        return over_mean(self.counts)

    def recent_utilisation(self) -> Floats:
        """[layers, experts]: load over the even share in the last quarter of recorded steps."""
        return over_mean(self.recent)


def over_mean(counts: Floats) -> Floats:
    """`counts` over their mean along the last axis; NaN where all are zero."""
    mean = counts.mean(axis=-1, keepdims=True)
    share: Floats = np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=mean > 0)
    return share


def read_loads(directory: Path, last_step: int, max_columns: int = MAX_COLUMNS) -> Loads | None:
    """The loads of `directory` up to `last_step`; None if there are none."""
    recorded = Recorded(directory, COLUMNS, last_step)
    draft: Loads | None = None
    for step, layer, chosen, table in recorded.parts():
        if chosen.any():
            counts = side_by_side(table, "counts", directory, ("loads", "experts"))[chosen]
            num_experts = counts.shape[1]
            draft = draft or _empty(recorded.steps, recorded.layers, num_experts, max_columns)
            _add(draft, step[chosen], layer[chosen], counts)
    return draft


class Recorded:
    """Records of steps and layers that a directory has, part by part, and which of them count."""

    def __init__(self, directory: Path, columns: Mapping[str, Any], last_step: int) -> None:
        """Those up to `last_step`, and of each step and layer the last one."""
        self._directory, self._columns = directory, columns
        self._keys = [
            (table.column("step").to_numpy(), table.column("layer").to_numpy())
            for table in read_records(directory, columns)
        ]
        nothing = (np.zeros(0, np.int64),) * 2
        step, layer = (np.concatenate(column) for column in zip(nothing, *self._keys, strict=True))
        self._counts = _latest(step, layer) & (step <= last_step)
        self.steps: Ints = np.unique(step[self._counts])
        """Of what counts; none if nothing does."""
        self.layers: Ints = np.unique(layer[self._counts])

    def parts(self) -> Iterator[tuple[Ints, Ints, Bools, Any]]:
        """Steps and layers of each part, which of its records count, and all of it."""
        tables, start = read_records(self._directory, self._columns), 0
        # A run that is still going on may have added parts since: zip leaves them.
        for (step, layer), table in zip(self._keys, tables, strict=False):
            yield step, layer, self._counts[start : start + len(step)], table
            start += len(step)


def _latest(step: Ints, layer: Ints) -> Bools:
    """Which records count: of each step and layer the last one."""
    key = (step * (int(layer.max(initial=0)) + 1) + layer)[::-1]
    _, index = np.unique(key, return_index=True)
    winners = np.zeros(len(step), dtype=np.bool_)
    winners[len(step) - 1 - index] = True
    return winners


def side_by_side(table: Any, column: str, directory: Path, words: tuple[str, str]) -> Floats:
    """[rows, entries] of a column of lists; `words`: what they hold, and of whom."""
    lists, (what, each) = table.column(column).combine_chunks(), words
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    if len(set(lists.value_lengths().to_pylist())) != 1:
        raise StoreError(
            f"'{directory}' holds {what} of unequal numbers of {each}: remove the directory "
            "to report without it"
        )
    if not len(flat):
        raise StoreError(f"'{directory}' holds {what} of no {each}: they are damaged, remove it")
    if flat.min() < 0:
        raise StoreError(f"'{directory}' holds {what} below 0: they are damaged, remove it")
    found: Floats = flat.reshape(table.num_rows, -1).astype(np.float64)
    return found


def _empty(steps: Ints, layers: Ints, num_experts: int, max_columns: int) -> Loads:
    affordable = MAX_CELLS // max(len(layers) * num_experts, 1)
    num_columns = min(len(steps), max_columns, max(affordable, 40))
    edges = np.arange(num_columns + 1) * len(steps) // num_columns
    return Loads(
        steps=steps,
        layers=layers,
        first_step=steps[edges[:-1]],
        last_step=steps[edges[1:] - 1],
        counts=np.zeros((num_columns, len(layers), num_experts)),
        recent=np.zeros((len(layers), num_experts)),
        imbalance=np.full((len(steps), len(layers)), np.nan),
    )


def _add(loads: Loads, step: Ints, layer: Ints, counts: Floats) -> None:
    if counts.shape[1] != loads.num_experts:
        raise StoreError(
            f"the loads change from {loads.num_experts} to {counts.shape[1]} experts at step "
            f"{step[0]}: remove the parts of another run from loads/"
        )
    at, row = np.searchsorted(loads.layers, layer), np.searchsorted(loads.steps, step)
    column = np.searchsorted(loads.first_step, step, side="right") - 1
    np.add.at(loads.counts, (column, at), counts)
    loads.imbalance[row, at] = over_mean(counts).max(axis=1)
    late = step >= loads.recent_steps[0]
    np.add.at(loads.recent, at[late], counts[late])
