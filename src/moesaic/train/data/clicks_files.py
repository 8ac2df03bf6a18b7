"""Files of click samples: found by name, read as Arrow columns in blocks."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from moesaic.base.errors import DataError
from moesaic.train.data.clicks_encode import ColumnNames, is_list

_BLOCK_BYTES = 4 << 20
_MAX_LINE_BYTES = 64 << 20
_BLOCK_ROWS = 1 << 15
_NUMBERS, _IDS = "numbers", "integers or strings"
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True)
class RawBlock:
    """Consecutive rows of a file, before they are parsed."""

    rows: bytes | pa.RecordBatch
    """Lines of text, or columns."""
    first: int
    """Number of the first row in the file, from 1."""


@dataclass(frozen=True)
class ParsedBlock:
    """Consecutive rows of a file as columns."""

    rows: pa.RecordBatch
    numbers: NDArray[np.int64]
    """Numbers of the rows in the file, from 1."""
    bad: list[tuple[int, str]]
    """Number and reason of each line with another number of fields."""


def find_files(key: str, path: str, *, is_parquet: bool) -> list[Path]:
    """Return the files of `path`, the value of the setting `key`, in the order of their names.

    Numbers in names count by value: day_2 stands before day_10.
    """
    location, label = Path(path).expanduser(), f"{key} = '{path}'"
    if location.is_dir():
        paths = [file.relative_to(location) for file in location.rglob("*") if file.is_file()]
        seen = [file for file in paths if not any(part[0] in "._" for part in file.parts)]
        files = [location / file for file in seen]
        if is_parquet:
            files = [file for file in files if file.suffix in _PARQUET]
    elif glob.has_magic(str(location)):
        matches = map(Path, glob.glob(str(location), recursive=True))
        files = [file for file in matches if file.is_file()]
    else:
        files = [location] if location.is_file() else []
    if not files:
        problem = "holds no such file" if location.is_dir() else "does not exist"
        kind = "Parquet" if is_parquet else "Criteo TSV"
        raise DataError(f"{label} {problem}: give a file, a directory or a glob of {kind}")
    tables = [file for file in files if file.suffix in _PARQUET]
    if tables and not is_parquet:
        raise DataError(
            f"{label} holds Parquet ('{tables[0].name}'), and is read as Criteo TSV: set "
            'data.format = "parquet", and name the columns'
        )
    return sorted(files, key=lambda file: _natural_order(file.as_posix()))


def _natural_order(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def read_blocks(file: Path, names: ColumnNames) -> Iterator[RawBlock]:
    """Yield the rows of `file` in blocks, without parsing text."""
    try:
        yield from _read_lines(file) if names.is_text else _read_table(file, names)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"'{file}' cannot be read ({reason}): replace it") from None


def _read_lines(file: Path) -> Iterator[RawBlock]:
    first, tail = 1, b""
    with pa.input_stream(str(file), compression="detect") as stream:
        while data := stream.read(_BLOCK_BYTES):
            end = data.rfind(b"\n") + 1
            if not end:
                tail += data
                if len(tail) > _MAX_LINE_BYTES:
                    raise DataError(
                        f"'{file}' line {first} is longer than 64 MiB: give lines of Criteo TSV"
                    )
                continue
            lines, tail = tail + data[:end], data[end:]
            yield RawBlock(lines, first)
            first += lines.count(b"\n")
    if tail:
        yield RawBlock(tail, first)


def _read_table(file: Path, names: ColumnNames) -> Iterator[RawBlock]:
    with parquet.ParquetFile(file) as table:
        _check_schema(table.schema_arrow, file, names)
        first = 1
        for rows in table.iter_batches(_BLOCK_ROWS, columns=names.all):
            yield RawBlock(rows, first)
            first += rows.num_rows


def parse_block(block: RawBlock, names: ColumnNames) -> ParsedBlock:
    """Return the rows of `block` as columns."""
    if isinstance(block.rows, pa.RecordBatch):
        return ParsedBlock(block.rows, block.first + np.arange(block.rows.num_rows), [])
    bad = list[tuple[int, str]]()

    def skip(row: Any) -> str:
        reason = f"{row.actual_columns} fields instead of {row.expected_columns}"
        bad.append((block.first + row.number - 1, reason))
        return "skip"

    table = csv.read_csv(
        pa.BufferReader(block.rows),
        csv.ReadOptions(
            use_threads=False, column_names=names.all, block_size=len(block.rows) + 1
        ),
        # An empty line is a row of empty fields, so that rows and lines have the same numbers.
        csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=skip
        ),
        csv.ConvertOptions(
            check_utf8=False, column_types=dict.fromkeys(names.all, pa.binary()),
            strings_can_be_null=False,
        ),
    )  # fmt: skip
    numbers = block.first + np.arange(table.num_rows + len(bad))
    if bad:
        numbers = np.setdiff1d(numbers, [number for number, _ in bad])
    empty = pa.RecordBatch.from_pylist([], table.schema)
    return ParsedBlock(next(iter(table.combine_chunks().to_batches()), empty), numbers, bad)


def _check_schema(schema: pa.Schema, file: Path, names: ColumnNames) -> None:
    """Raise DataError if a column is missing or has another type than its setting allows."""
    _check_column(schema, file, "data.label", names.label, _NUMBERS)
    for name in names.dense:
        _check_column(schema, file, "data.dense", name, _NUMBERS)
    for name in names.slots:
        _check_column(schema, file, "data.slots", name, f"{_IDS}, or lists of them")
    if names.weight is not None:
        _check_column(schema, file, "data.weight", names.weight, _NUMBERS)
    if names.user is not None:
        _check_column(schema, file, "data.user", names.user, _IDS)


def _check_column(schema: pa.Schema, file: Path, key: str, name: str, accepted: str) -> None:
    if schema.get_field_index(name) < 0:
        some = ", ".join(schema.names[:20])
        raise DataError(
            f"{key} names \"{name}\", and '{file}' has no column, or several, of that name: name "
            f"one of {some}"
        )
    types, kind = pa.types, schema.field(name).type
    if accepted == _NUMBERS:
        checks = [types.is_integer, types.is_floating, types.is_boolean, types.is_decimal]
    else:
        if accepted != _IDS and is_list(kind):
            kind = kind.value_type
        if types.is_dictionary(kind):
            kind = kind.value_type
        checks = [
            types.is_integer, types.is_string, types.is_large_string, types.is_binary,
            types.is_large_binary,
        ]  # fmt: skip
    if not any(check(kind) for check in checks):
        raise DataError(
            f"{key} names \"{name}\", which has the type {schema.field(name).type} in '{file}': "
            f"convert it to {accepted}"
        )
