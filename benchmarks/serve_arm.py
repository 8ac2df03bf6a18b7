"""moesaic's inference engine as a process of the theme `serve`.

`python -m benchmarks.serve_arm SETTINGS-AS-JSON` prints a line when it is ready. For each line of
JSON that it reads, it generates texts and prints their tokens and the seconds of prompts and of the
rest. Without a path it loads nothing, so that its peak is that of an idle interpreter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic.api.start import set_spin_count
from moesaic.kernels import device as devices
from moesaic.models.hf.origin import open_origin
from moesaic.serve.engine import EngineLimits, InferenceEngine
from moesaic.serve.loading import ServedModel, load_model
from moesaic.serve.requests import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

ZIPF = 0.8
"""Exponent of the frequencies of generated tokens by their id, as words of a language have."""
FIRST_WORD = 259
"""First token id that is drawn often."""


class Text:
    """Tokens of one stream."""

    def __init__(self) -> None:
        self.tokens, self.best = list[int](), list[int]()
        self.is_done = False

    def __call__(self, event: TokenEvent | FinishEvent) -> None:
        """Take an event of the engine."""
        if isinstance(event, FinishEvent):
            self.is_done = True
            if event.error is not None:
                raise event.error
        else:
            self.tokens.append(event.token)
            self.best += [token for token, _ in event.top]


def zipf_bias(vocab: int) -> dict[int, float]:
    """Return additions to logits that make tokens as frequent as words."""
    first = min(FIRST_WORD, vocab // 2)
    words = {first + i: -ZIPF * float(torch.tensor(i + 1.0).log()) for i in range(vocab - first)}
    return {**dict.fromkeys(range(first), -100.0), **words}


def run(engine: InferenceEngine, work: dict[str, Any], bias: dict[int, float]) -> dict[str, Any]:
    """Generate one text for each prompt; return tokens and seconds."""
    texts = [Text() for _ in work["prompts"]]
    before = engine.stats()
    began = time.perf_counter()
    for stream, (prompt, text) in enumerate(zip(work["prompts"], texts, strict=True)):
        sampling = SamplingParams(seed=work["seed"], logit_bias=bias)
        request = GenerationRequest(
            tuple(prompt), work["tokens"], sampling, choice=stream,
            top_logprobs=1 if work.get("check") else None,
        )  # fmt: skip
        engine.submit(request, text)
    while not all(text.tokens for text in texts):
        engine.step()
    prefill_s = time.perf_counter() - began
    while not all(text.is_done for text in texts):
        engine.step()
    after = engine.stats()
    return {
        "texts": [text.tokens for text in texts], "best": texts[0].best, "prefill_s": prefill_s,
        "decode_s": time.perf_counter() - began - prefill_s,
        "prefix_hits": after.prefix_hits - before.prefix_hits,
    }  # fmt: skip


def make_engine(settings: dict[str, Any]) -> tuple[ServedModel, InferenceEngine]:
    """Load the model and make its engine."""
    device = torch.device("cpu")
    torch.set_num_threads(settings["threads"])
    devices.activate(device)
    positions, streams = settings["positions"] * settings["streams"], settings["streams"]
    served = load_model(
        open_origin(Path(settings["path"])), device, settings["precision"],
        memory=settings.get("memory"), cache_tokens=positions, max_running=streams,
    )  # fmt: skip
    limits = EngineLimits(
        cache_tokens=positions, max_running=streams,
        prefix_cache=settings.get("prefix_cache", False),
    )  # fmt: skip
    return served, InferenceEngine(served.model, limits)


def main(arguments: Sequence[str]) -> None:
    """Serve requests from standard input."""
    settings = json.loads(arguments[0])
    if "path" not in settings:
        torch.ones(64, 64) @ torch.ones(64, 64)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.read()
        return
    served, engine = make_engine(settings)
    bias = zipf_bias(served.model.config.vocab)
    found = None if served.decision is None else served.decision.outcome
    slots = None if found is None else found.num_slots
    print(json.dumps({"ready": True, "slots": slots}), flush=True)
    for line in sys.stdin:
        before = served.expert_stats
        answer = run(engine, json.loads(line), bias)
        after = served.expert_stats
        used = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
        print(json.dumps({**answer, **used}), flush=True)


if __name__ == "__main__":
    set_spin_count()
    main(sys.argv[1:])
