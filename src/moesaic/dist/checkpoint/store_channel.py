"""Messages between the writer threads of all ranks, through the world's store.

Collectives are no option: a background thread's would interleave with training's in a different
order on every rank. Reads poll, so that `abandon` can end them.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from typing import Any

import torch.distributed as dist

from moesaic.base.errors import StoreError

_CHUNK_BYTES = 4 << 20
"""Maximum bytes per key; torch's store takes 8 MiB."""


class StoreChannel:
    """Messages of one saver. Every rank creates its savers in the same order, so their numbers
    match."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        # A counter in the store survives the process's own. The clone has its own connection, so a
        # main thread that blocks in the store does not block this one.
        number = store.add(f"checkpoint/savers/{rank}", 1)
        self._store = dist.PrefixStore(f"checkpoint/{number}", store.clone())  # type: ignore[attr-defined]
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Make all current and later reads fail."""
        self._abandoned.set()

    def post(self, key: str, message: Any) -> None:
        """Publish `message`, which must be JSON, to all ranks."""
        data = zlib.compress(json.dumps(message).encode(), 1)
        chunks = range(0, len(data), _CHUNK_BYTES)
        for number, start in enumerate(chunks):
            self._store.set(f"{key}/{number}", data[start : start + _CHUNK_BYTES])  # type: ignore[arg-type]
        self._store.set(key, str(len(chunks)))

    def read(self, keys: list[str], timeout_s: float) -> tuple[str, Any]:
        """Wait for the first of `keys` to be published; return key and message."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.001
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key, self._fetch(key)
            if self._abandoned.wait(pause_s):
                raise StoreError("the save was given up while it waited for other ranks")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no message from the other ranks within {timeout_s:.0f} s")
            pause_s = min(1.5 * pause_s, 0.1)

    def peek(self, key: str) -> Any:
        """Return the message under `key`, or None."""
        return self._fetch(key) if self._store.check([key]) else None

    def erase(self, key: str) -> None:
        """Remove a message."""
        if self._store.check([key]):
            for number in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)

    def _fetch(self, key: str) -> Any:
        num_chunks = int(self._store.get(key))
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(num_chunks))
        return json.loads(zlib.decompress(data))
