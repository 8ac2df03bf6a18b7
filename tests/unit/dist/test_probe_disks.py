"""Disks: positive rates, nothing left behind, and sentences where it cannot be."""

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
def place(tmp_path: Path) -> Path:
    try:
        with disks.opened(tmp_path):
            return tmp_path
    except disks.NoDirectAccess as refusal:
        pytest.skip(str(refusal))


def test_every_pattern_has_a_rate_and_the_file_is_gone(place: Path) -> None:
    found = disks.measure(place, 4 << 20, 0.2)
    assert set(found) == set(disks._PATTERNS)
    assert all(rate > 0 for (rate,) in found.values())
    assert list(place.iterdir()) == []


def test_the_file_has_no_name_even_while_it_is_used(place: Path) -> None:
    with disks.opened(place) as fd:
        assert os.fstat(fd).st_nlink == 0
        assert list(place.iterdir()) == []


def test_it_goes_past_the_page_cache(place: Path) -> None:
    with disks.opened(place) as fd, pytest.raises(OSError, match="Invalid argument"):
        os.pwrite(fd, b"three bytes are no block", 0)


@pytest.mark.parametrize(("kind", "waits"), [("read", False), ("write", True), ("mixed", True)])
def test_a_write_is_done_when_it_is_on_disk(
    kind: str, waits: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disks.opened(place) as fd:
        size = disks._prepare(fd, 1 << 20)
        monkeypatch.setattr(os, "fsync", lambda _: time.sleep(1.0))
        start = time.perf_counter()
        rate = disks._round(fd, 4096, kind, iter(range(0, size, 4096)), 0.0)
        took = time.perf_counter() - start
    least = disks._IN_FLIGHT * 4096
    assert (rate <= least / 1.0) == waits
    assert (took >= 1.0) == waits


def test_a_file_system_without_direct_access_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any) -> int:
        path.write_text("")  # As some do.
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(disks.NoDirectAccess, match=r"was not measured: .* name a directory"):
        disks.measure(tmp_path, 1 << 20, 0.1)
    disks.check(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"disks = '.*/nowhere' is no directory: name one"):
        disks.check(tmp_path / "nowhere")

    def refuse(*_: Any) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"disks = '.*' cannot be written \(Permission denied\)"):
        disks.check(tmp_path)


def test_a_full_disk_is_the_users(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(UserError, match=r"No space left on device\): make room"):
        disks.measure(place, 1 << 20, 0.1)
    assert list(place.iterdir()) == []
