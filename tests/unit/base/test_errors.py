"""User errors from file systems and exhausted memory; everything else stays a bug."""

from __future__ import annotations

import errno
import os

import pytest

from moesaic.base.errors import as_user_error, write_error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_file_system_errors_are_user_errors(number: int) -> None:
    error = OSError(number, os.strerror(number), "run/events/rank-0.jsonl")
    opening = f"'run/events/rank-0.jsonl': {os.strerror(number)}: "
    assert str(as_user_error(error, "")).startswith(opening)
    nameless = OSError(number, os.strerror(number))
    assert str(as_user_error(nameless, "")).startswith(os.strerror(number))
    assert str(write_error("--out = 'x'", error)).startswith("--out = 'x' cannot be written (")


def test_out_of_memory_is_a_user_error() -> None:
    torch = pytest.importorskip("torch")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried")):
        assert "not enough memory" in str(as_user_error(error, "buy some"))
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 55)
    assert "not enough memory" in str(as_user_error(refused.value, "buy some"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        RuntimeError("no 'out of memory.txt'"),
        OSError(errno.ENOENT, "gone"),
        IsADirectoryError(errno.EISDIR, "a directory"),
        OSError("network"),
        KeyError(),
    ],
)
def test_other_errors_are_not_user_errors(error: Exception) -> None:
    assert as_user_error(error, "buy some") is None
