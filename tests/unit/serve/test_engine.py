"""The engine against full forward passes without a cache, one token and one request at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, MoesaicError, StoreError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.serve.engine import EngineLimits, InferenceEngine
from moesaic.serve.engine_thread import EngineClosed, EngineThread
from moesaic.serve.requests import (
    EngineFull,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)

SMALL = {
    "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 41,
    "max_positions": 96,
}  # fmt: skip
LATENT = {
    "kv_heads": 4,
    "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
MODELS: dict[str, dict[str, object]] = {
    "tiny-dense": {}, "tiny-mixtral with a window": {"window": 7}, "tiny-olmoe": {},
    "tiny-qwen3": {}, "tiny-deepseek": LATENT,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)
LENGTHS = [(5, 12), (1, 9), (23, 14), (17, 1), (9, 20), (32, 6), (2, 3)]
"""Tokens of each prompt, and new tokens."""


def make_model(name: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    config = parse(ModelConfig, {**PRESETS[name.split()[0]], **SMALL, **MODELS[name]}, "test")
    model = LanguageModel(config).to(dtype)
    InitialSource(1, 0.4).fill(tensor_shards(model))
    return model


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def olmoe() -> LanguageModel:
    return make_model("tiny-olmoe")


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    draws = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 41, (length,), generator=draws).tolist())


def make_requests(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[GenerationRequest]:
    return [
        GenerationRequest(random_prompt(length, seed), new, GREEDY)
        for seed, (length, new) in enumerate(lengths)
    ]


@torch.no_grad()
def slow_greedy(model: LanguageModel, request: GenerationRequest) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        attention = AttentionMetadata.causal(1, len(tokens), window=model.config.window)
        inputs = Inputs(model.rotary(torch.arange(len(tokens))[None]), attention=attention)
        logits, _ = model(torch.tensor([tokens]), inputs)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(request.prompt) :]


@pytest.fixture(scope="module")
def expected(model: LanguageModel) -> list[list[int]]:
    return [slow_greedy(model, request) for request in make_requests()]


@dataclass
class Answer:
    """Events of one request."""

    tokens: list[TokenEvent] = field(default_factory=list)
    end: FinishEvent | None = None
    id: int = 0

    def __call__(self, event: TokenEvent | FinishEvent) -> None:
        assert self.end is None, "no event follows the last one"
        if isinstance(event, TokenEvent):
            self.tokens.append(event)
        else:
            self.end = event

    @property
    def ids(self) -> list[int]:
        return [event.token for event in self.tokens]


def limits(**changes: int | bool) -> EngineLimits:
    settings: dict[str, int | bool] = {
        "cache_tokens": 512, "max_running": 8, "tokens_per_pass": 64, "page_tokens": 4,
    }  # fmt: skip
    return EngineLimits(**{**settings, **changes})  # type: ignore[arg-type]


def submit(engine: InferenceEngine | EngineThread, request: GenerationRequest) -> Answer:
    answer = Answer()
    answer.id = engine.submit(request, answer)
    return answer


def run(
    engine: InferenceEngine,
    requests: Sequence[GenerationRequest],
    arrivals: Sequence[int] | None = None,
) -> list[Answer]:
    """Return the answers to requests; `arrivals` are the passes before which they are submitted."""
    answers: dict[int, Answer] = {}
    arrivals = arrivals or [0] * len(requests)
    now = 0
    while len(answers) < len(requests) or engine.has_requests:
        for index, request in enumerate(requests):
            if arrivals[index] == now:
                answers[index] = submit(engine, request)
        engine.step()
        now += 1
    assert not engine.step()
    assert engine.stats().pages_used == 0
    return [answers[index] for index in range(len(requests))]


def texts(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


SITUATIONS: dict[str, dict[str, int | bool]] = {
    "roomy": {},
    "one at a time": {"max_running": 1},
    "chunks of the prompt": {"tokens_per_pass": 5, "max_running": 5},
    "pages of one token": {"page_tokens": 1},
    "a small cache": {"cache_tokens": 40},
    "a small cache and chunks": {"cache_tokens": 40, "tokens_per_pass": 7, "max_running": 7},
    "no prefix cache": {"prefix_cache": False, "cache_tokens": 60},
}


def model_situations() -> list[object]:
    """Return each situation of one model and the hardest one of every model; the rest is long."""
    return [
        pytest.param(
            model, situation,
            marks=[] if model == "tiny-olmoe" or "and" in situation else [pytest.mark.soak],
        )
        for model in MODELS
        for situation in SITUATIONS
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "situation"), model_situations(), indirect=["model"])
def test_tokens_equal_full_recomputation(
    model: LanguageModel, expected: list[list[int]], situation: str
) -> None:
    engine = InferenceEngine(model, limits(**SITUATIONS[situation]))
    requests = make_requests()
    for arrivals in (None, [9, 4, 0, 7, 0, 2, 1]):
        answers = run(engine, requests, arrivals)
        assert texts(answers) == expected
        assert {answer.end and answer.end.reason for answer in answers} == {"length"}
    for _ in range(2):
        assert run(engine, requests[2:3])[0].ids == expected[2]
    if "small" in situation:
        assert engine.stats().preemptions > 0
    hits = engine.stats().prefix_hits
    assert hits == 0 if situation == "no prefix cache" else hits > 0


@pytest.fixture(scope="module")
def continued(olmoe: LanguageModel) -> Callable[[GenerationRequest], list[int]]:
    """Return a function like `slow_greedy`, which computes at most 8 tokens once per prompt."""
    known: dict[tuple[int, ...], list[int]] = {}

    def compute(request: GenerationRequest) -> list[int]:
        if request.prompt not in known:
            known[request.prompt] = slow_greedy(olmoe, replace(request, max_tokens=8))
        return known[request.prompt][: request.max_tokens]

    return compute


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_order_and_any_limits(
    olmoe: LanguageModel,
    continued: Callable[[GenerationRequest], list[int]],
    data: st.DataObject,
) -> None:
    """Prompts share beginnings, and texts continue earlier ones."""
    base = random_prompt(40, 3)
    lengths = data.draw(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=6)
    )
    requests = [GenerationRequest(base[:length], new, GREEDY) for length, new in lengths]
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    max_running = data.draw(st.integers(1, 6))
    engine = InferenceEngine(
        olmoe,
        limits(
            cache_tokens=data.draw(st.integers(48, 90)),
            max_running=max_running,
            tokens_per_pass=max_running + data.draw(st.integers(0, 20)),
            page_tokens=data.draw(st.sampled_from([1, 3, 4, 16])),
        ),
    )
    expected = [continued(request) for request in requests]
    for _ in range(2):
        assert texts(run(engine, requests, arrivals)) == expected


def test_a_later_turn_finds_the_earlier_one(olmoe: LanguageModel) -> None:
    engine = InferenceEngine(olmoe, limits(cache_tokens=64))
    first = run(engine, [GenerationRequest(random_prompt(21, 0), 12, GREEDY)])[0]
    prompt = (*random_prompt(21, 0), *first.ids, 5, 6)
    second = run(engine, [GenerationRequest(prompt, 10, GREEDY)])[0]
    assert second.end == FinishEvent("length")
    assert {event.cached_tokens for event in second.tokens} == {32}
    assert second.ids == slow_greedy(olmoe, GenerationRequest(prompt, 10, GREEDY))
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (21 + 35, 32)
    assert stats.computed_tokens == 21 + 11 + 3 + 9


def test_the_last_prompt_token_is_computed_on_a_full_hit(olmoe: LanguageModel) -> None:
    engine, request = InferenceEngine(olmoe, limits()), make_requests([(16, 4)])[0]
    first, second = run(engine, [request]), run(engine, [request])
    assert first[0].ids == second[0].ids
    assert second[0].tokens[0].cached_tokens == 15


def test_end_tokens_stop_a_request(olmoe: LanguageModel) -> None:
    request = make_requests()[0]
    whole = slow_greedy(olmoe, request)
    ending = replace(request, end_ids=frozenset({whole[3]}))
    (answer,) = run(InferenceEngine(olmoe, limits()), [ending])
    assert answer.ids == whole[: whole.index(whole[3]) + 1]
    assert answer.end == FinishEvent("stop")


def test_cancelled_requests_leave_the_others_alone(olmoe: LanguageModel) -> None:
    engine, requests = InferenceEngine(olmoe, limits(max_running=3)), make_requests()
    answers = [submit(engine, request) for request in requests]
    for _ in range(4):
        engine.step()
    engine.cancel(answers[0].id)
    engine.cancel(answers[6].id)  # It still waits.
    engine.cancel(99)
    while engine.step():
        pass
    engine.cancel(answers[0].id)
    for index, answer in enumerate(answers):
        assert answer.end is not None
        whole = slow_greedy(olmoe, requests[index])
        if index in (0, 6):
            assert answer.end.reason == "cancelled"
            assert answer.ids == whole[: len(answer.ids)]
            assert len(answer.ids) < len(whole)
        else:
            assert answer.ids == whole
    assert engine.stats().pages_used == 0
    assert not engine.has_requests


def test_a_handler_may_cancel_and_submit(olmoe: LanguageModel) -> None:
    engine, answer, after = InferenceEngine(olmoe, limits()), Answer(), Answer()

    def on_event(event: TokenEvent | FinishEvent) -> None:
        answer(event)
        if len(answer.tokens) == 2 and answer.end is None:
            engine.cancel(answer.id)
            engine.submit(make_requests()[1], after)

    answer.id = engine.submit(make_requests()[0], on_event)
    while engine.step():
        pass
    assert answer.end == FinishEvent("cancelled")
    assert len(answer.tokens) == 2
    assert after.ids == slow_greedy(olmoe, make_requests()[1])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ((), 4, "no token"), ((41,), 4, "vocabulary of 41"), ((1,) * 90, 7, "96 positions"),
        ((1,) * 40, 30, "cache's 64 positions"), ((1,), 0, "ask for 1 or more"),
    ],
)  # fmt: skip
def test_impossible_requests_are_rejected(
    olmoe: LanguageModel, prompt: tuple[int, ...], max_tokens: int, words: str
) -> None:
    engine = InferenceEngine(olmoe, limits(cache_tokens=64))
    with pytest.raises(ConfigError, match=words):
        submit(engine, GenerationRequest(prompt, max_tokens))
    assert not engine.step()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_per_pass": 7}, "tokens_per_pass"), ({"max_running": 0}, "max_running"),
        ({"cache_tokens": 3}, "cache_tokens"), ({"page_tokens": 0}, "page_tokens"),
    ],
)  # fmt: skip
def test_impossible_limits_are_rejected(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        limits(**changes)


def test_a_full_queue_says_when_to_come_back(olmoe: LanguageModel) -> None:
    engine = InferenceEngine(olmoe, limits(max_waiting=2, max_running=1))
    for has_run in (False, True):
        while engine.stats().num_waiting + engine.stats().num_running < 3:
            submit(engine, GenerationRequest((1, 2), 30, GREEDY))
        with pytest.raises(EngineFull, match=f"{2 if has_run else 3} requests wait") as caught:
            submit(engine, make_requests()[0])
        assert caught.value.retry_after_s >= 1
        engine.step()


def test_scores_that_are_not_finite_end_their_request_alone(olmoe: LanguageModel) -> None:
    damaged = make_model("tiny-olmoe")
    with torch.no_grad():
        damaged.embed.weight[7] = torch.nan
    healthy, ill = GenerationRequest((1, 2, 3), 4, GREEDY), GenerationRequest((1, 7, 3), 4, GREEDY)
    answers = run(InferenceEngine(damaged, limits()), [healthy, ill, healthy])
    assert answers[0].ids == answers[2].ids == slow_greedy(damaged, healthy)
    end = answers[1].end
    assert end is not None
    assert end.reason == "error"
    assert isinstance(end.error, StoreError)
    assert "token 1 cannot be chosen" in str(end.error)


def test_draws_depend_on_seed_choice_and_position_alone(olmoe: LanguageModel) -> None:
    sampled = SamplingParams(temperature=1.0, seed=3)
    request = GenerationRequest(random_prompt(9, 1), 12, sampled)
    (alone,) = run(InferenceEngine(olmoe, limits()), [request])
    other = replace(request, choice=1)
    company = [*make_requests(), other, replace(request, sampling=SamplingParams(seed=4)), request]
    engine = InferenceEngine(olmoe, limits(cache_tokens=70, tokens_per_pass=9))
    answers = run(engine, company, [0, 1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert answers[-1].ids == alone.ids
    assert len({tuple(answer.ids) for answer in answers[-3:]}) == 3


def test_log_probabilities_are_those_of_the_model(olmoe: LanguageModel) -> None:
    request = replace(make_requests()[0], top_logprobs=3)
    (answer,) = run(InferenceEngine(olmoe, limits()), [request])
    tokens = torch.tensor([[*request.prompt, *answer.ids]])
    with torch.no_grad():
        logits, _ = olmoe(tokens, Inputs(olmoe.rotary(torch.arange(tokens.shape[1])[None])))
    logprobs = logits[0, len(request.prompt) - 1 : -1].double().log_softmax(-1)
    for row, event in zip(logprobs, answer.tokens, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-9)
        assert event.top[0] == (event.token, event.logprob)
        assert [token for token, _ in event.top] == row.topk(3).indices.tolist()


@pytest.fixture
def make_thread(olmoe: LanguageModel) -> Callable[..., EngineThread]:
    def make(**changes: int) -> EngineThread:
        thread = EngineThread(InferenceEngine(olmoe, limits(**changes)))
        thread.start()
        return thread

    return make


def test_threads_submit_while_the_engine_runs(
    olmoe: LanguageModel, make_thread: Callable[..., EngineThread]
) -> None:
    thread, requests = make_thread(cache_tokens=60), make_requests()
    answers = [[Answer() for _ in requests] for _ in range(3)]

    def client(mine: list[Answer]) -> None:
        for request, answer in zip(requests, mine, strict=True):
            thread.submit(request, answer)

    clients = [threading.Thread(target=client, args=(mine,)) for mine in answers]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert thread.drain(60)
    with pytest.raises(EngineClosed):
        submit(thread, requests[0])
    thread.close()
    expected = [slow_greedy(olmoe, request) for request in requests]
    assert [texts(mine) for mine in answers] == [expected] * 3
    assert thread.stats().finished == 21


def test_closing_cancels_what_still_runs(make_thread: Callable[..., EngineThread]) -> None:
    thread = make_thread(max_running=1)
    answers = [submit(thread, GenerationRequest((1,), 80, GREEDY)) for _ in range(4)]
    assert not thread.drain(0.0)
    thread.close()
    assert all(answer.end is not None for answer in answers)
    assert answers[-1].end == FinishEvent("cancelled")


def test_a_failing_pass_ends_its_requests_alone(
    make_thread: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = make_thread(max_running=1)
    compute, failures = thread.engine._compute, [StoreError("file X is cut"), ValueError("odd")]

    tensors = weakref.WeakSet[torch.Tensor]()

    def fail_twice(shares: object) -> object:
        if failures:
            tensor = torch.zeros(1)
            tensors.add(tensor)
            raise failures.pop(0)
        return compute(shares)  # type: ignore[arg-type]

    monkeypatch.setattr(thread.engine, "_compute", fail_twice)
    answers = [submit(thread, make_requests()[0]) for _ in range(3)]
    assert thread.drain(60)
    thread.close()
    ends = [answer.end for answer in answers]
    assert [end and end.reason for end in ends] == ["error", "error", "length"]
    first, second = (end.error for end in ends[:2] if end is not None)
    assert isinstance(first, StoreError)
    assert isinstance(second, MoesaicError)
    assert "ValueError: odd" in str(second)
    assert not tensors, "an error keeps no tensors of its pass"
    assert thread.stats().pages_used == 0
