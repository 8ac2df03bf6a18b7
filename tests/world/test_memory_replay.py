"""Replay of a memory budget: exactly the reads and writes of a run with that budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_resume import run_job
from test_tiers import smallest

from moesaic.api.memory_replay import replay_memory
from moesaic.base.errors import ConfigError
from moesaic.base.events import RUN_LOG, read_events
from moesaic.facts.job import Job
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool

MODEL = {"vocab": 260, "layers": 3, "ffn": 32}
CASES: dict[str, dict[str, Any]] = {
    "early": {"clip": 0.0},
    "late, recompute": {"recompute": True},
    "few touched": {"batch": 1, "clip": 0.0},
    "few touched, late": {"batch": 1},
}


def tables(name: str, text: Path) -> dict[str, dict[str, Any]]:
    return {
        "model": {**MODEL, "top_k": 1} if "few" in name else MODEL,
        "train": {"micro_batches": 1, "precision": "fp32", "steps": 6, **CASES[name]},
        "data": {"validation_share": 0.0},
        "checkpoint": {"every": 0},
    }


def job_of(changes: dict[str, dict[str, Any]]) -> Job:
    return tiny_job(**{**changes, "data": {"sequence": 16}, "memory": {"ssd": "unused"}})


@pytest.mark.parametrize("residency", ["next-use", "lru"])
@pytest.mark.parametrize("name", CASES)
def test_replay_gives_the_traffic_of_the_run(
    ranks: RankPool, text: Path, tmp_path: Path, name: str, residency: str
) -> None:
    """The budget is replayed on the loads of a run without one."""
    changes = tables(name, text)
    host = smallest(job_of({**changes, "train": {"batch": 8, **changes["train"]}}), 17, 1)
    memory = {"host": host, "ssd": str(tmp_path / "scratch"), "residency": residency}
    plain, few = tmp_path / "plain", tmp_path / "few"
    order = {**changes["train"], "micro_batch_order": "by_block"}
    ranks.run(1, run_job, str(text), str(plain), {}, None, {**changes, "train": order})
    ranks.run(1, run_job, str(text), str(few), {}, None, {**changes, "memory": memory})
    measured = [event for event in read_events(few / RUN_LOG) if event["event"] == "step"]
    replayed = replay_memory(plain, host, residency)["steps"]
    assert len(measured) == 6
    names = ("accesses", "reads", "read_bytes", "written_bytes")
    assert [[one[name] for name in names] for one in replayed] == [
        [step[f"memory_{name}"] for name in names] for step in measured
    ]
    assert sum(one["reads"] for one in replayed) > 0


def test_a_budget_that_is_too_small_is_refused(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks.run(1, run_job, str(text), str(out), {}, None, tables("early", text))
    with pytest.raises(ConfigError, match=r'^--memory 10KB: memory\.host = "10KB" is too small'):
        replay_memory(out, "10KB", "lru")
    with pytest.raises(ConfigError, match=r"--memory.*residency"):
        replay_memory(out, "1GB", "oldest")
