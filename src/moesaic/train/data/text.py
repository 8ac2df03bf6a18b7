"""Documents from files: plain text, JSON lines, Parquet, and directories of Hugging Face
`datasets`.

Text, JSON lines and Parquet are read without `datasets`, which has these faults:

- it infers a type for every column and fails where metadata differ between lines;
- its errors name no line;
- it takes brackets in a file's name for a pattern;
- it connects to its hub on each load.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesaic.base.errors import DataError
from moesaic.train.data.sources import DATASET_FILES, TextSource, is_table

CHAT_KEYS = frozenset({"messages", "conversations"})
"""Keys that identify a file of conversations."""
LABEL_KEY = "label"
"""Column of the labels of texts."""
NO_LABEL = -1
_BATCH_ROWS = 1024


def read_text(source: TextSource, datasets_cache: Path) -> Iterator[str]:
    """Yield the documents of `source`; empty and null ones are skipped."""
    if source.kind == "dataset":
        documents = _read_dataset(source, datasets_cache)
    else:
        read = {"text": _read_plain, "jsonl": _read_json_lines, "parquet": _read_parquet}
        documents = (text for file in source.files for text in read[source.kind](file, source))
    return (text for text in documents if text)


def read_texts_with_records(
    source: TextSource, columns: Sequence[str]
) -> Iterator[tuple[str, Path, str, dict[str, Any]]]:
    """Yield the documents of `source` that are not empty: location in words, file, text, and the
    record that may have `columns`."""
    found: Iterable[tuple[str, dict[str, Any]]]
    for file in source.files:
        if source.kind == "text":
            found = ((f"'{file}'", {source.text_key: text}) for text in _read_plain(file, source))
        elif source.kind == "parquet":
            found = _read_columns(file, (source.text_key, *columns))
        else:
            found = _read_lines(file)
        for where, record in found:
            if text := _get_text(record, where, source):
                yield where, file, text, record


def read_labelled(source: TextSource) -> Iterator[tuple[str, int]]:
    """Yield the texts of `source` with their labels, `NO_LABEL` where there is none; empty and null
    ones are skipped."""
    for file in source.files:
        for where, record in read_records(file, (source.text_key, LABEL_KEY)):
            text, label = _get_text(record, where, source), record.get(LABEL_KEY)
            if label not in (0, 1, None) or isinstance(label, bool | float):
                raise DataError(
                    f"{where}: '{LABEL_KEY}' holds {label!r}: give 1 (original), 0 (generated), or "
                    "leave it out"
                )
            if text:
                yield text, NO_LABEL if label is None else label


def check_first_record(source: TextSource) -> None:
    """Raise if the first record of JSON lines or Parquet cannot be read."""
    if source.kind == "labelled":
        next(read_labelled(source), None)
    elif source.kind == "chat":
        next(read_records(source.files[0], ()), None)
    else:
        next(read_text(source, Path()), None)


@contextmanager
def _wrap_read_errors(file: Path, format_name: str) -> Iterator[None]:
    """Convert errors of the file system and decoders about `file` to `DataError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{file}' is not UTF-8 text ({error.reason} at byte {error.start}): convert it, or "
            "set data.format to what it is"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{file}' cannot be read as {format_name}: {error}") from None


def _read_plain(file: Path, source: TextSource) -> Iterator[str]:
    del source
    with _wrap_read_errors(file, "text"), pa.input_stream(str(file)) as stream:
        text = stream.read().decode("utf-8-sig")
    yield text


def _read_json_lines(file: Path, source: TextSource) -> Iterator[str]:
    for where, record in _read_lines(file):
        yield _get_text(record, where, source)


def read_records(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a file, a JSON line or a Parquet row, with its location in words.

    Only `columns` of Parquet are read; all columns if none of them exist.
    """
    return _read_columns(file, columns) if is_table(file) else _read_lines(file)


def _read_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _wrap_read_errors(file, "JSON lines"), pa.input_stream(str(file)) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), start=1):
            if not line.isspace():
                where = f"line {number} of '{file}'"
                yield where, _parse_record(line, where)


def _parse_record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): mend the file") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object: every line must be one")
    return record


def _read_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with _wrap_read_errors(file, "Parquet"), pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        known = [name for name in columns if name in schema.names] or schema.names
        read = _make_converter(pa.struct([schema.field(name) for name in known]))
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=known):
            for row in batch.to_pylist():
                number += 1
                where = f"row {number} of '{file}'"
                try:
                    record = read(row)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"{where} has a column that is not JSON ({error}): mend the file"
                    ) from None
                yield where, record


def _make_converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that converts a Parquet value of type `kind` to its JSON equivalent.

    All structs of a column have the same fields, and missing ones are null, so null fields are
    dropped. Values of mixed types are stored by `datasets` as text with an `arrow.json` type.
    """
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return json.loads
    if pa.types.is_struct(kind):
        fields = [(field.name, _make_converter(field.type)) for field in kind]
        return lambda row: {key: r(row[key]) for key, r in fields if row[key] is not None}
    if pa.types.is_map(kind):
        item = _make_converter(kind.item_type)
        return lambda pairs: {key: None if one is None else item(one) for key, one in pairs}
    if pa.types.is_nested(kind):
        value = _make_converter(kind.value_type)
        return lambda many: [None if one is None else value(one) for one in many]
    return lambda value: value


def _get_text(record: dict[str, Any], where: str, source: TextSource) -> str:
    if source.text_key not in record:
        raise DataError(_missing_column_message(where, source, record))
    text = record[source.text_key]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: {_name_column(source)} holds {text!r}, which is no text")
    return text or ""


def _name_column(source: TextSource) -> str:
    """Return the setting of the column as the user wrote it."""
    return f"{source.text_setting} = '{source.text_key}'"


def _read_parquet(file: Path, source: TextSource) -> Iterator[str]:
    with _wrap_read_errors(file, "Parquet"), pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        if source.text_key not in schema.names:
            raise DataError(_missing_column_message(f"'{file}'", source, schema.names))
        _check_type(schema.field(source.text_key).type, f"'{file}'", source)
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=[source.text_key]):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _check_type(kind: pa.DataType, where: str, source: TextSource) -> None:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(check(value) for check in checks):
        raise DataError(f"{where}: {_name_column(source)} holds {kind}, which is no text")


def _missing_column_message(where: str, source: TextSource, names: Iterable[str]) -> str:
    columns = sorted(names)
    shown = ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "")
    missing = f"{where} has no '{source.text_key}'"
    if CHAT_KEYS & set(columns) and source.is_of_job:
        return (
            f'{missing}, but {shown}: set data.format = "chat", or data.text_key to a column of '
            "text"
        )
    return f"{missing}: set {source.text_setting} to one of its columns ({shown})"


def _read_dataset(source: TextSource, cache: Path) -> Iterator[str]:
    import datasets

    directory = Path(source.path).expanduser().absolute()
    label = f"dataset directory '{source.path}'"
    # Exceptions of `datasets` vary; these are its own and those of its readers.
    library_error = datasets.exceptions.DatasetsError
    read_errors = (library_error, ValueError, OSError, pa.ArrowException, StopIteration)
    datasets.disable_progress_bars()  # The caller draws one.
    try:
        is_saved = any((directory / name).is_file() for name in DATASET_FILES)
        dataset = (
            datasets.load_from_disk(str(directory))
            if is_saved
            else datasets.load_dataset(str(directory), streaming=True, cache_dir=str(cache))
        )
        rows = _choose_split(dataset, source.split, label)
        yield from _read_rows(rows, source, label)
    except DataError:
        raise
    except read_errors as error:
        detail = " ".join(str(error).split())
        raise DataError(
            f"{label} cannot be read ({type(error).__name__}: {detail}): save it anew, or "
            "give a glob of its files and data.format"
        ) from None


def _choose_split(dataset: Any, split: str, label: str) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if split in dataset:
        return dataset[split]
    if len(dataset) == 1:
        return next(iter(dataset.values()))
    raise DataError(
        f"{label} has no split '{split}': set data.split (data.validation_split) to one of "
        f"{', '.join(map(str, dataset))}"
    )


def _read_rows(rows: Any, source: TextSource, label: str) -> Iterator[str]:
    names, text_key = rows.column_names, source.text_key
    if names is not None and text_key not in names:
        raise DataError(_missing_column_message(label, source, names))
    for table in rows.select_columns([text_key]).with_format("arrow").iter(_BATCH_ROWS):
        _check_type(table.schema.field(text_key).type, label, source)
        yield from (text or "" for text in table.column(text_key).to_pylist())
