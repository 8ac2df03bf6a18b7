"""The inference engine: texts in, texts out, many at a time."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from moesaic.api.generation import Generation, Score, TextRequest, ranked_text
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.base.units import parse_bytes
from moesaic.facts.job.credibility import LABELS
from moesaic.policy.serving.budget import PAGE_TOKENS
from moesaic.serve.config import EngineConfig, LoadConfig, SamplingConfig
from moesaic.serve.prompts import Prompt, PromptEncoder
from moesaic.serve.ranking import Ranking, best_of_each, check_ranking, likelihood
from moesaic.serve.requests import (
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    TokenScores,
)

if TYPE_CHECKING:
    from moesaic.api.evaluation import Evaluation
    from moesaic.facts.job import ModelConfig
    from moesaic.models.hf.origin import Origin
    from moesaic.serve.engine import InferenceEngine
    from moesaic.serve.engine_thread import EngineThread
    from moesaic.serve.loading import ServedModel

ScoredText = str | Sequence[int]
"""A context or a continuation: a text, or token ids."""
_Arrivals = SimpleQueue[tuple[TextRequest, TokenEvent | FinishEvent]]

_CACHE_FRACTION = 0.25
"""Part of the free memory that the key-value cache takes at most by default."""


class TextEngine:
    """Inference engine of a model on disk or in memory, for texts; any thread may use it.

    Weights are read and memory is taken at the first request. They are freed by `close`, when
    nothing refers to the engine any more, or when the program ends.
    """

    def __init__(
        self,
        origin: Origin,
        config: EngineConfig,
        prompts: PromptEncoder,
        load: Callable[[], ServedModel],
    ) -> None:
        """Create an engine; `load` returns the network, which the engine closes."""
        self._origin, self._config, self._load = origin, config, load
        self.prompts = prompts
        self.name = origin.path.resolve().name
        """Name of the model's directory."""
        self._lock = Lock()
        self._thread: EngineThread | None = None
        self._served: ServedModel | None = None
        self._end: weakref.finalize[..., TextEngine] | None = None
        """Function that ends the thread and closes the network; runs once."""
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the engine."""
        self.close()

    def close(self) -> None:
        """End all requests and free the memory."""
        with self._lock:
            self._is_closed = True
            self._thread = None
            if self._end is not None:
                self._end()
            elif self._served is not None:
                self._served.close()
            self._served = None

    @property
    def max_positions(self) -> int:
        """Positions of the model."""
        return self._origin.model.max_positions

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        chat: bool = False,
        system: str | None = None,
        best_of: int | None = None,
        rank: str | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Return the continuations of all prompts, in their order; `n` in a row for each.

        Args:
            prompts: texts, token ids, or lists of messages with `role` and `content`.
            chat: send each text as a user message, by the model's chat template.
            system: system message before each prompt, in a chat.
            best_of: texts to generate for each prompt; the `n` with the highest scores are
                returned, the best first.
            rank: scores of `best_of`: "likelihood" (default), the mean log-probability of the
                tokens, or "credibility", the probability by the model's classifier that the text
                is original.
            sampling: settings of `moesaic generate`, such as max_tokens=64, temperature=0,
                top_p, top_k, stop, ignore_eos, seed, n, logprobs and control={"genre": "docs"}.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts is a text: give a list of prompts")
        config = parse(SamplingConfig, sampling, "generate")
        if best_of is not None or rank is not None:
            ranking = check_ranking(best_of, rank, config.n, self._origin.model.labels)
            return self._generate_best(prompts, config, ranking, is_chat=chat, system=system)
        return self._generate(prompts, config, is_chat=chat, system=system)

    def credibility(self, texts: Sequence[str]) -> list[float]:
        """Return for each text the probability that it is original and not generated, by the
        model's classifier; 0 for an empty text."""
        if isinstance(texts, str):
            raise ConfigError("texts is a text: give a list of texts")
        return self._credibility([self.prompts.encode(text, 0) if text else [] for text in texts])

    def _credibility(self, texts: Sequence[Sequence[int]]) -> list[float]:
        requests = {tuple(ids): self._classification(ids) for ids in texts if ids}
        for one, _ in self.run(requests.values()):
            if one.error is not None:
                raise one.error
        original = LABELS.index("original")
        found = [requests[tuple(ids)] if ids else None for ids in texts]
        return [0.0 if one is None else math.exp(one.label_logprobs[original]) for one in found]

    def _classification(self, ids: Sequence[int]) -> TextRequest:
        """Return a request for the classes of a text."""
        request = GenerationRequest(tuple(ids), 0, is_classified=True)
        return TextRequest(ids, request, self.prompts.tokenizer, SamplingConfig())

    def _generate_best(
        self, prompts: Sequence[Prompt], config: SamplingConfig, ranking: Ranking, *,
        is_chat: bool, system: str | None,
    ) -> list[Generation]:  # fmt: skip
        """Return the `n` texts with the highest scores of each prompt, the best first."""
        changes: dict[str, Any] = {"n": ranking.best_of}
        if ranking.by == "likelihood" and config.logprobs is None:
            changes["logprobs"] = 0
        every = config.model_copy(update=changes)
        rows = self._generate(prompts, every, is_chat=is_chat, system=system)
        tokenizer = self.prompts.tokenizer
        ranked = [ranked_text(row, tokenizer, is_chat=is_chat) for row in rows]
        if ranking.by == "likelihood":
            pairs = zip(rows, ranked, strict=True)
            scores = [likelihood((row.logprobs or [])[: one.num_tokens]) for row, one in pairs]
        else:
            limits = self._start().engine.limits
            room = min(
                self.max_positions, limits.cache_tokens // limits.page_tokens * limits.page_tokens
            )
            # A text may have more tokens when it is encoded anew.
            scores = self._credibility([tokenizer.encode(one.text)[:room] for one in ranked])
        if config.logprobs is None:
            rows = [row._replace(logprobs=None, top_logprobs=None) for row in rows]
        chosen = best_of_each(scores, ranking.best_of, config.n)
        return [rows[index]._replace(score=scores[index]) for index in chosen]

    def _generate(
        self, prompts: Sequence[Prompt], config: SamplingConfig, *, is_chat: bool,
        system: str | None,
    ) -> list[Generation]:  # fmt: skip
        requests = [
            one
            for prompt in prompts
            for one in self.requests(prompt, config, is_chat=is_chat, system=system)
        ]
        for one, _ in self.run(requests):
            if one.error is not None:
                raise one.error
        return [one.result() for one in requests]

    def stream(
        self, prompt: Prompt, *, chat: bool = False, system: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Return an iterator over the pieces of a continuation, as they arrive.

        Arguments are those of `generate`. Closing the iterator ends the request.
        """
        config = parse(SamplingConfig, sampling, "stream")
        if config.n != 1:
            raise ConfigError(f"n = {config.n}: a stream has one text; call generate for several")
        return self._stream(self.requests(prompt, config, is_chat=chat, system=system))

    def _stream(self, requests: Sequence[TextRequest]) -> Iterator[str]:
        for one, piece in self.run(requests):
            if one.error is not None:
                raise one.error
            if piece:
                yield piece

    def score(
        self, pairs: Sequence[tuple[str | Sequence[int], str | Sequence[int]]]
    ) -> list[Score]:
        """Return the log-probabilities of continuations, in the order of the pairs.

        Args:
            pairs: a context and its continuation, both as texts or both as token ids. An empty text
                is a context without words.
        """
        ids = [self.prompts.encode_pair(*pair) for pair in pairs]
        found = dict(self.score_tokens(ids))
        return [
            Score(*pair, tokens, list(found[index].logprobs), found[index].is_greedy)
            for index, (pair, (_, tokens)) in enumerate(zip(pairs, ids, strict=True))
        ]

    def score_tokens(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> Iterator[tuple[int, TokenScores]]:
        """Yield the index and the scores of each pair of token ids, as they arrive.

        Pairs that differ in the last token alone are computed once. If contexts are equal, the
        first pair is computed before the others, which find the context in the prefix cache.
        """
        pairs_of: dict[tuple[int, ...], list[int]] = {}
        for index, (context, continuation) in enumerate(pairs):
            if not context:
                raise ConfigError("the context has no token: give at least one")
            if continuation:
                pairs_of.setdefault((*context, *continuation[:-1]), []).append(index)
            else:
                yield index, TokenScores((), True)
        groups: dict[tuple[int, ...], list[TextRequest]] = {}
        indices_of: dict[TextRequest, list[int]] = {}
        for prompt, indices in pairs_of.items():
            request = GenerationRequest(
                prompt, 0, continuations=tuple(tuple(pairs[index][1]) for index in indices)
            )
            one = TextRequest(prompt, request, self.prompts.tokenizer, SamplingConfig())
            indices_of[one] = indices
            groups.setdefault(tuple(pairs[indices[0]][0]), []).append(one)
        ordered = _first_of_each(list(groups.values()), self._config.max_running)
        for one, _ in self.run(ordered):
            if one.error is not None:
                raise one.error
            yield from zip(indices_of[one], one.scores, strict=True)

    def evaluate(
        self, tasks: Sequence[str | Path], *, scores: Sequence[str] = (), **settings: Any
    ) -> Evaluation:
        """Return the results on local tasks, by lm-eval.

        Args:
            tasks: directories with task files, or single .yaml and .jsonl files.
            scores: scoring functions of multiple-choice tasks; "all": all five.
            settings: shots, limit, chat and on_progress, as in `run_evaluation`.
        """
        from moesaic.api.evaluation import run_evaluation

        return run_evaluation(self, tasks, scores=scores, **settings)

    def generate_texts(
        self, prompts: Sequence[tuple[Sequence[int], SamplingConfig]], *, is_chat: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yield the index and the text of each prompt of token ids, as they end."""
        index_of: dict[TextRequest, int] = {}
        for index, (ids, config) in enumerate(prompts):
            for one in self.requests(list(ids), config, is_chat=is_chat):
                index_of[one] = index
        for one, _ in self.run(list(index_of)):
            if one.is_finished:
                yield index_of[one], one.result().text

    def requests(
        self,
        prompt: Prompt,
        config: SamplingConfig,
        *,
        is_chat: bool = False,
        system: str | None = None,
    ) -> list[TextRequest]:
        """Return the `n` requests of a prompt."""
        ids = self.prompts.encode(
            prompt, config.max_tokens, is_chat=is_chat, system=system, control=config.control
        )
        self._check_tokens("logit_bias", config.logit_bias)
        self._check_tokens("prompt", ids)
        is_chat |= not isinstance(prompt, str) and isinstance(prompt[0], dict)
        params = SamplingParams(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k,
            presence_penalty=config.presence_penalty, frequency_penalty=config.frequency_penalty,
            logit_bias=MappingProxyType(config.logit_bias), seed=config.seed,
        )  # fmt: skip
        return [
            TextRequest(
                prompt,
                GenerationRequest(
                    tuple(ids), config.max_tokens, params, choice=choice,
                    end_ids=frozenset() if config.ignore_eos else self.prompts.ends(is_chat),
                    top_logprobs=config.logprobs,
                ),
                self.prompts.tokenizer, config,
            )
            for choice in range(config.n)
        ]  # fmt: skip

    def run(self, requests: Iterable[TextRequest]) -> Iterator[tuple[TextRequest, str]]:
        """Yield requests with their new text, as it arrives; the last time when they are finished.

        Requests are taken from the iterable when the engine has room. They end with the iterator.
        """
        waiting, arrivals, ids = iter(requests), _Arrivals(), dict[TextRequest, int]()
        try:
            while True:
                has_room = len(ids) < 2 * self._config.max_running
                one = next(waiting, None) if has_room else None
                if one is not None:
                    thread = self._start()
                    try:
                        ids[one] = thread.submit(one.request, partial(_put, arrivals, one))
                    except ConfigError as error:
                        one.error = error
                        yield one, ""
                elif not ids:
                    return
                else:
                    one, event = arrivals.get()
                    if one in ids:  # It may have ended by a stop string.
                        piece = one.take(event)
                        if one.is_finished:
                            self._cancel(ids.pop(one))
                        yield one, piece
        finally:
            for request_id in ids.values():
                self._cancel(request_id)

    def _cancel(self, request_id: int) -> None:
        with self._lock:
            if self._thread is not None:
                self._thread.cancel(request_id)

    def _start(self) -> EngineThread:
        """Return the running engine; read the weights the first time."""
        from moesaic.serve.engine_thread import EngineThread

        with self._lock:
            if self._is_closed:
                raise ConfigError("the engine is closed: create another one")
            if self._thread is None:
                served = self._served or self._load()
                self._served = served  # It is read once, even if the cache does not fit at first.
                engine = make_engine(
                    served, self._config, max_waiting=sys.maxsize,
                    masked_ids=self.prompts.masked_ids,
                )  # fmt: skip
                self._thread = EngineThread(engine)
                self._thread.start()
                # A thread that still waits at the end of the program aborts it.
                self._end = weakref.finalize(self, _close, self._thread, served)
            return self._thread

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        """Raise ConfigError for tokens beyond the vocabulary."""
        vocab = self._origin.model.vocab
        for token in tokens:
            if not 0 <= token < vocab:
                raise ConfigError(
                    f"{name} has the token {token}, and the model's ids are 0 to {vocab - 1}: "
                    "use the model's tokenizer"
                )


def _close(thread: EngineThread, served: ServedModel) -> None:
    thread.close()
    served.close()


def _first_of_each(groups: Sequence[Sequence[TextRequest]], width: int) -> Iterator[TextRequest]:
    """Yield the first request of `width` groups, then the others of these groups, and so on."""
    for start in range(0, len(groups), width):
        part = groups[start : start + width]
        yield from (group[0] for group in part)
        yield from (one for group in part for one in group[1:])


def _put(arrivals: _Arrivals, one: TextRequest, event: TokenEvent | FinishEvent) -> None:
    arrivals.put((one, event))


def default_cache_tokens(
    model: ModelConfig, item_bytes: int, max_running: int, free_bytes: int
) -> int:
    """Return the positions that `max_running` texts need, within a part of the free memory."""
    position_bytes = model.layers * model.cache_width * item_bytes
    room = int(free_bytes * _CACHE_FRACTION) // position_bytes
    return max(min(max_running * model.max_positions, room), PAGE_TOKENS)


def make_engine(
    served: ServedModel, config: EngineConfig, max_waiting: int, masked_ids: Sequence[int] = ()
) -> InferenceEngine:
    """Return an engine over a loaded model, which never generates `masked_ids`."""
    from moesaic.kernels import device as devices
    from moesaic.serve.engine import EngineLimits, InferenceEngine

    tokens = config.cache_tokens
    if tokens is None and served.decision is not None:
        tokens = served.decision.outcome.cache_tokens
    if tokens is None:
        weight = served.model.embed.weight
        tokens = default_cache_tokens(
            served.model.config, weight.element_size(), config.max_running,
            devices.free_bytes(weight.device),
        )  # fmt: skip
    limits = EngineLimits(
        max_running=config.max_running, max_waiting=max_waiting,
        tokens_per_pass=config.tokens_per_pass,
        cache_tokens=tokens,
    )  # fmt: skip
    return InferenceEngine(served.model, limits, served.reads, masked_ids)


def load_network(
    origin: Origin, config: LoadConfig, progress: Callable[[int, int], None] | None = None
) -> ServedModel:
    """Return the network of `origin` on the device of the settings, within their memory.

    `progress` gets the bytes read and in total after every tensor."""
    from moesaic.kernels import device as devices
    from moesaic.kernels.grouped_mm import check_backend
    from moesaic.serve.loading import load_model

    device = devices.resolve(config.device, key="device")
    check_backend(config.grouped_mm if origin.model.experts else "auto", device, key="grouped_mm")
    devices.activate(device)
    if not isinstance(config, EngineConfig) or config.memory is None:
        return load_model(origin, device, config.precision, config.grouped_mm, progress=progress)
    return load_model(
        origin, device, config.precision, config.grouped_mm, parse_bytes(config.memory),
        cache_tokens=config.cache_tokens, tokens_per_pass=config.tokens_per_pass,
        max_running=config.max_running, progress=progress,
    )  # fmt: skip


class Engine(TextEngine):
    """Inference engine of a model on disk.

    A context manager: leaving it frees the memory.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        memory: str | None = None,
        device: str = "auto",
        precision: str = "keep",
        max_running: int = 32,
        **settings: Any,
    ) -> None:
        """Open the model in a Hugging Face directory, a run or a checkpoint.

        Args:
            directory: where it is; of a run, the newest intact checkpoint counts.
            memory: memory of this process, such as "4GB"; experts that do not fit are read from
                the model's files. None: as much as the model needs.
            device: torch device; auto: a GPU if there is one, else cpu.
            precision: keep (the dtype of the embedding on file), fp32, bf16 or fp64.
            max_running: texts that are generated at a time; further ones wait.
            settings: other settings of the engine in `moesaic generate`: cache_tokens,
                tokens_per_pass, grouped_mm and tokenizer.
        """
        from moesaic.models.hf.origin import open_origin

        given = {
            "memory": memory, "device": device, "precision": precision, "max_running": max_running,
        }  # fmt: skip
        config = parse(EngineConfig, {**given, **settings}, "Engine")
        origin = open_origin(Path(directory))
        super().__init__(
            origin, config, PromptEncoder(origin, config.tokenizer),
            partial(load_network, origin, config),
        )  # fmt: skip
        self.name = Path(directory).resolve().name

    @property
    def warnings(self) -> list[str]:
        """Sentences about the files, such as a damaged checkpoint that was passed over."""
        return self._origin.warnings
