"""Parquet files of click samples: columns that the job names, read by pyarrow.

Ids are integers, strings, or lists of them; compiled loops hash them. A missing id, or an empty
string, is no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.base.errors import ConfigError, DataError
from moesaic.train.data.clicks_block import MAX_DENSE, NUM_SHOWN, Block, Columns, scale_dense
from moesaic.train.data.clicks_hash import integer_keys, string_keys

_BLOCK_ROWS = 1 << 14
_MAX_KEYS = (1 << 16) - 1
"""Most keys of one slot in a sample."""
_NUMBERS, _IDS = "numbers", "integers or strings"
"""Types of columns."""

Rows = tuple[pa.RecordBatch, int]
"""Rows of a file, and the number of the first one, from 1."""
_Check = tuple[NDArray[np.bool_], str, str]
"""Rows that fail a check, the column, and the problem with its value."""
_Values = NDArray[np.float64]
"""Values of a column of numbers; NaN if missing."""


def read_rows(file: Path, columns: Columns) -> Iterator[Rows]:
    """Yield the rows of `file` in blocks."""
    with parquet.ParquetFile(file) as table:
        check_schema(table.schema_arrow, file, columns)
        first = 1
        for rows in table.iter_batches(_BLOCK_ROWS, columns=columns.names):
            yield rows, first
            first += rows.num_rows


def encode_rows(block: Rows, columns: Columns) -> Block:
    """Return the samples of `block`."""
    rows, first = block
    labels = np.zeros(rows.num_rows)
    if columns.label is not None:
        labels = _numbers(rows.column(columns.label))
    dense = np.empty((len(columns.dense), rows.num_rows))
    for feature, name in enumerate(columns.dense):
        dense[feature] = _numbers(rows.column(name))
    weights = np.ones(rows.num_rows)
    if columns.weight is not None:
        weights = np.nan_to_num(_numbers(rows.column(columns.weight)), nan=1.0, posinf=np.inf)
    ids = [_Ids(rows.column(name)) for name in columns.slots]
    counts = np.empty((rows.num_rows, len(ids)), np.int64)
    for slot, one in enumerate(ids):
        _count_ids(one.starts, one.valid, counts[:, slot])
    failed = [check for check in _checks(columns, labels, dense, weights, counts) if check[0].any()]
    if failed:
        is_bad = np.logical_or.reduce([mask for mask, _, _ in failed])
        clean = encode_rows((rows.filter(pa.array(~is_bad)), 0), columns)
        bad = np.flatnonzero(is_bad).tolist()
        examples = [(first + row, _reason(rows, row, failed)) for row in bad[:NUM_SHOWN]]
        return Block(clean.arrays, len(bad), tuple(examples))
    arrays: dict[str, NDArray[Any]] = {
        "labels": labels.astype(np.uint8), "dense": scale_dense(dense, columns.log_dense),
        "counts": counts.astype(np.uint16), "keys": _hash(ids, counts),
    }  # fmt: skip
    if columns.weight is not None:
        arrays["weights"] = weights.astype(np.float32)
    if columns.user is not None:
        arrays["users"] = _hash_users(_Ids(rows.column(columns.user)), len(ids))
    return Block(arrays)


def _numbers(column: pa.Array) -> _Values:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    values: _Values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


class _Ids:
    """Ids of a column: one for each row, or a list of them."""

    def __init__(self, column: pa.Array) -> None:
        if _is_list(column.type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            self.starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            """First id of each row, and the end of the last row."""
            column = column.flatten()
        else:
            self.starts = np.arange(len(column) + 1)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        self.valid = np.ones(len(column), np.bool_)
        """False for missing ids."""
        if column.null_count:
            self.valid = column.is_valid().to_numpy(zero_copy_only=False)
        self.numbers: NDArray[np.int64] | None = None
        """Ids, if they are integers."""
        if pa.types.is_integer(column.type):
            column = column.fill_null(0)
            wraps = column.type == pa.uint64()
            integers = column.view(pa.int64()) if wraps else column.cast(pa.int64())
            self.numbers = np.array(integers)
            return
        types, kind = pa.types, column.type
        is_large = types.is_large_string(kind) or types.is_large_binary(kind)
        _, offsets, data = column.buffers()
        self.offsets = np.zeros(len(column) + 1, np.int64)
        """Starts of ids in `data`, and the end of the last one, if they are strings."""
        if offsets is not None and len(column):
            part = slice(column.offset, column.offset + len(column) + 1)
            self.offsets[:] = np.frombuffer(offsets, np.int64 if is_large else np.int32)[part]
        self.data = np.empty(0, np.uint8)
        """Bytes of ids, if they are strings."""
        if data is not None:
            self.data = np.frombuffer(data, np.uint8)[self.offsets[0] : self.offsets[-1]].copy()
        self.offsets -= self.offsets[0]
        self.valid &= np.diff(self.offsets) > 0

    def keys(self, slot: int) -> NDArray[np.int64]:
        """Return the keys of all ids in slot number `slot`; those of missing ids mean nothing."""
        keys: NDArray[np.int64]
        if self.numbers is None:
            keys = string_keys(slot, self.offsets[None], self.data)[0]
        else:
            keys = integer_keys(slot, self.numbers)
        return keys


def hash_ids(ids: Any, slot: int = 0) -> NDArray[np.int64]:
    """Return the keys of ids in a slot, as training has them, [ids].

    Args:
        ids: integers or non-empty strings: a list, a numpy array or a pyarrow array.
        slot: place of the column in the job's `data.slots`, from 0; 0 to 25 of Criteo TSV, whose
            ids are strings.
    """
    column = pa.array(ids)
    if not (pa.types.is_integer(column.type) or pa.types.is_string(column.type)):
        raise ConfigError(f"ids have the type {column.type}: pass integers or strings")
    found = _Ids(column)
    if not found.valid.all():
        missing = int(np.flatnonzero(~found.valid)[0])
        raise ConfigError(f"id {missing} is missing or empty, which is no key: remove it")
    return found.keys(slot)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _checks(
    columns: Columns,
    labels: _Values,
    dense: _Values,
    weights: _Values,
    counts: NDArray[np.int64],
) -> Iterator[_Check]:
    """Yield checks of all rows, from the first column to the last."""
    if columns.label is not None:
        yield (labels != 0) & (labels != 1), columns.label, "is not 0 or 1"
    for name, values in zip(columns.dense, dense, strict=True):
        yield np.abs(values) > MAX_DENSE, name, "is infinite or too large"
    if columns.weight is not None:
        is_bad = (weights < 0) | (weights > MAX_DENSE)
        yield is_bad, columns.weight, "is negative or infinite"
    for slot, name in enumerate(columns.slots):
        yield counts[:, slot] > _MAX_KEYS, name, f"has more than {_MAX_KEYS} keys"


def _reason(rows: pa.RecordBatch, row: int, failed: list[_Check]) -> str:
    """Return why `row` is malformed."""
    name, problem = next((name, problem) for mask, name, problem in failed if mask[row])
    return f"{name} = {str(rows.column(name)[row].as_py())[:40]} {problem}"


def _hash(ids: list[_Ids], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys of all samples, one sample after the other, and in each by slot."""
    starts = np.cumsum(counts).reshape(counts.shape) - counts
    keys = np.empty(int(counts.sum()), np.int64)
    for slot, one in enumerate(ids):
        _write_keys(one.starts, one.valid, one.keys(slot), starts[:, slot], keys)
    return keys


