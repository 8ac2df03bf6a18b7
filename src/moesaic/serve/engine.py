"""Inference engine: continuous batching over one model, with a paged key-value cache.

A pass is one row of tokens of many requests. `plan_pass` decides which requests take part; the
engine places their pages, runs the model's blocks, and chooses the next token of each request whose
tokens are all computed. Requests with continuations get scores instead. Keys, positions and
attention metadata of a pass are made once, for all layers.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError, MoesaicError, StoreError
from moesaic.kernels import cpu_attention
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention_backends import AttentionMetadata, Segment
from moesaic.nn.inputs import ByProduct, Inputs
from moesaic.policy.serving.batching import (
    BatchingDecision,
    BatchingFacts,
    RunningRequest,
    WaitingRequest,
    count_pages,
    plan_pass,
)
from moesaic.policy.serving.budget import PAGE_TOKENS
from moesaic.serve.cache import PagedCache, page_keys
from moesaic.serve.expert_reads import ExpertReads
from moesaic.serve.requests import (
    EngineFull,
    EventHandler,
    FinishEvent,
    GenerationRequest,
    check_request,
)
from moesaic.serve.sampling import choose_tokens
from moesaic.serve.scoring import ContinuationScores, rows_at_once, score_targets

_PASS_WEIGHT = 0.2
"""Weight of the last pass in the mean seconds of a pass."""
_ONE_ROW = range(1)


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of an inference engine."""

    cache_tokens: int
    """Positions of the key-value cache over all requests."""
    max_running: int = 32
    """Requests that are computed at a time."""
    max_waiting: int = 256
    """Requests that wait while as many as possible are computed."""
    tokens_per_pass: int = 512
    """Tokens of a forward pass."""
    page_tokens: int = PAGE_TOKENS
    """Positions of a page of the cache."""
    prefix_cache: bool = True
    """True if prompts reuse the keys and values of earlier requests."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "page_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: set it to 1 or more")
        if self.tokens_per_pass < self.max_running:
            raise ConfigError(
                f"tokens_per_pass = {self.tokens_per_pass} is less than max_running = "
                f"{self.max_running}: a pass has a token of each request; raise tokens_per_pass"
            )
        if self.cache_tokens < self.page_tokens:
            raise ConfigError(
                f"cache_tokens = {self.cache_tokens} is less than a page of {self.page_tokens}: "
                "raise cache_tokens"
            )


class EngineStats(NamedTuple):
    """Present state of an engine, and its counts since the start."""

    num_running: int
    num_waiting: int
    pages_used: int
    """Pages of running requests."""
    pages_cached: int
    """Free pages whose content the prefix cache can find."""
    pages_total: int
    pass_s: float
    """Mean seconds of the last passes."""
    prompt_tokens: int
    """Tokens of the prompts that were computed or found."""
    generated_tokens: int
    computed_tokens: int
    """Tokens of all passes."""
    prefix_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens that were found there."""
    preemptions: int
    passes: int
    finished: int
    """Requests that have ended, for any reason."""


_COUNTS = EngineStats._fields[EngineStats._fields.index("prompt_tokens") :]


@dataclass(eq=False)
class RequestState:
    """A request in progress."""

    id: int
    request: GenerationRequest
    on_event: EventHandler
    tokens: list[int]
    """The prompt, and the tokens generated so far."""
    keys: list[bytes]
    """Keys of the full pages of `tokens`; empty without a prefix cache."""
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    num_found: int | None = None
    """Prompt tokens that the prefix cache had at the first admission."""
    is_cancelled: bool = False
    scores: ContinuationScores = field(init=False)
    """Scores of the continuations so far."""

    def __post_init__(self) -> None:
        self.scores = ContinuationScores(self.request)

    @property
    def is_complete(self) -> bool:
        """True if the next token can be chosen."""
        return self.num_computed == len(self.tokens)


