"""Event log of a run: JSON lines, appended as events happen, one file per rank.

A line is `{"time": seconds, "event": name, ...}`. A killed run leaves at most one broken last line,
which readers skip and the next writer ends. Bulk records (expert loads, routing) go to
`base.records`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.base.errors import StoreError, write_error

RUN_LOG = Path("events") / "rank-0.jsonl"
"""Events of the whole run, in its directory."""


class EventLog:
    """An append-only writer of events to one file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        if _ends_in_broken_line(path):
            self._file.write("\n")

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event; thread-safe. `fields` must be JSON-serialisable."""
        line = json.dumps({"time": time.time(), "event": event, **fields}) + "\n"
        try:
            with self._lock:
                self._file.write(line)
        except OSError as error:
            raise write_error(f"'{self._path}'", error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def find_run_log(run: Path) -> Path:
    """Return the events of the whole run in the directory `run`; raise if it holds none."""
    path = run / RUN_LOG
    if not path.is_file():
        raise StoreError(
            f"there is no run directory '{run}' with {RUN_LOG}: name one that `moesaic train` wrote"
        )
    return path


def _ends_in_broken_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of one file, oldest first; skip broken lines."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and "event" in record:
                yield record