def _hash_users(ids: _Ids, slot: int) -> NDArray[np.int64]:
    """Return the users' keys; users that are missing are 0."""
    return np.where(ids.valid, ids.keys(slot), 0)


def check_schema(schema: pa.Schema, file: Path, columns: Columns) -> None:
    """Raise DataError if a column is missing or has another type than its setting allows."""
    if columns.label is not None:
        _check_column(schema, file, "data.label", columns.label, _NUMBERS)
    for name in columns.dense:
        _check_column(schema, file, "data.dense", name, _NUMBERS)
    for name in columns.slots:
        _check_column(schema, file, "data.slots", name, f"{_IDS}, or lists of them")
    if columns.weight is not None:
        _check_column(schema, file, "data.weight", columns.weight, _NUMBERS)
    if columns.user is not None:
        _check_column(schema, file, "data.user", columns.user, _IDS)


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
        if accepted != _IDS and _is_list(kind):
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


@cached_njit
def _count_ids(starts: Any, valid: Any, counts: Any) -> None:
    """Count the ids of each row that are not missing."""
    for row in range(len(counts)):
        count = 0
        for index in range(starts[row], starts[row + 1]):
            count += valid[index]
        counts[row] = count


@cached_njit
def _write_keys(starts: Any, valid: Any, keys: Any, places: Any, written: Any) -> None:
    """Write the keys of row r to `written`, from `places[r]` on."""
    for row in range(len(places)):
        place = places[row]
        for index in range(starts[row], starts[row + 1]):
            if valid[index]:
                written[place] = keys[index]
                place += 1
