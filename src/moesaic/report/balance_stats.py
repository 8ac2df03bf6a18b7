"""Expert-load balance of each layer over the steps, read from the `balance/` records of a run.

Values are summed into a bounded number of columns of neighbouring steps, so memory does not grow
with the run. If a step was recorded twice, the later record counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moesaic.report.loads import Records

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

VALUES = (
    "imbalance_before", "imbalance_after", "replicas", "replica_bytes", "planning_s",
    "replica_wait_s", "gradient_wait_s", "forward_s", "backward_s", "predicted_experts_s",
    "predicted_exposed_s", "predicted_s", "predicted_unbalanced_s",
)  # fmt: skip
_BY_RANK = "tokens_before"
COLUMNS = {
    "step": pa.int64(), "layer": pa.int64(), **dict.fromkeys(VALUES, pa.float64()),
    _BY_RANK: pa.list_(pa.int64()),
}  # fmt: skip
MAX_COLUMNS = 200
"""Points of a curve over steps."""


@dataclass(frozen=True)
class BalanceStats:
    """Sums of recorded values by column and layer."""

    steps: Ints
    """Recorded steps, ascending."""
    layers: Ints
    """Recorded layers, ascending."""
    first_step: Ints
    """First step of each column."""
    last_step: Ints
    """Last step of each column."""
    recorded: Floats
    """Number of recorded steps, [columns, layers]."""
    sums: dict[str, Floats]
    """Sum of each value over the recorded steps, [columns, layers]; NaN where it is unknown."""
    most_tokens: float
    """Most tokens of one rank in one layer and step, without replicas."""

    def by_step(self, *names: str) -> Floats:
        """Return the sum of these values over all layers, per step, [columns]."""
        total: Floats = _over(self._sum(names), self.recorded).sum(axis=1)
        return total

    def by_layer(self, *names: str) -> Floats:
        """Return the sum of these values per step of each layer, [layers]."""
        return _over(self._sum(names).sum(axis=0), self.recorded.sum(axis=0))

    def _sum(self, names: tuple[str, ...]) -> Floats:
        total: Floats = np.sum([self.sums[name] for name in names], axis=0)
        return total


def read_balance_stats(
    directory: Path, last_step: int, max_columns: int = MAX_COLUMNS
) -> BalanceStats | None:
    """Return the records of `directory` up to `last_step`; None if there are none."""
    records = Records(directory, COLUMNS, last_step)
    steps, layers = records.steps, records.layers
    if not len(steps):
        return None
    num_columns = min(len(steps), max_columns)
    edges = np.arange(num_columns + 1) * len(steps) // num_columns
    first_step = steps[edges[:-1]]
    recorded = np.zeros((num_columns, len(layers)))
    sums = {name: np.zeros_like(recorded) for name in VALUES}
    most_tokens = 0.0
    for step, layer, valid, table in records.parts():
        column = np.searchsorted(first_step, step[valid], side="right") - 1
        cell = (column, np.searchsorted(layers, layer[valid]))
        np.add.at(recorded, cell, 1)
        for name, values in sums.items():
            np.add.at(values, cell, table.column(name).to_numpy()[valid])
        most_tokens = max(most_tokens, _most(table.filter(pa.array(valid)).column(_BY_RANK)))
    return BalanceStats(
        steps, layers, first_step, steps[edges[1:] - 1], recorded, sums, most_tokens
    )


def _most(lists: Any) -> float:
    flat = lists.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return float(flat.max(initial=0))


def _over(values: Floats, number: Floats) -> Floats:
    means: Floats = np.divide(values, number, out=np.full(values.shape, np.nan), where=number != 0)
    return means
