from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from storages import NUM_BLOCKS, RESIDENCIES, Belady, Recorder, Twin, filled, new_file

from moesaic.base.errors import StoreError
from moesaic.store.cache import BlockCache, Residency
from moesaic.store.file import BlockFile
from moesaic.testing.places import content_path

pytestmark = pytest.mark.timeout(60)
"""The deadline: a hang fails."""

CHECKPOINT = "resume from the newest checkpoint"


def run_until_error(cache: BlockCache, seed: int = 0) -> StoreError:
    """Compare all bytes until an operation fails; close the cache as the error passes."""
    with pytest.raises(StoreError) as caught, cache:
        Twin(cache, seed).run(10_000)
    return caught.value


def fail_after(
    monkeypatch: pytest.MonkeyPatch, name: str, num_calls: int, number: int, delay_s: float = 0
) -> None:
    """Let a call of `os` fail after some calls; others take a while, so that several run."""
    call, calls = getattr(os, name), count()

    def failing(fd: int, *arguments: object) -> int:
        if next(calls) >= num_calls:
            raise OSError(number, os.strerror(number))
        time.sleep(delay_s)
        return int(call(fd, *arguments))

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize(
    ("name", "number"),
    [("preadv", errno.EIO), ("pwritev", errno.EIO), ("pwritev", errno.ENOSPC)],
)
@pytest.mark.parametrize("num_calls", [0, 1, 30])
def test_an_io_error_ends_a_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residency: Callable[[], Residency],
    name: str, number: int, num_calls: int,
) -> None:  # fmt: skip
    file = new_file(tmp_path)
    fail_after(monkeypatch, name, num_calls, number, delay_s=0.0005)
    error = run_until_error(BlockCache(file, 5, residency()), seed=num_calls)
    assert f"'{file.path}' at byte " in str(error)
    assert os.strerror(number) in str(error)
    assert CHECKPOINT in str(error)
    assert isinstance(error.__cause__, OSError)
    assert not file.path.exists()


def damage(file: BlockFile, kind: str) -> None:
    stride_bytes, seed = file.stride_bytes, random.Random(0)
    if kind == "truncated":
        os.truncate(content_path(file), 7 * stride_bytes + 100)
        return
    with content_path(file).open("r+b") as other:
        contents = bytearray(other.read())
        for block in range(0, NUM_BLOCKS, 2):
            if kind == "flipped":
                contents[seed.randrange(block * stride_bytes, (block + 1) * stride_bytes)] ^= 16
            else:
                middle, end = (block + 1) * stride_bytes, (block + 2) * stride_bytes
                two = contents[middle:end] + contents[block * stride_bytes : middle]
                contents[block * stride_bytes : end] = two
        other.seek(0)
        other.write(contents)
        os.fsync(other.fileno())


@pytest.mark.parametrize(
    ("kind", "words"),
    [("truncated", "ends after"), ("flipped", "differs from"), ("exchanged", "differs from")],
)
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_damage_of_the_file_is_found(
    tmp_path: Path, kind: str, words: str, reads_ahead: bool
) -> None:
    def read_all() -> None:
        for _ in range(2):
            if reads_ahead:
                cache.expect(range(NUM_BLOCKS))
            for block in range(NUM_BLOCKS):
                with cache.hold([block]) as slots:
                    assert (cache.memory[slots[block]] == block).all()

    file = new_file(tmp_path)
    with filled(file, 4) as cache:
        damage(file, kind)
        with pytest.raises(StoreError, match=words) as caught:
            read_all()
    assert f"'{file.path}' at byte " in str(caught.value)
    assert CHECKPOINT in str(caught.value)


def wait_for_error(cache: BlockCache) -> None:
    """Wait until a thread has failed."""
    until = time.monotonic() + 30
    while not cache._threads.failed and time.monotonic() < until:
        time.sleep(0.001)
    assert cache._threads.failed


