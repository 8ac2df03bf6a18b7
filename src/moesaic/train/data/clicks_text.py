"""Criteo TSV: a label, 13 integers and 26 strings on a line, also compressed.

pyarrow splits blocks of lines into fields. A compiled loop parses the numbers and hashes the
strings. An empty field is a missing value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.base.errors import DataError
from moesaic.train.data.clicks_block import MAX_DENSE, NUM_SHOWN, Block, Columns, scale_dense
from moesaic.train.data.clicks_hash import string_keys

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 64 << 20
_MINUS, _PLUS, _ZERO = 45, 43, 48
"""Characters of an integer."""

_LABEL = "label"
"""Name of the added column of a file without labels."""

Lines = tuple[bytes, int]
"""Lines of a file, and the number of the first one, from 1."""


def read_lines(file: Path) -> Iterator[Lines]:
    """Yield the lines of `file` in blocks."""
    first, tail = 1, b""
    with pa.input_stream(str(file), compression="detect") as stream:
        while data := stream.read(_BLOCK_BYTES):
            end = data.rfind(b"\n") + 1
            if end:
                lines, tail = tail + data[:end], data[end:]
                yield lines, first
                first += lines.count(b"\n")
            else:
                tail += data
            if len(tail) > _MAX_LINE_BYTES:
                raise DataError(
                    f"'{file}' line {first} is longer than 64 MiB: give lines of Criteo TSV"
                )
    if tail:
        yield tail, first


def encode_lines(lines: Lines, columns: Columns) -> Block:
    """Return the samples of `lines`."""
    data, first = lines
    try:
        return _encode_lines(data, first, {}, columns)
    except pa.ArrowInvalid:
        data, reasons = _replace_malformed(data, len(columns.names))
        return _encode_lines(data, first, reasons, columns)


def _replace_malformed(data: bytes, num_fields: int) -> tuple[bytes, dict[int, str]]:
    """Replace lines with another number of fields by lines that hold no numbers; return their
    reasons by row. pyarrow's own handler of such lines fails on text that is no UTF-8."""
    reasons, kept = dict[int, str](), list[bytes]()
    for row, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        num_found = line.count(b"\t") + 1
        if num_found != num_fields:
            reasons[row] = f"{num_found} fields instead of {num_fields}"
        elif b"\r" in line[:-1]:
            reasons[row] = "a carriage return inside the line"
        kept.append(b"\t".join([b"-"] * num_fields) if row in reasons else line)
    return b"\n".join(kept), reasons


def _encode_lines(data: bytes, first: int, reasons: dict[int, str], columns: Columns) -> Block:
    table = csv.read_csv(
        pa.BufferReader(data),
        csv.ReadOptions(use_threads=False, column_names=columns.names, block_size=len(data) + 1),
        # An empty line becomes a row of empty fields, so that each line has its row.
        csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        csv.ConvertOptions(
            check_utf8=False, column_types=dict.fromkeys(columns.names, pa.binary()),
            strings_can_be_null=False,
        ),
    ).combine_chunks()  # fmt: skip
    if columns.label is None:
        table = table.add_column(0, _LABEL, pa.array([b"0"] * len(table), pa.binary()))
    arrays, is_bad = _encode_fields(table, columns)
    bad_rows = np.flatnonzero(is_bad)
    examples = tuple(
        (first + int(row), reasons.get(int(row)) or _reason(table, row, columns))
        for row in bad_rows[:NUM_SHOWN]
    )
    return Block(arrays, len(bad_rows), examples)


def _encode_fields(
    table: pa.Table, columns: Columns
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """Return the arrays of a block, and true for rows that are malformed."""
    offsets, data = _join_columns(table)
    num_numbers = 1 + len(columns.dense)
    values = np.empty((num_numbers, table.num_rows), np.float64)
    is_bad = np.zeros(table.num_rows, np.bool_)
    _parse_integers(offsets[:num_numbers], data, MAX_DENSE, values, is_bad)
    is_bad |= (np.diff(offsets[0]) != 1) | ((values[0] != 0) & (values[0] != 1))
    offsets = offsets[num_numbers:]
    column_keys = string_keys(0, offsets, data)
    counts = np.zeros(column_keys.T.shape, np.uint16)
    keys = np.empty(counts.size + 1, np.int64)
    num_keys = _collect_keys(offsets, column_keys, is_bad, counts, keys)
    arrays = {
        "labels": (values[0] == 1).astype(np.uint8), "counts": counts,
        "dense": scale_dense(values[1:], columns.log_dense),
    }  # fmt: skip
    if is_bad.any():
        arrays = {name: array[~is_bad] for name, array in arrays.items()}
    return {**arrays, "keys": keys[:num_keys]}, is_bad


def _join_columns(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return starts and ends of all fields, [columns, rows + 1], and the bytes of all columns."""
    offsets = np.zeros((table.num_columns, table.num_rows + 1), np.int64)
    parts, base = [np.empty(0, np.uint8)], 0
    for number, column in enumerate(table.columns if table.num_rows else ()):
        chunk = column.chunk(0)
        _, starts, data = chunk.buffers()
        # A column that is read from text begins at its buffers' start.
        np.add(np.frombuffer(starts, np.int32)[: len(chunk) + 1], base, out=offsets[number])
        if data is not None:
            parts.append(np.frombuffer(data, np.uint8)[: offsets[number, -1] - base])
        base = int(offsets[number, -1])
    return offsets, np.concatenate(parts)


def _reason(table: pa.Table, row: int, columns: Columns) -> str:
    """Return why `row` is malformed."""
    label = columns.label or _LABEL
    for name in (label, *columns.dense):
        text = table.column(name)[row].as_py().decode(errors="replace")
        if name == label:
            problem = "" if text in ("0", "1") else "not 0 or 1"
        else:
            problem = "" if re.fullmatch(r"([+-]?[0-9]+)?", text) else "no integer"
        if problem:
            return f"{name} = '{text[:40]}' is {problem}"
    return "an integer is too large"


@cached_njit
def _parse_integers(offsets: Any, data: Any, limit: float, values: Any, is_bad: Any) -> None:
    """Parse decimal integers with an optional sign, [columns, rows]; an empty field gives NaN."""
    for column in range(len(values)):
        for row in range(values.shape[1]):
            start, stop = offsets[column, row], offsets[column, row + 1]
            if start == stop:
                values[column, row] = np.nan
                continue
            is_negative = data[start] == _MINUS
            if is_negative or data[start] == _PLUS:
                start += 1
            value, is_good = 0.0, start < stop
            for index in range(start, stop):
                digit = np.int64(data[index]) - _ZERO
                is_good &= 0 <= digit <= 9
                value = value * 10.0 + digit
            is_bad[row] |= not is_good or value > limit
            values[column, row] = -value if is_negative else value


@cached_njit
def _collect_keys(offsets: Any, column_keys: Any, is_bad: Any, counts: Any, keys: Any) -> int:
    """Write the keys of good rows to `keys`, one row after the other; return their number."""
    place = 0
    for row in range(len(is_bad)):
        if is_bad[row]:
            continue
        for slot in range(len(column_keys)):
            count = int(offsets[slot, row] < offsets[slot, row + 1])
            counts[row, slot] = count
            keys[place] = column_keys[slot, row]
            place += count
    return place
