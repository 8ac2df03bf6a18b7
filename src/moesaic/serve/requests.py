"""Requests to the inference engine, and the events that answer them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from moesaic.base.errors import MoesaicError

if TYPE_CHECKING:
    from torch import Tensor


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
    """One text to generate."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """Maximum number of new tokens."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the text; the end token is the last event's."""
    choice: int = 0
    """Number of this text among several of one prompt and seed."""
    top_logprobs: int | None = None
    """Most likely tokens whose log-probabilities each event has; None: no log-probabilities."""
    is_scored: bool = False
    """True: classify the prompt instead of continuing it; the last event has the result."""


class TokenEvent(NamedTuple):
    """A new token of a request."""

    token: int
    logprob: float | None
    """Log-probability of the token by the model's own logits, before any sampling setting."""
    top: tuple[tuple[int, float], ...]
    """Most likely tokens with their log-probabilities, if the request asks for them."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


class FinishEvent(NamedTuple):
    """The end of a request; no event follows."""

    reason: Literal["stop", "length", "cancelled", "error"]
    """stop: an end token, or the prompt is classified; length: `max_tokens`; error: see `error`."""
    error: MoesaicError | None = None
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
