"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of `path` at the end.

    Nothing of it stays if anything fails. A crash of the machine may still lose it: what must
    outlast that is flushed to disk by whoever writes it. Who may read it stays as it was.
    """
    with _partial(path) as partial:
        yield partial
        with suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)


@contextmanager
def adding(path: Path) -> Iterator[Path]:
    """As `replacing`, for a `path` that nothing is at.

    What has come to be there by the end stays, and FileExistsError is raised.
    """
    with _partial(path) as partial:
        yield partial
        os.link(partial, path)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
    finally:
        with suppress(OSError):  # Mostly there is none by then.
            partial.unlink()
