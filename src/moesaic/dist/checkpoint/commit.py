"""Rank 0's part of a save: put the ranks' shares together and in force, or take them back.

The order of what reaches the disk is what makes a checkpoint whole or absent: files, manifest,
commit record under another name, their directories, then the rename.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from moesaic.base import tensorfile
from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint.directory import PARTIAL_COMMIT
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    Manifest,
    TensorRecord,
    commit_record,
)

_PATIENCE_S = 30.0
"""How long a shared file system may take to show one rank the files of another."""


def commit(path: Path, manifest: Manifest, phase: Callable[[str], None]) -> None:
    """Make the files at `path` a checkpoint; it is one from the rename on."""
    data = manifest.to_bytes()
    _write_synced(path / MANIFEST, data)
    phase("manifest_written")
    _write_synced(path / PARTIAL_COMMIT, commit_record(manifest, data))
    tensorfile.sync_directory(path)
    tensorfile.sync_directory(path.parent)
    phase("commit_written")
    os.replace(path / PARTIAL_COMMIT, path / COMMIT)
    tensorfile.sync_directory(path)
    phase("committed")


def discard(path: Path, rank: int, *names: str) -> None:
    """Remove `names`, then `rank`'s files, of a save that failed.

    The directory stays, as other ranks may still be writing there. Failing here hides nothing: the
    failure of the save is being raised, and what stays is cleaned away by the next save.
    """
    with contextlib.suppress(OSError):
        for name in names:
            (path / name).unlink(missing_ok=True)
        for file in (*path.glob(f"rank-{rank}.*"), *path.glob(f"rank-{rank}-*")):
            file.unlink(missing_ok=True)


def merge(tensors: dict[str, TensorRecord], key: str, record: TensorRecord, rank: int) -> None:
    """Add one rank's pieces of a tensor to those of the ranks before it."""
    known = tensors.setdefault(key, record)
    if known is record:
        return
    if (known.dtype, known.shape) != (record.dtype, record.shape):
        raise AssertionError(
            f"{key} is {record.dtype} {list(record.shape)} on rank {rank} and "
            f"{known.dtype} {list(known.shape)} on the ranks before it"
        )
    tensors[key] = known.model_copy(update={"pieces": known.pieces + record.pieces})


def await_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Wait until this rank sees all that the others wrote, as their file system is shared."""
    until = time.monotonic() + _PATIENCE_S
    for name, record in files.items():
        file = path / name
        while not (file.exists() and file.stat().st_size == record.num_bytes):
            if time.monotonic() > until:
                raise StoreError(
                    f"'{file}' is not seen by rank 0: all ranks must share the directory"
                )
            time.sleep(0.05)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
