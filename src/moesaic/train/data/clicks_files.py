"""Files of click samples, found by their names."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from moesaic.base.errors import DataError
from moesaic.facts.job import ClicksConfig

PATH_KEYS = ("data.path", "data.validation_path")
"""Keys of a job that name samples."""
_PARQUET = (".parquet", ".pq")


def job_files(config: ClicksConfig, key: str) -> list[Path]:
    """Return the files that one of `PATH_KEYS` names; raise if it names none."""
    path = getattr(config, key.removeprefix("data."))
    return [] if path is None else find_files(key, path, is_parquet=config.is_parquet)


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
