"""Rank processes of tests and benchmarks always end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool

BUSY = """
import os, sys
from pathlib import Path
from moesaic.testing.ranks import RankPool

def busy(world):
    Path(sys.argv[1], f"{world.rank}.pid").write_text(str(os.getpid()))
    while True:
        pass

if __name__ == "__main__":
    RankPool().run(2, busy)
"""


def test_busy_ranks_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    owner = subprocess.Popen([sys.executable, script, tmp_path])
    try:
        wait_for(lambda: len(started_pids(tmp_path)) == 2)
        busy = started_pids(tmp_path)
        assert all(map(is_running, busy))
    finally:
        owner.kill()
        owner.wait()
    try:
        wait_for(lambda: not any(map(is_running, busy)))
    finally:
        for process in filter(is_running, busy):
            os.kill(process, 9)


class Unreadable:
    """Object that cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (int, ("not a number",))


def unreadable(world: World) -> object:
    return Unreadable()


def own_pid(world: World) -> tuple[int, int]:
    return world.rank, os.getpid()


def test_a_pool_recovers_from_an_unreadable_result_and_a_killed_rank() -> None:
    pool = RankPool()
    try:
        with pytest.raises(ValueError, match="not a number"):
            pool.run(2, unreadable)
        found = pool.run(2, own_pid)
        assert [rank for rank, _ in found] == [0, 1]
        os.kill(found[1][1], 9)
        wait_for(lambda: not is_running(found[1][1]))
        again = pool.run(2, own_pid)
        assert [rank for rank, _ in again] == [0, 1]
        assert not {pid for _, pid in found} & {pid for _, pid in again}
    finally:
        pool.close()


def started_pids(place: Path) -> list[int]:
    """Return the process ids of ranks that have started."""
    return [int(text) for file in place.glob("*.pid") if (text := file.read_text())]


def is_running(process: int) -> bool:
    """Return whether the process or one of its threads runs; a zombie does not."""
    place = Path(f"/proc/{process}")
    try:
        ended = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended or len(list((place / "task").iterdir())) > 1
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            pytest.fail("timed out after a minute")
        time.sleep(0.1)
