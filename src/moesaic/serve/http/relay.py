"""Events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from moesaic.serve.requests import EventHandler, FinishEvent, TokenEvent

Event = TokenEvent | FinishEvent
Receiver = Callable[[Event], None]
"""Function that takes the events of one request, on the event loop's thread."""


class EventRelay:
    """Carries events to the event loop; one wake-up carries those of a whole pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[tuple[Receiver, Event]] = []

    def handler(self, receive: Receiver) -> EventHandler:
        """Return the function that the engine calls; `receive` gets its events on the loop."""

        def put(event: Event) -> None:
            with self._lock:
                is_first = not self._waiting
                self._waiting.append((receive, event))
            if is_first:
                with suppress(RuntimeError):  # The loop is closed: the server has ended.
                    self._loop.call_soon_threadsafe(self._deliver)

        return put

    def _deliver(self) -> None:
        with self._lock:
            events, self._waiting = self._waiting, []
        for receive, event in events:
            receive(event)
