"""Click files read once, in order and without the cache; they may have no labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from moesaic.base.errors import DataError
from moesaic.facts.job.clicks import ClicksConfig
from moesaic.train.data.clicks_batch import ClickBatch
from moesaic.train.data.clicks_block import Block, Columns
from moesaic.train.data.clicks_cache import BadLines, encode_file, gather_batch
from moesaic.train.data.clicks_files import find_files
from moesaic.train.data.clicks_table import check_schema, encode_rows
from moesaic.train.data.clicks_text import read_lines


@dataclass(frozen=True)
class ClickScan:
    """Files of click samples, to be read once."""

    files: list[Path]
    """Files in the order of their names."""
    columns: Columns
    """Columns of all files; no label if the first file has none."""

    @classmethod
    def open(cls, config: ClicksConfig, path: str) -> ClickScan:
        """Find the files of `path`, in the format of a job's data section."""
        files = find_files("--data", path, is_parquet=config.is_parquet)
        columns = Columns.of(config)
        if not _has_labels(files[0], columns):
            columns = replace(columns, label=None)
        return cls(files, columns)

    @property
    def has_labels(self) -> bool:
        """True if the files have labels."""
        return self.columns.label is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def batches(self) -> Iterator[ClickBatch]:
        """Yield all samples in order.

        Raises:
            DataError: a line is malformed; then the predictions after it would be of other lines.
        """
        bad = BadLines(0, is_text=not self.columns.is_parquet, is_fixed=True)
        for number, file in enumerate(self.files):
            for block in encode_file(file, self.columns):
                bad.add(file, block.num_bad, block.examples)
                yield to_batch(block, number)


def to_batch(block: Block, day: int = 0) -> ClickBatch:
    """Return all samples of a block, of one day."""
    counts = block.arrays["counts"]
    starts = np.concatenate(([0], np.cumsum(counts.sum(1, dtype=np.int64))))
    return gather_batch({**block.arrays, "starts": starts}, np.arange(len(counts)), day)


def sample_columns(samples: pa.Table, columns: Columns) -> Block:
    """Return the samples of a table in memory, whose columns a job names.

    Raises:
        DataError: a column is missing or has another type, or a row is malformed.
    """
    file = Path("samples")
    for index, field in enumerate(samples.schema):
        if pa.types.is_null(field.type):  # All values are missing.
            kind = pa.float64() if field.name in columns.dense else pa.string()
            samples = samples.set_column(index, field.name, samples.column(index).cast(kind))
    check_schema(samples.schema, file, columns)
    rows = samples.select(columns.names).combine_chunks().to_batches()
    batch = rows[0] if rows else pa.RecordBatch.from_pylist([], samples.schema)
    block = encode_rows((batch, 1), columns)
    BadLines(0, is_text=False, is_fixed=True).add(file, block.num_bad, block.examples)
    return block


def _has_labels(file: Path, columns: Columns) -> bool:
    """Return whether a file has the column of labels; text has it unless each line has one field
    less."""
    if columns.label is None:
        return False
    try:
        if columns.is_parquet:
            return columns.label in parquet.read_schema(file).names
        lines, _ = next(read_lines(file), (b"", 1))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"'{file}' cannot be read ({reason}): replace it") from None
    return lines.partition(b"\n")[0].count(b"\t") != len(columns.names) - 2
