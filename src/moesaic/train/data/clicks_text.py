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
from moesaic.train.data.clicks_block import MAX_DENSE, NUM_SHOWN, Block, Columns
from moesaic.train.data.clicks_hash import bytes_key, overlapping_words, slot_word

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 64 << 20
_MINUS, _PLUS, _ZERO, _ONE, _NINE = 45, 43, 48, 49, 57
"""Characters of an integer."""
_SMALL_LOGS = np.log1p(np.arange(4096.0)).astype(np.float32)
"""Scaled values of small dense features."""

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
    bad = list[tuple[int, str]]()

    def skip(row: Any) -> str:
        reason = f"{row.actual_columns} fields instead of {row.expected_columns}"
        bad.append((first + row.number - 1, reason))
        return "skip"

    table = csv.read_csv(
        pa.BufferReader(data),
        csv.ReadOptions(use_threads=False, column_names=columns.names, block_size=len(data) + 1),
        # An empty line becomes a row of empty fields, so that each line has its row.
        csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=skip
        ),
        csv.ConvertOptions(
            check_utf8=False, column_types=dict.fromkeys(columns.names, pa.binary()),
            strings_can_be_null=False,
        ),
    ).combine_chunks()  # fmt: skip
    if columns.label is None:
        table = table.add_column(0, _LABEL, pa.array([b"0"] * len(table), pa.binary()))
    arrays, is_bad = _encode_fields(table, columns)
    bad_rows = np.flatnonzero(is_bad)
    if not len(bad_rows) and not bad:
        return Block(arrays)
    numbers = np.arange(first, first + len(is_bad) + len(bad))
    numbers = np.setdiff1d(numbers, [number for number, _ in bad], assume_unique=True)
    found = [(int(numbers[row]), _reason(table, row, columns)) for row in bad_rows[:NUM_SHOWN]]
    return Block(arrays, len(bad) + len(bad_rows), tuple(sorted([*bad, *found])[:NUM_SHOWN]))


def _encode_fields(
    table: pa.Table, columns: Columns
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """Return the arrays of a block, and true for rows that are malformed."""
    num_rows, num_slots = table.num_rows, len(columns.slots)
    labels = np.empty(num_rows, np.uint8)
    dense = np.empty((num_rows, len(columns.dense)), np.float32)
    counts = np.empty((num_rows, num_slots), np.uint16)
    keys, is_bad = np.empty(counts.size, np.int64), np.zeros(num_rows, np.bool_)
    offsets, data = _join_columns(table)
    slots = np.array([slot_word(slot) for slot in range(num_slots)], np.uint64)
    num_samples, num_keys = _encode_rows(
        (offsets, data, overlapping_words(data)), slots, columns.log_dense,
        (labels, dense, counts, keys), is_bad,
    )  # fmt: skip
    arrays = {"labels": labels, "dense": dense, "counts": counts}
    arrays = {name: values[:num_samples] for name, values in arrays.items()}
    return {**arrays, "keys": keys[:num_keys]}, is_bad


def _join_columns(table: pa.Table) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return starts and ends of all fields, [columns, rows + 1], and the bytes of all columns."""
    offsets = np.zeros((table.num_columns, table.num_rows + 1), np.int32)
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
def _encode_rows(strings: Any, slots: Any, log_dense: bool, arrays: Any, is_bad: Any) -> Any:
    """Fill `arrays` with the good rows; return their number and the number of their keys."""
    offsets, data, words = strings
    labels, dense, counts, keys = arrays
    sample = place = 0
    for row in range(len(is_bad)):
        start, stop = offsets[0, row], offsets[0, row + 1]
        is_good = stop - start == 1 and _ZERO <= data[start] <= _ONE
        labels[sample] = is_good and data[start] == _ONE
        for feature in range(dense.shape[1]):
            start, stop = offsets[1 + feature, row], offsets[1 + feature, row + 1]
            value, is_integer = _parse_integer(data, start, stop)
            is_good &= is_integer
            if not log_dense:
                dense[sample, feature] = value
            elif 0 <= value < len(_SMALL_LOGS):
                dense[sample, feature] = _SMALL_LOGS[int(value)]
            else:
                dense[sample, feature] = np.copysign(np.log1p(abs(value)), value)
        num_keys = place
        for slot in range(len(slots)):
            column = 1 + dense.shape[1] + slot
            start, stop = offsets[column, row], offsets[column, row + 1]
            counts[sample, slot] = start < stop
            if start < stop:
                keys[place] = bytes_key(slots[slot], data, words, start, stop)
                place += 1
        if is_good:
            sample += 1
        else:
            is_bad[row], place = True, num_keys
    return sample, place


@cached_njit
def _parse_integer(data: Any, start: int, stop: int) -> Any:
    """Return the integer in a field, 0 if it is empty, and whether it is one."""
    if start == stop:
        return 0.0, True
    is_negative = data[start] == _MINUS
    if is_negative or data[start] == _PLUS:
        start += 1
    value, is_good = 0.0, start < stop
    for index in range(start, stop):
        is_good &= _ZERO <= data[index] <= _NINE
        value = value * 10.0 + (np.int64(data[index]) - _ZERO)
    return -value if is_negative else value, is_good and value <= MAX_DENSE
