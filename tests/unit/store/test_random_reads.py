"""RandomReads: the same bytes as plain reads, and errors that name file and byte."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.errors import StoreError
from moesaic.store.checksum import block_sum
from moesaic.store.random_reads import RandomReads

BLOCK = 4096
COUNT = 300


@pytest.fixture
def reads() -> Iterator[RandomReads]:
    reads = RandomReads(BLOCK, num_threads=3)
    yield reads
    reads.close()


def made(path: Path, seed: int) -> NDArray[np.uint64]:
    """Write a file of random blocks, and return its words."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, (COUNT, BLOCK // 8), np.uint64)
    for block in words:
        block[0] = block_sum(block)
    path.write_bytes(words.tobytes())
    return words


def opened(path: Path) -> FileIO:
    file = path.open("rb", buffering=0)
    direct_io.set_direct_io(file, True)
    return file


@pytest.mark.parametrize("count", [0, 1, 5, 500])
def test_reads_are_the_bytes_of_the_files(
    disk_or_memory: Path, reads: RandomReads, count: int
) -> None:
    words, files = [], []
    for seed in range(2):
        words.append(made(disk_or_memory, seed))
        files.append(opened(disk_or_memory))
        disk_or_memory.unlink()
    rng = np.random.default_rng(9)
    file_of, blocks = rng.integers(0, 2, count), rng.integers(0, COUNT, count)
    out = reads.buffer(count)
    reads.read(files, file_of, blocks, out)
    assert np.array_equal(out.view(np.uint64), np.stack(words)[file_of, blocks])
    for file in files:
        file.close()


@pytest.mark.parametrize("bit", [0, 63, 64, 64 + 63, 8 * BLOCK - 1])
def test_a_flipped_bit_is_found(tmp_path: Path, reads: RandomReads, bit: int) -> None:
    path = tmp_path / "a.bin"
    data = made(path, 0).view(np.uint8).reshape(COUNT, BLOCK)
    data[123, bit // 8] ^= 1 << bit % 8
    path.write_bytes(data.tobytes())
    with opened(path) as file:
        blocks = np.arange(100, 200)
        expected = f"{re.escape(str(path))}' at byte {123 * BLOCK} differs"
        with pytest.raises(StoreError, match=expected):
            reads.read([file], np.zeros_like(blocks), blocks, reads.buffer(len(blocks)))


def test_a_file_that_ends_early_is_found(tmp_path: Path, reads: RandomReads) -> None:
    path = tmp_path / "a.bin"
    made(path, 0)
    os.truncate(path, 77 * BLOCK + 512)
    with opened(path) as file:
        blocks = np.arange(50, 100)
        with pytest.raises(StoreError, match=f"byte {77 * BLOCK} ends after 512 of {BLOCK} bytes"):
            reads.read([file], np.zeros_like(blocks), blocks, reads.buffer(len(blocks)))


def test_an_error_of_the_drive_names_the_byte(tmp_path: Path, reads: RandomReads) -> None:
    path = tmp_path / "a.bin"
    made(path, 0)
    with path.open("ab", buffering=0) as file:  # Open for writing, so every read fails.
        blocks = np.array([4])
        strerror = os.strerror(errno.EBADF)
        with pytest.raises(StoreError, match=rf"byte {4 * BLOCK} cannot be read \({strerror}\)"):
            reads.read([file], np.zeros_like(blocks), blocks, reads.buffer(1))


def test_blocks_have_the_alignment_of_direct_io() -> None:
    with pytest.raises(ValueError, match="1000 bytes"):
        RandomReads(1000)
