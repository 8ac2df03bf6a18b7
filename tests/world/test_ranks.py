"""Ranks of tests and benchmarks leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.dist.world import World
from moesaic.testing.ranks import Ranks

BUSY = """
import os, sys
from pathlib import Path
from moesaic.testing.ranks import Ranks

def busy(world):
    Path(sys.argv[1], f"{world.rank}.pid").write_text(str(os.getpid()))
    while True:
        pass

if __name__ == "__main__":
    Ranks().run(2, busy)
"""


def test_busy_ranks_end_with_whoever_has_them(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    owner = subprocess.Popen([sys.executable, script, tmp_path])
    try:
        wait_for(lambda: len(written(tmp_path)) == 2)
        busy = written(tmp_path)
        assert all(map(runs, busy))
    finally:
        owner.kill()
        owner.wait()
    try:
        wait_for(lambda: not any(map(runs, busy)))
    finally:
        for process in filter(runs, busy):
            os.kill(process, 9)


class Unreadable:
    """Whoever unpickles it fails."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (int, ("not a number",))


def unreadable(world: World) -> object:
    return Unreadable()


def own_pid(world: World) -> tuple[int, int]:
    return world.rank, os.getpid()


def test_a_pool_works_again_after_an_answer_that_nobody_can_read_and_a_death_between_runs() -> None:
    pool = Ranks()
    try:
        with pytest.raises(ValueError, match="not a number"):
            pool.run(2, unreadable)
        found = pool.run(2, own_pid)
        assert [rank for rank, _ in found] == [0, 1]
        os.kill(found[1][1], 9)
        wait_for(lambda: not runs(found[1][1]))
        again = pool.run(2, own_pid)
        assert [rank for rank, _ in again] == [0, 1]
        assert not {pid for _, pid in found} & {pid for _, pid in again}
    finally:
        pool.close()


def written(place: Path) -> list[int]:
    """Processes of ranks that have begun."""
    return [int(text) for file in place.glob("*.pid") if (text := file.read_text())]


def runs(process: int) -> bool:
    """Whether it or a thread of it is there; what has ended and nobody has asked after is not."""
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
            pytest.fail("not within a minute")
        time.sleep(0.1)
