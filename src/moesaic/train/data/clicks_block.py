"""Columns of click files, and blocks of samples that are encoded from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.facts.job.clicks import CRITEO_DENSE, CRITEO_SLOTS, ClicksConfig

NUM_SHOWN = 5
"""Malformed rows of a file or a run whose reasons are kept."""
MAX_DENSE = float(np.finfo(np.float32).max)
"""Largest dense feature."""
_SMALL_LOGS = np.log1p(np.arange(4096.0)).astype(np.float32)
"""Logarithms of small integers, which are frequent."""


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns, and how they are encoded."""

    label: str | None
    """None: the file has no labels, and they are 0."""
    dense: tuple[str, ...]
    slots: tuple[str, ...]
    weight: str | None
    user: str | None
    log_dense: bool
    is_parquet: bool

    @classmethod
    def of(cls, config: ClicksConfig) -> Columns:
        """Return the columns of the job's data section."""
        if config.is_parquet:
            return cls(
                config.label, tuple(config.dense), tuple(config.slots), config.weight,
                config.user, config.log_dense, is_parquet=True,
            )  # fmt: skip
        dense = tuple(f"I{number}" for number in range(1, CRITEO_DENSE + 1))
        slots = tuple(f"C{number}" for number in range(1, CRITEO_SLOTS + 1))
        return cls("label", dense, slots, None, None, config.log_dense, is_parquet=False)

    @property
    def names(self) -> list[str]:
        """Names of all columns, each once."""
        names = (self.label, *self.dense, *self.slots, self.weight, self.user)
        return list(dict.fromkeys(name for name in names if name is not None))


@dataclass(frozen=True)
class Block:
    """Encoded samples, and the malformed rows between them."""

    arrays: dict[str, NDArray[Any]]
    """Arrays by name: labels [n], dense [n, num_dense], counts of keys [n, num_slots], and keys by
    sample and slot; if the columns exist, weights [n] and users [n]."""
    num_bad: int = 0
    """Number of malformed rows, which are left out."""
    examples: tuple[tuple[int, str], ...] = ()
    """Row of the file, from 1, and reason of the first malformed rows."""


def scale_dense(values: NDArray[np.float64], log_dense: bool) -> NDArray[np.float32]:
    """Return dense features, [n, num_dense], of the `values` of columns, [num_dense, n]."""
    scaled = np.empty(values.T.shape, np.float32)
    _scale_dense(values, log_dense, scaled)
    return scaled


@cached_njit
def _scale_dense(values: Any, log_dense: bool, scaled: Any) -> None:
    for feature in range(len(values)):
        for row in range(values.shape[1]):
            value = values[feature, row]
            if np.isnan(value):
                value = 0.0
            if not log_dense:
                scaled[row, feature] = value
            elif 0 <= value < len(_SMALL_LOGS) and value == int(value):
                scaled[row, feature] = _SMALL_LOGS[int(value)]
            else:
                scaled[row, feature] = np.copysign(np.log1p(abs(value)), value)
