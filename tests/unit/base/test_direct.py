from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.base import direct
from moesaic.base.errors import StoreError

UNIT = direct._ALIGNMENT
BLOCK = 4 * UNIT
SIZES = [0, 1, UNIT - 1, UNIT, UNIT + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 7 * BLOCK + 5]
SHARED = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file on a disk, and one on a file system that may have no disk below it."""
    if request.param == "disk":
        yield tmp_path / "file"
        return
    if not SHARED.is_dir():
        pytest.skip("there is no /dev/shm")
    path = SHARED / f"moesaic-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [1000, UNIT, 3 * BLOCK + 7])
def test_what_is_written_is_read(place: Path, size: int, chunk: int) -> None:
    data = os.urandom(size)
    direct.write(place, (data[at : at + chunk] for at in range(0, size, chunk)))
    assert place.read_bytes() == data
    assert b"".join(bytes(part) for part in direct.parts(place, direct.memory(size))) == data
    for start, end in ((0, size), (size // 3, size), (size // 3, size // 2), (size, size)):
        assert direct.read(place, start, end - start) == data[start:end]


def test_a_block_is_written_while_the_next_one_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, write = threading.Event(), direct._write_whole

    def write_late(file: FileIO, data: memoryview, past: bool) -> None:
        assert asked.wait(20)
        write(file, data, past)

    def chunks() -> Iterator[bytes]:
        yield b"a" * BLOCK
        asked.set()
        yield b"b" * BLOCK

    monkeypatch.setattr(direct, "_write_whole", write_late)
    direct.write(tmp_path / "file", chunks())
    assert (tmp_path / "file").read_bytes() == b"a" * BLOCK + b"b" * BLOCK


def test_files_go_past_the_page_cache_where_they_can(tmp_path: Path) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system knows no way past its page cache")
    with (tmp_path / "file").open("wb", buffering=0) as file:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            pytest.skip("the file system of the test has one way only")
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        direct._go_past(file, True)
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        direct._go_past(file, False)
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT


def test_each_way_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the disk is asked with the cache out of the way, but for a file's end."""
    path, data = tmp_path / "file", os.urandom(2 * BLOCK + 5)
    with path.open("wb", buffering=0) as file:
        direct._go_past(file, True)
        if not hasattr(os, "O_DIRECT") or not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            pytest.skip("the file system of the test has one way only")
    retrying, past = direct._retrying, list[bool]()

    def seen(file: FileIO, move: Callable[[memoryview], int], data: memoryview) -> int:
        past.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        return retrying(file, move, data)

    monkeypatch.setattr(direct, "_retrying", seen)
    direct.write(path, [data])
    assert past == [True, True, False]
    past.clear()
    assert b"".join(direct.parts(path, direct.memory(len(data)))) == data
    assert len(past) >= 3
    assert all(past)
    past.clear()
    assert direct.read(path, 1, 2 * BLOCK) == data[1 : 1 + 2 * BLOCK]
    assert past
    assert all(past)


def test_a_part_is_there_when_it_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the disk gives it."""
    path, whole, data = tmp_path / "file", direct._read_whole, os.urandom(3 * BLOCK)
    path.write_bytes(data)
    buffer = direct.memory(len(data))
    buffer[:] = bytes(len(buffer))

    def late(file: FileIO, buffer: memoryview) -> int:
        time.sleep(0.05)
        return whole(file, buffer)

    monkeypatch.setattr(direct, "_read_whole", late)
    assert b"".join(bytes(part) for part in direct.parts(path, buffer)) == data


def test_a_disk_with_another_alignment_is_reached_through_the_cache(tmp_path: Path) -> None:
    data, path = os.urandom(3 * UNIT), tmp_path / "file"
    odd = direct.memory(4 * UNIT)[1:]
    odd[: len(data)] = data
    with path.open("wb", buffering=0) as file:
        direct._write_whole(file, odd[: len(data)], past=True)
    assert path.read_bytes() == data
    odd[:] = bytes(len(odd))
    with path.open("rb", buffering=0) as file:
        direct._go_past(file, True)
        assert direct._read_whole(file, odd) == len(data)
    assert odd[: len(data)] == data


def test_a_file_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with pytest.raises(StoreError, match=r"short' ends before byte 101: restore it"):
        direct.read(path, 1, 100)


def test_a_disk_may_give_less_than_it_has_been_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is reached over a network does; what follows is where it belongs."""
    retrying = direct._retrying
    data, path = os.urandom(3 * BLOCK + 5), tmp_path / "file"

    def grudging(file: FileIO, move: Callable[[memoryview], int], data: memoryview) -> int:
        return retrying(file, move, data[: min(len(data), UNIT + 100)])

    monkeypatch.setattr(direct, "_retrying", grudging)
    direct.write(path, [data])
    assert path.read_bytes() == data
    buffer = direct.memory(len(data))
    assert b"".join(bytes(part) for part in direct.parts(path, buffer)) == data
    assert buffer[: len(data)] == data
    assert direct.read(path, 7, 2 * BLOCK) == data[7 : 7 + 2 * BLOCK]


def test_a_file_that_is_cut_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "file", direct._read_whole
    path.write_bytes(bytes(2 * BLOCK))

    def cut(file: FileIO, buffer: memoryview) -> int:
        os.truncate(path, BLOCK + 3)
        return whole(file, buffer)

    monkeypatch.setattr(direct, "_read_whole", cut)
    with pytest.raises(StoreError, match=f"file' ends before byte {2 * BLOCK}: restore it"):
        list(direct.parts(path, direct.memory(2 * BLOCK)))


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it cannot be opened, or the disk gives it up on the way."""
    with pytest.raises(StoreError, match=r"absent' cannot be read \(No such file.*\): restore it"):
        direct.read(tmp_path / "absent", 0, 1)
    with pytest.raises(StoreError, match=r"absent' cannot be read"):
        list(direct.parts(tmp_path / "absent", direct.memory(1)))
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * BLOCK))

    def broken(file: FileIO, move: Callable[[memoryview], int], data: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct, "_retrying", broken)
    with pytest.raises(StoreError, match=r"file' cannot be read \(Input/output error\)"):
        direct.read(path, 0, 1)
    with pytest.raises(StoreError, match=r"file' cannot be read \(Input/output error\)"):
        list(direct.parts(path, direct.memory(2 * BLOCK)))


def test_others_run_while_a_block_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is numpy's, which lets go of the interpreter; a memoryview's would hold it."""
    copied, copyto = list[int](), np.copyto

    def seen(to: Any, source: Any) -> None:
        copied.append(source.nbytes)
        copyto(to, source)

    monkeypatch.setattr(direct.np, "copyto", seen)
    direct.write(tmp_path / "file", [bytes(BLOCK), bytes(3)])
    assert copied == [BLOCK, 3]


def test_what_a_maker_raises_is_raised(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(5 * BLOCK)
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        direct.write(tmp_path / "file", chunks())


def test_a_full_disk_is_raised(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    for blocks in (1, 5):
        with pytest.raises(OSError, match="No space left"):
            direct.write(full, [bytes(blocks * BLOCK + 1)])


def test_whoever_has_enough_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9 * BLOCK))
    parts = direct.parts(path, direct.memory(9 * BLOCK))
    assert len(next(parts)) == BLOCK
    parts.close()  # type: ignore[attr-defined]