class InferenceEngine:
    """Engine over a whole model in this process.

    One thread calls `step`; any thread may submit and cancel. Events come from the thread that
    calls `step`.
    """

    def __init__(
        self,
        model: LanguageModel,
        limits: EngineLimits,
        reads: ExpertReads | None = None,
        masked_ids: Sequence[int] = (),
    ) -> None:
        """Make an engine.

        Args:
            model: the model, whole, on one device.
            limits: sizes of the engine.
            reads: how experts are read; None: all of them are in memory.
            masked_ids: tokens that are never generated, such as soft prompts.
        """
        self.model, self.limits, self._reads = model.eval(), limits, reads
        weight, num_pages = model.embed.weight, limits.cache_tokens // limits.page_tokens
        self._device, self._cache = (
            weight.device,
            PagedCache(model.config, num_pages, limits.page_tokens, weight.detach()),
        )
        self._masked = None
        if masked_ids:
            self._masked = torch.tensor(masked_ids, dtype=torch.int64, device=weight.device)
        cpu_attention.prepare(weight.dtype, weight.device)  # Else the first token waits for it.
        self._pages = self._cache.pages
        self._rows_at_once = rows_at_once(
            model.config.vocab, limits.max_running, is_limited=reads is not None
        )
        self._lock, self._ids = Lock(), count(1)
        self._live = dict[int, RequestState]()
        """Requests that wait or run."""
        self._waiting, self._running = deque[RequestState](), list[RequestState]()
        self._in_pass = list[RequestState]()
        self._has_cancelled = False
        self._counts = Counter[str]()
        self._pass_s = 0.0
        self.decisions = list[Decision[BatchingFacts, BatchingDecision]]()
        """Facts and decision of the last pass."""

    def submit(self, request: GenerationRequest, on_event: EventHandler) -> int:
        """Add a request to the queue, and return its number.

        Raise ConfigError for a request that can never run, EngineFull if too many wait.
        """
        check_request(request, self.model.config, self._pages.num_pages * self.limits.page_tokens)
        tokens = list(request.prompt)
        keys = page_keys(tokens, self.limits.page_tokens) if self.limits.prefix_cache else []
        with self._lock:
            # The next pass admits the first requests of the queue, if the cache has room.
            num_admitted = self.limits.max_running - len(self._running)
            if len(self._waiting) >= self.limits.max_waiting + num_admitted:
                raise EngineFull(len(self._waiting), self._retry_after_s())
            state = RequestState(next(self._ids), request, on_event, tokens, keys)
            self._live[state.id] = state
            self._waiting.append(state)
        return state.id

    def cancel(self, request_id: int) -> None:
        """End a request before the next pass; numbers of ended requests are ignored."""
        with self._lock:
            state = self._live.get(request_id)
            if state is not None:
                state.is_cancelled = self._has_cancelled = True

    def cancel_all(self) -> None:
        """End all requests before the next pass."""
        for request_id in list(self._live):
            self.cancel(request_id)

    @property
    def has_requests(self) -> bool:
        """True if a request waits or runs."""
        return bool(self._live)

    def stats(self) -> EngineStats:
        """Return the state and the counts; any thread may call this."""
        return EngineStats(
            num_running=len(self._running), num_waiting=len(self._waiting),
            pages_used=self._pages.num_used, pages_cached=self._pages.num_cached,
            pages_total=self._pages.num_pages, pass_s=self._pass_s,
            **{name: self._counts[name] for name in _COUNTS},
        )  # fmt: skip

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one pass; return False if there was nothing to do.

        If it raises, `fail_pass` ends the requests of the pass.
        """
        began, self._in_pass = time.perf_counter(), []
        self._end_cancelled()
        decision = self._decide()
        if not decision.shares:
            return False
        self._preempt(decision.preempted)
        self._admit(len(decision.admitted))
        shares = list[tuple[RequestState, int]]()
        for request_id, number in decision.shares:
            state = self._live[request_id]
            # The prefix cache may have lost pages since they were counted.
            shares.append((state, min(number, len(state.tokens) - state.num_computed)))
        self._in_pass = [state for state, _ in shares]
        num_tokens = sum(number for _, number in shares)
        if self._reads is not None:
            self._reads.begin(num_tokens)
        self._answer(self._compute(shares), shares)
        self._count_pass(num_tokens, time.perf_counter() - began)
        return True

    def fail_pass(self, error: MoesaicError) -> None:
        """End the requests of a pass that raised; all, if it raised before they were known."""
        for state in self._in_pass or list(self._live.values()):
            if state.id in self._live:
                self._finish(state, FinishEvent("error", error))

    def _end_cancelled(self) -> None:
        with self._lock:
            if not self._has_cancelled:
                return
            self._has_cancelled = False
            cancelled = [state for state in self._live.values() if state.is_cancelled]
        for state in cancelled:
            self._finish(state, FinishEvent("cancelled"))

    def _decide(self) -> BatchingDecision:
        limits, page_tokens = self.limits, self.limits.page_tokens
        with self._lock:
            queue = list(islice(self._waiting, limits.max_running - len(self._running)))
        facts = BatchingFacts(
            running=tuple(
                RunningRequest(
                    one.id, len(one.tokens), one.num_computed, len(self._pages.pages(one.id))
                )
                for one in self._running
            ),
            waiting=tuple(
                WaitingRequest(
                    one.id,
                    len(one.tokens),
                    self._count_known(one, self._pages.count_found(one.keys)),
                )
                for one in queue
            ),
            num_pages=self._pages.num_pages,
            page_tokens=page_tokens,
            tokens_per_pass=limits.tokens_per_pass,
            max_running=limits.max_running,
        )
        self.decisions = []
        return decide(plan_pass, facts, self.decisions)

    def _count_known(self, state: RequestState, num_pages: int) -> int:
        """Return the tokens that need not be computed, given the pages found; the last one always
        is, and all whose next tokens are scored."""
        num_needed = max(state.request.num_scored, 1)
        return min(num_pages * self.limits.page_tokens, len(state.tokens) - num_needed)

    def _preempt(self, request_ids: Sequence[int]) -> None:
        """Send the requests admitted last back to the head of the queue."""
        for request_id in request_ids:
            state = self._running.pop()
            assert state.id == request_id, "the request admitted last is preempted first"
            self._pages.release(state.id)
            state.num_computed, state.scores = 0, ContinuationScores(state.request)
            with self._lock:
                self._waiting.appendleft(state)
        self._counts["preemptions"] += len(request_ids)

    def _admit(self, number: int) -> None:
        """Give pages to the first requests of the queue."""
        page_tokens = self.limits.page_tokens
        for _ in range(number):
            with self._lock:
                state = self._waiting.popleft()
            self._running.append(state)
            found = self._pages.place(
                state.id,
                count_pages(len(state.tokens), page_tokens),
                count_pages(state.request.num_positions, page_tokens),
                state.keys,
            )
            state.num_computed = self._count_known(state, found)
            if state.num_found is None:
                state.num_found = state.num_computed
                self._counts["prompt_tokens"] += len(state.tokens)
                self._counts["prefix_queries"] += len(state.tokens)
                self._counts["prefix_hits"] += state.num_computed

    def _compute(self, shares: Sequence[tuple[RequestState, int]]) -> Tensor:
        """Compute the next tokens of each request; return their hidden states, [tokens, hidden]."""
        page_tokens = self.limits.page_tokens
        for state, number in shares:
            needed = count_pages(state.num_computed + number, page_tokens)
            self._pages.grow(state.id, needed)
        tokens, positions, places = list[int](), list[int](), list[int]()
        segments = list[Segment]()
        for state, number in shares:  # Pages have moved, if at all, before this loop.
            start, stop = state.num_computed, state.num_computed + number
            base = self._pages.pages(state.id).start * page_tokens
            queries = range(len(tokens), len(tokens) + number)
            segments.append(Segment(_ONE_ROW, queries, range(base, base + stop)))
            tokens += state.tokens[start:stop]
            positions += range(start, stop)
            places += range(base + start, base + stop)
        rows = torch.tensor((tokens, positions, places), device=self._device)
        hidden = self._forward(rows, segments)
        for state, number in shares:
            first = state.num_computed // page_tokens
            state.num_computed += number
            if self.limits.prefix_cache:
                self._record_pages(state, range(first, state.num_computed // page_tokens))
        return hidden

    def _record_pages(self, state: RequestState, indices: range) -> None:
        """Record pages that are complete, so that other requests find them."""
        if indices.stop > len(state.keys):
            state.keys = page_keys(state.tokens, self.limits.page_tokens, state.keys)
        for index in indices:
            self._pages.record(state.id, index, state.keys[index])

    def _forward(self, rows: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return the last hidden states; `rows` has tokens, their positions and their places in
        the cache, [3, tokens]."""
        tokens, positions, places = rows
        self._cache.write_to(places)
        attention = AttentionMetadata(tuple(segments), self.model.config.window)
        x: Tensor = tokens[None]
        inputs = Inputs(self.model.rotary(positions[None]), attention=attention, cache=self._cache)
        for name, block in self.model.blocks():
            if name != "head":
                x, _ = block(x, inputs)
        return x[0]

    def _project(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, [rows, vocab]."""
        positions = torch.zeros((1, 1), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.model.head(hidden[None], Inputs(self.model.rotary(positions)))[0]
        return logits[0]

    def _answer(self, hidden: Tensor, shares: Sequence[tuple[RequestState, int]]) -> None:
        """Choose the next token of each request whose tokens are all computed; score others."""
        choosing, last = list[RequestState](), list[int]()
        scoring, stop = list[tuple[RequestState, range]](), 0
        classified = list[tuple[RequestState, int]]()
        for state, number in shares:
            rows, stop = range(stop, stop + number), stop + number
            if state.request.continuations:
                scoring.append((state, rows))
            elif state.is_complete and state.request.is_classified:
                classified.append((state, rows[-1]))
            elif state.is_complete:
                choosing.append(state)
                last.append(rows[-1])
        if choosing:
            is_part = len(last) < len(hidden)
            index = torch.tensor(last, device=hidden.device) if is_part else slice(None)
            self._choose(self._project(hidden[index]), choosing)
        if classified:
            self._classify(hidden, classified)
        targets = [
            target
            for state, rows in scoring
            for target in state.scores.targets(
                range(state.num_computed - len(rows), state.num_computed), rows.start
            )
        ]
        score_targets(self._project, hidden, targets, self._rows_at_once)
        for state, _ in scoring:
            if state.is_complete:
                self._finish(state, state.scores.finish())

    def _classify(self, hidden: Tensor, requests: Sequence[tuple[RequestState, int]]) -> None:
        """End requests with the classes of the rows of their last tokens."""
        index = torch.tensor([row for _, row in requests], device=hidden.device)
        positions = torch.zeros((1, 1), dtype=torch.int64, device=hidden.device)
        keep = frozenset[ByProduct]({"label_logits"})
        inputs = Inputs(self.model.rotary(positions), keep=keep, project=False)
        _, report = self.model.head(hidden[index][None], inputs)
        rows = report.label_logits[0].double().log_softmax(dim=-1).tolist()
        for (state, _), row in zip(requests, rows, strict=True):
            event = FinishEvent("stop", label_logprobs=tuple(row))
            is_finite = all(map(math.isfinite, row))
            self._finish(state, event if is_finite else FinishEvent("error", _not_finite(state)))

    def _choose(self, logits: Tensor, states: Sequence[RequestState]) -> None:
        """Choose the next token of each request, and send the events."""
        lowest, highest = logits.aminmax(dim=-1)
        is_finite = (lowest.isfinite() & highest.isfinite()).tolist()
        if not all(is_finite):
            logits = logits[torch.tensor(is_finite, device=logits.device)]
            for state, finite in zip(states, is_finite, strict=True):
                if not finite:
                    self._finish(state, FinishEvent("error", _not_finite(state)))
            states = [state for state, finite in zip(states, is_finite, strict=True) if finite]
        if not states:
            return
        events = choose_tokens(logits, states, self._masked)
        for state, event in zip(states, events, strict=True):
            state.tokens.append(event.token)
            state.generated.append(event.token)
            state.on_event(event._replace(cached_tokens=state.num_found or 0))
            if event.token in state.request.end_ids:
                self._finish(state, FinishEvent("stop"))
            elif len(state.generated) == state.request.max_tokens:
                self._finish(state, FinishEvent("length"))
        self._counts["generated_tokens"] += len(states)

    def _finish(self, state: RequestState, event: FinishEvent) -> None:
        """End a request, leave its pages to the prefix cache, and send the last event."""
        is_running = state in self._running
        if is_running:
            self._running.remove(state)
            self._pages.release(state.id)
        with self._lock:
            if not is_running:
                self._waiting.remove(state)
            del self._live[state.id]
        self._counts["finished"] += 1
        state.on_event(event)

    def _count_pass(self, num_tokens: int, seconds: float) -> None:
        if self._reads is not None:
            self._reads.end(num_tokens, seconds)
        weight = _PASS_WEIGHT if self._counts["passes"] else 1.0
        self._pass_s += weight * (seconds - self._pass_s)
        self._counts["passes"] += 1
        self._counts["computed_tokens"] += num_tokens

    def _retry_after_s(self) -> float:
        """Return the seconds until the first running request ends, if it takes all its tokens."""
        rests = [one.request.max_tokens - len(one.generated) for one in list(self._running)]
        return max(1.0, min(rests, default=0) * self._pass_s)


def _not_finite(state: RequestState) -> StoreError:
    return StoreError(
        f"token {len(state.generated) + 1} cannot be chosen, as the model's scores are not finite: "
        "its weights are damaged or its training diverged; use an earlier checkpoint, or "
        "precision = fp32 if the weights are sound"
    )
