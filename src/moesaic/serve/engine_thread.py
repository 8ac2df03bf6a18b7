"""A thread that runs an inference engine for requests of other threads."""

from __future__ import annotations

import time
from threading import Event, Lock, Thread, get_ident
from traceback import clear_frames

from moesaic.base.errors import MoesaicError, as_user_error
from moesaic.serve.engine import EngineStats, InferenceEngine
from moesaic.serve.requests import EventHandler, GenerationRequest

_POLL_S = 0.01
"""Seconds between two looks at the remaining requests, while the engine drains."""


class EngineClosed(MoesaicError):
    """The engine takes no more requests."""

    def __init__(self) -> None:
        super().__init__("the engine is shutting down and takes no more requests")


class EngineThread:
    """Runs passes of an engine on a thread of its own, while there are requests."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self._work, self._stops = Event(), Event()
        self._lock, self._is_closed = Lock(), False
        self._thread = Thread(target=self._run, name="moesaic engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: EventHandler) -> int:
        """Add a request to the queue, and return its number; see `InferenceEngine.submit`.

        Raise EngineClosed after `drain` or `close`.
        """
        with self._lock:  # A request before `close` is cancelled, none is added later.
            if self._is_closed:
                raise EngineClosed
            request_id = self.engine.submit(request, on_event)
        self._work.set()
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request before the next pass; numbers of ended requests are ignored."""
        self.engine.cancel(request_id)
        self._work.set()

    def stats(self) -> EngineStats:
        """Return the engine's state and counts."""
        return self.engine.stats()

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, and wait until all have ended; return False after `timeout_s`."""
        self._refuse_requests()
        deadline = time.monotonic() + timeout_s
        while self.engine.has_requests:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """End the thread; requests that have not ended are cancelled."""
        self._refuse_requests()
        self._stops.set()
        self._work.set()
        if self._thread.ident not in (None, get_ident()):  # Garbage may be collected there.
            self._thread.join()

    def _refuse_requests(self) -> None:
        with self._lock:
            self._is_closed = True

    def _run(self) -> None:
        while not self._stops.is_set():
            self._work.wait()
            self._work.clear()
            while self._step() and not self._stops.is_set():
                pass
        self.engine.cancel_all()
        self._step()

    def _step(self) -> bool:
        """Run one pass; an error ends the requests of the pass, and the engine goes on."""
        try:
            return self.engine.step()
        except Exception as error:  # noqa: BLE001 - the error goes to the requests of the pass
            known = error if isinstance(error, MoesaicError) else None
            remedy = "lower tokens_per_pass or cache_tokens"
            wrapped = known or as_user_error(error, remedy) or _failed_pass(error)
            if wrapped is not error:
                wrapped.__cause__ = error
            _free_frames(wrapped)
            self.engine.fail_pass(wrapped)
            return True


def _failed_pass(error: Exception) -> MoesaicError:
    return MoesaicError(f"the forward pass failed: {type(error).__name__}: {error}")


def _free_frames(error: BaseException | None) -> None:
    """Free the tensors and leases of the pass, which the holder of the error would keep."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
