"""Cache of click samples in binary form: one directory of arrays for each file, which is one day.

The directory's name is a hash of the file's path, size and time, and of the settings that encode
it. A directory that lacks a part is written anew. Days are read by memory map.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.base.errors import DataError, StoreError
from moesaic.train.data.cache_directory import write_once
from moesaic.train.data.clicks_batch import ClickBatch, offsets_of
from moesaic.train.data.clicks_block import NUM_SHOWN, Block, Columns
from moesaic.train.data.clicks_table import encode_rows, read_rows
from moesaic.train.data.clicks_text import encode_lines, read_lines

FORMAT = 1
DEFAULT_CACHE = "~/.cache/moesaic/clicks"
_FACTS = "day.json"
_MAX_THREADS = 8

ProgressCallback = Callable[[Path, int], object]
"""Callback that receives a file and the samples read so far, repeatedly."""
MapDay = Callable[[Path, Columns], dict[str, NDArray[Any]]]
"""`map_day`, or a cache of its results: each mapped day takes file descriptors."""


@dataclass
class BadLines:
    """Malformed lines of a run."""

    limit: int
    """Malformed lines that are left out, data.max_bad_lines."""
    is_text: bool
    count: int = 0
    """Malformed lines so far."""
    shown: list[str] = field(default_factory=list)
    """Places and reasons of the first ones."""
    is_fixed: bool = False
    """True if `limit` is no setting: none may be left out."""

    def add(self, file: Path, count: int, examples: Iterable[tuple[int, str]]) -> None:
        """Count malformed lines of `file`; raise if there are too many.

        Args:
            file: the file.
            count: number of malformed lines.
            examples: number and reason of the first ones.
        """
        self.count += count
        unit = "line" if self.is_text else "row"
        new = [f"'{file}' {unit} {line}: {reason}" for line, reason in examples]
        self.shown = [*self.shown, *new][:NUM_SHOWN]
        if self.count and self.is_fixed:
            raise DataError(
                f"malformed {unit}s ({'; '.join(self.shown)}): correct or remove them; none is "
                f"left out here, so that each {unit} has its prediction"
            )
        if self.count > self.limit:
            raise DataError(
                f"malformed {unit}s, more than data.max_bad_lines = {self.limit} "
                f"({'; '.join(self.shown)}): correct them, or raise data.max_bad_lines"
            )


@dataclass(frozen=True)
class _Field:
    """Array of a day in a file."""

    dtype: str
    width: tuple[int, ...]
    """Sizes of its dimensions after the first."""


def _fields(columns: Columns) -> dict[str, _Field]:
    fields = {
        "labels": _Field("|u1", ()), "dense": _Field("<f4", (len(columns.dense),)),
        "counts": _Field("<u2", (len(columns.slots),)), "starts": _Field("<i8", ()),
        "keys": _Field("<i8", ()),
    }  # fmt: skip
    if columns.weight is not None:
        fields["weights"] = _Field("<f4", ())
    if columns.user is not None:
        fields["users"] = _Field("<i8", ())
    return fields


class FileDay:
    """Samples of one day in the cache; implements `Day`."""

    def __init__(self, directory: Path, columns: Columns, map_day: MapDay) -> None:
        facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
        self.digest = str(facts["digest"])
        """Hash of the samples."""
        self._directory, self._columns, self._map_day = directory, columns, map_day
        self._num_samples = int(facts["samples"])

    @property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        try:
            return self._map_day(self._directory, self._columns)
        except OSError as error:
            raise StoreError(
                f"data.cache: '{self._directory}' cannot be read ({error.strerror}): resume the "
                "run, and it is written anew"
            ) from None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def load(self, positions: NDArray[np.int64], number: int) -> ClickBatch:
        """Return the samples at `positions`, marked as samples of day `number`."""
        return gather_batch(self._arrays, positions, number)


def gather_batch(
    arrays: Mapping[str, NDArray[Any]], positions: NDArray[np.int64], number: int
) -> ClickBatch:
    """Return the samples at `positions` of arrays by name, marked as samples of day `number`."""
    size = len(positions)
    counts = np.empty((arrays["counts"].shape[1], size), np.int64)
    _gather_counts(positions, arrays["counts"], counts)
    offsets = offsets_of(counts)
    keys = np.empty(offsets[-1], np.int64)
    _gather_keys(positions, arrays["starts"], arrays["keys"], offsets, keys)
    labels = np.empty(size, np.float32)
    dense = np.empty((size, arrays["dense"].shape[1]), np.float32)
    _gather_values(positions, arrays["labels"], arrays["dense"], labels, dense)
    weights = arrays["weights"][positions] if "weights" in arrays else np.ones(size, np.float32)
    users = arrays["users"][positions] if "users" in arrays else None
    days = np.full(size, number, np.int32)
    return ClickBatch(labels, weights, dense, keys, offsets, users, days)


def map_day(directory: Path, columns: Columns) -> dict[str, NDArray[Any]]:
    """Return the arrays of a day in the cache, by name."""
    return {
        name: _map_array(directory / f"{name}.bin", one) for name, one in _fields(columns).items()
    }


def _map_array(file: Path, field_: _Field) -> NDArray[Any]:
    values = np.empty(0, field_.dtype)
    if file.stat().st_size:
        # A plain array over the same pages: slicing a memmap object is slow.
        values = np.asarray(np.memmap(file, field_.dtype, "r"))
    values.flags.writeable = False  # Compiled code has one type for all arrays of a field.
    return values.reshape(-1 if len(values) else 0, *field_.width)


def open_day(
    file: Path,
    columns: Columns,
    cache: Path,
    map_day: MapDay,
    bad: BadLines,
    on_progress: ProgressCallback,
) -> FileDay:
    """Return the samples of `file` from the cache, after writing them into it if necessary.

    Args:
        file: the file.
        columns: its columns.
        cache: directory of all days.
        map_day: see `MapDay`.
        bad: counter of malformed lines.
        on_progress: see `ProgressCallback`.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read ({error.strerror}): replace it") from None
    facts = [FORMAT, os.path.abspath(file), status.st_size, status.st_mtime_ns, asdict(columns)]
    directory = cache / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    written = list[int]()

    def write(partial: Path) -> None:
        written.append(1)
        _write(partial, file, columns, bad, on_progress)

    try:
        write_once(directory, write, lambda: on_progress(file, 0), _is_complete)
        if not written:
            known = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
            bad.add(file, known["num_bad"], known["bad"])
        return FileDay(directory, columns, map_day)
    except OSError as error:
        raise DataError(
            f"data.cache = '{cache}' cannot be used ({error}): make room there, or set data.cache "
            "to another directory"
        ) from None


