"""Click probabilities of a trained recommender, for samples in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moesaic.api.table import Table
from moesaic.base.errors import ConfigError
from moesaic.models.recommender_files import (
    RecommenderOrigin,
    open_recommender,
    predict_logits,
)
from moesaic.train.data.clicks_block import Columns
from moesaic.train.data.clicks_scan import sample_columns, to_batch


class Predictor:
    """A trained recommender in this process: its network and its table."""

    def __init__(self, origin: RecommenderOrigin, table: Table) -> None:
        """Take a recommender and its table; `open` finds them."""
        self.origin, self.table = origin, table
        self._network = origin.load_network()
        columns = Columns.of(origin.job.data)
        self._columns = replace(columns, label=None, weight=None, user=None)

    @classmethod
    def open(cls, source: str | Path) -> Self:
        """Return the recommender of a run of kind "ctr", of a checkpoint, or of an export."""
        return cls.load(open_recommender(Path(source)))

    @classmethod
    def load(cls, origin: RecommenderOrigin) -> Self:
        """Return a recommender on disk, with rows beyond memory on the drive of a job that names
        one."""
        settings = origin.job.table
        drive = {"host": settings.host, "ssd": settings.ssd}
        is_here = origin.checkpoint is not None and settings.ssd is not None
        table = Table.open_stored(
            origin.rows, origin.path, drive if is_here else {}, read_only=True
        )
        with ExitStack() as stack:
            stack.callback(table.close)
            predictor = cls(origin, table)
            stack.pop_all()
        return predictor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def columns(self) -> list[str]:
        """Columns that samples have: dense features, then slots."""
        return self._columns.names

    def predict(self, samples: pa.Table | Mapping[str, Any]) -> NDArray[np.float32]:
        """Return the click probability of each sample.

        Args:
            samples: values of each of `columns`, as an Arrow table or as lists by name: numbers for
                dense features; integers, strings, or lists of them for slots.
        """
        if self.origin.job.data.stream is not None:
            raise ConfigError(
                f"'{self.origin.path}' was trained on the built-in stream, whose samples have no "
                "columns: predict samples of a recommender that was trained on files"
            )
        batch = to_batch(sample_columns(_as_table(samples), self._columns))
        return probabilities(self.logits(batch.keys, batch.offsets, batch.dense))

    def logits(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64], dense: NDArray[np.float32]
    ) -> NDArray[Any]:
        """Return the logits of samples whose ids are keys already; see `predict_logits`."""
        return predict_logits(self._network, self.table, keys, offsets, dense)

    def close(self) -> None:
        """Free the table."""
        self.table.close()


def probabilities(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the probabilities of logits."""
    result: NDArray[np.float32] = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    return result


def _as_table(samples: pa.Table | Mapping[str, Any]) -> pa.Table:
    if isinstance(samples, pa.Table):
        return samples
    try:
        return pa.table(dict(samples))
    except (pa.ArrowException, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"samples are no table ({reason}): give lists of equal length by column"
        ) from None
