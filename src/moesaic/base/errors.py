"""Exceptions of moesaic, split by whether the user can fix them.

`UserError` and its subclasses are for the user: the command line prints the message and exits 2.
Any other exception that reaches the command line is a bug: it prints a traceback and exits 1.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path


class MoesaicError(Exception):
    """Base class of every error that moesaic raises on purpose."""


class UserError(MoesaicError):
    """An error that the user can fix; the message names key, value and remedy."""


class ConfigError(UserError, ValueError):
    """An impossible setting in a job, flag or settings file."""


def join_mistakes(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error that lists all mistakes of several, each with where it is."""
    lines = list[str]()
    for error in errors:
        heading, *listed = str(error).split("\n  ")
        origin = heading.rpartition(": ")[0]
        lines += [f"{origin}: {one}" for one in listed] or [heading]
    return ConfigError("\n  ".join([f"{len(lines)} mistakes", *lines]))


class DoesNotFitError(UserError):
    """A job that needs more memory than the machine has, as predicted or as found; the command line
    exits 3."""


class ClusterError(ConfigError):
    """A missing fact in a cluster; callers that know its file add where to fix it."""


class DivergedError(UserError):
    """A non-finite loss or gradient. The failing step did not change the training state, except for
    experts in memory tiers without `train.clip`."""

    is_on_all_ranks = True
    """False if perhaps not every rank raises it, so that collectives would wait in vain."""


class DataError(UserError):
    """Unusable training text, tokenizer or dataset directory."""


class StoreError(UserError):
    """A missing, truncated or corrupt file."""


class WeightsError(StoreError):
    """A missing, unused or mis-shaped tensor in a model directory."""


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or name another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow it, or name another place"),
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EIO: "the disk may be failing; name another place",
}
"""Remedies by errno, for errors of the file system that the user can fix."""

_OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator: ", "unable to mmap", "std::bad_alloc")
"""Messages of torch and C++ when host memory is exhausted."""


def write_error(what: str, error: OSError) -> StoreError:
    """Return the error for `what`, a setting or a path, that cannot be written."""
    remedy = _REMEDIES.get(error.errno or 0, "name another place")
    return StoreError(f"{what} cannot be written ({error.strerror or error}): {remedy}")


def as_user_error(error: BaseException, memory_remedy: str) -> UserError | None:
    """Return `error` as a UserError if the file system or a lack of memory caused it, else None.

    `memory_remedy` says what to do against a lack of memory.
    """
    text = str(error)
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        place = f"'{Path(error.filename)}': " if isinstance(error.filename, str) else ""
        return StoreError(f"{place}{error.strerror}: {_REMEDIES[error.errno]}")
    short = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    short |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    short |= isinstance(error, RuntimeError) and any(
        words in text for words in _OUT_OF_MEMORY_TEXTS
    )
    if not short:
        return None
    detail = f" ({text.splitlines()[0]})" if text else ""
    return DoesNotFitError(f"there is not enough memory{detail}: {memory_remedy}")
