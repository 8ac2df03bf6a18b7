"""Bulk facts of a run as Parquet: a directory of parts, each whole or absent.

A writer that is killed loses the rows since its last part and nothing else: a part is written
under another name and renamed when complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


def read_records(
    directory: Path, columns: Mapping[str, pa.DataType] | None = None
) -> Iterator[pa.Table]:
    """The parts of a directory, oldest first.

    Of `columns`, if any are given, each must have all, of such types and without gaps.
    """
    for path in list_parts(directory):
        yield read_part(path, columns)


def read_part(path: Path, columns: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """One of them."""
    try:
        wanted = None
        if columns is not None:
            wanted = [name for name in pq.read_schema(path).names if name in columns]
        table = pq.read_table(path, columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"'{path}' is not readable Parquet ({error}): remove it") from None
    return table if columns is None else _only(table, columns, path)


def _only(table: pa.Table, columns: Mapping[str, pa.DataType], path: Path) -> pa.Table:
    found = {}
    for name, kind in columns.items():
        if name not in table.column_names:
            raise StoreError(f"'{path}' has no column '{name}': remove it, it is of others")
        column = table.column(name)
        gaps = column.null_count
        if not gaps and pa.types.is_nested(column.type):
            gaps = sum(chunk.flatten().null_count for chunk in column.chunks)
        if gaps:
            raise StoreError(f"'{path}' has gaps in its column '{name}': it is damaged, remove it")
        try:
            found[name] = column.cast(kind)
        except pa.ArrowException:
            raise StoreError(
                f"'{path}' has {column.type} in its column '{name}', not {kind}: remove it, it is "
                "of others"
            ) from None
    return pa.table(found)
