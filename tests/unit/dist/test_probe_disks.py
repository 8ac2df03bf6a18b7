"""Disk probe: positive rates, no leftover files, and clear errors."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import UserError
from moesaic.dist.probe import disks


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    try:
        with disks.open_direct(tmp_path):
            return tmp_path
    except disks.NoDirectIO as error:
        pytest.skip(str(error))


def test_every_pattern_has_a_rate_and_no_file_is_left(directory: Path) -> None:
    found = disks.measure(directory, 4 << 20, 0.2)
    assert set(found) == set(disks._PATTERNS)
    assert all(rate > 0 for (rate,) in found.values())
    assert list(directory.iterdir()) == []


def test_file_has_no_name_and_uses_direct_io(directory: Path) -> None:
    with disks.open_direct(directory) as fd:
        assert os.fstat(fd).st_nlink == 0
        assert list(directory.iterdir()) == []
        with pytest.raises(OSError, match="Invalid argument"):
            os.pwrite(fd, b"not a whole block", 0)


@pytest.mark.parametrize(("kind", "waits"), [("read", False), ("write", True), ("mixed", True)])
def test_write_rates_include_fsync(
    kind: str, waits: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disks.open_direct(directory) as fd:
        size = disks._prepare(fd, 1 << 20)
        monkeypatch.setattr(os, "fsync", lambda _: time.sleep(1.0))
        start = time.perf_counter()
        rate = disks._round(fd, 4096, kind, iter(range(0, size, 4096)), 0.0)
        elapsed_s = time.perf_counter() - start
    min_bytes = disks._QUEUE_DEPTH * 4096
    assert (rate <= min_bytes / 1.0) == waits
    assert (elapsed_s >= 1.0) == waits


def test_missing_direct_io_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any) -> int:
        path.write_text("")  # Some file systems create the file.
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(disks.NoDirectIO, match=r"was not measured: .* name a directory"):
        disks.measure(tmp_path, 1 << 20, 0.1)
    disks.check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"disks = '.*/absent' is not a directory; name one"):
        disks.check_writable(tmp_path / "absent")

    def refuse(*_: Any) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"disks = '.*' cannot be written \(Permission denied\)"):
        disks.check_writable(tmp_path)


def test_full_disk_is_a_user_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(UserError, match=r"No space left on device\): make room"):
        disks.measure(directory, 1 << 20, 0.1)
    assert list(directory.iterdir()) == []
