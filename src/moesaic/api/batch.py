"""Batches of prompts in OpenAI's form: a file of requests in, a file of answers out.

A line of the requests is `{"custom_id": ..., "body": {...}}` or a body alone, such as `{"prompt":
...}`. A line of the answers is written when its request has ended, so answers have another order.
A batch that was cut off goes on where it was: requests with an answer are skipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

from pydantic import Field

from moesaic.api.engine import TextEngine
from moesaic.api.generation import Generation, TextRequest
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, MoesaicError, UserError, write_error
from moesaic.base.lock import LockHeld, fail_if_locked, file_lock
from moesaic.serve.config import SamplingConfig
from moesaic.serve.http.schemas import IGNORED

_IGNORED = IGNORED | {"stream", "stream_options"}
"""Fields of OpenAI's bodies that change no answer here."""


class BatchCounts(NamedTuple):
    """Requests of a batch."""

    answered: int
    failed: int
    skipped: int
    """Requests that had an answer before."""
    tokens: int
    """Generated tokens."""


class _Body(SamplingConfig):
    """Body of a request."""

    model: str | None = None
    prompt: Annotated[str, Field(min_length=0)] | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass
class _Line:
    """A line of the requests."""

    number: int
    custom_id: str
    body: _Body | None = None
    requests: list[TextRequest] = field(default_factory=list)


class _Batch:
    """A batch while it is computed."""

    def __init__(
        self,
        engine: TextEngine,
        defaults: Mapping[str, Any],
        is_chat: bool,
        system: str | None,
        answers: BinaryIO,
        done: set[str],
    ) -> None:
        self._engine, self._defaults = engine, defaults
        self._is_chat, self._system = is_chat, system
        self._answers, self._done, self._seen = answers, done, set[str]()
        self._line_of: dict[TextRequest, _Line] = {}
        self.counts = BatchCounts(0, 0, 0, 0)

    def run(self, source: Path, on_progress: Callable[[BatchCounts], None]) -> None:
        """Answer the requests in `source`."""
        for one, _ in self._engine.run(self._requests(source)):
            if one.is_finished:
                line = self._line_of.pop(one)
                if all(other.is_finished for other in line.requests):
                    self._answer(line)
                    on_progress(self.counts)

    def _requests(self, source: Path) -> Iterator[TextRequest]:
        """Yield the requests of all lines without an answer; write errors of bad lines."""
        with source.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                line = _Line(number, f"line-{number}")
                try:
                    self._read(line, text)
                except UserError as error:
                    if line.custom_id in self._done:
                        self._count(skipped=1)
                    else:
                        self._write_error(line, "invalid_request", error)
                self._line_of |= dict.fromkeys(line.requests, line)
                yield from line.requests

    def _read(self, line: _Line, text: bytes) -> None:
        """Read a line; one with an answer gets no requests."""
        custom_id, raw = _parse_line(text)
        if custom_id in self._seen:
            raise ConfigError(f"custom_id '{custom_id}' is that of an earlier line: change it")
        line.custom_id = custom_id or line.custom_id
        self._seen.add(line.custom_id)
        if line.custom_id in self._done:
            self._count(skipped=1)
            return
        body = line.body = parse(_Body, {**self._defaults, **raw}, "body")
        prompt = body.prompt if body.messages is None else body.messages
        if prompt is None or (body.prompt is not None and body.messages is not None):
            raise ConfigError("body: give a prompt or messages, and not both")
        is_chat = self._is_chat or body.messages is not None
        line.requests = self._engine.requests(
            prompt, body, is_chat=is_chat, system=self._system if is_chat else None
        )

    def _answer(self, line: _Line) -> None:
        """Write the answer of a line whose requests have ended."""
        try:
            results = [one.result() for one in line.requests]
        except MoesaicError as error:
            self._write_error(line, "failed", error)
            return
        assert line.body is not None, "the line has requests"
        new = sum(len(result.tokens) for result in results)
        used = len(results[0].prompt_tokens)
        is_chat = line.body.messages is not None
        body = {
            "id": f"batch-{line.custom_id}", "created": int(time.time()),
            "object": "chat.completion" if is_chat else "text_completion",
            "model": line.body.model or self._engine.name,
            "choices": [
                self._choice(index, one, is_chat=is_chat) for index, one in enumerate(results)
            ],
            "usage": {
                "prompt_tokens": used, "completion_tokens": new, "total_tokens": used + new,
            },
        }  # fmt: skip
        self._write(line, {"status_code": 200, "request_id": body["id"], "body": body}, None)
        self._count(answered=1, tokens=new)

    def _write_error(self, line: _Line, code: str, error: Exception) -> None:
        self._write(line, None, {"code": code, "message": f"line {line.number}: {error}"})
        self._count(failed=1)

    def _write(self, line: _Line, response: object, error: object) -> None:
        answer = {
            "id": f"line-{line.number}", "custom_id": line.custom_id, "response": response,
            "error": error,
        }  # fmt: skip
        text = json.dumps(answer, ensure_ascii=False) + "\n"
        try:
            self._answers.write(text.encode(errors="replace"))
            self._answers.flush()
        except OSError as error:
            raise write_error(f"output '{self._answers.name}'", error) from None

    def _count(self, **more: int) -> None:
        counts = self.counts._asdict()
        self.counts = BatchCounts(**{name: counts[name] + more.get(name, 0) for name in counts})

    def _choice(self, index: int, result: Generation, *, is_chat: bool) -> dict[str, Any]:
        """Return a choice in OpenAI's form."""
        content: dict[str, Any] = {"text": result.text}
        if is_chat:
            content = {"message": {"role": "assistant", "content": result.text}}
        logprobs = None
        if result.logprobs is not None and result.top_logprobs is not None:
            tokens = [self._text_of(token) for token in result.tokens]
            top = [
                {self._text_of(token): logprob for token, logprob in one.items()}
                for one in result.top_logprobs
            ]
            logprobs = _logprobs(tokens, result.logprobs, top, is_chat=is_chat)
        return {
            "index": index, **content, "logprobs": logprobs, "finish_reason": result.finish_reason,
        }  # fmt: skip

    def _text_of(self, token: int) -> str:
        return self._engine.prompts.tokenizer.decode([token], with_special_tokens=True)


