"""Documents from files: plain text, JSON lines, Parquet, and what Hugging Face `datasets` reads.

`find_text` says what a path stands for and complains early; `read_text` streams its documents, in
an order that depends on the files' names alone. Text, JSON lines and Parquet are read without
`datasets`: it infers a type for every column, fails where metadata differ between lines, names
no line, takes brackets in a file's name for a pattern and calls home on each load.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from moesaic.base.errors import DataError

Kind = Literal["text", "jsonl", "parquet", "dataset", "chat"]

SUFFIXES: dict[str, Kind] = {
    ".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
}  # fmt: skip
TAKEN = {"auto": {"text", "jsonl", "parquet"}, "chat": {"jsonl", "parquet"}}
"""Values of data.format that take files of several kinds, those of a directory by their names."""
COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}
"""Suffixes after which text and JSON lines are unpacked on the way."""

_SAVED = ("dataset_dict.json", "state.json")
CONVERSATIONS = frozenset({"messages", "conversations"})
"""Keys by which a file of conversations is known."""
_ROWS = 1024


@dataclass(frozen=True)
class TextSource:
    """What a path stands for."""

    key: str
    """The setting that names it."""
    path: str
    """As the user wrote it."""
    kind: Kind
    files: tuple[Path, ...]
    """Every file that holds a part of it."""
    text_key: str
    split: str


def find_text(key: str, path: str, kind: str, text_key: str, split: str) -> TextSource:
    """What `path`, the value of the setting `key`, stands for; `kind` is data.format."""
    place = Path(path).expanduser()
    named = f"{key} = '{path}'"
    if place.is_dir():
        files, found = _scan(place, kind, named)
    else:
        files = [place] if place.is_file() else _glob(place, named)
        found = "dataset" if kind == "dataset" else _kind_of(files, kind, named)
    if found == "dataset" and not place.is_dir():
        raise DataError(
            f"{named} is no directory, but data.format = 'dataset': give one, or 'auto'"
        )
    return TextSource(key, path, found, tuple(files), text_key, split)


def read_text(source: TextSource, datasets_cache: Path) -> Iterator[str]:
    """The documents of `source`, one by one; those without text (empty, null) are passed over."""
    if source.kind == "dataset":
        documents = _read_dataset(source, datasets_cache)
    else:
        read = {"text": _read_plain, "jsonl": _read_json_lines, "parquet": _read_parquet}
        documents = (text for file in source.files for text in read[source.kind](file, source))
    return (text for text in documents if text)


def _glob(place: Path, named: str) -> list[Path]:
    if not glob.has_magic(str(place)):
        problem = "is neither a file nor a directory" if place.exists() else "does not exist"
        raise DataError(f"{named} {problem}: give a file, a directory or a glob")
    files = [Path(found) for found in sorted(glob.glob(str(place), recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(f"{named} matches no file: mend the pattern")
    return files


def _scan(place: Path, kind: str, named: str) -> tuple[list[Path], Kind]:
    """The files of a directory and below that belong to the kind asked for, in order of name."""
    try:
        found = [file.relative_to(place) for file in place.rglob("*") if file.is_file()]
    except OSError as error:
        raise DataError(f"{named} cannot be searched ({error}): give a narrower one") from None
    shown = [file for file in found if not any(part.startswith(".") for part in file.parts)]
    every = [place / file for file in sorted(shown, key=lambda file: file.as_posix())]
    if kind == "dataset" or (kind == "auto" and _is_dataset(place)):
        if not every:
            raise DataError(f"{named} is an empty directory: there is no text in it")
        return every, "dataset"
    taken = TAKEN.get(kind, {kind})
    files = [file for file in every if SUFFIXES.get(_suffix(file)) in taken]
    if not files:
        wanted = [suffix for suffix, one in SUFFIXES.items() if one in taken]
        raise DataError(
            f"{named} holds no file named *{', *'.join(wanted)}: give a directory that does, or "
            "a glob of the files and data.format"
        )
    return files, _kind_of(files, kind, named)


def _is_dataset(place: Path) -> bool:
    """Whether `datasets` saved this directory, or it is a repository with a dataset card."""
    if any((place / name).is_file() for name in _SAVED):
        return True
    card = place / "README.md"
    return card.is_file() and card.read_bytes()[:4].startswith(b"---")


def _kind_of(files: Iterable[Path], kind: str, named: str) -> Kind:
    if kind not in TAKEN:
        return cast(Kind, kind)
    kinds: dict[Kind, Path] = {}
    for file in files:
        if kind == "chat":
            found: Kind | None = "parquet" if _is_table(file) else "jsonl"
        else:
            found = SUFFIXES.get(_suffix(file))
        if found is None:
            raise DataError(
                f"{named}: the name of '{file}' does not say what it holds: set data.format to "
                "'text', 'jsonl' or 'parquet'"
            )
        kinds.setdefault(found, file)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise DataError(
            f"{named} mixes {one} ('{first.name}') and {other} ('{second.name}'): give a glob of "
            f"one of them{', or set data.format' if kind == 'auto' else ''}"
        )
    return "chat" if kind == "chat" else next(iter(kinds))


def _suffix(file: Path) -> str:
    """The suffix that tells the format, under that of a compression."""
    packed = file.suffix.lower() in COMPRESSED
    return (file.with_suffix("") if packed else file).suffix.lower()


def _is_table(file: Path) -> bool:
    """Whether conversations of `file` are rows; all others are lines."""
    return _suffix(file) == ".parquet"


@contextmanager
def _readable(file: Path, what: str) -> Iterator[None]:
    """Turn what the file system and the decoders say about `file` into an error of the user's."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{file}' is not UTF-8 text ({error.reason} at byte {error.start}): convert it, or "
            "set data.format to what it is"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{file}' cannot be read as {what}: {error}") from None


