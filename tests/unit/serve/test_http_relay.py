"""Events of a pass reach the event loop with one wake-up, in their order."""

from __future__ import annotations

import asyncio
import threading

from moesaic.serve.http.relay import Event, EventRelay
from moesaic.serve.requests import FinishEvent, TokenEvent


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.wakeups = 0

    def call_soon_threadsafe(self, *args: object, **kwargs: object) -> asyncio.Handle:
        self.wakeups += 1
        return super().call_soon_threadsafe(*args, **kwargs)  # type: ignore[arg-type]


def test_one_wakeup_for_many_events() -> None:
    loop = CountingLoop()
    relay, received = EventRelay(loop), dict[int, list[Event]]()
    expected: list[Event] = [
        *(TokenEvent(token, None, ()) for token in range(5)),
        FinishEvent("stop"),
    ]

    def one_pass(event: Event) -> None:
        for handler in handlers:
            handler(event)

    handlers = [relay.handler(received.setdefault(number, []).append) for number in range(30)]
    for count, event in enumerate(expected, start=1):
        thread = threading.Thread(target=one_pass, args=(event,))
        thread.start()
        thread.join()
        assert loop.wakeups == count
        loop.run_until_complete(asyncio.sleep(0))
    assert all(events == expected for events in received.values())
    loop.close()
    handlers[0](FinishEvent("stop"))  # The server has ended: nothing happens.