def _logprobs(
    tokens: list[str], logprobs: list[float], top: list[dict[str, float]], *, is_chat: bool
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions or of chats."""
    if not is_chat:
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}
    content = []
    for token, logprob, others in zip(tokens, logprobs, top, strict=True):
        best = [{"token": other, "logprob": value} for other, value in others.items()]
        content.append({"token": token, "logprob": logprob, "top_logprobs": best})
    return {"content": content}


def _parse_line(text: bytes) -> tuple[str | None, dict[str, Any]]:
    """Return the custom_id and the body of a line."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not JSON ({error}): fix it") from None
    if not isinstance(raw, dict):
        raise ConfigError("it is no JSON object: give one with a body")
    custom_id = raw.pop("custom_id", None)
    if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
        raise ConfigError("custom_id is no text: give one")
    body = raw.get("body", raw)
    if not isinstance(body, dict):
        raise ConfigError("body is no JSON object: give one with a prompt or messages")
    body = {key: one for key, one in body.items() if key not in _IGNORED and one is not None}
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    if isinstance(body.get("logprobs"), bool):  # The form of chats.
        top = body.pop("top_logprobs", 0)
        if body.pop("logprobs"):
            body["logprobs"] = top
    return custom_id, body


def run_batch(
    engine: TextEngine,
    source: str | Path,
    target: str | Path,
    *,
    chat: bool = False,
    system: str | None = None,
    on_progress: Callable[[BatchCounts], None] = lambda counts: None,
    **sampling: Any,
) -> BatchCounts:
    """Answer the requests in `source`, and add the answers to `target`.

    Args:
        engine: the engine that answers.
        source: a line of JSON for each request.
        target: file of answers; if it exists, requests with an answer there are skipped.
        chat: send each prompt as a user message.
        system: system message before each chat.
        on_progress: function of the counts so far, called after each answer.
        sampling: settings of `moesaic generate` for requests that do not set them.
    """
    source, target = Path(source), Path(target)
    parse(SamplingConfig, sampling, "batch")
    if not source.is_file():
        raise ConfigError(f"input '{source}' is no file: give one with a request in each line")
    with _open_answers(target) as (answers, done):
        batch = _Batch(engine, sampling, chat, system, answers, done)
        batch.run(source, on_progress)
    return batch.counts


@contextmanager
def locked_output(path: Path) -> Iterator[BinaryIO]:
    """Yield the file at `path`, open to be read and appended to by this process alone."""
    with ExitStack() as stack:
        try:
            lock = path.with_name(f"{path.name}.lock")
            stack.enter_context(file_lock(lock, fail_if_locked))
            file = stack.enter_context(path.open("a+b"))
        except LockHeld as error:
            raise ConfigError(
                f"output '{path}' is written by {error}: wait, or name another file"
            ) from None
        except OSError as error:
            raise write_error(f"output '{path}'", error) from None
        file.seek(0)
        yield file


@contextmanager
def _open_answers(path: Path) -> Iterator[tuple[BinaryIO, set[str]]]:
    """Yield the file of answers, without a torn last line, and the ids that it has."""
    with locked_output(path) as file:
        done, end = set[str](), 0
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                end += len(line)
                done.add(_answered_id(path, number, line))
        file.truncate(end)
        yield file, done


def _answered_id(path: Path, number: int, line: bytes) -> str:
    try:
        custom_id = json.loads(line)["custom_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        custom_id = None
    if not isinstance(custom_id, str):
        raise ConfigError(
            f"line {number} of output '{path}' is no answer of a batch: name another file"
        )
    return custom_id
