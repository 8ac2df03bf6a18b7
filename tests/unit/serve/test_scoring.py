"""Scores of continuations against full forward passes without a cache, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.inputs import Inputs
from moesaic.serve.engine import EngineLimits, InferenceEngine
from moesaic.serve.requests import FinishEvent, GenerationRequest, SamplingParams, TokenScores
from moesaic.serve.scoring import rows_at_once

SIZES = {
    "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 41,
    "max_positions": 96,
}  # fmt: skip
Pair = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module", params=["tiny-olmoe", "tiny-dense"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    config = parse(ModelConfig, {**PRESETS[request.param], **SIZES}, "test")
    model = LanguageModel(config).to(torch.float64)
    InitialSource(1, 0.4).fill(tensor_shards(model))
    return model


@torch.no_grad()
def slow_scores(model: LanguageModel, pair: Pair) -> TokenScores:
    context, continuation = pair
    tokens = torch.tensor([[*context, *continuation]])
    positions = torch.arange(tokens.shape[1])[None]
    logits, _ = model(tokens, Inputs(model.rotary(positions)))
    rows = logits[0, len(context) - 1 : -1]
    found = rows.log_softmax(dim=-1)[range(len(continuation)), list(continuation)]
    is_greedy = rows.argmax(dim=-1).tolist() == list(continuation)
    return TokenScores(tuple(found.tolist()), is_greedy)


def make_request(pair: Pair, *others: Sequence[int]) -> GenerationRequest:
    context, continuation = pair
    tokens = (*context, *continuation)
    return GenerationRequest(
        tokens[:-1], 0, continuations=(continuation, *(tuple(other) for other in others))
    )


def run(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[FinishEvent]:
    events: dict[int, list[object]] = {index: [] for index in range(len(requests))}
    for index, request in enumerate(requests):
        engine.submit(request, events[index].append)
    while engine.step():
        pass
    assert engine.stats().pages_used == 0
    ends = [own[-1] for own in events.values()]
    assert all(isinstance(end, FinishEvent) for end in ends)
    return [end for end in ends if isinstance(end, FinishEvent)]


def draw(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 41, (length,), generator=generator).tolist())


SHARED = draw(21, 0)
PAIRS: list[Pair] = [
    (SHARED, draw(3, 1)), (SHARED, draw(1, 2)), (SHARED, draw(17, 3)), (draw(1, 4), draw(40, 5)),
    (draw(50, 6), draw(2, 7)), (SHARED[:8], SHARED[8:]),
]  # fmt: skip
SITUATIONS: dict[str, dict[str, int | bool]] = {
    "roomy": {},
    "one at a time": {"max_running": 1},
    "chunks of the prompt": {"tokens_per_pass": 5, "max_running": 5},
    "a small cache": {"cache_tokens": 64, "tokens_per_pass": 7, "max_running": 7},
    "no prefix cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_scores_equal_full_recomputation(model: LanguageModel, situation: str) -> None:
    settings: dict[str, int | bool] = {
        "cache_tokens": 512, "max_running": 8, "tokens_per_pass": 64, "page_tokens": 4,
        **SITUATIONS[situation],
    }  # fmt: skip
    engine = InferenceEngine(model, EngineLimits(**settings))  # type: ignore[arg-type]
    expected = [slow_scores(model, pair) for pair in PAIRS]
    text = GenerationRequest(SHARED, 6, SamplingParams(temperature=0.0))
    greedy = run(InferenceEngine(model, EngineLimits(cache_tokens=512)), [text])[0]
    for _ in range(2):  # The second time prefixes are in the cache.
        *ends, generated = run(engine, [*map(make_request, PAIRS), text])
        assert generated == greedy
        for end, (logprobs, is_greedy) in zip(ends, expected, strict=True):
            assert end.reason == "length"
            assert end.scores[0].is_greedy == is_greedy
            assert end.scores[0].logprobs == pytest.approx(logprobs, abs=1e-9)


def test_continuations_of_one_request_are_scored_together(model: LanguageModel) -> None:
    engine = InferenceEngine(model, EngineLimits(cache_tokens=512))
    first = PAIRS[0]
    other, last = (*first[1][:-1], 7), (9,)
    [end] = run(engine, [make_request(first, other, last)])
    assert engine.stats().computed_tokens == len(first[0]) + len(first[1]) - 1
    contexts = first[0], first[0], (*first[0], *first[1][:-1])
    for scores, context, continuation in zip(
        end.scores, contexts, (first[1], other, last), strict=True
    ):
        expected = slow_scores(model, (context, continuation))
        assert scores.logprobs == pytest.approx(expected.logprobs, abs=1e-9)


def test_shared_prefixes_are_computed_once(model: LanguageModel) -> None:
    engine = InferenceEngine(model, EngineLimits(cache_tokens=512, page_tokens=4))
    run(engine, [make_request(PAIRS[0])])
    before = engine.stats().computed_tokens
    run(engine, [make_request(PAIRS[1])])
    assert engine.stats().computed_tokens - before == 1


def test_the_greedy_text_scores_as_greedy(model: LanguageModel) -> None:
    tokens: list[int] = []
    engine = InferenceEngine(model, EngineLimits(cache_tokens=512))
    engine.submit(
        GenerationRequest(SHARED, 5, SamplingParams(temperature=0.0)),
        lambda event: tokens.append(event.token) if not isinstance(event, FinishEvent) else None,
    )
    while engine.step():
        pass
    [end] = run(engine, [make_request((SHARED, tuple(tokens)))])
    assert end.scores[0].is_greedy


def test_requests_that_cannot_be_scored(model: LanguageModel) -> None:
    engine = InferenceEngine(model, EngineLimits(cache_tokens=512))
    for request, message in (
        (GenerationRequest((1, 2), 3, continuations=((2,),)), "set it to 0"),
        (GenerationRequest((1, 2), 0, continuations=((1, 2, 3),)), "1 to 2 tokens"),
        (GenerationRequest((1, 2), 0, continuations=((),)), "1 to 2 tokens"),
        (GenerationRequest((1, 2), 0, continuations=((41,),)), "vocabulary of 41"),
        (GenerationRequest((1, 2), 0), "ask for 1 or more"),
        (GenerationRequest((1,) * 97, 0, continuations=((2,),)), "96 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.submit(request, lambda event: None)


def test_damaged_weights_are_an_error(model: LanguageModel) -> None:
    weight = model.head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[3] = float("nan")
    try:
        [end] = run(InferenceEngine(model, EngineLimits(cache_tokens=64)), [make_request(PAIRS[0])])
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert end.reason == "error"
    assert isinstance(end.error, StoreError)


def test_rows_at_once_stay_within_a_memory_budget() -> None:
    assert rows_at_once(150_000, 32, is_limited=True) == 32
    assert rows_at_once(150_000, 32, is_limited=False) == 32
    assert rows_at_once(1000, 32, is_limited=True) == 32
    assert rows_at_once(1000, 32, is_limited=False) > 1000
