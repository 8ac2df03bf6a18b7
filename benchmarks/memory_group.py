"""Processes in memory control groups (version 1), and the bandwidth of the drive under them."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.memory_arm import Settings
from moesaic.base import direct_io

ROOT = Path("/sys/fs/cgroup/memory")
THREADS = 4
_LOOK_S = 2.0
"""Seconds of one measurement of the drive."""


class Killed(Exception):
    """A process ended before its answer; the kernel kills those whose group is full."""


def can_limit() -> bool:
    """Return whether this process may make control groups of version 1."""
    return (ROOT / "memory.limit_in_bytes").exists() and os.access(ROOT, os.W_OK)


class Group:
    """Control group of one process; its limit includes page cache."""

    def __init__(self, limit_bytes: int) -> None:
        """Create the group; 0: no limit."""
        self.path = ROOT / f"moesaic-benchmark-{os.getpid()}-{time.monotonic_ns()}"
        self.path.mkdir()
        if limit_bytes:
            (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))

    def enter(self) -> None:
        """Move this process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """Peak of memory and page cache."""
        return int((self.path / "memory.max_usage_in_bytes").read_text())

    def remove(self) -> None:
        """Remove the group, once its process has ended."""
        for _ in range(50):
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


class Arm:
    """Process in a group of its own that takes steps on request."""

    def __init__(
        self, command: Sequence[str], limit_bytes: int = 0, env: Mapping[str, str] | None = None
    ) -> None:
        self._group = Group(limit_bytes)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, cwd=measure.ROOT, env=env, preexec_fn=self._group.enter,
        )  # fmt: skip
        self.figures = list[dict[str, Any]]()
        """Figures of all steps."""
        try:
            self.ready = self._answer()
        except Killed:
            self.close()
            raise

    @classmethod
    def training(cls, settings: Settings, limit_bytes: int = 0) -> Arm:
        """Start a training run of moesaic."""
        command = [sys.executable, "-m", "benchmarks.memory_arm", settings.to_json()]
        return cls(command, limit_bytes)

    def step(self, request: object = None) -> dict[str, Any]:
        """Take a step, or do what `request` asks for; return its figures."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n" if request is None else json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Killed from None
        self.figures.append(self._answer())
        return self.figures[-1]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # Peers print other lines.
                found: dict[str, Any] = json.loads(line)
                return found
        raise Killed

    @property
    def peak_bytes(self) -> int:
        """Peak of the group."""
        return self._group.peak_bytes

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._group.remove()


@contextmanager
def started(start: Callable[[], Arm]) -> Iterator[Arm]:
    """Start an arm, and end it at the end."""
    arm = start()
    try:
        yield arm
    finally:
        arm.close()


def mixed_bandwidth(directory: Path, block_bytes: int, num_blocks: int = 24) -> float:
    """Return the bytes per second of threads that read and write blocks in turn, without the page
    cache."""
    path = directory / "bandwidth.bin"
    with path.open("wb+", buffering=0) as file:
        direct_io.reserve(file, num_blocks * block_bytes)
        direct_io.set_direct_io(file, True)
        pages = mmap.mmap(-1, THREADS * block_bytes)
        buffers = [
            memoryview(pages)[n * block_bytes : (n + 1) * block_bytes] for n in range(THREADS)
        ]
        with ThreadPoolExecutor(THREADS) as pool:

            def write(block: int) -> None:
                direct_io.write_at(file, buffers[block % THREADS], block * block_bytes)

            for first in range(0, num_blocks, THREADS):
                list(pool.map(write, range(first, first + THREADS)))
            end = time.perf_counter() + _LOOK_S

            def transfer(thread: int) -> int:
                done, blocks = 0, range(thread, num_blocks, THREADS)
                while time.perf_counter() < end:
                    block = blocks[done % len(blocks)]
                    if done % 2:
                        direct_io.write_at(file, buffers[thread], block * block_bytes)
                    else:
                        direct_io.read_at(file, buffers[thread], block * block_bytes)
                    done += 1
                return done

            began = time.perf_counter()
            total = sum(pool.map(transfer, range(THREADS)))
            seconds = time.perf_counter() - began
    path.unlink()
    return total * block_bytes / seconds
