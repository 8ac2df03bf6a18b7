"""vLLM's CPU build on the theme's models, whole in memory.

`python serve_vllm.py SETTINGS-AS-JSON` prints a line when it is ready. For each line of JSON that
it reads, it decodes as many tokens as given, which it draws itself, and prints seconds. Decoding is
the time beyond that of the same prompts with one token.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams


def seconds(model: LLM, prompts: list[list[int]], tokens: int, seed: int) -> float:
    """Return the seconds that `tokens` tokens after each prompt take."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
    texts = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    model.generate(texts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def run(model: LLM, work: dict[str, Any]) -> dict[str, float]:
    """Decode the streams of a request; return seconds."""
    prefill_s = seconds(model, work["prompts"], 1, 0)
    decoded = len(work["texts"][0])
    return {
        "prefill_s": prefill_s,
        "decode_s": seconds(model, work["prompts"], 1 + decoded, 1) - prefill_s,
    }


def main() -> None:
    """Serve requests from standard input."""
    settings = json.loads(sys.argv[1])
    model = LLM(
        model=settings["path"], dtype=settings["dtype"], max_model_len=1024,
        max_num_seqs=settings["streams"], enable_prefix_caching=False, disable_log_stats=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
