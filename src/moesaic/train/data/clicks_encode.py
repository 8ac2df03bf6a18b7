"""Arrow columns of click samples as arrays: numbers are parsed and scaled, ids become keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import copysign, log1p
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.facts.job.clicks import CRITEO_DENSE, CRITEO_SLOTS, ClicksConfig
from moesaic.train.data.clicks_hash import bytes_key, integer_key, slot_word

NUM_SHOWN = 5
"""Malformed rows of a block whose reasons are kept."""
MAX_KEYS = (1 << 16) - 1
"""Most keys of one slot in a sample."""
_MINUS, _PLUS, _ZERO, _NINE = 45, 43, 48, 57
"""Characters of an integer."""

Check = tuple[NDArray[np.bool_], str, str]
"""Rows that fail a check, the column, and the problem with its value."""


@dataclass(frozen=True)
class ColumnNames:
    """Names of the columns, and how they are encoded."""

    label: str
    dense: tuple[str, ...]
    slots: tuple[str, ...]
    weight: str | None
    user: str | None
    log_dense: bool
    is_text: bool
    """True if numbers are strings of digits, and empty strings are missing values."""

    @classmethod
    def of(cls, config: ClicksConfig) -> ColumnNames:
        """Return the columns of the job's data section."""
        if config.is_parquet:
            return cls(
                config.label, tuple(config.dense), tuple(config.slots), config.weight,
                config.user, config.log_dense, is_text=False,
            )  # fmt: skip
        dense = tuple(f"I{number}" for number in range(1, CRITEO_DENSE + 1))
        slots = tuple(f"C{number}" for number in range(1, CRITEO_SLOTS + 1))
        return cls("label", dense, slots, None, None, config.log_dense, is_text=True)

    @property
    def all(self) -> list[str]:
        """Names of all columns, each once."""
        others = [name for name in (self.weight, self.user) if name is not None]
        return list(dict.fromkeys((self.label, *self.dense, *self.slots, *others)))


@dataclass(frozen=True)
class Block:
    """Encoded samples."""

    arrays: dict[str, NDArray[Any]]
    """Arrays by name: labels [n], dense [n, num_dense], counts of keys [n, num_slots], keys; if the
    columns exist, weights [n] and users [n]."""
    bad_rows: NDArray[np.int64]
    """Rows of the input that are malformed and left out."""
    reasons: list[str]
    """Reasons of the first `NUM_SHOWN` malformed rows."""


def encode(rows: pa.RecordBatch, names: ColumnNames) -> Block:
    """Return the samples of `rows`, which have the columns `names`, without malformed ones."""
    labels, *dense = (
        _numbers(rows.column(name), is_text=names.is_text) for name in (names.label, *names.dense)
    )
    weights = None if names.weight is None else _numbers(rows.column(names.weight), is_text=False)
    ids = [_Ids(rows.column(name)) for name in names.slots]
    counts = np.empty((rows.num_rows, len(ids)), np.int64)
    for slot, one in enumerate(ids):
        _count_ids(one.starts, one.valid, counts[:, slot])
    failed = [check for check in _checks(names, (labels, dense, weights), counts) if check[0].any()]
    if failed:
        bad = np.logical_or.reduce([mask for mask, _, _ in failed])
        clean = encode(rows.filter(pa.array(~bad)), names)
        bad_rows = np.flatnonzero(bad)
        reasons = [_reason(rows, int(row), failed) for row in bad_rows[:NUM_SHOWN]]
        return Block(clean.arrays, bad_rows, reasons)
    arrays: dict[str, NDArray[Any]] = {
        "labels": labels.values.astype(np.uint8), "dense": _scale(dense, names.log_dense),
        "counts": counts.astype(np.uint16), "keys": _hash(ids, counts),
    }  # fmt: skip
    if weights is not None:
        arrays["weights"] = np.nan_to_num(weights.values, nan=1.0).astype(np.float32)
    if names.user is not None:
        users = np.zeros(rows.num_rows, np.int64)
        _fill_user(_Ids(rows.column(names.user)), len(ids), users)
        arrays["users"] = users
    return Block(arrays, np.empty(0, np.int64), [])


@dataclass(frozen=True)
class _Numbers:
    """Values of a numeric column."""

    values: NDArray[np.float64]
    """Values; NaN if missing, infinite if too large."""
    malformed: NDArray[np.bool_]
    """True for strings that are no integer."""


def _numbers(column: pa.Array, *, is_text: bool) -> _Numbers:
    malformed = np.zeros(len(column), np.bool_)
    if not is_text:
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return _Numbers(values, malformed)
    offsets, data = _byte_buffers(column)
    values = np.empty(len(column), np.float64)
    _parse_integers(offsets, data, values, malformed)
    return _Numbers(values, malformed)


