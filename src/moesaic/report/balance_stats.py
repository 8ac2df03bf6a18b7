"""Expert-load balance by step and by layer, read from the `balance/` records of a run.

If a step was recorded twice, the later record counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from moesaic.report.loads import Floats, Ints, Records

VALUES = (
    "imbalance_before", "imbalance_after", "replicas", "replica_bytes", "planning_s",
    "replica_wait_s", "gradient_wait_s", "forward_s", "backward_s", "predicted_experts_s",
    "predicted_exposed_s", "predicted_s", "predicted_unbalanced_s",
)  # fmt: skip
COLUMNS = {"step": pa.int64(), "layer": pa.int64(), **dict.fromkeys(VALUES, pa.float64())}


@dataclass(frozen=True)
class BalanceStats:
    """Recorded values by step and by layer; NaN where they are unknown."""

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


def read_balance_stats(directory: Path, last_step: int) -> BalanceStats | None:
    """Return the records of `directory` up to `last_step`; None if there are none."""
    records = Records(directory, COLUMNS, last_step)
    steps, layers = records.steps, records.layers
    if not len(steps):
        return None
    recorded = np.zeros(len(layers))
    by_step = {name: np.zeros(len(steps)) for name in VALUES}
    by_layer = {name: np.zeros(len(layers)) for name in VALUES}
    for step, layer, valid, table in records.parts():
        row, column = np.searchsorted(steps, step[valid]), np.searchsorted(layers, layer[valid])
        np.add.at(recorded, column, 1)
        for name in VALUES:
            values = table.column(name).to_numpy()[valid]
            np.add.at(by_step[name], row, values)
            np.add.at(by_layer[name], column, values)
    means = {name: sums / recorded for name, sums in by_layer.items()}
    return BalanceStats(steps, layers, by_step, means)
