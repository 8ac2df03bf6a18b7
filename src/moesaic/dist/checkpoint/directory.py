"""A directory of checkpoints: which are committed, in what order, and how one goes away.

A checkpoint is a directory `step-00000010` (`step-00000010-2` where a run went back and came by
the same step again). It exists from the moment its COMMIT does until the moment that goes.
Only files that a saver writes are ever removed.

A run that goes back leaves the file HEAD beside its checkpoints: until the next commit, the one
that it names is the newest.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

from moesaic.base.errors import StoreError
from moesaic.base.tensorfile import sync_directory
from moesaic.dist.checkpoint.manifest import COMMIT, MANIFEST

PARTIAL_COMMIT = f"{COMMIT}.partial"
HEAD = "HEAD"

_CHECKPOINT = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_WRITTEN = re.compile(rf"rank-\d+(-\d+)?\.safetensors|{re.escape(MANIFEST)}|{COMMIT}(\.partial)?")


def committed(directory: Path) -> list[Path]:
    """The committed checkpoints in `directory`, the newest commit first."""
    rows = _by_serial(directory)
    paths = [path for _, path in reversed(rows)]
    name, serial = _read_head(directory) or ("", 0)
    if rows and rows[-1][0][0] < serial:
        paths.sort(key=lambda path: path.name != name)
    return paths


def go_back_to(path: Path) -> None:
    """Make a committed checkpoint the one to go on from, until the next commit."""
    directory = path.parent
    partial = directory / f"{HEAD}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"checkpoint": path.name, "serial": next_serial(directory)}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / HEAD)
    sync_directory(directory)


def _read_head(directory: Path) -> tuple[str, int] | None:
    try:
        raw = json.loads((directory / HEAD).read_bytes())
        return str(raw["checkpoint"]), int(raw["serial"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise StoreError(
            f"'{directory / HEAD}' is damaged, so that nobody knows which checkpoint the run goes "
            "on from: remove that file, and name one with --resume PATH"
        ) from None


def candidates(directory: Path) -> list[Path]:
    """The committed checkpoints, the one to go on from first.

    Where commit record and manifest do not agree on the order of a checkpoint, nobody can say that
    there is a newer one: it goes before all others, so that whoever opens it hears of the damage.
    """
    paths = committed(directory)
    doubtful = [p for p in paths if _read_serial(p / COMMIT) != _read_serial(p / MANIFEST)]
    return doubtful + [path for path in paths if path not in doubtful]


def next_serial(directory: Path) -> int:
    """The serial number of the next commit in `directory`."""
    head = _read_head(directory)
    highest = max((serial for (serial, _, _), _ in _by_serial(directory)), default=0)
    return max(highest + 1, head[1] if head else 0)


def vacant(directory: Path, step: int) -> Path:
    """The path for a checkpoint of `step` that takes no committed one's place."""
    path, revision = directory / f"step-{step:08d}", 1
    while (path / COMMIT).exists():
        revision += 1
        path = directory / f"step-{step:08d}-{revision}"
    return path


def leftovers(directory: Path) -> list[Path]:
    """What saves that were cut off left in `directory`."""
    return [path for _, path in _checkpoints(directory) if not (path / COMMIT).exists()]


def withdraw(path: Path) -> None:
    """Make a checkpoint one that was never committed; its files stay."""
    (path / COMMIT).unlink(missing_ok=True)
    sync_directory(path)


def remove(path: Path) -> None:
    """Remove an uncommitted checkpoint's files, and the directory unless it holds others."""
    for file in path.iterdir():
        if _WRITTEN.fullmatch(file.name):
            file.unlink(missing_ok=True)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _checkpoints(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found.append(((int(match[1]), int(match[2] or 1)), path))
    return sorted(found)


def _by_serial(directory: Path) -> list[tuple[tuple[int, int, int], Path]]:
    """(serial, step, revision) and path of each committed checkpoint, oldest first."""
    rows = [
        ((_read_serial(path / COMMIT), *order), path)
        for order, path in _checkpoints(directory)
        if (path / COMMIT).exists()
    ]
    return sorted(rows)


def _read_serial(file: Path) -> int:
    """The serial number in a commit record or manifest; 0 where it cannot be read."""
    try:
        return max(int(json.loads(file.read_bytes())["serial"]), 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0  # Opening the checkpoint says what is wrong with it.
