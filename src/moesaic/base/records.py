"""Bulk facts of a run as Parquet: a directory of parts, each whole or absent.

A writer that is killed loses the rows since its last part and nothing else: a part is written
under another name and renamed when complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesaic.base.errors import StoreError, unwritable
from moesaic.base.files import replacing


class RecordWriter:
    """Collects rows and writes them as numbered parts of `directory`."""

    def __init__(self, directory: Path, schema: pa.Schema, rows_per_part: int = 4096) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._schema, self._limit = directory, schema, rows_per_part
        self._rows: list[Mapping[str, Any]] = []
        parts = [int(path.stem.split("-")[1]) for path in list_parts(directory)]
        self._next = max(parts, default=-1) + 1

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; a part is written once enough have come."""
        self._rows.extend(rows)
        if len(self._rows) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what has come since the last part."""
        if not self._rows:
            return
        table = pa.Table.from_pylist([dict(row) for row in self._rows], schema=self._schema)
        target = self._directory / f"part-{self._next:06d}.parquet"
        try:
            with replacing(target) as partial:
                pq.write_table(table, partial)
        except OSError as error:
            raise unwritable(f"'{target}'", error) from None
        self._rows, self._next = [], self._next + 1


def list_parts(directory: Path) -> list[Path]:
    """The parts of a directory, oldest first."""
    return [
        path
        for path in sorted(directory.glob("part-*.parquet"))
        if path.is_file() and path.stem.removeprefix("part-").isdecimal()
    ]


def read_records(directory: Path, columns: Sequence[str] = ()) -> Iterator[pa.Table]:
    """The parts of a directory, oldest first; each must have `columns`."""
    for path in list_parts(directory):
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"'{path}' is not readable Parquet ({error}): remove it") from None
        lacking = [name for name in columns if name not in table.column_names]
        if lacking:
            raise StoreError(f"'{path}' has no column '{lacking[0]}': remove it, it is of others")
        yield table
