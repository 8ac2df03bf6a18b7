"""A server in this process over an engine that follows a script, for what a real engine does
rarely or slowly."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from moesaic.base.errors import ConfigError, StoreError
from moesaic.models.tokenizer import ByteTokenizer
from moesaic.serve.engine import EngineStats
from moesaic.serve.http import server
from moesaic.serve.http.api_model import ApiModel
from moesaic.serve.http.app import Service, make_app
from moesaic.serve.http.metrics import Metrics
from moesaic.serve.requests import (
    EngineFull,
    EventHandler,
    FinishEvent,
    GenerationRequest,
    TokenEvent,
)

CONTEXT = 4096
DAMAGE = "damage"
"""A prompt with this text ends with an error after its second token."""
MODEL = ApiModel(
    name="scripted", tokenizer=ByteTokenizer(), control=None, template=None,
    end_ids=frozenset({256}), chat_end_ids=frozenset({256}), vocab=260, context=CONTEXT,
    max_choices=8, expert_layers=(1, 2), num_experts=4, created=1,
)  # fmt: skip


def script(prompt: str, choice: int) -> bytes:
    """Return the answer to a prompt, which an end token follows."""
    return f"[{choice}] \N{SNOWMAN} after {prompt}".encode()


class ScriptedEngine:
    """An engine whose passes give each request the next byte of its script."""

    def __init__(self, pass_s: float = 0.0, max_waiting: int = 1000) -> None:
        self._pass_s, self._max_waiting = pass_s, max_waiting
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._live: dict[int, tuple[GenerationRequest, EventHandler, Iterator[int]]] = {}
        self._cancelled: set[int] = set()
        self._ends = threading.Event()
        self.num_tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: EventHandler) -> int:
        prompt = bytes(request.prompt).decode()
        if "impossible" in prompt:
            raise ConfigError("the cache has 3 pages: raise cache_tokens")
        tokens = [*script(prompt, request.choice), 256]
        if not request.end_ids:
            tokens = tokens * CONTEXT
        with self._lock:
            if len(self._live) >= self._max_waiting:
                raise EngineFull(len(self._live), 2.4)
            number = next(self._ids)
            self._live[number] = request, on_event, iter(tokens[: request.max_tokens])
        return number

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._cancelled.add(request_id)

    def stats(self) -> EngineStats:
        counts = dict.fromkeys(EngineStats._fields, 0)
        return EngineStats(**{  # type: ignore[arg-type]
            **counts, "num_running": len(self._live), "generated_tokens": self.num_tokens,
        })  # fmt: skip

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._lock:
                live = list(self._live.items())
            for number, (request, on_event, tokens) in live:
                end = self._advance(number, request, on_event, tokens)
                if end is not None:
                    with self._lock:
                        del self._live[number]
                    on_event(end)
            time.sleep(self._pass_s if live else 0.002)

    def _advance(
        self, number: int, request: GenerationRequest, on_event: EventHandler, tokens: Iterator[int]
    ) -> FinishEvent | None:
        if number in self._cancelled:
            return FinishEvent("cancelled")
        token = next(tokens, None)
        if token is None:
            return FinishEvent("length")
        self.num_tokens += 1
        top = tuple((token + other, -1.0 - other) for other in range(request.top_logprobs or 0))
        logprob = None if request.top_logprobs is None else -1.0
        on_event(TokenEvent(token, logprob, top, cached_tokens=3))
        if DAMAGE in bytes(request.prompt).decode() and token == ord("0"):
            return FinishEvent("error", StoreError("'model.safetensors' is cut off: restore it"))
        return FinishEvent("stop") if token in request.end_ids else None


@contextmanager
def scripted_server(engine: ScriptedEngine, **changes: Any) -> Iterator[str]:
    """Serve over `engine` on a thread of this process, and yield the URL."""
    own = {name: changes.pop(name, None) for name in ("api_key", "experts")}
    model = replace(MODEL, **changes)
    app = make_app(Service(model, engine, Metrics(model.name, engine.stats), **own))
    bound = server.bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, lifespan="on", ws="none")
    running = uvicorn.Server(config)
    server.listen(bound)
    thread = threading.Thread(target=running.run, args=([bound],))
    thread.start()
    try:
        yield server.url_of(bound)
    finally:
        running.should_exit = True
        thread.join()
        engine.close()
