"""Ranks of tests and benchmarks leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def written(place: Path) -> list[int]:
    """Processes of ranks that have begun."""
    return [int(text) for file in place.glob("*.pid") if (text := file.read_text())]


def runs(process: int) -> bool:
    """Whether it is there; what has ended and nobody has asked after is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            pytest.fail("not within a minute")
        time.sleep(0.1)
