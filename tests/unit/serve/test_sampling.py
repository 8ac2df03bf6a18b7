"""Choice of tokens against one row at a time in numpy, and its independence of company."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moesaic.kernels.randomness import uniform
from moesaic.serve import sampling as sampling_module
from moesaic.serve.requests import GenerationRequest, SamplingParams, TokenEvent
from moesaic.serve.sampling import choose_tokens

VOCAB = 301
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {7: 3.5, 9: -100.0}},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": -0.25}, {},
    {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.6}, {"top_p": 0.0}, {"top_k": 1},
    {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.6, "logit_bias": {3: 2.0, 4: -1.0}},
    {"temperature": 1e-9}, {"top_k": 10_000, "top_p": 0.99, "temperature": 3.0},
]  # fmt: skip


@dataclass(frozen=True)
class Sequence:
    """Request in progress."""

    request: GenerationRequest
    generated: list[int] = field(default_factory=list)


def make_sequences(count: int) -> list[Sequence]:
    draw = random.Random(1)
    sequences = []
    for index in range(count):
        raw = dict(SETTINGS[index % len(SETTINGS)])
        raw["logit_bias"] = MappingProxyType(raw.get("logit_bias", {}))
        params = SamplingParams(**raw, seed=draw.choice([0, 5, 2**62]))
        request = GenerationRequest(
            tuple(range(draw.randint(1, 9))), 100, params, choice=draw.randrange(3),
            top_logprobs=draw.choice([None, None, 0, 4]),
        )  # fmt: skip
        sequences.append(Sequence(request, draw.choices(range(20), k=draw.randrange(30))))
    return sequences


def make_logits(rows: int, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)


def choose_slowly(row: np.ndarray[Any, Any], sequence: Sequence) -> TokenEvent:
    """Choose the token of one row, with numpy."""
    request, params = sequence.request, sequence.request.sampling
    scores = row.astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(sequence.generated):
        times = sequence.generated.count(token)
        scores[token] -= params.presence_penalty + params.frequency_penalty * times
    if params.temperature == 0:
        token = int(scores.argmax())
    else:
        odds = np.exp((scores - scores.max()) / params.temperature)
        odds /= odds.sum()
        order = np.argsort(-odds, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        share = np.cumsum(odds[order]) / odds[order].sum()
        # A token counts if those before it fall short of top_p.
        order = order[: 1 + int((share < params.top_p).sum())]
        if not params.top_k and params.top_p == 1:
            order = np.sort(order)
        position = len(request.prompt) + len(sequence.generated)
        (draw,) = uniform(
            params.seed, "next token", 0, torch.tensor([request.choice]), torch.tensor([position])
        )
        kept = np.cumsum(odds[order])
        token = int(order[(kept < float(draw) * kept[-1]).sum()])
    if request.top_logprobs is None:
        return TokenEvent(token, None, ())
    wide = row.astype(np.float64)
    logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-logprobs)[: request.top_logprobs]
    return TokenEvent(token, logprobs[token], tuple((int(i), logprobs[i]) for i in best))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("likeliest", [8, 1024])
def test_tokens_match_one_row_at_a_time(
    dtype: torch.dtype, likeliest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module, "_LIKELIEST", likeliest)
    sequences, logits = make_sequences(240), make_logits(240, dtype)
    events = choose_tokens(logits, sequences)
    for row, (event, sequence) in enumerate(zip(events, sequences, strict=True)):
        expected = choose_slowly(logits[row].numpy(), sequence)
        assert event.token == expected.token, sequence.request.sampling
        assert [token for token, _ in event.top] == [token for token, _ in expected.top]
        if expected.logprob is None:
            assert event.logprob is None
        else:
            assert event.logprob == pytest.approx(expected.logprob, abs=2e-6)
            for (_, ours), (_, theirs) in zip(event.top, expected.top, strict=True):
                assert ours == pytest.approx(theirs, abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    sequences, logits = make_sequences(48), make_logits(48, dtype)
    together = choose_tokens(logits, sequences)
    assert [
        choose_tokens(logits[i : i + 1], sequences[i : i + 1])[0] for i in range(48)
    ] == together
    order = random.Random(4).sample(range(48), 48)
    shuffled = choose_tokens(logits[order], [sequences[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_draws_follow_the_probabilities() -> None:
    count = 8_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(count, -1)

    def shares(**settings: Any) -> Tensor:
        requests = [
            GenerationRequest((0,) * (1 + i % 100), 10, SamplingParams(seed=i // 100, **settings))
            for i in range(count)
        ]
        events = choose_tokens(logits, [Sequence(request) for request in requests])
        tokens = torch.tensor([event.token for event in events])
        return torch.bincount(tokens, minlength=4) / count

    odds = (logits[0].double() / 0.7).softmax(-1).float()
    torch.testing.assert_close(shares(temperature=0.7), odds, atol=0.02, rtol=0)
    two = torch.zeros(4)
    two[:2] = odds[:2] / odds[:2].sum()
    torch.testing.assert_close(shares(temperature=0.7, top_k=2), two, atol=0.02, rtol=0)
    torch.testing.assert_close(shares(temperature=0.7, top_p=0.8), two, atol=0.02, rtol=0)


def test_draws_depend_on_seed_choice_and_position() -> None:
    logits = torch.zeros(1, 1000)
    base = GenerationRequest((1, 2, 3), 10, SamplingParams(seed=1))

    def token(request: GenerationRequest, generated: list[int] | None = None) -> int:
        return choose_tokens(logits, [Sequence(request, generated or [])])[0].token

    others = [
        token(replace(base, sampling=SamplingParams(seed=2))), token(replace(base, choice=1)),
        token(base, [4]), token(replace(base, prompt=(1, 2))),
    ]  # fmt: skip
    assert len({token(base), *others}) == 5
    # A preempted request goes on with the draws of its positions.
    assert token(replace(base, prompt=(9,)), [4, 5]) == token(base)


class RecordedCalls(TorchFunctionMode):
    """Names of the functions of torch that are called, and most elements that `topk` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.num_sorted = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        if func.__name__ == "topk":
            self.num_sorted = max(self.num_sorted, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_greedy_rows_cost_no_softmax() -> None:
    logits, calls = make_logits(2), RecordedCalls()
    for temperature, names in ((0.0, {"argmax"}), (1.0, {"softmax"})):
        request = GenerationRequest((1,), 1, SamplingParams(temperature=temperature))
        with calls:
            events = choose_tokens(logits, [Sequence(request)] * 2)
        assert calls.names & {"argmax", "softmax", "log_softmax", "sort", "topk"} >= names
        if not temperature:
            assert [event.token for event in events] == logits.argmax(-1).tolist()
            assert not calls.names & {"softmax", "log_softmax", "sort", "topk", "double"}


@pytest.mark.parametrize("settings", [{"top_p": 0.99}, {"top_p": 0.1}, {"top_k": 4000}])
def test_few_scores_are_sorted_at_once(settings: dict[str, Any]) -> None:
    """While it is sorted, a score takes more memory than a pass has for it."""
    request, rows, vocab = GenerationRequest((1,), 1, SamplingParams(**settings)), 300, 5000
    with RecordedCalls() as calls:
        choose_tokens(torch.zeros(rows, vocab), [Sequence(request)] * rows)
    assert vocab <= calls.num_sorted <= sampling_module._SORTED_ELEMENTS < rows * vocab


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_masked_tokens_are_never_chosen(setting: dict[str, Any]) -> None:
    raw = {**setting, "logit_bias": MappingProxyType(setting.get("logit_bias", {}))}
    request = GenerationRequest((1,), 9, SamplingParams(**raw), top_logprobs=2)
    logits = make_logits(24)
    best = logits.argmax(dim=-1).unique()
    sequences = [Sequence(replace(request, choice=choice)) for choice in range(len(logits))]
    free, kept = choose_tokens(logits, sequences), choose_tokens(logits, sequences, best)
    assert not {one.token for one in kept} & set(best.tolist())
    # Log-probabilities stay those of the model.
    assert [one.top for one in kept] == [one.top for one in free]
