"""Model of lm-eval over the inference engine. Importing this module imports lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.serve.config import SamplingConfig
from moesaic.serve.prompts import PromptEncoder
from moesaic.serve.requests import TokenScores

DEFAULT_MAX_TOKENS = 256
"""New tokens of a task that does not set `max_gen_toks`, as in lm-eval's own models."""
_MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "seed")

TokenPair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation."""
OnProgress = Callable[[str, int, int], None]
"""Function that gets the kind of requests, how many of them are answered, and their number."""


class ScoringEngine(Protocol):
    """Interface of the engine that answers the requests."""

    prompts: PromptEncoder

    @property
    def max_positions(self) -> int:
        """Positions of the model."""

    def score_tokens(self, pairs: Sequence[TokenPair]) -> Iterator[tuple[int, TokenScores]]:
        """Yield the index and the scores of each pair, as they arrive."""

    def generate_texts(
        self, prompts: Sequence[tuple[Sequence[int], SamplingConfig]], *, is_chat: bool
    ) -> Iterator[tuple[int, str]]:
        """Yield the index and the continuation of each prompt, as they end."""


class HarnessModel(TemplateLM):
    """moesaic's inference engine as a model of lm-eval.

    Texts become tokens as in lm-eval's `hf` model, so that both give the same numbers.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        on_progress: OnProgress = lambda kind, done, total: None,
        *,
        is_chat: bool = False,
    ) -> None:
        super().__init__()
        self._engine, self._prompts = engine, engine.prompts
        self._on_progress, self._is_chat = on_progress, is_chat
        self.num_truncated = 0
        """Texts that were longer than the model's positions and lost their first tokens."""

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self._prompts.tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        return self._prompts.start_id

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self._engine.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, a part of lm-eval's cache keys."""
        return self._prompts.tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return a name for the model's own template, the only one it knows."""
        return self.tokenizer_name if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, up to the answer or to the start of one."""
        start = ""
        if not add_generation_prompt:
            *chat_history, last = chat_history
            start = last["content"]
        return self._prompts.template.render(chat_history) + start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **settings: Any
    ) -> list[int]:
        """Return the tokens of a text.

        The tokenizer's start token is added, unless the text begins with it.
        """
        tokenizer = self._prompts.tokenizer
        if add_special_tokens is None:
            start = tokenizer.decode([self.prefix_token_id], with_special_tokens=True)
            add_special_tokens = not string.startswith(start)
        return tokenizer.encode(string, has_special_tokens=not add_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the model's positions."""
        windows = list[TokenPair]()
        owners = list[int]()
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append(make_disjoint_window(window))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._score(windows, "texts"), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the text after each prompt, up to the first of its stop strings."""
        prompts = list[tuple[Sequence[int], SamplingConfig]]()
        for request in requests:
            text, settings = request.args
            config = sampling_config(settings, self.max_length)
            tokens = self.tok_encode(text)
            prompts.append((self._cut(tokens, self.max_length - config.max_tokens), config))
        answers = self._engine.generate_texts(prompts, is_chat=self._is_chat)
        return self._collect(answers, len(prompts), "texts to generate")

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = True,
        **settings: Any,
    ) -> list[tuple[float, bool]]:
        pairs = list[TokenPair]()
        for (_, continuation), before, tokens in requests:
            if len(tokens) > self.max_length:
                raise ConfigError(
                    f"the continuation {keys.show(continuation)} has {len(tokens)} tokens, more "
                    f"than the model's {self.max_length} positions: shorten the task's answers"
                )
            whole = self._cut([*before, *tokens], self.max_length + 1)
            pairs.append((whole[: len(whole) - len(tokens)], tokens))
        return self._score(pairs, "continuations")

    def _score(self, pairs: Sequence[TokenPair], kind: str) -> list[tuple[float, bool]]:
        scores = self._collect(self._engine.score_tokens(pairs), len(pairs), kind)
        return [(sum(one.logprobs), one.is_greedy) for one in scores]

    def _collect(self, answers: Iterable[tuple[int, Any]], total: int, kind: str) -> list[Any]:
        """Return the answers in the order of their requests, and report progress."""
        found = dict[int, Any]()
        self._on_progress(kind, 0, total)
        for index, answer in answers:
            found[index] = answer
            self._on_progress(kind, len(found), total)
        return [found[index] for index in range(total)]

    def _cut(self, tokens: list[int], limit: int) -> list[int]:
        """Return the last `limit` tokens, and count texts that lose some."""
        self.num_truncated += len(tokens) > limit
        return tokens[-limit:]


def sampling_config(settings: Mapping[str, Any], max_positions: int) -> SamplingConfig:
    """Return the settings of a text from the `generation_kwargs` of a task."""
    known = {"until", "do_sample", *_MAX_TOKENS_KEYS, *_SAMPLING_KEYS}
    for key in settings.keys() - known:
        raise ConfigError(
            f"generation_kwargs.{key} = {keys.show(settings[key])} is not supported: remove it "
            f"from the task; known keys are {', '.join(sorted(known))}"
        )
    limits = [key for key in _MAX_TOKENS_KEYS if settings.get(key) is not None]
    max_tokens = int(settings[limits[0]]) if limits else DEFAULT_MAX_TOKENS
    if max_tokens >= max_positions:
        raise ConfigError(
            f"generation_kwargs.max_gen_toks = {max_tokens} leaves no room for a prompt in the "
            f"model's {max_positions} positions: set a lower one in the task"
        )
    stop = settings.get("until") or []
    values: dict[str, Any] = {
        key: settings[key] for key in _SAMPLING_KEYS if settings.get(key) is not None
    }
    temperature, is_sampled = float(values.pop("temperature", 0.0)), settings.get("do_sample")
    if is_sampled is None:
        is_sampled = temperature > 0
    if is_sampled and not temperature:  # As in lm-eval's `hf` model, where generate() refuses.
        raise ConfigError(
            "generation_kwargs.do_sample = true needs generation_kwargs.temperature above 0: set "
            "it in the task, or remove do_sample for greedy texts"
        )
    raw = {
        "top_p": 1.0, **values, "temperature": temperature if is_sampled else 0.0,
        "max_tokens": max_tokens,
        "stop": [stop] if isinstance(stop, str) else [*filter(None, stop)],
    }  # fmt: skip
    return parse(SamplingConfig, raw, "generation_kwargs")
