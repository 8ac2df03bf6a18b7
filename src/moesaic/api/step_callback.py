"""Callback of the user after each step of ranks in other processes, which wait for its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesaic.train.trainer import StepCallback


@contextmanager
def serve_callback(on_step: StepCallback) -> Iterator[str]:
    """Call `on_step` on a thread for each step that rank 0 reports; yield the address for ranks.

    An exception in `on_step` ends the run after its step, and is raised at the end.
    """
    errors: list[BaseException] = []

    def call(figures: dict[str, float]) -> bool | None:
        try:
            answer = on_step(figures)
            return None if answer is None else bool(answer)  # A plain value can be sent.
        except BaseException as error:  # noqa: BLE001 - raised after the end of the run
            errors.append(error)
            return False

    def serve() -> None:
        with suppress(EOFError, OSError), listener.accept() as connection:
            while True:
                connection.send(call(connection.recv()))

    with Listener(family="AF_UNIX") as listener:
        address = str(listener.address)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            with suppress(OSError):  # Ends `accept` if rank 0 never connected.
                Client(address).close()
            thread.join()
    if errors:
        raise errors[0]


def remote_callback(address: str) -> StepCallback:
    """Return a function that calls the callback of the process at `address`.

    It connects when it is first called, which only rank 0 does.
    """
    connect = cache(Client)

    def call(figures: dict[str, float]) -> bool | None:
        connection = connect(address)
        connection.send(figures)
        answer: bool | None = connection.recv()
        return answer

    return call
