"""Serve a model in the least memory that works, under the limit of a control group."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from moesaic.base.errors import ConfigError
from moesaic.base.host_memory import used_memory_bytes
from moesaic.kernels import device as devices
from moesaic.models.hf.origin import open_origin
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.serve.loading import load_model

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
    with load_model(origin, CPU, memory=memory) as served, torch.inference_mode():
        assert served.decision is not None
        facts, budget = served.decision.facts, served.decision.outcome
        # The engine fills its cache; each page is in use.
        peak, cache = 0, torch.ones(budget.cache_tokens * facts.position_bytes, dtype=torch.uint8)
        for rows, length in ((1, 300), (8, 1), (1, 300), (2, 40), (1, 1), (1, 300)):
            tokens = torch.randint(0, served.model.config.vocab, (rows, length))
            positions = torch.arange(length).expand(rows, -1)
            attention = AttentionMetadata.causal(rows, length)
            inputs = Inputs(served.model.rotary(positions), attention=attention)
            logits, _ = served.model(tokens, inputs)
            assert bool(logits.isfinite().all())
            peak = max(peak, used_memory_bytes())
        in_memory = sum(len(experts) for experts in served.experts_in_memory().values())
        stats = served.expert_stats
    found = {
        "memory": memory, "peak": peak, "cache": len(cache), "in_memory": in_memory,
        "slots": budget.num_slots, "experts": facts.num_experts, "misses": stats.misses,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
