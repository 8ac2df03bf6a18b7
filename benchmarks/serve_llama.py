"""llama.cpp on the theme's models, in an environment of its own.

`python serve_llama.py SETTINGS-AS-JSON` prints a line when it is ready. For each line of JSON that
it reads, it processes prompts and given continuations, and prints seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp as llama


class Model:
    """A model in a GGUF file, mapped into memory."""

    def __init__(self, path: str, positions: int, streams: int, threads: int) -> None:
        llama.llama_backend_init()
        self._log = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._log, None)
        settings = llama.llama_model_default_params()
        settings.use_mmap = True
        self._model = llama.llama_model_load_from_file(path.encode(), settings)
        context = llama.llama_context_default_params()
        context.n_ctx = positions * streams
        context.n_batch = context.n_ubatch = 512
        context.n_seq_max = streams
        context.n_threads = context.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._batch = llama.llama_batch_init(512, 0, 1)

    def forget(self) -> None:
        """Empty the cache of keys and values."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def forward(self, tokens: list[tuple[int, int, int]], with_logits: set[int]) -> None:
        """Process (stream, position, token); `with_logits` has indices of tokens."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (stream, position, token) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
            batch.logits[index] = index in with_logits
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp cannot process the batch")

    def best(self, index: int) -> int:
        """Return the most likely token after a token of the last batch."""
        vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        logits = llama.llama_get_logits_ith(self._context, index)[:vocab]
        return max(range(vocab), key=logits.__getitem__)


def run(model: Model, work: dict[str, Any]) -> dict[str, Any]:
    """Process prompts, then one token a stream at a time; return seconds of both.

    With `check`, return also the most likely tokens of the first stream."""
    model.forget()
    prompts, texts, best = work["prompts"], work["texts"], list[int]()
    began = time.perf_counter()
    for stream, prompt in enumerate(prompts):
        for first in range(0, len(prompt), 512):
            part = prompt[first : first + 512]
            rows = [(stream, first + index, token) for index, token in enumerate(part)]
            model.forward(rows, {len(part) - 1})
    prefill_s = time.perf_counter() - began
    began = time.perf_counter()
    for step in range(len(texts[0])):
        rows = [
            (stream, len(prompt) + step, text[step])
            for stream, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        model.forward(rows, set(range(len(rows))))
        if work.get("check"):
            best.append(model.best(0))
    return {"prefill_s": prefill_s, "decode_s": time.perf_counter() - began, "best": best}


def main() -> None:
    """Serve requests from standard input."""
    settings = json.loads(sys.argv[1])
    model = Model(settings["path"], settings["positions"], settings["streams"], settings["threads"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
