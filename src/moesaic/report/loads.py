"""Expert loads of a run, read part by part so that memory does not grow with the run.

Counts are summed into a bounded number of columns of neighbouring steps; with fewer recorded steps
than columns a column is a step. A step that was recorded twice counts as in its later part.
"""

from __future__ import annotations

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
    keys = [_keys(table) for table in read_records(directory, COLUMNS)]
    if not keys:
        return None
    step, layer = (np.concatenate(column) for column in zip(*keys, strict=True))
    winners = latest(step, layer) & (step <= last_step)
    if not winners.any():
        return None
    steps, layers = np.unique(step[winners]), np.unique(layer[winners])
    draft: Loads | None = None
    start = 0
    # A run that is still going on may have added parts since the keys were read: zip leaves them.
    for (part_step, part_layer), table in zip(keys, read_records(directory, COLUMNS), strict=False):
        chosen = winners[start : start + len(part_step)]
        start += len(part_step)
        if chosen.any():
            counts = _counts(table, directory)[chosen]
            draft = draft or _empty(steps, layers, counts.shape[1], max_columns)
            _add(draft, part_step[chosen], part_layer[chosen], counts)
    return draft


def _keys(table: Any) -> tuple[Ints, Ints]:
    step, layer = (table.column(name).to_numpy() for name in ("step", "layer"))
    return step, layer


def latest(step: Ints, layer: Ints) -> npt.NDArray[np.bool_]:
    """Which records count: of each step and layer the last one."""
    key = (step * (int(layer.max()) + 1) + layer)[::-1]
    _, index = np.unique(key, return_index=True)
    winners = np.zeros(len(step), dtype=np.bool_)
    winners[len(step) - 1 - index] = True
    return winners


def _counts(table: Any, directory: Path) -> Floats:
    flat = table.column("counts").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if table.num_rows == 0 or len(flat) % table.num_rows:
        raise StoreError(
            f"'{directory}' holds loads of unequal numbers of experts: remove the directory "
            "to report without expert loads"
        )
    if not len(flat):
        raise StoreError(f"'{directory}' holds loads of no experts: they are damaged, remove it")
    if flat.min() < 0:
        raise StoreError(f"'{directory}' holds loads below 0: they are damaged, remove it")
    counts: Floats = flat.reshape(table.num_rows, -1).astype(np.float64)
    return counts


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
