"""Rank 0's part of a save: merge the ranks' records, then commit or discard the files.

The write order makes a commit atomic: files, manifest, commit record under a temporary name, fsync
of their directories, rename.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from moesaic.base import safetensors_file
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

_FILE_TIMEOUT_S = 30.0
"""Seconds in which a shared file system must show one rank the files of another."""


def commit(path: Path, manifest: Manifest, phase: Callable[[str], None]) -> None:
    """Write manifest and commit record at `path`; the checkpoint exists from the rename on."""
    data = manifest.to_bytes()
    _write_synced(path / MANIFEST, data)
    phase("manifest_written")
    _write_synced(path / PARTIAL_COMMIT, commit_record(manifest, data))
    safetensors_file.sync_directory(path)
    safetensors_file.sync_directory(path.parent)
    phase("commit_written")
    os.replace(path / PARTIAL_COMMIT, path / COMMIT)
    safetensors_file.sync_directory(path)
    phase("committed")


def discard(path: Path, rank: int, *names: str) -> None:
    """Remove `names` and the files of `rank` after a failed save.

    The directory stays, because other ranks may still write there. Errors are ignored: the caller
    raises the failure itself, and the next save removes leftovers.
    """
    with contextlib.suppress(OSError):
        for name in names:
            (path / name).unlink(missing_ok=True)
        for file in (*path.glob(f"rank-{rank}.*"), *path.glob(f"rank-{rank}-*")):
            file.unlink(missing_ok=True)


def merge(tensors: dict[str, TensorRecord], key: str, record: TensorRecord, rank: int) -> None:
    """Add one rank's shards of a tensor to those of the ranks before it."""
    known = tensors.setdefault(key, record)
    if known is record:
        return
    if (known.dtype, known.shape) != (record.dtype, record.shape):
        raise AssertionError(
            f"{key} is {record.dtype} {list(record.shape)} on rank {rank} and "
            f"{known.dtype} {list(known.shape)} on the ranks before it"
        )
    tensors[key] = known.model_copy(update={"shards": known.shards + record.shards})


def await_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Wait until this rank sees the files of all ranks on the shared file system."""
    deadline = time.monotonic() + _FILE_TIMEOUT_S
    for name, record in files.items():
        file = path / name
        while not (file.exists() and file.stat().st_size == record.num_bytes):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"rank 0 does not see '{file}'; put the directory on a file system that all "
                    "ranks share"
                )
            time.sleep(0.05)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
