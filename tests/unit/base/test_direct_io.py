from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import pytest

from moesaic.base import direct_io
from moesaic.base.errors import StoreError

UNIT = direct_io.ALIGNMENT
BLOCK = 4 * UNIT
SIZES = [0, 1, UNIT - 1, UNIT, UNIT + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 7 * BLOCK + 5]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [1000, 3 * BLOCK + 7])
def test_written_data_is_read_back(disk_or_memory: Path, size: int, chunk: int) -> None:
    data = os.urandom(size)
    direct_io.write(disk_or_memory, (data[at : at + chunk] for at in range(0, size, chunk)))
    assert disk_or_memory.read_bytes() == data
    assert (
        b"".join(
            bytes(part)
            for part in direct_io.read_blocks(disk_or_memory, direct_io.aligned_buffer(size))
        )
        == data
    )
    for start, end in ((0, size), (size // 3, size), (size // 3, size // 2), (size, size)):
        assert direct_io.read(disk_or_memory, start, end - start) == data[start:end]


def test_writing_overlaps_filling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested, write = threading.Event(), direct_io._write_all

    def write_late(file: FileIO, data: memoryview, direct: bool) -> None:
        assert requested.wait(20)
        write(file, data, direct)

    def chunks() -> Iterator[bytes]:
        yield b"a" * BLOCK
        requested.set()
        yield b"b" * BLOCK

    monkeypatch.setattr(direct_io, "_write_all", write_late)
    direct_io.write(tmp_path / "file", chunks())
    assert (tmp_path / "file").read_bytes() == b"a" * BLOCK + b"b" * BLOCK


def test_reads_and_writes_bypass_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All transfers bypass the page cache, except for the end of a written file."""
    path, data = tmp_path / "file", os.urandom(2 * BLOCK + 5)
    with path.open("wb", buffering=0) as file:
        direct_io.set_direct_io(file, True)
        if not hasattr(os, "O_DIRECT") or not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            pytest.skip("the file system of the test has no direct I/O")
    retry, direct = direct_io._with_cache_fallback, list[bool]()

    def record(file: FileIO, transfer: Callable[[memoryview], int], data: memoryview) -> int:
        direct.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        return retry(file, transfer, data)

    monkeypatch.setattr(direct_io, "_with_cache_fallback", record)
    direct_io.write(path, [data])
    assert direct == [True, True, False]
    direct.clear()
    assert b"".join(direct_io.read_blocks(path, direct_io.aligned_buffer(len(data)))) == data
    assert len(direct) >= 3
    assert all(direct)
    direct.clear()
    assert direct_io.read(path, 1, 2 * BLOCK) == data[1 : 1 + 2 * BLOCK]
    assert direct
    assert all(direct)


def test_block_is_complete_when_yielded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, data = tmp_path / "file", direct_io._read_all, os.urandom(3 * BLOCK)
    path.write_bytes(data)
    buffer = direct_io.aligned_buffer(len(data))
    buffer[:] = bytes(len(buffer))

    def read_late(file: FileIO, buffer: memoryview) -> int:
        time.sleep(0.05)
        return whole(file, buffer)

    monkeypatch.setattr(direct_io, "_read_all", read_late)
    assert b"".join(bytes(part) for part in direct_io.read_blocks(path, buffer)) == data


def test_misaligned_transfer_uses_the_cache(tmp_path: Path) -> None:
    data, path = os.urandom(3 * UNIT), tmp_path / "file"
    odd = direct_io.aligned_buffer(4 * UNIT)[1:]
    odd[: len(data)] = data
    with path.open("wb", buffering=0) as file:
        direct_io._write_all(file, odd[: len(data)], direct=True)
    assert path.read_bytes() == data
    odd[:] = bytes(len(odd))
    with path.open("rb", buffering=0) as file:
        direct_io.set_direct_io(file, True)
        assert direct_io._read_all(file, odd) == len(data)
    assert odd[: len(data)] == data


def test_partial_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may transfer less; the rest still lands at the right offset."""
    retry = direct_io._with_cache_fallback
    data, path = os.urandom(3 * BLOCK + 5), tmp_path / "file"

    def partial(file: FileIO, transfer: Callable[[memoryview], int], data: memoryview) -> int:
        return retry(file, transfer, data[: min(len(data), UNIT + 100)])

    monkeypatch.setattr(direct_io, "_with_cache_fallback", partial)
    direct_io.write(path, [data])
    assert path.read_bytes() == data
    buffer = direct_io.aligned_buffer(len(data))
    assert b"".join(bytes(part) for part in direct_io.read_blocks(path, buffer)) == data
    assert buffer[: len(data)] == data
    assert direct_io.read(path, 7, 2 * BLOCK) == data[7 : 7 + 2 * BLOCK]


def test_truncated_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for a file that was short from the start and for one cut while it is read."""
    path, whole = tmp_path / "file", direct_io._read_all
    path.write_bytes(bytes(2 * BLOCK))
    with pytest.raises(StoreError, match=f"file' ends before byte {2 * BLOCK + 1}: restore it"):
        direct_io.read(path, 1, 2 * BLOCK)

    def cut(file: FileIO, buffer: memoryview) -> int:
        os.truncate(path, BLOCK + 3)
        return whole(file, buffer)

    monkeypatch.setattr(direct_io, "_read_all", cut)
    with pytest.raises(StoreError, match=f"file' ends before byte {2 * BLOCK}: restore it"):
        list(direct_io.read_blocks(path, direct_io.aligned_buffer(2 * BLOCK)))


def test_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for a file that cannot be opened and for an error while reading."""
    with pytest.raises(StoreError, match=r"absent' cannot be read \(No such file.*\): restore it"):
        direct_io.read(tmp_path / "absent", 0, 1)
    with pytest.raises(StoreError, match=r"absent' cannot be read"):
        list(direct_io.read_blocks(tmp_path / "absent", direct_io.aligned_buffer(1)))
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * BLOCK))

    def broken(file: FileIO, transfer: Callable[[memoryview], int], data: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct_io, "_with_cache_fallback", broken)
    with pytest.raises(StoreError, match=r"file' cannot be read \(Input/output error\)"):
        direct_io.read(path, 0, 1)
    with pytest.raises(StoreError, match=r"file' cannot be read \(Input/output error\)"):
        list(direct_io.read_blocks(path, direct_io.aligned_buffer(2 * BLOCK)))


def test_error_of_the_chunk_iterator_is_raised(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(5 * BLOCK)
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        direct_io.write(tmp_path / "file", chunks())


def test_a_full_disk_is_raised(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    for blocks in (1, 5):
        with pytest.raises(OSError, match="No space left"):
            direct_io.write(full, [bytes(blocks * BLOCK + 1)])


def test_reading_can_stop_early(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9 * BLOCK))
    parts = direct_io.read_blocks(path, direct_io.aligned_buffer(9 * BLOCK))
    assert len(next(parts)) == BLOCK
    parts.close()  # type: ignore[attr-defined]