def _read_plain(file: Path, source: TextSource) -> Iterator[str]:
    del source
    with _readable(file, "text"), pa.input_stream(str(file)) as stream:
        text = stream.read().decode("utf-8-sig")
    yield text


def _read_json_lines(file: Path, source: TextSource) -> Iterator[str]:
    for where, record in _read_lines(file):
        yield _text_of(record, where, source.text_key)


def read_records(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, lines of JSON or rows of Parquet, each with where it stands, in words.

    Of Parquet only `columns` are read, all if it has none of them.
    """
    return _read_columns(file, columns) if _is_table(file) else _read_lines(file)


def _read_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _readable(file, "JSON lines"), pa.input_stream(str(file)) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), start=1):
            if not line.isspace():
                where = f"line {number} of '{file}'"
                yield where, _record_of(line, where)


def _record_of(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): mend the file") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object: every line must be one")
    return record


def _read_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with _readable(file, "Parquet"), pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        known = [name for name in columns if name in schema.names] or schema.names
        read = _reader(pa.struct([_field(schema, name, file) for name in known]), "")
        for batch in parquet.iter_batches(_ROWS, columns=known):
            for row in batch.to_pylist():
                number += 1
                where = f"row {number} of '{file}'"
                try:
                    record = read(row)
                except DataError as error:
                    raise DataError(f"{where}: {error}") from None
                yield where, record


def _field(schema: pa.Schema, name: str, file: Path) -> pa.Field:
    if schema.names.count(name) > 1:
        raise DataError(f"'{file}' has more than one column '{name}': rename all but one")
    return schema.field(name)


def _reader(kind: pa.DataType, name: str) -> Callable[[Any], Any]:
    """What makes of a value of the type `kind`, under `name`, what it would be in a line of JSON.

    All structs of a column have the same fields: those that one of them lacks are null in it, and
    are left out again. What differs too much `datasets` keeps as text, of a type that says so.
    """
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return partial(_unpack, name=name)
    if pa.types.is_struct(kind):
        fields = [(f.name, _reader(f.type, f"{name}.{f.name}".lstrip("."))) for f in kind]
        return lambda row: {key: r(row[key]) for key, r in fields if row[key] is not None}
    if pa.types.is_map(kind):
        item = _reader(kind.item_type, name)
        return lambda pairs: {key: None if one is None else item(one) for key, one in pairs}
    if pa.types.is_nested(kind):
        value = _reader(kind.value_type, name)
        return lambda many: [None if one is None else value(one) for one in many]
    return lambda value: value


def _unpack(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"column '{name}' holds {text!r:.80}, which is not JSON ({error}): mend the file"
        ) from None


def _text_of(record: dict[str, Any], where: str, text_key: str) -> str:
    if text_key not in record:
        raise DataError(_no_column(where, text_key, record))
    text = record[text_key]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: data.text_key = '{text_key}' holds {text!r}, which is no text")
    return text or ""


def _read_parquet(file: Path, source: TextSource) -> Iterator[str]:
    with _readable(file, "Parquet"), pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        if source.text_key not in schema.names:
            raise DataError(_no_column(f"'{file}'", source.text_key, schema.names))
        _check_type(_field(schema, source.text_key, file).type, f"'{file}'", source.text_key)
        for batch in parquet.iter_batches(_ROWS, columns=[source.text_key]):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _check_type(kind: pa.DataType, where: str, text_key: str) -> None:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(check(value) for check in checks):
        raise DataError(f"{where}: data.text_key = '{text_key}' holds {kind}, which is no text")


def _no_column(where: str, text_key: str, names: Iterable[str]) -> str:
    known = sorted(names)
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    if CONVERSATIONS & set(known):
        return (
            f"{where} has no '{text_key}', but {shown}: set data.format = \"chat\", or "
            "data.text_key to a column of text"
        )
    return f"{where} has no '{text_key}': set data.text_key to one of its columns ({shown})"


def _read_dataset(source: TextSource, cache: Path) -> Iterator[str]:
    import datasets

    place = Path(source.path).expanduser().absolute()
    named = f"dataset directory '{source.path}'"
    # What `datasets` raises is a mixed bag; these are its own and those of the readers below it.
    own = datasets.exceptions.DatasetsError
    complaints = (own, ValueError, OSError, pa.ArrowException, StopIteration)
    with _quiet(datasets):
        try:
            saved = any((place / name).is_file() for name in _SAVED)
            whole = (
                datasets.load_from_disk(str(place))
                if saved
                else datasets.load_dataset(str(place), streaming=True, cache_dir=str(cache))
            )
            rows = _choose_split(whole, source.split, named)
            yield from _read_rows(rows, source.text_key, named)
        except DataError:
            raise
        except complaints as error:
            detail = " ".join(str(error).split())
            raise DataError(
                f"{named} cannot be read ({type(error).__name__}: {detail}): save it anew, or "
                "give a glob of its files and data.format"
            ) from None


def _choose_split(whole: Any, split: str, named: str) -> Any:
    if not isinstance(whole, dict):
        return whole
    if split in whole:
        return whole[split]
    if len(whole) == 1:
        return next(iter(whole.values()))
    raise DataError(
        f"{named} has no split '{split}': set data.split (data.validation_split) to one of "
        f"{', '.join(map(str, whole))}"
    )


def _read_rows(rows: Any, text_key: str, named: str) -> Iterator[str]:
    names = rows.column_names
    if names is not None and text_key not in names:
        raise DataError(_no_column(named, text_key, names))
    for table in rows.select_columns([text_key]).with_format("arrow").iter(_ROWS):
        _check_type(table.schema.field(text_key).type, named, text_key)
        yield from (text or "" for text in table.column(text_key).to_pylist())


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the library's own progress bars: the caller draws one."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def fingerprint(source: TextSource) -> list[str]:
    """What tells this text from another, or from its own earlier state, without reading it."""
    lines = [f"{source.kind} {source.text_key} {source.split}"]
    for file in source.files:
        with _readable(file, "text"):
            status = file.stat()
        lines.append(f"{os.path.abspath(file)} {status.st_size} {status.st_mtime_ns}")
    return lines
