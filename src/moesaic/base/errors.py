"""The errors of moesaic, told apart by who can mend them.

`UserError` and its kin are the user's to mend: the command line prints their one sentence and
exits 2. Anything else that reaches the command line is our bug: it prints a traceback and exits 1.
"""

from __future__ import annotations

import errno
from pathlib import Path


class MoesaicError(Exception):
    """Root of every error that moesaic raises on purpose."""


class UserError(MoesaicError):
    """Something the user can mend: the message names key, value and remedy."""


class ConfigError(UserError, ValueError):
    """A job, flag or file of settings says something impossible."""


class DivergedError(UserError):
    """Training has left the numbers: the state was not changed by the step that shows it."""


class DataError(UserError):
    """Training text, a tokenizer or a dataset directory cannot be used as asked."""


class StoreError(UserError):
    """Bytes at rest are missing, half-written or not what was written."""


class WeightsError(StoreError):
    """A model directory holds a missing, unused or mis-shaped tensor."""


_REFUSALS = frozenset(
    (
        errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ELOOP,
        errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
    )
)  # fmt: skip
"""What a file system says that the user can mend."""

_NO_MEMORY = ("DefaultCPUAllocator: ", "out of memory")


def unwritable(what: str, error: OSError) -> StoreError:
    """`what`, a setting or a path, cannot be written, as `error` says."""
    reason = error.strerror or str(error)
    return StoreError(
        f"{what} cannot be written ({reason}): make room there, or name another place"
    )


def as_user_error(error: BaseException) -> UserError | None:
    """`error` as the user's own, where a file system or the memory of the machine is behind it."""
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        place = f"'{Path(error.filename)}': " if isinstance(error.filename, str) else ""
        return StoreError(f"{place}{error.strerror}: make room, or name another place")
    text = str(error)
    short = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    )
    if not short:
        return None
    detail = f" ({text.splitlines()[0]})" if text else ""
    return UserError(
        f"there is not enough memory{detail}: take smaller batches or sequences, or more ranks "
        "(moesaic train JOB.toml --dry-run says what a rank needs)"
    )
