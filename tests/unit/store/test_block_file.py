from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.errors import StoreError
from moesaic.store.checksum import block_checksum
from moesaic.store.file import BlockFile
from moesaic.testing.places import content_path

CHECKPOINT = "resume from the newest checkpoint"


def buffer(file: BlockFile, seed: int = 0) -> NDArray[np.uint8]:
    """Return aligned memory with random content for one block."""
    memory = np.frombuffer(direct_io.aligned_buffer(file.stride_bytes), np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), np.uint8)
    return memory


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BlockFile]:
    """Yield a file of 4 blocks of 3 pages, all written."""
    file = BlockFile(tmp_path / "blocks", 4, 3 * 4096)
    for block in range(4):
        file.write(block, buffer(file, block))
    yield file
    file.close()


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 300_001])
def test_blocks_are_read_back(disk_or_memory: Path, block_bytes: int) -> None:
    file = BlockFile(disk_or_memory, 5, block_bytes)
    assert file.stride_bytes >= block_bytes
    assert file.stride_bytes % 4096 == 0
    assert content_path(file).stat().st_size == 5 * file.stride_bytes
    order = [3, 0, 4, 1]
    for block in order:
        assert not file.has(block)
        file.write(block, buffer(file, block))
        assert file.has(block)
    file.write(3, buffer(file, 30))
    assert not file.has(2)
    memory = buffer(file)
    for block, seed in ((0, 0), (1, 1), (3, 30), (4, 4)):
        file.read(block, memory)
        assert np.array_equal(memory, buffer(file, seed))
    assert not disk_or_memory.exists()
    file.close()


def test_another_block_or_length_is_refused(file: BlockFile) -> None:
    for block in (-1, 4):
        with pytest.raises(ValueError, match=f"block {block} of 4"):
            file.read(block, buffer(file))
    with pytest.raises(ValueError, match="12287"):
        file.write(0, buffer(file)[1:])


@pytest.mark.parametrize("bit", [0, 7, 8 * 4096 + 3, 8 * 3 * 4096 - 1])
def test_a_flipped_bit_is_found(file: BlockFile, bit: int) -> None:
    offset = 2 * file.stride_bytes + bit // 8
    with content_path(file).open("r+b") as other:
        other.seek(offset)
        value = other.read(1)[0] ^ 1 << bit % 8
        other.seek(offset)
        other.write(bytes([value]))
        os.fsync(other.fileno())
    memory = buffer(file)
    with pytest.raises(StoreError, match="differs from") as caught:
        file.read(2, memory)
    assert f"'{file.path}' at byte {2 * file.stride_bytes} " in str(caught.value)
    assert CHECKPOINT in str(caught.value)
    file.read(1, memory)


