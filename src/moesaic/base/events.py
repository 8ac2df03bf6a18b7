"""The events of a run: small facts as JSON lines, appended as they happen, one file a rank.

A line is `{"time": seconds, "event": name, ...}`. A run that was cut off leaves at most one broken
last line, which readers pass over. Bulk facts (expert loads, routing) go to `base.records`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.base.errors import unwritable


class EventLog:
    """Appends events to one file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event, from any thread; `fields` must be JSON."""
        line = json.dumps({"time": time.time(), "event": event, **fields}) + "\n"
        try:
            with self._lock:
                self._file.write(line)
        except OSError as error:
            raise unwritable(f"'{self._path}'", error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of one file, oldest first; a line broken by a killed writer is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and "event" in record:
                yield record