def _is_complete(directory: Path) -> bool:
    """Return true if no file of a day is missing, cut or longer than it was written."""
    try:
        facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
        sizes = {name: (directory / f"{name}.bin").stat().st_size for name in facts["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(sizes == facts["sizes"])


def _write(
    directory: Path, file: Path, columns: Columns, bad: BadLines, on_progress: ProgressCallback
) -> None:
    """Write the samples of `file` block by block. Memory holds a few blocks."""
    fields = _fields(columns)
    hashes = {name: hashlib.sha256() for name in fields}
    sizes = dict.fromkeys(fields, 0)
    num_samples = num_keys = num_bad = 0
    examples = list[tuple[int, str]]()
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((directory / f"{name}.bin").open("wb")) for name in fields
        }

        def append(name: str, values: NDArray[Any]) -> None:
            data = np.ascontiguousarray(values, fields[name].dtype).reshape(-1).view(np.uint8).data
            files[name].write(data)
            hashes[name].update(data)
            sizes[name] += len(data)

        append("starts", np.zeros(1))
        for block in encode_file(file, columns):
            bad.add(file, block.num_bad, block.examples)
            num_bad += block.num_bad
            examples = [*examples, *block.examples][:NUM_SHOWN]
            ends = num_keys + np.cumsum(block.arrays["counts"].sum(1, dtype=np.int64))
            for name, values in {**block.arrays, "starts": ends}.items():
                append(name, values)
            num_samples, num_keys = num_samples + len(ends), num_keys + len(block.arrays["keys"])
            on_progress(file, num_samples)
        if not num_samples:
            raise DataError(f"'{file}' holds no samples: remove it, or give others")
        for one in files.values():
            one.flush()
            os.fsync(one.fileno())
    joined = "".join(f"{name} {hashes[name].hexdigest()}\n" for name in fields)
    facts = {
        "path": str(file), "samples": num_samples, "sizes": sizes, "num_bad": num_bad,
        "bad": examples, "digest": hashlib.sha256(joined.encode()).hexdigest(),
    }  # fmt: skip
    with (directory / _FACTS).open("w", encoding="utf-8") as text:
        json.dump(facts, text, indent=2)
        text.flush()
        os.fsync(text.fileno())


def encode_file(file: Path, columns: Columns) -> Iterator[Block]:
    """Yield the encoded blocks of `file` in order; threads encode some at once."""
    threads = min(os.cpu_count() or 1, _MAX_THREADS)
    encode: Callable[[Any, Columns], Block] = encode_lines
    blocks: Iterator[Any] = read_lines(file)
    if columns.is_parquet:
        encode, blocks = encode_rows, read_rows(file, columns)
    pending = deque[Future[Block]]()
    with ThreadPoolExecutor(threads, "clicks") as pool:
        while (block := _read_next(blocks, file)) is not None:
            pending.append(pool.submit(encode, block, columns))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _read_next(blocks: Iterator[Any], file: Path) -> Any:
    """Return the next of `blocks`, or None at the end."""
    try:
        return next(blocks, None)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"'{file}' cannot be read ({reason}): replace it") from None


@cached_njit
def _gather_counts(positions: Any, counts: Any, gathered: Any) -> None:
    for sample in range(len(positions)):
        for slot in range(len(gathered)):
            gathered[slot, sample] = counts[positions[sample], slot]


@cached_njit
def _gather_keys(positions: Any, starts: Any, keys: Any, offsets: Any, gathered: Any) -> None:
    """Gather keys, which are stored by sample, into bags, which are ordered by slot."""
    size = len(positions)
    for sample in range(size):
        key = starts[positions[sample]]
        for bag in range(sample, len(offsets) - 1, size):
            for index in range(offsets[bag], offsets[bag + 1]):
                gathered[index] = keys[key]
                key += 1


@cached_njit
def _gather_values(positions: Any, labels: Any, dense: Any, out_labels: Any, out: Any) -> None:
    for sample in range(len(positions)):
        out_labels[sample] = labels[positions[sample]]
        for feature in range(dense.shape[1]):
            out[sample, feature] = dense[positions[sample], feature]
