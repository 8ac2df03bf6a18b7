"""Serve a model in the least memory that works, under the limit of a control group."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from moesaic.base.errors import ConfigError
from moesaic.kernels import device as devices
from moesaic.models.hf.origin import open_origin
from moesaic.serve.engine import EngineLimits, InferenceEngine
from moesaic.serve.loading import load_model
from moesaic.serve.requests import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

CPU = torch.device("cpu")


def main(directory: Path, limit: Path) -> None:
    devices.activate(CPU)
    origin = open_origin(directory)
    try:
        load_model(origin, CPU, memory=1 << 20)
    except ConfigError as error:
        (least,) = re.findall(r'set memory to "(\d+)MiB" or more', str(error))
    memory = int(least) << 20
    limit.write_text(str(memory))
    with load_model(origin, CPU, memory=memory) as served:
        assert served.decision is not None
        facts, budget = served.decision.facts, served.decision.outcome
        limits = EngineLimits(cache_tokens=budget.cache_tokens, max_running=16)
        engine = InferenceEngine(served.model, limits, served.reads)
        preemptions = serve_all(engine)
        in_memory = sum(len(experts) for experts in served.experts_in_memory().values())
        stats = served.expert_stats
    found = {
        "memory": memory, "preemptions": preemptions,
        "in_memory": in_memory, "slots": budget.num_slots, "experts": facts.num_experts,
        "misses": stats.misses,
    }  # fmt: skip
    print(json.dumps(found))


def serve_all(engine: InferenceEngine) -> int:
    """Fill every page of the cache, and sort all scores; return the number of preemptions."""
    room, ends = engine.limits.cache_tokens - 16, list[str]()

    def take(event: TokenEvent | FinishEvent) -> None:
        if isinstance(event, FinishEvent):
            ends.append(event.reason)

    flat = SamplingParams(temperature=100.0, top_p=0.999)
    prompts = [tuple(range(room - 40)), *((7, number) for number in range(24))]
    for number, prompt in enumerate(prompts):
        new = 40 if number == 0 else 20
        engine.submit(GenerationRequest(prompt, new, flat, top_logprobs=20), take)
    while engine.step():
        pass
    assert ends == ["length"] * len(prompts)
    return engine.stats().preemptions


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
