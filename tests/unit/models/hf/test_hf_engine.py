"""Greedy tokens of the engine against those of transformers, in fp32, for every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from moesaic.models.hf.config import read_config
from moesaic.models.hf.reader import HFSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.serve.engine import EngineLimits, InferenceEngine
from moesaic.serve.requests import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

CASES = [
    "llama", "llama-tied-wide", "llama-linear", "llama-llama3", "mixtral", "mixtral-window",
    "olmoe", "olmoe-renormalised", "qwen3", "qwen3-window", "qwen3-yarn", "deepseek",
    "deepseek-yarn",
]  # fmt: skip
LENGTHS, NEW_TOKENS = (17, 2, 11, 5), 14
LIMITS = {
    "roomy": EngineLimits(cache_tokens=256, page_tokens=4),
    "chunks in a small cache": EngineLimits(
        cache_tokens=48, max_running=4, tokens_per_pass=6, page_tokens=4
    ),
}
TIE = 1e-4
"""Distance of two best logits within which either token is right."""


def load(directory: Any) -> LanguageModel:
    config, _ = read_config(directory)
    model = LanguageModel(config)
    HFSource(directory, config).fill(tensor_shards(model))
    return model


def greedy(engine: InferenceEngine, prompts: list[list[int]]) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]

    def submit(prompt: list[int], tokens: list[int]) -> None:
        def on_event(event: TokenEvent | FinishEvent) -> None:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)

        sampling = SamplingParams(temperature=0.0)
        engine.submit(GenerationRequest(tuple(prompt), NEW_TOKENS, sampling), on_event)

    for prompt, tokens in zip(prompts, texts, strict=True):
        submit(prompt, tokens)
        engine.step()
    while engine.step():
        pass
    return texts


def is_tie(theirs: Any, prompt: list[int], ours: list[int], expected: list[int]) -> bool:
    """Return whether the first difference is a choice between two equally good tokens."""
    first = next(i for i in range(NEW_TOKENS) if ours[i] != expected[i])
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + expected[:first]])).logits[0, -1]
    best = logits.topk(2)
    tied = {ours[first], expected[first]} == set(best.indices.tolist())
    return tied and float(best.values[0] - best.values[1]) < TIE


@pytest.mark.parametrize("case", CASES)
def test_engine_matches_transformers(case: str, peer: Callable[[str], Any]) -> None:
    """Prompts are shorter and longer than the window; later ones hit the prefix cache."""
    found = peer(case)
    model = load(found.directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(found.directory).eval()
    theirs.generation_config.eos_token_id = None
    prompts = [found.tokens[i % 3, :n].tolist() for i, n in enumerate(LENGTHS)]
    expected = []
    for prompt in prompts:
        row = torch.tensor([prompt])
        continued = theirs.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        expected.append(continued[0, len(prompt) :].tolist())
    num_ties = 0
    for limits in LIMITS.values():
        engine = InferenceEngine(model, limits)
        for order in (prompts, prompts[::-1]):
            for prompt, ours in zip(order, greedy(engine, order), strict=True):
                theirs_text = expected[prompts.index(prompt)]
                if ours != theirs_text:
                    assert is_tie(theirs, prompt, ours, theirs_text)
                    num_ties += 1
        assert engine.stats().prefix_hits > 0
    assert num_ties <= 1
