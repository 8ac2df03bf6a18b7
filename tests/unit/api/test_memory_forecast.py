"""Forecast of a memory budget: what lives where, in plans, dry runs and the example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic import Cluster, ConfigError, Job
from moesaic.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "larger-than-memory.toml"


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["train", str(EXAMPLE), "--dry-run", "--json", *arguments]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "build" / "demo").mkdir(parents=True)
    (tmp_path / "build" / "demo" / "topics.jsonl").write_text('{"text": "some text"}\n')
    monkeypatch.chdir(tmp_path)


def test_the_example_keeps_four_times_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    facts = dry_run(capsys)
    tiers, memory = facts["memory_tiers"], facts["memory_per_rank"]
    assert tiers["expert_state_bytes"] > 4 * tiers["host_bytes"]
    assert memory["experts_bytes"] == tiers["experts_bytes"]
    assert 0.97 * tiers["host_bytes"] < memory["peak_bytes"] <= tiers["host_bytes"]
    # Each step reads everything that is not in memory at least once, and writes it.
    missing = tiers["expert_state_bytes"] - tiers["experts_bytes"]
    assert missing < tiers["read_bytes_per_step"] < 3 * tiers["expert_state_bytes"]
    assert missing < tiers["written_bytes_per_step"] < 2 * tiers["expert_state_bytes"]


def test_more_memory_reads_less_down_to_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ("210MB", "225MB", "600MB", "2GB")
    tiers = [dry_run(capsys, "--set", f"memory.host={host}")["memory_tiers"] for host in budgets]
    reads = [one["read_bytes_per_step"] for one in tiers]
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == tiers[-1]["written_bytes_per_step"] == 0


def test_the_smallest_budget_that_is_named_works(capsys: pytest.CaptureFixture[str]) -> None:
    smallest = dry_run(capsys)["memory_tiers"]["smallest_budget_bytes"]
    assert main(["train", str(EXAMPLE), "--dry-run", "--set", f"memory.host={smallest - 1}B"]) == 2
    assert "is too small for this job, which needs" in capsys.readouterr().err
    dry_run(capsys, "--set", f"memory.host={smallest}B")


def test_plans_say_bytes_per_day(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job.load(EXAMPLE)
    cluster = Cluster.preset("cpu")
    planned = job.plan(cluster, nproc=1)
    tiers = planned.figures["memory_tiers"]
    assert tiers["host_bytes"] == 225_000_000
    assert planned.figures["memory_per_rank"]["peak_bytes"] <= tiers["host_bytes"]
    cluster.save("cluster.toml")
    assert main(["plan", str(EXAMPLE), "--cluster", "cluster.toml", "--nproc", "1"]) == 0
    out = capsys.readouterr().out
    for words in ("expert state", "per day", "the smallest that works"):
        assert words in out


def test_a_job_without_a_budget_has_no_forecast() -> None:
    raw = Job.load(EXAMPLE).config.model_dump(mode="json", exclude_unset=True)
    del raw["memory"]
    planned = Job.load(raw).plan(Cluster.preset("cpu"), nproc=1)
    assert planned.figures["memory_tiers"] is None


def test_bad_sizes_are_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r'memory\.host=much: "much" is not a size: write one such as'
    ):
        Job.load(EXAMPLE, sets=["memory.host=much"])