@pytest.mark.parametrize("first", ["hold", "expect", "discard", "flush"])
def test_an_error_behind_is_raised_once_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Several write-backs fail, while the caller does something else."""
    cache = filled(new_file(tmp_path), 4)
    fail_after(monkeypatch, "pwritev", 0, errno.ENOSPC)
    with cache.hold([0, 1, 2, 3]):
        for block in range(4):
            cache.mark_dirty(block)
    cache.expect([4, 5, 6, 7])
    wait_for_error(cache)
    cache.take_stats()

    def hold() -> None:
        with cache.hold([4]):
            raise AssertionError("a lost block came")

    calls: dict[str, Callable[[], None]] = {
        "hold": hold,
        "expect": lambda: cache.expect([1]),
        "discard": lambda: cache.discard(1),
        "flush": cache.flush,
    }
    with pytest.raises(StoreError, match=r"No space left.*make room") as caught:
        calls[first]()
    assert isinstance(caught.value.__cause__, OSError)
    for call in [*calls.values(), *calls.values()]:
        with pytest.raises(StoreError, match=f"lost by an earlier error.*{CHECKPOINT}") as later:
            call()
        assert later.value.__cause__ is None
    cache.close()


def test_an_error_while_blocks_are_held_comes_after_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a hold raises nothing, so an exception of its body passes."""
    cache = filled(new_file(tmp_path), 3)
    fail_after(monkeypatch, "preadv", 0, errno.EIO)

    def fail() -> None:
        with cache, cache.hold([NUM_BLOCKS - 1]):
            cache.expect([1, 2])
            wait_for_error(cache)
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_read_only_storage_goes_on_after_an_error(tmp_path: Path) -> None:
    """The holds that need the damaged block fail, each with its own error."""

    class Damaged(Recorder):
        damaged = frozenset[int]()

        def read(self, block: int, memory: NDArray[np.uint8]) -> None:
            if block in self.damaged:
                raise StoreError(f"block {block} is damaged")
            super().read(block, memory)

    storage = Damaged(new_file(tmp_path))
    with filled(storage, 4) as cache:
        storage.is_read_only, storage.damaged = True, frozenset({5, 6})
        for blocks in ([4, 5], [7], [5, 6, 8], [1, 2, 3, 4], [6], [7, 8]):
            is_damaged = not storage.damaged.isdisjoint(blocks)
            with pytest.raises(StoreError, match=r"block [56] is") if is_damaged else nullcontext():
                with cache.hold(blocks) as slots:
                    assert all((cache.memory[slots[block]] == block).all() for block in blocks)
                assert not is_damaged
        with cache.hold([1]), pytest.raises(StoreError, match="block 5"), cache.hold([5]):
            pass
        storage.damaged = frozenset()
        with cache.hold([5, 6]) as slots:
            assert (cache.memory[slots[5]] == 5).all()


def test_close_with_transfers_in_flight(tmp_path: Path) -> None:
    recorder = Recorder(new_file(tmp_path))
    cache = filled(recorder, 8)
    with cache.hold(range(8)):
        for block in range(8):
            cache.mark_dirty(block)
    recorder.delay_s = 0.02
    cache.expect(range(8, 16))
    with cache:
        pass
    assert not (tmp_path / "blocks").exists()
    count_then = len(recorder.transfers)
    time.sleep(0.02)
    assert len(recorder.transfers) == count_then


def test_close_hides_no_error_and_raises_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(new_file(tmp_path), 4)
    fail_after(monkeypatch, "preadv", 0, errno.EIO)

    def fail() -> None:
        with cache:
            cache.expect([1, 2, 3])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not (tmp_path / "blocks").exists()


def test_nothing_starts_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(new_file(tmp_path))
    with filled(recorder, 4, num_threads=1) as cache:
        recorder.transfers.clear()
        fail_after(monkeypatch, "preadv", 0, errno.EIO)
        cache.expect([3, 2, 1])
        wait_for_error(cache)
    assert recorder.transfers == [("read", 3)]


def test_another_exception_of_a_thread_comes_as_it_is(tmp_path: Path) -> None:
    class Broken(Recorder):
        def write(self, block: int, memory: object) -> None:
            raise IndexError(f"block {block}")

    with BlockCache(Broken(new_file(tmp_path)), 4, Belady()) as cache:
        with cache.hold([3]):
            cache.mark_dirty(3)
        with pytest.raises(IndexError, match="block 3"):
            cache.flush()


def test_interrupted_waits_leave_a_usable_cache(tmp_path: Path) -> None:
    """Ctrl-C while a hold waits for a slot whose block is still being written."""
    gate = threading.Event()

    class Gated(Recorder):
        def write(self, block: int, memory: object) -> None:
            gate.wait(30)
            super().write(block, memory)  # type: ignore[arg-type]

    gate.set()
    storage = Gated(new_file(tmp_path))
    with filled(storage, 1) as cache:
        with cache.hold([5]) as slots:
            cache.memory[slots[5]] = 55
            cache.mark_dirty(5)
        cache.discard(6)
        gate.clear()
        wait = cache._threads._changed.wait

        def interrupt(timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return wait(timeout)

        cache._threads._changed.wait = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt), cache.hold([6]):
            pass
        cache._threads._changed.wait = wait  # type: ignore[method-assign]
        gate.set()
        for block, value in ((6, 0), (5, 55)):
            with cache.hold([block]) as slots:
                assert (cache.memory[slots[block]] == value).all()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on a file system of 512 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_at_creation(tiny_disk: Path) -> None:
    path = tiny_disk / "blocks"
    with pytest.raises(StoreError, match=f"'{path}' needs 768.0 KiB, and 512.0 KiB are free"):
        BlockFile(path, 2 * 48, 5000)
    assert list(tiny_disk.iterdir()) == []


def test_a_full_disk_in_a_write_back(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system reserves nothing, and others fill it."""

    def refuse(fd: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = new_file(tiny_disk)
    (tiny_disk / "other").write_bytes(bytes(450_000))
    error = run_until_error(BlockCache(file, 5, Belady()))
    assert f"'{file.path}' at byte " in str(error)
    assert "make room, or name another place; then " + CHECKPOINT in str(error)
    assert [path.name for path in tiny_disk.iterdir()] == ["other"]
