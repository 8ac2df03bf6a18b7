"""Atomic file writes: a file appears whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` at the end.

    If anything fails, nothing of it stays. An existing `path` keeps its permissions. Nothing is
    flushed to disk: callers that must survive a crash of the machine call fsync.
    """
    with _partial_file(path) as partial:
        yield partial
        with suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)


@contextmanager
def atomic_create(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file becomes `path` at the end; `path` must not exist.

    If another process creates `path` meanwhile, that file stays and FileExistsError is raised.
    """
    with _partial_file(path) as partial:
        yield partial
        os.link(partial, path)


@contextmanager
def _partial_file(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
    finally:
        with suppress(OSError):  # Usually the file is gone by now.
            partial.unlink()
