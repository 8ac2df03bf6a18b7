"""Shared by every test: one pool of ranks for a whole session."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from commands import Commands
from moesaic.testing.ranks import RankPool

hypothesis.settings.register_profile("brief", max_examples=40, deadline=None)
hypothesis.settings.load_profile("brief")

if not torch.cuda.is_available():  # Triton asks when it is imported, and kernels are made.
    os.environ["TRITON_INTERPRET"] = "1"

# Whoever takes a connection looks up the name of who asks, of loopback too: by itself the C library
# waits five seconds for an answer that was lost, and as long again.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

LONGEST = ("world", "fault", "cli", "report", "hf")
"""Directories of tests that take long, in their order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that no process has it to itself at the end."""

    def place(item: pytest.Item) -> int:
        directory = Path(item.path).parent.name
        return LONGEST.index(directory) if directory in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Have the collector pass over modules and tests from now on: they are many, and they stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(params=["disk", "memory"])
def disk_or_memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a path on a disk, then one in memory, where direct I/O may not exist."""
    if request.param == "disk":
        yield tmp_path / "file"
        return
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm")
    path = shared / f"moesaic-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def memory_group() -> Iterator[Path | None]:
    """Yield a new memory control group of version 1, or None where this process may not make one.

    A test writes its `memory.limit_in_bytes` and moves processes by `cgroup.procs`."""
    groups = Path("/sys/fs/cgroup/memory")
    if not ((groups / "memory.limit_in_bytes").exists() and os.access(groups, os.W_OK)):
        yield None
        return
    group = groups / f"moesaic-test-{os.getpid()}"
    group.mkdir()
    yield group
    end = time.monotonic() + 10.0
    while group.exists() and time.monotonic() < end:
        try:
            group.rmdir()
        except OSError:  # The kernel still counts the ended process.
            time.sleep(0.05)


@pytest.fixture
def commands(capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capfd)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
