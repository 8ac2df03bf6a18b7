"""Messages between the writer threads of all ranks, by way of the world's store.

No collective happens here: a collective in a thread meets those of the training in another order
on every rank. Reading polls, so that a thread can be told to give up.
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
"""Longest value that is put under one key; torch's store takes 8 MiB."""


class Board:
    """One saver's messages. Every rank makes its savers in the same order, and so meets itself."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        # The order comes from the store, not from a counter of the process; the clone has a
        # connection of its own, so a main thread that blocks in the store does not block us.
        number = store.add(f"checkpoint/savers/{rank}", 1)
        self._store = dist.PrefixStore(f"checkpoint/{number}", store.clone())  # type: ignore[attr-defined]
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Have every wait, now and later, end in an error."""
        self._abandoned.set()

    def post(self, key: str, message: Any) -> None:
        """Put up `message`, which is JSON, for all to read."""
        data = zlib.compress(json.dumps(message).encode(), 1)
        chunks = range(0, len(data), _CHUNK_BYTES)
        for number, start in enumerate(chunks):
            self._store.set(f"{key}/{number}", data[start : start + _CHUNK_BYTES])  # type: ignore[arg-type]
        self._store.set(key, str(len(chunks)))

    def read(self, keys: list[str], patience_s: float) -> tuple[str, Any]:
        """The first of `keys` that is put up, and its message."""
        until = time.monotonic() + patience_s
        pause_s = 0.001
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key, self._fetch(key)
            if self._abandoned.wait(pause_s):
                raise StoreError("the save was given up while it waited for other ranks")
            if time.monotonic() > until:
                raise TimeoutError(f"no word from the other ranks in {patience_s:.0f} s")
            pause_s = min(1.5 * pause_s, 0.1)

    def peek(self, key: str) -> Any:
        """The message put up under `key`; None if there is none."""
        return self._fetch(key) if self._store.check([key]) else None

    def erase(self, key: str) -> None:
        """Take a message down."""
        if self._store.check([key]):
            for number in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)

    def _fetch(self, key: str) -> Any:
        num_chunks = int(self._store.get(key))
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(num_chunks))
        return json.loads(zlib.decompress(data))
