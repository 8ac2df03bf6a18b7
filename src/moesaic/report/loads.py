"""Expert loads of a run, read file by file so that memory does not grow with the run.

Counts are summed into a bounded number of columns of neighbouring steps. If a step was recorded
twice, the later record counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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
MAX_CELLS = 40_000
"""Cells of the heat maps of all layers together; many experts get fewer columns."""
_MIN_COLUMNS = 16
"""Columns of the heat maps, however many experts there are."""
DEAD = 0.05
"""Share of an even load below which an expert is dead."""
HOT = 2.0
"""Multiple of an even load above which an expert is hot."""
_ENOUGH = 20
"""Mean tokens per expert below which chance alone makes experts dead or hot."""


@dataclass(frozen=True)
class Extreme:
    """Dead or hot expert in the last quarter of recorded steps."""

    layer: int
    """Layer of the expert."""
    expert: int
    """Index of the expert in its layer."""
    utilisation: float
    """Load over the even share."""


@dataclass(frozen=True)
class Loads:
    """Tokens routed to each expert."""

    steps: Ints
    """Recorded steps, ascending."""
    layers: Ints
    """Recorded layers, ascending."""
    first_step: Ints
    """First step of each column."""
    last_step: Ints
    """Last step of each column."""
    counts: Floats
    """Tokens by expert, summed over the steps of a column, [columns, layers, experts]."""
    recent: Floats
    """Tokens by expert over the last quarter of recorded steps, [layers, experts]."""
    imbalance: Floats
    """Tokens of the busiest expert over the mean, [steps, layers]."""

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer."""
        return int(self.recent.shape[1])

    @property
    def recent_steps(self) -> Ints:
        """Last quarter of the recorded steps, at least one."""
        return self.steps[len(self.steps) - -(-len(self.steps) // 4) :]

    @property
    def recent_imbalance(self) -> float:
        """Mean imbalance of the layers over the last quarter; NaN if no token was routed."""
        recent = self.imbalance[-len(self.recent_steps) :]
        return float(np.mean(recent[np.isfinite(recent)])) if np.isfinite(recent).any() else np.nan

    @cached_property
    def recent_utilisation(self) -> Floats:
        """Load over the even share in the last quarter, [layers, experts]."""
        return over_mean(self.recent)

    @cached_property
    def dead(self) -> list[Extreme]:
        """Experts under `DEAD`, by layer and expert."""
        return self._extremes(self.recent_utilisation < DEAD)

    @cached_property
    def hot(self) -> list[Extreme]:
        """Experts over `HOT`, hottest first."""
        hot = self._extremes(self.recent_utilisation > HOT)
        return sorted(hot, key=lambda extreme: -extreme.utilisation)

    def utilisation(self) -> Floats:
        """Return load over the even share, [columns, layers, experts]; NaN if not recorded."""
        return over_mean(self.counts)

    def _extremes(self, mask: Bools) -> list[Extreme]:
        mask = mask & (self.recent.mean(axis=1, keepdims=True) >= _ENOUGH)
        return [
            Extreme(int(self.layers[row]), int(expert), float(self.recent_utilisation[row, expert]))
            for row, expert in np.argwhere(mask)
        ]


def over_mean(counts: Floats) -> Floats:
    """Divide `counts` by their mean along the last axis; NaN where all are zero."""
    mean = counts.mean(axis=-1, keepdims=True)
    share: Floats = np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=mean > 0)
    return share


def read_loads(directory: Path, last_step: int, max_columns: int = MAX_COLUMNS) -> Loads | None:
    """Return the loads of `directory` up to `last_step`; None if there are none."""
    records = Records(directory, COLUMNS, last_step)
    loads: Loads | None = None
    for step, layer, valid, table in records.parts():
        if valid.any():
            counts = _counts(table, directory, loads.num_experts if loads else None)[valid]
            loads = loads or _empty(records.steps, records.layers, counts.shape[1], max_columns)
            _add(loads, step[valid], layer[valid], counts)
    return loads


class Records:
    """Records of a directory by step and layer, read file by file.

    The last record of a step and layer is valid.
    """

    def __init__(self, directory: Path, columns: Mapping[str, Any], last_step: int) -> None:
        """Read the steps and layers of the records up to `last_step`."""
        self._directory, self._columns = directory, columns
        self._keys = [
            (table.column("step").to_numpy(), table.column("layer").to_numpy())
            for table in read_records(directory, columns)
        ]
        empty = (np.zeros(0, np.int64),) * 2
        step, layer = (np.concatenate(column) for column in zip(empty, *self._keys, strict=True))
        self._valid = _latest(step, layer) & (step <= last_step)
        self.steps: Ints = np.unique(step[self._valid])
        """Steps of valid records, ascending."""
        self.layers: Ints = np.unique(layer[self._valid])
        """Layers of valid records, ascending."""

    def parts(self) -> Iterator[tuple[Ints, Ints, Bools, Any]]:
        """Yield steps, layers, validity and the whole table of each file."""
        tables, start = read_records(self._directory, self._columns), 0
        # A running job may have added files since: zip ignores them.
        for (step, layer), table in zip(self._keys, tables, strict=False):
            yield step, layer, self._valid[start : start + len(step)], table
            start += len(step)


def _latest(step: Ints, layer: Ints) -> Bools:
    """Mark the last record of each step and layer."""
    key = (step * (int(layer.max(initial=0)) + 1) + layer)[::-1]
    _, index = np.unique(key, return_index=True)
    last = np.zeros(len(step), dtype=np.bool_)
    last[len(step) - 1 - index] = True
    return last


def _counts(table: Any, directory: Path, num_experts: int | None) -> Floats:
    """Return the counts of a file, [records, experts]."""
    lists = table.column("counts").combine_chunks()
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    lengths = set(lists.value_lengths().to_pylist())
    if (
        len(lengths) != 1
        or num_experts not in (None, *lengths)
        or (flat.min() if len(flat) else -1) < 0
    ):
        raise StoreError(
            f"'{directory}' holds damaged loads: each record needs a count of 0 or more for each "
            "of the same experts; remove the directory to report without it"
        )
    counts: Floats = flat.reshape(table.num_rows, -1).astype(np.float64)
    return counts


def _empty(steps: Ints, layers: Ints, num_experts: int, max_columns: int) -> Loads:
    affordable = MAX_CELLS // (len(layers) * num_experts)
    num_columns = min(len(steps), max_columns, max(affordable, _MIN_COLUMNS))
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
    at, row = np.searchsorted(loads.layers, layer), np.searchsorted(loads.steps, step)
    column = np.searchsorted(loads.first_step, step, side="right") - 1
    np.add.at(loads.counts, (column, at), counts)
    loads.imbalance[row, at] = over_mean(counts).max(axis=1)
    late = step >= loads.recent_steps[0]
    np.add.at(loads.recent, at[late], counts[late])
