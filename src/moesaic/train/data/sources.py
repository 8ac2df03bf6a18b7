"""Files of a text setting: found by their names, without reading them. Imports neither torch nor
pyarrow."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from moesaic.base.config import noted
from moesaic.base.errors import DataError
from moesaic.facts.job import DataConfig
from moesaic.models.tokenizer import Tokenizer, open_tokenizer

Kind = Literal["text", "jsonl", "parquet", "dataset", "chat", "labelled"]

SUFFIXES: dict[str, Kind] = {
    ".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
}  # fmt: skip
ACCEPTED_KINDS = {
    "auto": {"text", "jsonl", "parquet"}, "chat": {"jsonl", "parquet"},
    "labelled": {"jsonl", "parquet"},
}  # fmt: skip
"""Suffix-based formats that each value of data.format accepts."""
_RECORD_KINDS = ("chat", "labelled")
"""Formats of records in JSON lines or Parquet, which file names do not tell."""
COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}
"""Suffixes of compressed text and JSON lines, which are decompressed while reading."""

DATASET_FILES = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class TextSource:
    """Files of one text setting."""

    key: str
    """Setting that names the text."""
    path: str
    """Path as the user wrote it."""
    kind: Kind
    files: tuple[Path, ...]
    """All files of the text."""
    text_key: str
    split: str

    @property
    def is_of_job(self) -> bool:
        """True for text that a job names, and not a verb."""
        return self.key.startswith("data.")

    @property
    def text_setting(self) -> str:
        """Setting that names the column of the text."""
        return "data.text_key" if self.is_of_job else "text_key"


def source_keys(config: DataConfig) -> list[str]:
    """Return the keys that name the training text and, if it is separate, the validation text."""
    separate = [] if config.validation_path is None else ["data.validation_path"]
    return ["data.path", *separate]


def find_source(config: DataConfig, key: str) -> TextSource:
    """Return the text that one of `source_keys` names."""
    path, split = config.path, config.split
    if key == "data.validation_path":
        path, split = str(config.validation_path), config.validation_split
    return find_text(key, path, config.format, config.text_key, split)


def find_sources(config: DataConfig) -> list[TextSource]:
    """Return the training text and, if it is separate, the validation text."""
    return [find_source(config, key) for key in source_keys(config)]


def open_inputs(
    config: DataConfig, found: dict[str, str]
) -> tuple[list[TextSource], Tokenizer | None]:
    """Return the texts and the tokenizer that are there; mistakes go to `found`, by key."""
    sources, tokenizer = list[TextSource](), None
    for key in source_keys(config):
        with noted(found, key):
            sources.append(find_source(config, key))
    with noted(found, "data.tokenizer"):
        tokenizer = open_tokenizer(config.tokenizer, config.end_token)
    return sources, tokenizer


def find_text(key: str, path: str, kind: str, text_key: str, split: str) -> TextSource:
    """Return the files of `path`, the value of the setting `key`; `kind` is data.format."""
    location = Path(path).expanduser()
    label = f"{key} = '{path}'"
    if location.is_dir():
        files, found_kind = _scan(location, kind, label)
    else:
        files = [location] if location.is_file() else _glob(location, label)
        found_kind = "dataset" if kind == "dataset" else _detect_kind(files, kind, label)
    if found_kind == "dataset" and not location.is_dir():
        raise DataError(
            f"{label} is no directory, but data.format = 'dataset': give one, or 'auto'"
        )
    return TextSource(key, path, found_kind, tuple(files), text_key, split)


def fingerprint(source: TextSource) -> list[str]:
    """Return strings that change with the text, without reading it."""
    lines = [f"{source.kind} {source.text_key} {source.split}"]
    for file in source.files:
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"'{file}' cannot be read: {error}") from None
        lines.append(f"{os.path.abspath(file)} {status.st_size} {status.st_mtime_ns}")
    return lines


def _glob(pattern: Path, label: str) -> list[Path]:
    if not glob.has_magic(str(pattern)):
        problem = "is neither a file nor a directory" if pattern.exists() else "does not exist"
        raise DataError(f"{label} {problem}: give a file, a directory or a glob")
    files = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(f"{label} matches no file: mend the pattern")
    return files


def _scan(directory: Path, kind: str, label: str) -> tuple[list[Path], Kind]:
    """Return the files of a directory tree that match `kind`, ordered by name, and their format."""
    try:
        paths = [file.relative_to(directory) for file in directory.rglob("*") if file.is_file()]
    except OSError as error:
        raise DataError(f"{label} cannot be searched ({error}): give a narrower one") from None
    visible = [file for file in paths if not any(part.startswith(".") for part in file.parts)]
    all_files = [directory / file for file in sorted(visible, key=lambda file: file.as_posix())]
    if kind == "dataset" or (kind == "auto" and _is_dataset(directory)):
        if not all_files:
            raise DataError(f"{label} is an empty directory: there is no text in it")
        return all_files, "dataset"
    accepted = ACCEPTED_KINDS.get(kind, {kind})
    files = [file for file in all_files if file_kind(file) in accepted]
    if not files:
        suffixes = [suffix for suffix, one in SUFFIXES.items() if one in accepted]
        raise DataError(
            f"{label} holds no file named *{', *'.join(suffixes)}: give a directory that does"
            + (", or a glob of the files and data.format" * label.startswith("data."))
        )
    return files, _detect_kind(files, kind, label)


def _is_dataset(directory: Path) -> bool:
    """Return true for a directory saved by `datasets`, or a repository with a dataset card."""
    if any((directory / name).is_file() for name in DATASET_FILES):
        return True
    card = directory / "README.md"
    return card.is_file() and card.read_bytes()[:4].startswith(b"---")


def _detect_kind(files: Iterable[Path], kind: str, label: str) -> Kind:
    if kind not in ACCEPTED_KINDS:
        return cast(Kind, kind)
    kinds: dict[Kind, Path] = {}
    for file in files:
        if kind in _RECORD_KINDS:
            found: Kind | None = "parquet" if is_table(file) else "jsonl"
        else:
            found = file_kind(file)
        if found is None:
            remedy = "set data.format to 'text', 'jsonl' or 'parquet'"
            if not label.startswith("data."):
                remedy = f"give a glob of files named *{', *'.join(SUFFIXES)}"
            raise DataError(f"{label}: the name of '{file}' does not say what it holds: {remedy}")
        kinds.setdefault(found, file)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise DataError(
            f"{label} mixes {one} ('{first.name}') and {other} ('{second.name}'): give a glob of "
            f"one of them{', or set data.format' * (kind == 'auto' and label.startswith('data.'))}"
        )
    return cast(Kind, kind) if kind in _RECORD_KINDS else next(iter(kinds))


def file_kind(file: Path) -> Kind | None:
    """Return the format that a file's name tells; None for an unknown one."""
    return SUFFIXES.get(_suffix(file))


def _suffix(file: Path) -> str:
    """Return the suffix that identifies the format, without that of a compression."""
    packed = file.suffix.lower() in COMPRESSED
    return (file.with_suffix("") if packed else file).suffix.lower()


def is_table(file: Path) -> bool:
    """Return true if conversations of `file` are Parquet rows; in other files they are lines."""
    return _suffix(file) == ".parquet"
