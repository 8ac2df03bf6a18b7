"""`moesaic serve` with less memory than the model needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest
from tests.unit.serve.test_serve_process import serving

from moesaic.api.engine import Engine
from moesaic.base.events import read_events
from moesaic.base.host_memory import used_memory_bytes
from moesaic.models.hf.reader import SINGLE_NAME
from moesaic.testing.served import write_chat_model

BF16 = ["--set", "precision=bf16"]
PROMPTS = ["Of mosaics and their stones", "Whereas", "0123456789 " * 40]


def test_a_server_reads_experts_that_do_not_fit(tmp_path: Path) -> None:
    model = write_chat_model(
        tmp_path / "model",
        hidden=192,
        head_dim=48,
        ffn=384,
        layers=4,
        experts=32,
        top_k=2,
        max_positions=1024,
    )
    command = [sys.executable, "-m", "moesaic", "serve", str(model), "--memory", "10KB"]
    refused = subprocess.run([*command, *BF16, "--dry-run"], capture_output=True, text=True)
    least = re.search(r'set memory to "(\d+)MiB"', refused.stderr)
    assert refused.returncode == 2
    assert least is not None
    with Engine(model, cache_tokens=1024, precision="bf16") as engine:
        expected = [one.text for one in engine.generate(PROMPTS, temperature=0, max_tokens=20)]
    memory = f"{int(least[1]) + 20}MiB"
    events = tmp_path / "events.jsonl"
    sets = [*BF16, "--set", "cache_tokens=1024", "--set", f"events={events}"]
    with serving(model, "--memory", memory, *sets) as server:

        def complete(prompt: str) -> str:
            answer = server.client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=20
            )
            return answer.choices[0].text

        assert [complete(prompt) for prompt in PROMPTS] == expected
        experts = json.loads(urllib.request.urlopen(f"{server.url}/experts").read())
        assert not experts["all_in_memory"]
        assert experts["misses"] > 0
        assert 0 < sum(len(layer["in_memory"]) for layer in experts["layers"]) < 4 * 32
        metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        for name in ("hits", "misses", "read_bytes", "stall_seconds"):
            value = re.search(rf"^moesaic:expert_{name}_total{{.*}} (\S+)$", metrics, re.MULTILINE)
            assert value is not None
            assert float(value[1]) > 0
        assert used_memory_bytes(server.process.pid) < (int(least[1]) + 20) << 20
        first, second = list(read_events(events))[:2]
        assert first["decision"]["num_slots"] < first["facts"]["num_experts"] == 4 * 32
        assert second["decision"]["regime"] == "fetch"
        assert second["facts"]["num_slots"] == first["decision"]["num_slots"]

        # The file is cut while the server runs: requests fail with its name, the server stays.
        weights = model / SINGLE_NAME
        os.truncate(weights, 100_000)
        prompt = " ".join(map(str, range(100)))  # It uses other experts.
        with pytest.raises(openai.InternalServerError, match=re.escape(weights.name)):
            complete(prompt)
        assert urllib.request.urlopen(f"{server.url}/health").status == 200
