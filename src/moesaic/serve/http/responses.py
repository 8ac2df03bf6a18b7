"""Answers in OpenAI's wire format, whole or as the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from typing import Any

from moesaic.serve.http.api_model import ApiModel
from moesaic.serve.http.generation import Update, Usage
from moesaic.serve.requests import TokenEvent

DONE = b"data: [DONE]\n\n"
"""Last event of a stream."""


def sse(content: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def usage_content(usage: Usage) -> dict[str, Any]:
    """Return the usage as clients read it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Answer:
    """Form of the answer to one request."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: ApiModel, has_logprobs: bool, includes_usage: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model, self._has_logprobs = model, has_logprobs
        self._includes_usage = includes_usage
        self._created = int(time.time())

    def whole(self, updates: Iterable[Update], usage: Usage) -> dict[str, Any]:
        """Return the answer that all `updates` make."""
        found: dict[int, list[Update]] = {}
        for update in updates:
            found.setdefault(update.choice, []).append(update)
        choices = [self._choice(_joined(own)) for _, own in sorted(found.items())]
        return {**self._content(self.kind, choices), "usage": usage_content(usage)}

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice in a stream; None if it has none."""
        raise NotImplementedError

    def chunk(self, update: Update) -> dict[str, Any]:
        """Return the chunk of new text of one choice."""
        raise NotImplementedError

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the chunk that ends a stream with its usage."""
        return {**self._content(self.chunk_kind, []), "usage": usage_content(usage)}

    def _choice(self, update: Update) -> dict[str, Any]:
        """Return a whole choice."""
        raise NotImplementedError

    def _content(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self._created, "model": self._model.name,
            "choices": choices,
        }  # fmt: skip

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        content = self._content(self.chunk_kind, [choice])
        return {**content, "usage": None} if self._includes_usage else content


class CompletionAnswer(Answer):
    """An answer of `/v1/completions`."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, model: ApiModel, has_logprobs: bool, includes_usage: bool) -> None:
        super().__init__(model, has_logprobs, includes_usage)
        self._offsets: dict[int, int] = {}
        """Characters of the tokens of each choice until now."""

    def opening(self, choice: int) -> dict[str, Any] | None:
        """See `Answer`."""
        del choice
        return None

    def chunk(self, update: Update) -> dict[str, Any]:
        """See `Answer`."""
        return self._chunk(self._choice(update))

    def _choice(self, update: Update) -> dict[str, Any]:
        logprobs = self._logprobs(update) if self._has_logprobs else None
        return {
            "index": update.choice, "text": update.text, "logprobs": logprobs,
            "finish_reason": update.finish_reason,
        }  # fmt: skip

    def _logprobs(self, update: Update) -> dict[str, Any]:
        texts = [self._model.token_text(token.token) for token in update.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(update.choice, 0))
            self._offsets[update.choice] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in update.tokens],
            "top_logprobs": [
                {self._model.token_text(other): logprob for other, logprob in token.top}
                for token in update.tokens
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """An answer of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, Any] | None:
        """See `Answer`."""
        delta = {"role": "assistant", "content": ""}
        update = Update(choice, "", [], None)
        return self._chunk({**self._common(update), "delta": delta, "logprobs": None})

    def chunk(self, update: Update) -> dict[str, Any]:
        """See `Answer`."""
        delta = {"content": update.text} if update.text else {}
        return self._chunk({**self._common(update), "delta": delta})

    def _choice(self, update: Update) -> dict[str, Any]:
        message = {"role": "assistant", "content": update.text, "refusal": None}
        return {**self._common(update), "message": message}

    def _common(self, update: Update) -> dict[str, Any]:
        logprobs = self._logprobs(update.tokens) if self._has_logprobs else None
        return {
            "index": update.choice, "logprobs": logprobs, "finish_reason": update.finish_reason
        }  # fmt: skip

    def _logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any]:
        content = [
            {
                **self._token(event.token, event.logprob),
                "top_logprobs": [self._token(*other) for other in event.top],
            }
            for event in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._model.token_text(token)
        # The bytes of a part of a character are unknown here.
        encoded = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}


def _joined(updates: list[Update]) -> Update:
    """Return the updates of one choice as one."""
    return Update(
        updates[0].choice,
        "".join(one.text for one in updates),
        [token for one in updates for token in one.tokens],
        updates[-1].finish_reason,
    )