class _Ids:
    """Ids of a column: integers or strings, one for each row or a list of them."""

    def __init__(self, column: pa.Array) -> None:
        if is_list(column.type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            self.starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            """First id of each row, and the end of the last row."""
            column = column.flatten()
        else:
            self.starts = np.arange(len(column) + 1)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        self.valid = np.ones(len(column), np.bool_)
        """False for missing ids; an empty string is missing too."""
        if column.null_count:
            self.valid = column.is_valid().to_numpy(zero_copy_only=False)
        self.numbers = np.empty(0, np.int64)
        """Ids, if they are integers."""
        self.offsets, self.data = np.empty(0, np.int64), np.empty(0, np.uint8)
        """Starts and bytes of ids, if they are strings."""
        if pa.types.is_integer(column.type):
            column = column.fill_null(0)
            wraps = column.type == pa.uint64()
            integers = column.view(pa.int64()) if wraps else column.cast(pa.int64())
            self.numbers = integers.to_numpy(zero_copy_only=False)
        else:
            self.offsets, self.data = _byte_buffers(column)
            self.valid &= np.diff(self.offsets) > 0

    def write_keys(self, slot: int, places: NDArray[np.int64], keys: NDArray[np.int64]) -> None:
        """Write the keys of row r to `keys`, from `places[r]` on."""
        if len(self.offsets):
            _write_byte_keys(slot, self.starts, self.valid, self.offsets, self.data, places, keys)
        else:
            _write_integer_keys(slot, self.starts, self.valid, self.numbers, places, keys)


def is_list(kind: pa.DataType) -> bool:
    """Return true for the types of lists."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _byte_buffers(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets and bytes of strings."""
    types, kind = pa.types, column.type
    is_large = types.is_large_string(kind) or types.is_large_binary(kind)
    _, offsets, data = column.buffers()
    start, stop = column.offset, column.offset + len(column) + 1
    numbers = np.frombuffer(offsets, np.int64 if is_large else np.int32)[start:stop]
    bytes_ = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return numbers.astype(np.int64), bytes_


def _checks(
    names: ColumnNames,
    numbers: tuple[_Numbers, list[_Numbers], _Numbers | None],
    counts: NDArray[np.int64],
) -> Iterator[Check]:
    """Yield checks of all rows, from the first column to the last."""
    labels, dense, weights = numbers
    is_label = (labels.values == 0) | (labels.values == 1)
    yield ~is_label | labels.malformed, names.label, "is not 0 or 1"
    problem = "is no integer" if names.is_text else "is infinite"
    for name, one in zip(names.dense, dense, strict=True):
        yield one.malformed | np.isinf(one.values), name, problem
    if weights is not None and names.weight is not None:
        is_bad = (weights.values < 0) | np.isinf(weights.values)
        yield is_bad, names.weight, "is negative or infinite"
    for slot, name in enumerate(names.slots):
        yield counts[:, slot] > MAX_KEYS, name, f"has more than {MAX_KEYS} keys"


def _reason(rows: pa.RecordBatch, row: int, failed: list[Check]) -> str:
    """Return why `row` is malformed."""
    name, problem = next((name, problem) for mask, name, problem in failed if mask[row])
    value = rows.column(name)[row].as_py()
    text = repr(value.decode(errors="replace") if isinstance(value, bytes) else value)
    return f"{name} = {text[:40]} {problem}"


def _scale(dense: list[_Numbers], log_dense: bool) -> NDArray[np.float32]:
    """Return dense features, [n, num_dense]."""
    rows = len(dense[0].values) if dense else 0
    scaled = np.empty((rows, len(dense)), np.float32)
    for feature, one in enumerate(dense):
        _scale_column(one.values, log_dense, scaled[:, feature])
    return scaled


def _hash(ids: list[_Ids], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys of all samples, one sample after the other, and in each by slot."""
    ends = np.cumsum(counts).reshape(counts.shape)
    keys = np.empty(int(counts.sum()), np.int64)
    starts = ends - counts
    for slot, one in enumerate(ids):
        one.write_keys(slot, starts[:, slot], keys)
    return keys


def _fill_user(ids: _Ids, slot: int, users: NDArray[np.int64]) -> None:
    """Set `users` to the keys of `ids`; those of missing ids stay."""
    found = np.flatnonzero(ids.valid)
    keys = np.empty(len(found), np.int64)
    ids.write_keys(slot, np.cumsum(ids.valid) - ids.valid, keys)
    users[found] = keys


@cached_njit
def _parse_integers(offsets: Any, data: Any, values: Any, malformed: Any) -> None:
    """Parse decimal integers with an optional sign; an empty string gives NaN."""
    for row in range(len(values)):
        start, stop = offsets[row], offsets[row + 1]
        if start == stop:
            values[row] = np.nan
            continue
        is_negative = data[start] == _MINUS
        if is_negative or data[start] == _PLUS:
            start += 1
        value, is_good = 0.0, start < stop
        for index in range(start, stop):
            character = data[index]
            is_good &= _ZERO <= character <= _NINE
            value = value * 10.0 + (character - _ZERO)
        values[row] = -value if is_negative else value
        malformed[row] = not is_good


@cached_njit
def _scale_column(values: Any, log_dense: bool, scaled: Any) -> None:
    """Write the scaled values; missing ones become 0."""
    for row in range(len(values)):
        value = values[row]
        if np.isnan(value):
            value = 0.0
        scaled[row] = copysign(log1p(abs(value)), value) if log_dense else value


@cached_njit
def _count_ids(starts: Any, valid: Any, counts: Any) -> None:
    """Count the ids of each row that are not missing."""
    for row in range(len(counts)):
        count = 0
        for index in range(starts[row], starts[row + 1]):
            count += valid[index]
        counts[row] = count


@cached_njit
def _write_integer_keys(
    slot: int, starts: Any, valid: Any, numbers: Any, places: Any, keys: Any
) -> None:
    word = slot_word(slot)
    for row in range(len(places)):
        place = places[row]
        for index in range(starts[row], starts[row + 1]):
            if valid[index]:
                keys[place] = integer_key(word, numbers[index])
                place += 1


@cached_njit
def _write_byte_keys(
    slot: int, starts: Any, valid: Any, offsets: Any, data: Any, places: Any, keys: Any
) -> None:
    word = slot_word(slot)
    for row in range(len(places)):
        place = places[row]
        for index in range(starts[row], starts[row + 1]):
            if valid[index]:
                keys[place] = bytes_key(word, data, offsets[index], offsets[index + 1])
                place += 1