def test_the_checksum_finds_every_flipped_bit(file: BlockFile) -> None:
    memory = buffer(file)
    before = block_checksum(memory)
    for bit in range(8 * len(memory)):
        memory[bit // 8] ^= 1 << bit % 8
        assert block_checksum(memory) != before
        memory[bit // 8] ^= 1 << bit % 8
    assert block_checksum(memory) == before


def exchange(path: Path, first: int, second: int, count: int) -> None:
    with path.open("r+b") as file:
        contents = []
        for at in (first, second):
            file.seek(at)
            contents.append(file.read(count))
        for at, content in zip((second, first), contents, strict=True):
            file.seek(at)
            file.write(content)
        os.fsync(file.fileno())


def test_exchanged_blocks_are_found(file: BlockFile) -> None:
    exchange(content_path(file), 0, 2 * file.stride_bytes, file.stride_bytes)
    for block in (0, 2):
        with pytest.raises(StoreError, match="differs from"):
            file.read(block, buffer(file))


def test_exchanged_sectors_are_found(file: BlockFile) -> None:
    sectors = range(0, file.stride_bytes, 512)
    for first, second in pairwise([*sectors, *sectors[::9]]):
        exchange(content_path(file), first, second, 512)
        with pytest.raises(StoreError, match="differs from"):
            file.read(0, buffer(file))
        exchange(content_path(file), first, second, 512)
    file.read(0, buffer(file))


@pytest.mark.parametrize("left", [0, 100, 4096])
def test_a_truncated_file_is_found(file: BlockFile, left: int) -> None:
    os.truncate(content_path(file), 3 * file.stride_bytes + left)
    with pytest.raises(StoreError, match=f"ends after {left} of 12288 bytes: {CHECKPOINT}"):
        file.read(3, buffer(file))
    file.read(2, buffer(file))


def failing(number: int) -> Callable[..., int]:
    def transfer(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return transfer


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_names_path_and_remedy(
    file: BlockFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "preadv", failing(number))
    monkeypatch.setattr(os, "pwritev", failing(number))
    for transfer in (file.read, file.write):
        with pytest.raises(StoreError, match=os.strerror(number)) as caught:
            transfer(1, buffer(file))
        assert f"'{file.path}' at byte {file.stride_bytes} " in str(caught.value)
        assert CHECKPOINT in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)


def test_short_transfers_go_on(file: BlockFile, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:4096]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: pwritev(fd, [b[0][:4096]], at))
    file.write(1, buffer(file, 10))
    memory = buffer(file)
    file.read(1, memory)
    assert np.array_equal(memory, buffer(file, 10))
    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: 0)
    with pytest.raises(StoreError, match=r"nothing more was written.*" + CHECKPOINT):
        file.write(1, memory)


def test_a_disk_of_another_alignment_uses_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(transfer: Callable[..., int]) -> Callable[..., int]:
        def transfer_without_direct_io(fd: int, *arguments: object) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "alignment")
            return transfer(fd, *arguments)

        return transfer_without_direct_io

    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    monkeypatch.setattr(os, "pwritev", refusing(os.pwritev))
    file = BlockFile(tmp_path / "blocks", 2, 4096)
    assert not file.is_direct
    file.write(1, buffer(file, 1))
    memory = buffer(file)
    file.read(1, memory)
    assert np.array_equal(memory, buffer(file, 1))
    file.close()


def test_a_short_transfer_leaves_direct_io_on(
    file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest is not aligned, and goes through the page cache."""
    if not file.is_direct:
        pytest.skip("the file system of the test has no direct I/O")
    pwritev = os.pwritev
    # The file has no name any more.
    with open(f"/proc/self/fd/{file._file.fileno()}", "rb+", buffering=0) as plain:

        def short(fd: int, buffers: list[memoryview], at: int) -> int:
            if at % 4096:
                return pwritev(fd, buffers, at)
            return pwritev(plain.fileno(), [buffers[0][:100]], at)

        monkeypatch.setattr(os, "pwritev", short)
        file.write(1, buffer(file, 10))
    assert file.is_direct
    memory = buffer(file)
    file.read(1, memory)
    assert np.array_equal(memory, buffer(file, 10))


def test_a_refusal_for_another_reason_leaves_direct_io_on(
    file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_direct = file.is_direct
    monkeypatch.setattr(os, "preadv", failing(errno.EINVAL))
    with pytest.raises(StoreError, match=os.strerror(errno.EINVAL)):
        file.read(1, buffer(file))
    assert file.is_direct == was_direct


def test_a_file_system_that_reserves_nothing_gets_a_sparse_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, count: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = BlockFile(tmp_path / "blocks", 10, 4096)
    stat = content_path(file).stat()
    assert (stat.st_size, stat.st_blocks) == (10 * 4096, 0)
    file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_at_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, start: int, count: int) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "blocks"
    with pytest.raises(StoreError, match=f"'{path}' needs 4194304.0 TiB, and [0-9.]+ .iB are free"):
        BlockFile(path, 1 << 50, 4096)
    assert not path.exists()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match=r"needs 40.0 KiB.*make room, or name"):
        BlockFile(path, 10, 4096)
    assert not path.exists()


def test_a_path_that_cannot_be_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing/blocks' cannot be written .*name another place"):
        BlockFile(tmp_path / "missing" / "blocks", 1, 1)
