"""A text that the inference engine generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from moesaic.base.errors import MoesaicError
from moesaic.serve.adversarial import drop_cut_sentence
from moesaic.serve.config import SamplingConfig
from moesaic.serve.prompts import Prompt
from moesaic.serve.requests import FinishEvent, GenerationRequest, TokenEvent, TokenScores
from moesaic.serve.text import TextDecoder, TextStream

if TYPE_CHECKING:
    from moesaic.models.tokenizer import Tokenizer


class Generation(NamedTuple):
    """Continuation of one prompt."""

    prompt: Prompt
    """The prompt as it was given: a text, token ids or messages."""
    prompt_tokens: list[int]
    tokens: list[int]
    """New token ids, up to and including an end token or the last one of a stop string."""
    text: str
    """Text of the new tokens, up to a stop string."""
    finish_reason: str
    """stop: an end token or a stop string; length: `max_tokens`."""
    logprobs: list[float] | None = None
    """Log-probability of each new token by the model's own scores, if asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """Most likely tokens at each position with their log-probabilities, if asked for."""
    score: float | None = None
    """Score of the text among several, if they were ranked; higher is better."""


class Score(NamedTuple):
    """Log-probabilities of a continuation."""

    context: str | Sequence[int]
    """The context as it was given: a text or token ids."""
    continuation: str | Sequence[int]
    """The continuation as it was given."""
    tokens: list[int]
    """Token ids of the continuation."""
    logprobs: list[float]
    """Log-probability of each token, given the context and the tokens before it."""
    is_greedy: bool
    """True if greedy decoding writes this continuation."""

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(self.logprobs)


class RankedText(NamedTuple):
    """Part of a generated text that rankings judge."""

    text: str
    """Prompt and continuation, or the answer of a chat, without blanks at both ends. A last
    sentence that `max_tokens` cut is left out, unless nothing else is new."""
    num_tokens: int
    """New tokens of this part."""


def ranked_text(row: Generation, tokenizer: Tokenizer, *, is_chat: bool = False) -> RankedText:
    """Return the part of a text that rankings judge, by likelihood as by credibility."""
    prompt, start = row.prompt, ""
    if not (is_chat or (not isinstance(prompt, str) and isinstance(prompt[0], dict))):
        start = prompt if isinstance(prompt, str) else tokenizer.decode(row.prompt_tokens)
    whole = start + row.text
    if row.finish_reason == "length":
        complete = drop_cut_sentence(whole.strip())
        kept = len(whole) - len(whole.lstrip()) + len(complete)
        if complete and len(start) < kept < len(whole.rstrip()):
            return RankedText(
                whole[:kept].strip(), _count_tokens(row.tokens, kept - len(start), tokenizer)
            )
    return RankedText(whole.strip(), len(row.tokens))


def _count_tokens(tokens: Sequence[int], length: int, tokenizer: Tokenizer) -> int:
    """Return how many of the first tokens have `length` characters of the text."""
    decoder, num_characters = TextDecoder(tokenizer), 0
    for index, token in enumerate(tokens, start=1):
        num_characters += len(decoder.push(token))
        if num_characters >= length:
            return index
    return len(tokens)


class TextRequest:
    """A request to the engine, and its answer so far."""

    def __init__(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        config: SamplingConfig,
    ) -> None:
        self.prompt, self.request = prompt, request
        stop = [config.stop] if isinstance(config.stop, str) else config.stop
        self._stream = TextStream(tokenizer, stop, includes_stop=config.include_stop)
        self._pieces: list[str] = []
        self._events: list[TokenEvent] = []
        self._finish_reason: str | None = None
        self.scores: tuple[TokenScores, ...] = ()
        """Scores of the request's continuations, if it has any."""
        self.error: MoesaicError | None = None
        """Error that ended the request."""
        self.label_logprobs: tuple[float, ...] = ()
        """Log-probabilities of the classes of the prompt, if it was classified."""

    @property
    def is_finished(self) -> bool:
        """True if no text follows."""
        return self._finish_reason is not None or self.error is not None

    def take(self, event: TokenEvent | FinishEvent) -> str:
        """Return the new text of an event."""
        if isinstance(event, TokenEvent):
            self._events.append(event)
            piece = self._stream.push(event.token)
            if self._stream.is_stopped:
                self._finish_reason = "stop"
        elif event.reason in ("stop", "length"):
            piece, self.scores = self._stream.finish(), event.scores
            self.label_logprobs = event.label_logprobs
            self._finish_reason = "stop" if self._stream.is_stopped else event.reason
        else:
            piece = ""
            self.error = event.error or MoesaicError("the engine was closed before the text ended")
        self._pieces.append(piece)
        return piece

    def result(self) -> Generation:
        """Return the complete answer; raise the error that ended the request, if one did."""
        if self.error is not None:
            raise self.error
        assert self._finish_reason is not None, "the request runs"
        logprobs = top_logprobs = None
        if self.request.top_logprobs is not None:
            logprobs = [event.logprob for event in self._events if event.logprob is not None]
            top_logprobs = [dict(event.top) for event in self._events]
        return Generation(
            self.prompt, list(self.request.prompt), [event.token for event in self._events],
            "".join(self._pieces), self._finish_reason, logprobs, top_logprobs,
        )  # fmt: skip
