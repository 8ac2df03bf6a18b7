"""One HTTP request at work: its requests to the engine, and their answers as pieces of text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple, Protocol

from moesaic.base.errors import ConfigError
from moesaic.serve.engine_thread import EngineClosed
from moesaic.serve.http.api_model import ApiModel
from moesaic.serve.http.errors import ApiError, engine_failed, engine_full, shutting_down, too_long
from moesaic.serve.http.metrics import Metrics
from moesaic.serve.http.relay import Event, EventRelay
from moesaic.serve.requests import (
    EngineFull,
    EventHandler,
    FinishEvent,
    GenerationRequest,
    TokenEvent,
)
from moesaic.serve.text import TextStream

LOG = logging.getLogger("moesaic.serve")
FinishReason = Literal["stop", "length"]


class Engine(Protocol):
    """The part of the inference engine that the server needs; both functions return at once."""

    def submit(self, request: GenerationRequest, on_event: EventHandler) -> int:
        """Queue a request and return its id."""

    def cancel(self, request_id: int) -> None:
        """End a request; ids of ended requests are ignored."""


class Update(NamedTuple):
    """New text of one choice."""

    choice: int
    """Index of the choice in the answer."""
    text: str
    tokens: list[TokenEvent]
    """New tokens, also those whose text is held back."""
    finish_reason: FinishReason | None
    """Reason for the end, in the choice's last update."""


class Usage(NamedTuple):
    """Tokens of an HTTP request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class _Choice:
    """State of one request to the engine."""

    def __init__(self, request: GenerationRequest, text: TextStream, started: float) -> None:
        self.request, self.text = request, text
        self.request_id: int | None = None
        """Id in the engine while the request runs there."""
        self.events: list[Event] = []
        """Events that no update has yet."""
        self.is_open = True
        self.num_tokens = 0
        self.cached_tokens = 0
        self.started = self.last_token_at = started


class Generation:
    """Choices of one HTTP request, from submission to the last piece of text.

    `submit` may run on any thread, before the other methods, which run on the event loop's.
    `close` ends everything that still runs.
    """

    def __init__(
        self,
        engine: Engine,
        relay: EventRelay,
        model: ApiModel,
        metrics: Metrics,
        requests: Sequence[GenerationRequest],
        stop: Sequence[str],
    ) -> None:
        self._engine, self._relay, self._metrics = engine, relay, metrics
        self._arrival = asyncio.Event()
        self._error: ApiError | None = None
        self._started = time.perf_counter()
        self._choices = [
            _Choice(request, TextStream(model.tokenizer, stop), self._started)
            for request in requests
        ]
        self._choices_per_prompt = 1 + max(request.choice for request in requests)

    @property
    def num_choices(self) -> int:
        """Choices of the answer, over all prompts."""
        return len(self._choices)

    def submit(self) -> None:
        """Hand all requests to the engine, or none: raise ApiError if it does not take one."""
        try:
            for choice in self._choices:
                on_event = self._relay.handler(self._receiver(choice))
                choice.request_id = self._engine.submit(choice.request, on_event)
        except (EngineFull, EngineClosed, ConfigError) as error:
            for choice in self._choices:
                self._stop(choice)
            if isinstance(error, EngineFull):
                raise engine_full(error) from None
            if isinstance(error, EngineClosed):
                raise shutting_down() from None
            raise too_long(str(error), "max_tokens") from None

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield new text as it arrives, until all choices have ended.

        Raise ApiError after the last text if the engine gave a request up.
        """
        while any(choice.is_open for choice in self._choices):
            await self._arrival.wait()
            self._arrival.clear()
            found = [
                self._update(index, choice)
                for index, choice in enumerate(self._choices)
                if choice.is_open and choice.events
            ]
            updates = [one for one in found if one.text or one.tokens or one.finish_reason]
            if updates:
                yield updates
            if self._error is not None:
                raise self._error

    def usage(self) -> Usage:
        """Return the tokens until now; a prompt counts once for all its choices."""
        firsts = self._choices[:: self._choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(choice.request.prompt) for choice in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
        )

    def close(self) -> None:
        """Cancel the requests that the engine still computes, and log the whole."""
        num_open = sum(choice.is_open for choice in self._choices)
        for choice in self._choices:
            if choice.is_open:
                self._end(choice, "abort")
        usage = self.usage()
        LOG.debug(
            "%d texts, %d of them aborted: %d prompt tokens (%d cached), %d new tokens, %.3f s",
            self.num_choices, num_open, usage.prompt_tokens, usage.cached_tokens,
            usage.completion_tokens, time.perf_counter() - self._started,
        )  # fmt: skip

    def _receiver(self, choice: _Choice) -> EventHandler:
        def receive(event: Event) -> None:
            choice.events.append(event)
            self._arrival.set()

        return receive

    def _update(self, index: int, choice: _Choice) -> Update:
        events, choice.events = choice.events, []
        text, tokens, reason = "", [], None
        for event in events:
            if isinstance(event, FinishEvent):
                text += choice.text.finish()
                reason = self._finish(choice, event)
                break
            self._count(choice, event)
            tokens.append(event)
            text += choice.text.push(event.token)
            if choice.text.is_stopped:
                self._end(choice, "stop")
                reason = "stop"
                break
        return Update(index, text, tokens, reason)

    def _count(self, choice: _Choice, event: TokenEvent) -> None:
        now = time.perf_counter()
        if choice.num_tokens:
            self._metrics.observe_next_token(now - choice.last_token_at)
        else:
            self._metrics.observe_first_token(now - choice.started)
        choice.num_tokens += 1
        choice.cached_tokens = event.cached_tokens
        choice.last_token_at = now

    def _finish(self, choice: _Choice, event: FinishEvent) -> FinishReason | None:
        """Return why the engine ended a request; None, and keep the error, if it gave it up."""
        choice.request_id = None
        if event.reason == "stop" or event.reason == "length":
            reason = "stop" if choice.text.is_stopped else event.reason
            self._end(choice, reason)
            return reason
        is_cancelled = event.reason == "cancelled"
        self._end(choice, "abort" if is_cancelled else "error")
        self._error = shutting_down() if is_cancelled else engine_failed(event.error)
        return None

    def _end(self, choice: _Choice, reason: str) -> None:
        self._stop(choice)
        self._metrics.observe_end(
            reason, time.perf_counter() - choice.started, len(choice.request.prompt),
            choice.num_tokens,
        )  # fmt: skip

    def _stop(self, choice: _Choice) -> None:
        """Take no more events, and let the engine stop if it still computes."""
        choice.is_open = False
        if choice.request_id is not None:
            self._engine.cancel(choice.request_id)
            choice.request_id = None
