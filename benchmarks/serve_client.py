"""Client of the theme `serve`: streams that ask a server for one text after the other.

`python -m benchmarks.serve_client SETTINGS-AS-JSON` prints what it found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import openai


async def run(settings: dict[str, Any]) -> dict[str, float]:
    """Keep all streams busy for some seconds; return tokens per second and errors."""
    client = openai.AsyncOpenAI(
        base_url=f"{settings['url']}/v1", api_key="none", max_retries=0, timeout=300.0
    )
    counts, requests, errors = [0] * settings["streams"], 0, 0
    began = time.perf_counter()

    async def stream(index: int) -> None:
        nonlocal requests, errors
        words = random.Random(index)
        while time.perf_counter() - began < settings["seconds"]:
            prompt = [words.randrange(64, 256) for _ in range(settings["prompt"])]
            try:
                answer = await client.completions.create(
                    model="model", prompt=prompt, max_tokens=settings["tokens"], temperature=1.0,
                    seed=words.randrange(1 << 30), stream=True, extra_body={"ignore_eos": True},
                    stream_options={"include_usage": True},
                )  # fmt: skip
                async for chunk in answer:
                    if chunk.usage is not None:
                        counts[index] += chunk.usage.completion_tokens
            except openai.OpenAIError:
                errors += 1
            requests += 1

    await asyncio.gather(*(stream(index) for index in range(settings["streams"])))
    seconds = time.perf_counter() - began
    mean = sum(counts) / len(counts)
    return {
        "tokens_per_s": sum(counts) / seconds, "requests": requests, "errors": errors,
        "least_share": min(counts) / max(mean, 1.0),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))
