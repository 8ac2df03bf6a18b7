"""Expert loads of a run and their balance, read file by file so that memory stays bounded.

Counts are summed into a bounded number of columns of neighbouring steps. If a step was recorded
twice, the later record counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moesaic.base.errors import StoreError
from moesaic.base.records import read_records
from moesaic.report.series import Floats, Ints, edges, known_mean

Bools = npt.NDArray[np.bool_]

KEY_COLUMNS = {"step": pa.int64(), "layer": pa.int64()}
LOAD_COLUMNS = {**KEY_COLUMNS, "counts": pa.list_(pa.int64())}
BALANCE_VALUES = (
    "imbalance_before", "imbalance_after", "replicas", "replica_bytes", "planning_s",
    "replica_wait_s", "gradient_wait_s", "forward_s", "backward_s", "predicted_experts_s",
    "predicted_exposed_s", "predicted_s", "predicted_unbalanced_s",
)  # fmt: skip
BALANCE_COLUMNS = {**KEY_COLUMNS, **dict.fromkeys(BALANCE_VALUES, pa.float64())}
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


class Extreme(NamedTuple):
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
    counts: Floats
    """Tokens by expert, summed over the steps of a column, [columns, layers, experts]."""
    recent: Floats
    """Tokens by expert over the last quarter of recorded steps, [layers, experts]."""

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer."""
        return int(self.recent.shape[1])

    @property
    def column_steps(self) -> Floats:
        """Middle of the steps of each column."""
        bounds = edges(len(self.steps), len(self.counts))
        middle: Floats = (self.steps[bounds[:-1]] + self.steps[bounds[1:] - 1]) / 2
        return middle

    @property
    def recent_steps(self) -> Ints:
        """Last quarter of the recorded steps, at least one."""
        return self.steps[len(self.steps) - -(-len(self.steps) // 4) :]

    @property
    def recent_imbalance(self) -> float:
        """Busiest expert over the mean in the last quarter, averaged over layers with tokens."""
        return known_mean(self.recent_utilisation.max(axis=1))

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


@dataclass(frozen=True)
class BalanceStats:
    """Recorded balance by step and by layer; NaN where a value is unknown."""

    steps: Ints
    """Recorded steps, ascending."""
    layers: Ints
    """Recorded layers, ascending."""
    by_step: dict[str, Floats]
    """Sum of each value over the layers, [steps]."""
    by_layer: dict[str, Floats]
    """Mean of each value over the steps, [layers]."""

    def mean(self, *names: str) -> float:
        """Return the mean over steps of the sum of these values over layers."""
        return float(sum(self.by_step[name].mean() for name in names))


def over_mean(counts: Floats) -> Floats:
    """Divide `counts` by their mean along the last axis; NaN where all are zero."""
    mean = counts.mean(axis=-1, keepdims=True)
    share: Floats = np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=mean > 0)
    return share


def read_loads(directory: Path, last_step: int, max_columns: int = MAX_COLUMNS) -> Loads | None:
    """Return the loads of `directory` up to `last_step`; None if there are none."""
    records = _Records(directory, LOAD_COLUMNS, last_step)
    steps, layers = records.steps, records.layers
    loads: Loads | None = None
    for row, layer, table in records.parts():
        counts = _counts(table, directory, loads.num_experts if loads else None)
        if loads is None:
            shape = len(layers), counts.shape[1]
            affordable = max(MAX_CELLS // (shape[0] * shape[1]), _MIN_COLUMNS)
            num_columns = min(len(steps), max_columns, affordable)
            loads = Loads(steps, layers, np.zeros((num_columns, *shape)), np.zeros(shape))
        bounds = edges(len(steps), len(loads.counts))
        np.add.at(loads.counts, (np.searchsorted(bounds, row, side="right") - 1, layer), counts)
        late = row >= len(steps) - len(loads.recent_steps)
        np.add.at(loads.recent, layer[late], counts[late])
    return loads


def read_balance_stats(directory: Path, last_step: int) -> BalanceStats | None:
    """Return the records of `directory` up to `last_step`; None if there are none."""
    records = _Records(directory, BALANCE_COLUMNS, last_step)
    steps, layers = records.steps, records.layers
    if not len(steps):
        return None
    recorded = np.zeros(len(layers))
    by_step = {name: np.zeros(len(steps)) for name in BALANCE_VALUES}
    by_layer = {name: np.zeros(len(layers)) for name in BALANCE_VALUES}
    for row, layer, table in records.parts():
        np.add.at(recorded, layer, 1)
        for name in BALANCE_VALUES:
            values = table.column(name).to_numpy()
            np.add.at(by_step[name], row, values)
            np.add.at(by_layer[name], layer, values)
    means = {name: sums / recorded for name, sums in by_layer.items()}
    return BalanceStats(steps, layers, by_step, means)


class _Records:
    """Records of a directory by step and layer; the last one of a step and layer is valid."""

    def __init__(self, directory: Path, columns: Mapping[str, Any], last_step: int) -> None:
        """Read the steps and layers of the records up to `last_step`."""
        self._directory, self._columns = directory, columns
        keys = [
            np.stack([table.column(name).to_numpy() for name in KEY_COLUMNS])
            for table in read_records(directory, columns)
        ]
        step, layer = np.concatenate([np.zeros((2, 0), np.int64), *keys], axis=1)
        valid = _latest(step, layer) & (step <= last_step)
        self._valid = np.split(valid, np.cumsum([key.shape[1] for key in keys])[:-1])
        self.steps: Ints = np.unique(step[valid])
        """Steps of valid records, ascending."""
        self.layers: Ints = np.unique(layer[valid])
        """Layers of valid records, ascending."""

    def parts(self) -> Iterator[tuple[Ints, Ints, Any]]:
        """Yield the valid records of each file, with the index of their step and layer."""
        # A running job may have added files since: zip ignores them.
        tables = read_records(self._directory, self._columns)
        for valid, table in zip(self._valid, tables, strict=False):
            if valid.any():
                kept = table.filter(pa.array(valid))
                step, layer = (kept.column(name).to_numpy() for name in KEY_COLUMNS)
                yield np.searchsorted(self.steps, step), np.searchsorted(self.layers, layer), kept


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
