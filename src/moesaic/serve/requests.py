"""Requests to the inference engine, and the events that answer them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from moesaic.base.errors import ConfigError, MoesaicError

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.facts.job import ModelConfig


@dataclass(frozen=True)
class SamplingParams:
    """Settings that choose the next token of one request."""

    temperature: float = 1.0
    """Sampling temperature; 0 picks the most likely token."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities sum to this."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0: all."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the request has generated."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the request has generated it."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the logits of tokens."""
    seed: int = 0
    """Random seed; a draw depends on the seed, the choice and the position alone."""

    @cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """Tokens of `logit_bias`, and their summands, in memory of the host."""
        import torch

        values = torch.tensor(list(self.logit_bias.values()), dtype=torch.float64)
        return torch.tensor(list(self.logit_bias), dtype=torch.int64), values


@dataclass(frozen=True)
class GenerationRequest:
    """One text to generate, or continuations of a prompt to score."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """Maximum number of new tokens; 0 if `continuations` are scored."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the text; the end token is the last event's."""
    choice: int = 0
    """Number of this text among several of one prompt and seed."""
    top_logprobs: int | None = None
    """Most likely tokens whose log-probabilities each event has; None: no log-probabilities."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """Token sequences to score. The last token of each follows the prompt, and its other tokens
    are the last ones of the prompt."""

    is_classified: bool = False
    """True: classify the prompt by the model's classifier instead of continuing it."""

    @property
    def num_scored(self) -> int:
        """Positions of the prompt, at its end, whose next tokens are scored."""
        return max(map(len, self.continuations), default=0)

    @property
    def num_positions(self) -> int:
        """Positions of the cache that the request needs; the last new token needs none."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)


class TokenEvent(NamedTuple):
    """A new token of a request."""

    token: int
    logprob: float | None
    """Log-probability of the token by the model's own logits, before any sampling setting."""
    top: tuple[tuple[int, float], ...]
    """Most likely tokens with their log-probabilities, if the request asks for them."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


class TokenScores(NamedTuple):
    """Scores of a continuation."""

    logprobs: tuple[float, ...]
    """Log-probability of each token after all tokens before it."""
    is_greedy: bool
    """True if each token is the most likely one."""


class FinishEvent(NamedTuple):
    """The end of a request; no event follows."""

    reason: Literal["stop", "length", "cancelled", "error"]
    """stop: an end token; length: `max_tokens`; error: see `error`."""
    error: MoesaicError | None = None
    scores: tuple[TokenScores, ...] = ()
    """Scores of each of the request's continuations."""
    label_logprobs: tuple[float, ...] = ()
    """Log-probabilities of the classes of a prompt that was classified."""


EventHandler = Callable[[TokenEvent | FinishEvent], None]
"""Function that takes the events of one request in order, on the engine's thread; it is fast and
raises nothing."""


class EngineFull(MoesaicError):
    """Too many requests wait; `retry_after_s` says when to try again."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{num_waiting} requests wait already: try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


def check_request(request: GenerationRequest, model: ModelConfig, num_positions: int) -> None:
    """Raise ConfigError if a request can never run with a cache of `num_positions`."""
    length = len(request.prompt)
    if not length:
        raise ConfigError("the prompt holds no token: give it at least one")
    tokens = chain(request.prompt, *request.continuations)
    if not all(0 <= token < model.vocab for token in tokens):
        raise ConfigError(
            f"the prompt holds a token beyond the model's vocabulary of {model.vocab}: it was made "
            "with another tokenizer"
        )
    if request.is_classified:
        if not model.labels:
            raise ConfigError(
                "the model has no classifier: train one with [credibility] in a job, or rank by "
                "likelihood"
            )
    elif request.continuations:
        _check_continuations(request)
    elif request.max_tokens < 1:
        raise ConfigError(f"max_tokens = {request.max_tokens}: ask for 1 or more")
    if length + request.max_tokens > model.max_positions:
        raise ConfigError(
            f"the prompt has {length} tokens and max_tokens = {request.max_tokens}: together more "
            f"than the model's {model.max_positions} positions; lower max_tokens or shorten the "
            "prompt"
        )
    if request.num_positions > num_positions:
        raise ConfigError(
            f"the prompt has {length} tokens and max_tokens = {request.max_tokens}: together more "
            f"than the cache's {num_positions} positions; lower max_tokens, shorten the prompt, or "
            "give the cache more memory"
        )


def _check_continuations(request: GenerationRequest) -> None:
    length = len(request.prompt)
    if request.max_tokens:
        raise ConfigError(
            f"max_tokens = {request.max_tokens} of a request whose continuations are scored: set "
            "it to 0"
        )
    if not all(1 <= len(one) <= length for one in request.continuations):
        raise ConfigError(
            f"the prompt has {length} tokens and continuations have "
            f"{sorted(set(map(len, request.continuations)))}: give continuations of 1 to {length} "
            "tokens"
        )
