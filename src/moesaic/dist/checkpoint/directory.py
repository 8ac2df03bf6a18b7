"""Checkpoint directory: which checkpoints are committed, their order, and their removal.

A checkpoint is a directory `step-00000010`, or `step-00000010-2` if a rolled-back run repeats the
step. It exists as long as its COMMIT file does. Only files that a saver writes are ever removed.

A rollback writes the file HEAD beside the checkpoints. Until the next commit, the checkpoint named
there counts as the newest.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

from moesaic.base.errors import StoreError
from moesaic.base.safetensors_file import sync_directory
from moesaic.dist.checkpoint.manifest import COMMIT, MANIFEST

PARTIAL_COMMIT = f"{COMMIT}.partial"
HEAD = "HEAD"

_CHECKPOINT = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_WRITTEN = re.compile(rf"rank-\d+(-\d+)?\.safetensors|{re.escape(MANIFEST)}|{COMMIT}(\.partial)?")


def list_committed(directory: Path) -> list[Path]:
    """Return the committed checkpoints in `directory`, newest first."""
    entries = _by_serial(directory)
    paths = [path for _, path in reversed(entries)]
    name, serial = _read_head(directory) or ("", 0)
    if entries and entries[-1][0][0] < serial:
        paths.sort(key=lambda path: path.name != name)
    return paths


def set_head(path: Path) -> None:
    """Make a committed checkpoint the one to resume from, until the next commit."""
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
            f"'{directory / HEAD}' is damaged, so the checkpoint to resume from is unknown; "
            "remove the file and name a checkpoint by its path"
        ) from None


def resume_candidates(directory: Path) -> list[Path]:
    """Return the committed checkpoints, the one to resume from first.

    Damaged ones, whose commit record and manifest disagree on the serial number, might be the
    newest. They come first, so that opening them reports the damage.
    """
    paths = list_committed(directory)
    damaged = [p for p in paths if _read_serial(p / COMMIT) != _read_serial(p / MANIFEST)]
    return damaged + [path for path in paths if path not in damaged]


def next_serial(directory: Path) -> int:
    """Return the serial number of the next commit in `directory`."""
    head = _read_head(directory)
    highest = max((serial for (serial, _, _), _ in _by_serial(directory)), default=0)
    return max(highest + 1, head[1] if head else 0)


def new_checkpoint_path(directory: Path, step: int) -> Path:
    """Return an unused path for a checkpoint of `step`."""
    path, revision = directory / f"step-{step:08d}", 1
    while (path / COMMIT).exists():
        revision += 1
        path = directory / f"step-{step:08d}-{revision}"
    return path


def list_uncommitted(directory: Path) -> list[Path]:
    """Return the directories of interrupted saves."""
    return [path for _, path in _checkpoints(directory) if not (path / COMMIT).exists()]


def remove_commit(path: Path) -> None:
    """Remove the commit record of a checkpoint; its files stay."""
    (path / COMMIT).unlink(missing_ok=True)
    sync_directory(path)


def remove_files(path: Path) -> None:
    """Remove the files of an uncommitted checkpoint, and the directory unless it holds others."""
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
    matches = []
    for path in directory.iterdir():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            matches.append(((int(match[1]), int(match[2] or 1)), path))
    return sorted(matches)


def _by_serial(directory: Path) -> list[tuple[tuple[int, int, int], Path]]:
    """Return (serial, step, revision) and path of each committed checkpoint, oldest first."""
    entries = [
        ((_read_serial(path / COMMIT), *order), path)
        for order, path in _checkpoints(directory)
        if (path / COMMIT).exists()
    ]
    return sorted(entries)


def _read_serial(file: Path) -> int:
    """Return the serial number in a commit record or manifest; 0 if unreadable."""
    try:
        return max(int(json.loads(file.read_bytes())["serial"]), 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0  # Opening the checkpoint reports the damage.
