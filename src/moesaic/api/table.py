"""Embedding tables by key, for anyone's own training loop and for serving."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from moesaic.base.config import parse
from moesaic.facts.job.table import TableConfig
from moesaic.ps.table import Table as Rows
from moesaic.ps.table import TableStats

if TYPE_CHECKING:
    from moesaic.ps.table import Lookup

DType = Literal["float32", "float64"]


class Table:
    """Embedding rows by key. A key is any int64; a key without a row has its first value."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.dim = rows.dim
        """Numbers per row."""

    @classmethod
    def open(cls, *, dim: int, seed: int = 0, dtype: DType = "float32", **settings: Any) -> Table:
        """Return a table in memory.

        Args:
            dim: numbers per row.
            seed: seed of first values.
            dtype: type of rows and of their optimizer state.
            settings: keys of the table [table] of a job, such as `optimizer="adam"` or `lr=0.01`.
        """
        config = parse(TableConfig, settings, "Table.open")
        return cls(Rows(config, dim, seed=seed, dtype=dtype))

    def __len__(self) -> int:
        return self._rows.num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def pull(self, keys: ArrayLike | Tensor) -> Any:
        """Return the rows of keys, [keys, dim]: a torch tensor for a torch tensor of keys, else a
        numpy array. Nothing is stored."""
        values = self._rows.pull(_to_numpy(keys))
        return torch.from_numpy(values) if isinstance(keys, Tensor) else values

    def push(
        self,
        keys: ArrayLike | Tensor,
        grads: ArrayLike | Tensor,
        clicks: ArrayLike | Tensor | None = None,
    ) -> None:
        """Update the rows of keys by gradients. Those of equal keys are summed first.

        Args:
            keys: a key per sample, [n].
            grads: gradients, [n, dim].
            clicks: 1 for a clicked sample, else 0, [n]; None: none was clicked.
        """
        self._rows.push(_to_numpy(keys), _to_numpy(grads), _to_numpy(clicks))

    def look_up(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64], *, training: bool
    ) -> Lookup:
        """Return the sums of rows in bags, for `TableBag`."""
        return self._rows.look_up(keys, offsets, training=training)

    def step(self) -> None:
        """Update the rows by the gradients that `TableBag` collected since the last call."""
        self._rows.step()

    def end_day(self) -> int:
        """End a day: scores decay, rows are evicted by the settings. Return how many were."""
        return self._rows.end_day()

    def stats(self) -> TableStats:
        """Return rows, bytes in memory, and counts since the table was opened."""
        return self._rows.stats()

    def close(self) -> None:
        """Free the directory for others; what was not saved is lost."""


A = TypeVar("A")


def _to_numpy(values: A | Tensor) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values
