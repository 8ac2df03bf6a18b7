"""One process at a time, and no lock outlives its holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from moesaic.base.lock import file_lock

HOLD = """
import sys, time
from pathlib import Path
from moesaic.base.lock import file_lock
with file_lock(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


class BusyError(Exception):
    """Another process holds the lock."""


def give_up(holder: str) -> NoReturn:
    raise BusyError(holder)


def test_lock_is_removed_on_release(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with file_lock(path, give_up):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(BusyError, match=f"process {os.getpid()} on "), file_lock(path, give_up):
            pass
        assert path.exists()
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), file_lock(path, give_up):
        _ = 1 / 0
    assert not path.exists()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid} on "), file_lock(path, give_up):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert path.exists()
    with file_lock(path, give_up):
        pass
    assert not path.exists()


def test_lock_is_exclusive(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "LOCK", 0, 0
    pause = threading.Event()

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with file_lock(path, lambda _: pause.wait(0.0005)):
                inside += 1
                most = max(most, inside)
                pause.wait(0.0002)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    assert not path.exists()
