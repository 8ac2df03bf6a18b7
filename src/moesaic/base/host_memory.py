"""Main memory that this process takes, and may take."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

AUTO_FRACTION = 0.8
"""Part of the free memory that a budget of "auto" takes."""


def used_memory_bytes(process: int | None = None) -> int:
    """Return the main memory that only this or another process takes, and keeps until it ends.

    Code of libraries does not count: processes share it, and the system reads it again."""
    status = Path("/proc") / ("self" if process is None else str(process)) / "status"
    if not status.exists():
        return 0
    found = re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    return sum(map(int, found)) * 1024


def total_memory_bytes() -> int:
    """Return the main memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def reserve_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that takes pages, huge ones if possible, only where it is written.

    Arrays in it grow in place."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    with suppress(OSError):  # The kernel may have no huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def free_memory_bytes() -> int:
    """Return the main memory that this process may still take: of the machine, and of its control
    group."""
    meminfo = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo, re.MULTILINE)
    free = (
        int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    return min([free, *(max(limit - used, 0) for limit, used in _control_groups())])


def memory_limit_bytes() -> int:
    """Return the main memory of the machine, or of the control group that has less."""
    return min([total_memory_bytes(), *(limit for limit, _ in _control_groups())])


def count_killed_for_memory() -> int:
    """Return how many processes of this control group, or of the machine where no group counts, the
    kernel has killed for lack of memory; 0 if it does not say."""
    own = [
        group / ("memory.oom_control" if is_first_version else "memory.events")
        for group, _, is_first_version in _memory_groups()
    ]
    for place in (*own, Path("/proc/vmstat")):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", place.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _memory_groups() -> Iterator[tuple[Path, Path, bool]]:
    """Yield this process's control group for memory in each hierarchy, with the root of that, and
    whether it is of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup", *(["memory"] if controllers else []))
            yield root / path.strip("/"), root, bool(controllers)


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group of this process, without page cache."""
    for group, root, is_first_version in _memory_groups():
        limit, used = (
            ("memory.limit_in_bytes", "total_rss") if is_first_version else ("memory.max", "anon")
        )
        for one in [group, *(parent for parent in group.parents if parent.is_relative_to(root))]:
            with suppress(OSError, ValueError, KeyError):  # Not set, or hidden in a container.
                stat = dict(line.split() for line in (one / "memory.stat").read_text().splitlines())
                yield int((one / limit).read_text()), int(stat[used])
