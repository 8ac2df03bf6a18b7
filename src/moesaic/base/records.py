"""Bulk records of a run as Parquet: a directory of numbered parts, each complete or absent.

A part is written under a temporary name and renamed when complete. A killed writer loses only the
rows since the last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesaic.base.errors import StoreError, write_error
from moesaic.base.files import atomic_replace


class RecordWriter:
    """A writer that buffers rows and writes them as numbered parts of `directory`."""

    def __init__(self, directory: Path, schema: pa.Schema, rows_per_part: int = 4096) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._schema, self._rows_per_part = directory, schema, rows_per_part
        self._rows: list[Mapping[str, Any]] = []
        parts = [int(path.stem.split("-")[1]) for path in list_parts(directory)]
        self._next = max(parts, default=-1) + 1

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; write a part once enough are buffered."""
        self._rows.extend(rows)
        if len(self._rows) >= self._rows_per_part:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as a part."""
        if not self._rows:
            return
        table = pa.Table.from_pylist([dict(row) for row in self._rows], schema=self._schema)
        target = self._directory / f"part-{self._next:06d}.parquet"
        try:
            with atomic_replace(target) as partial:
                pq.write_table(table, partial)
        except OSError as error:
            raise write_error(f"'{target}'", error) from None
        self._rows, self._next = [], self._next + 1


def list_parts(directory: Path) -> list[Path]:
    """Return the parts of a directory, oldest first."""
    return [
        path
        for path in sorted(directory.glob("part-*.parquet"))
        if path.is_file() and path.stem.removeprefix("part-").isdecimal()
    ]


def read_records(
    directory: Path, columns: Mapping[str, pa.DataType] | None = None
) -> Iterator[pa.Table]:
    """Yield the parts of a directory as tables, oldest first.

    With `columns`, each part must have all of them, without nulls, in types that cast to these.
    """
    for path in list_parts(directory):
        yield read_part(path, columns)


def read_part(path: Path, columns: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Return one part as a table; `columns` as in `read_records`."""
    try:
        wanted = None
        if columns is not None:
            wanted = [name for name in pq.read_schema(path).names if name in columns]
        table = pq.read_table(path, columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"'{path}' is not readable Parquet ({error}): remove it") from None
    return table if columns is None else _select_columns(table, columns, path)


def _select_columns(table: pa.Table, columns: Mapping[str, pa.DataType], path: Path) -> pa.Table:
    found = {}
    for name, kind in columns.items():
        if name not in table.column_names:
            raise StoreError(
                f"'{path}' has no column '{name}': another program wrote it, remove it"
            )
        column = table.column(name)
        nulls = column.null_count
        if not nulls and pa.types.is_nested(column.type):
            nulls = sum(chunk.flatten().null_count for chunk in column.chunks)
        if nulls:
            raise StoreError(f"'{path}' has nulls in column '{name}': it is damaged, remove it")
        try:
            found[name] = column.cast(kind)
        except pa.ArrowException:
            raise StoreError(
                f"'{path}' has {column.type} in column '{name}', not {kind}: another program wrote "
                "it, remove it"
            ) from None
    return pa.table(found)
