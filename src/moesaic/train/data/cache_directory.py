"""Directories of a cache: each is written once, under another name, and renamed when complete.

A lock serialises writers on one machine.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moesaic.base.lock import LockHeld, fail_if_locked, file_lock
from moesaic.base.safetensors_file import sync_directory

_POLL_S = 0.1
_PARTIAL, _LOCK = ".partial", ".lock"


def write_once(
    directory: Path,
    write: Callable[[Path], object],
    on_wait: Callable[[], object],
    is_complete: Callable[[Path], bool] = Path.is_dir,
) -> None:
    """Write `directory` unless it is complete.

    Args:
        directory: the directory; its parent is the cache.
        write: function that fills a new directory with synced files.
        on_wait: called repeatedly while another process writes.
        is_complete: false for a directory that is missing or damaged, which is replaced.
    """

    def wait(_holder: str) -> None:
        on_wait()
        time.sleep(_POLL_S)

    if is_complete(directory):
        return
    cache = directory.parent
    cache.mkdir(parents=True, exist_ok=True)
    with file_lock(cache / f"{directory.name}{_LOCK}", wait):
        if is_complete(directory):
            return
        shutil.rmtree(directory, ignore_errors=True)
        _remove_partial(cache)
        partial = cache / f"{directory.name}{_PARTIAL}"
        # We hold the lock, so a killed writer left this.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            write(partial)
            sync_directory(partial)
            os.replace(partial, directory)
            sync_directory(cache)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _remove_partial(cache: Path) -> None:
    """Remove partial directories of killed writers, whose locks are free."""
    for partial in cache.glob(f"*{_PARTIAL}"):
        with suppress(LockHeld), file_lock(partial.with_suffix(_LOCK), fail_if_locked):
            shutil.rmtree(partial, ignore_errors=True)
