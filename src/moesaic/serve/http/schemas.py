"""Requests in OpenAI's wire format.

Fields that change no answer of this server are accepted by name. Fields that would change it are
refused by name, unless their value asks for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moesaic.base import keys
from moesaic.facts.job.control import ControlValues
from moesaic.serve.config import MAX_CHOICES, MAX_TOP_LOGPROBS
from moesaic.serve.http.errors import ApiError, unsupported

_MAX_STOPS = 16

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls",
})  # fmt: skip
"""Fields of OpenAI's client that change no answer here."""

_UNSUPPORTED = {
    "tools": "describe the tools in a message, or leave them out",
    "tool_choice": 'leave it out, or give "none"',
    "functions": "describe the functions in a message, or leave them out",
    "function_call": 'leave it out, or give "none"',
    "response_format": 'give {"type": "text"}, or ask for the form in a message',
    "audio": "leave it out; answers are text",
    "modalities": 'give ["text"]',
    "prediction": "leave it out",
    "moderation": "leave it out",
    "web_search_options": "leave it out",
    "reasoning_effort": "leave it out",
    "verbosity": "leave it out",
    "suffix": "leave it out; the model continues the prompt alone",
    "echo": "leave it out, and put the prompt before the answer yourself",
    "best_of": "give the value of n, or leave it out; no answers are ranked",
}
"""Fields of OpenAI's client that this server refuses, with remedies."""
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "best_of": (1,),
}  # fmt: skip
"""Values of refused fields that ask for nothing; empty values do so too."""


class _Wire(BaseModel):
    """An object of the wire format, without coercion."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Wire):
    """Settings of a stream."""

    include_usage: bool = False
    """True if the last chunk has the usage of the request."""


class _Request(_Wire):
    """Fields that both kinds of completions have; None and absent fields take their defaults."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: tuple[str, ...] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    """True if the text goes on after an end token; not a field of OpenAI."""

    @field_validator("stop", mode="before")
    @classmethod
    def _list_stops(cls, value: object) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
            raise ValueError("it must be a non-empty string or a list of them")
        if len(stops) > _MAX_STOPS:
            raise ValueError(f"it must have at most {_MAX_STOPS} strings")
        return tuple(stops)

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def top_candidates(self) -> int | None:
        """Most likely tokens for which log-probabilities are wanted; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Most new tokens; None: as many as the context has room for."""
        raise NotImplementedError


class CompletionRequest(_Request):
    """A request to `/v1/completions`."""

    prompt: tuple[str | tuple[int, ...], ...]
    """Prompts as texts or token ids."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    control: ControlValues | None = None
    """Attributes of the text, as in `moesaic generate`; not a field of OpenAI."""

    @model_validator(mode="after")
    def _check_prompts(self) -> CompletionRequest:
        if not all(self.prompt) and self.control is None:
            raise ValueError("prompt is empty: give some text")
        return self

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_prompts(cls, value: object) -> tuple[str | tuple[int, ...], ...]:
        prompts: list[Any] = value if isinstance(value, list) else [value]
        if prompts and all(_is_token(one) for one in prompts):
            prompts = [prompts]
        if not prompts or not all(isinstance(one, str) or _is_token_list(one) for one in prompts):
            raise ValueError("it must be a text, a list of texts, token ids, or lists of token ids")
        return tuple(one if isinstance(one, str) else tuple(one) for one in prompts)

    @property
    def top_candidates(self) -> int | None:
        """See `_Request`."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """See `_Request`; OpenAI's default is 16."""
        return self.max_tokens or 16


class ChatMessage(_Wire):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: object) -> str:
        parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in parts
        ]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError('it must be a text or a list of {"type": "text", "text": ...}')
        return "".join(text for text in texts if isinstance(text, str))

    def rendered(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content, "name": self.name}


class ChatRequest(_Request):
    """A request to `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true: add it, or leave both out")
        return self

    @property
    def top_candidates(self) -> int | None:
        """See `_Request`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """See `_Request`."""
        return self.max_completion_tokens or self.max_tokens


R = TypeVar("R", CompletionRequest, ChatRequest)


def parse_request(kind: type[R], text: bytes) -> R:
    """Return the body of a request; raise ApiError that names the field and a remedy."""
    try:
        request = kind.model_validate_json(text)
    except ValidationError as error:
        raise _mistake(kind, error) from None
    _check_other_fields(request)
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            for field, value in (message.model_extra or {}).items():
                if value:
                    raise unsupported(f"messages[{index}].{field}", "put it into the content")
    return request


def _mistake(kind: type[R], error: ValidationError) -> ApiError:
    """Return the first mistake in a body."""
    detail = error.errors(include_url=False)[0]
    reason, location = detail["type"], detail["loc"]
    if reason == "json_invalid":
        return ApiError(f"the body is not JSON ({detail['ctx']['error']}): fix it")
    if not location:
        param = None
        if reason == "value_error":
            message = str(detail["ctx"]["error"])
            param = message.partition(" ")[0]
        else:
            message = "the body is no JSON object: send one"
        return ApiError(message, param=param, code="invalid_value")
    param = keys.dotted_key(location)
    if reason == "missing":
        message = f"{param} is missing: {_remedy(param, detail['input'])}"
        return ApiError(message, param=param, code="missing_required_parameter")
    hint = detail["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    hint = hint.partition(" after validation")[0].replace("List should", "it must")
    message = f"{param} = {keys.show(detail['input'])}: {hint[:1].lower()}{hint[1:]}"
    code = "invalid_type" if "type" in reason else "invalid_value"
    return ApiError(message, param=param, code=code)


def _remedy(missing: str, body: Any) -> str:
    """Return what to do about a field that is missing in a body."""
    routes = {
        "prompt": ("messages", "/v1/chat/completions"),
        "messages": ("prompt", "/v1/completions"),
    }
    other, route = routes.get(missing, ("", ""))
    return f"add it, or send {other} to {route}" if other in body else "add it"


def _check_other_fields(request: CompletionRequest | ChatRequest) -> None:
    """Raise ApiError for a field that this server does not know or implement."""
    others: Mapping[str, Any] = request.model_extra or {}
    for field, value in others.items():
        if field in IGNORED or value is None:
            continue
        if field not in _UNSUPPORTED:
            known = [*type(request).model_fields, *_UNSUPPORTED, *IGNORED]
            near = difflib.get_close_matches(field, known, n=1)
            remedy = f"did you mean '{near[0]}'?" if near else "remove it"
            message = f"unknown field '{field}': {remedy}"
            raise ApiError(message, param=field, code="unknown_parameter")
        asks_nothing = not value or value in _WITHOUT_EFFECT.get(field, ())
        if not asks_nothing and not (field == "best_of" and value == request.num_choices):
            raise unsupported(field, _UNSUPPORTED[field])


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_token, value))
