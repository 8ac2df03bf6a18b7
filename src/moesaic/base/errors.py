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


class ClusterError(ConfigError):
    """A cluster lacks what is asked of it: who knows its file says where that is to be mended."""


class DivergedError(UserError):
    """Training has left the numbers: the state was not changed by the step that shows it."""


class DataError(UserError):
    """Training text, a tokenizer or a dataset directory cannot be used as asked."""


class StoreError(UserError):
    """Bytes at rest are missing, half-written or not what was written."""


class WeightsError(StoreError):
    """A model directory holds a missing, unused or mis-shaped tensor."""


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or name another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow it, or name another place"),
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EIO: "the disk may be failing; name another place",
}
"""What a file system says that the user can mend, and how."""

_NO_MEMORY = ("DefaultCPUAllocator: ", "unable to mmap", "std::bad_alloc")
"""How torch says that memory on the host is spent."""


def unwritable(what: str, error: OSError) -> StoreError:
    """`what`, a setting or a path, cannot be written, as `error` says."""
    remedy = _REMEDIES.get(error.errno or 0, "name another place")
    return StoreError(f"{what} cannot be written ({error.strerror or error}): {remedy}")


def as_user_error(error: BaseException, on_memory: str) -> UserError | None:
    """`error` as the user's own, where a file system or the memory of the machine is behind it.

    `on_memory` is what helps against too little memory.
    """
    text = str(error)
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        place = f"'{Path(error.filename)}': " if isinstance(error.filename, str) else ""
        return StoreError(f"{place}{error.strerror}: {_REMEDIES[error.errno]}")
    short = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    short |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    short |= isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    if not short:
        return None
    detail = f" ({text.splitlines()[0]})" if text else ""
    return UserError(f"there is not enough memory{detail}: {on_memory}")
