"""Forecast of a memory budget: what lives where, in plans, dry runs and the example."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import Commands
from moesaic import Cluster, ConfigError, Job
from moesaic.api import memory_here, memory_replay, plan_search
from moesaic.base.errors import DoesNotFitError
from moesaic.testing.jobs import RUN_JOB

EXAMPLE = Path(__file__).parents[3] / "examples" / "larger-than-memory.toml"
DRY_RUN = ["train", str(EXAMPLE), "--dry-run"]


def dry_run(commands: Commands, *arguments: str) -> dict[str, Any]:
    facts: dict[str, Any] = commands.facts([*DRY_RUN, *arguments])
    return facts


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "build" / "demo").mkdir(parents=True)
    (tmp_path / "build" / "demo" / "topics.jsonl").write_text('{"text": "some text"}\n' * 99)
    monkeypatch.chdir(tmp_path)


def test_the_example_keeps_four_times_its_budget(commands: Commands) -> None:
    facts = dry_run(commands)
    tiers, memory = facts["memory_tiers"], facts["memory_per_rank"]
    assert tiers["expert_state_bytes"] > 4 * tiers["host_bytes"]
    assert memory["experts_bytes"] == tiers["experts_bytes"]
    assert 0.97 * tiers["host_bytes"] < memory["peak_bytes"] <= tiers["host_bytes"]
    # Each step reads everything that is not in memory at least once, and writes it.
    missing = tiers["expert_state_bytes"] - tiers["experts_bytes"]
    assert missing < tiers["read_bytes_per_step"] < 3 * tiers["expert_state_bytes"]
    assert missing < tiers["written_bytes_per_step"] < 2 * tiers["expert_state_bytes"]


def test_more_memory_reads_less_down_to_nothing(commands: Commands) -> None:
    budgets = ("210MB", "225MB", "600MB", "2GB")
    tiers = [dry_run(commands, "--set", f"memory.host={host}")["memory_tiers"] for host in budgets]
    reads = [one["read_bytes_per_step"] for one in tiers]
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == tiers[-1]["written_bytes_per_step"] == 0


def test_the_smallest_budget_that_is_named_works(commands: Commands) -> None:
    smallest = dry_run(commands)["memory_tiers"]["smallest_budget_bytes"]
    assert "is too small for this job, which needs" in commands.refusal(
        ["train", str(EXAMPLE), "--dry-run", "--set", f"memory.host={smallest - 1}B"]
    )
    dry_run(commands, "--set", f"memory.host={smallest}B")


def test_the_largest_model_is_the_last_that_a_dry_run_accepts(
    commands: Commands,
) -> None:
    smallest = dry_run(commands, "--set", "model.experts=24")["memory_tiers"][
        "smallest_budget_bytes"
    ]
    sets = [f"memory.host={smallest}B"]
    figures = Job.load(EXAMPLE, sets=sets).largest_model(Cluster.preset("cpu"), 10**13, nproc=1)
    largest = figures["largest"][1]
    assert largest["resource"] == "memory per rank"
    assert largest["experts"] >= 24
    line = [*DRY_RUN, "--set", sets[0], "--set"]
    commands.run(line, f"model.experts={largest['experts']}")
    refusal = commands.refusal(line, f"model.experts={largest['experts'] + 1}")
    assert "is too small for this job" in refusal


CLUSTER = """
name = "here"

[[hosts]]
name = "here"
preset = "cpu"
"""
DISK = """
[[hosts.disks]]
path = "/data"
read = {read}
write = 1e12
random_read = 1e12
random_write = 1e12
mixed = 1e12
"""


def planned(disks: str) -> dict[str, Any]:
    """Return the figures of the example on a host with `disks`."""
    Path("cluster.toml").write_text(CLUSTER + disks)
    return Job.load(EXAMPLE).plan(Cluster.load("cluster.toml"), nproc=1).figures


def test_a_step_waits_for_a_slow_drive() -> None:
    unknown, fast = planned(""), planned(DISK.format(read=1e13))
    slow = planned(DISK.format(read=1e9))
    assert unknown["drive"] is None
    assert fast["drive"]["wait_s"] == 0
    assert fast["step_s"] == pytest.approx(unknown["step_s"])
    assert slow["step_s"] == pytest.approx(fast["step_s"] + slow["drive"]["wait_s"])
    read_s = slow["memory_tiers"]["read_bytes_per_step"] / 1e9
    assert read_s < slow["drive"]["busy_s"] < 1.1 * read_s
    assert 0 < slow["drive"]["wait_s"] < slow["drive"]["busy_s"] <= slow["step_s"]
    for figures in (unknown, fast, slow):
        for seconds in ("phases_s", "blocks_s", "seconds_by_kind"):
            assert sum(figures[seconds].values()) == pytest.approx(figures["step_s"])
    assert fast["bottleneck"].startswith("elementwise: ")
    assert slow["bottleneck"].startswith("drive: ")
    assert slow["bottleneck"].endswith("raise train.batch or memory.host, or use a faster drive")


def test_the_disk_above_the_directory_counts() -> None:
    other = DISK.format(read=1e13)
    own = DISK.format(read=1e9).replace("/data", "/data/scratch")
    Path("cluster.toml").write_text(CLUSTER + other + own)
    cluster, busy_s = Cluster.load("cluster.toml"), []
    for directory in ("/data/scratch/below", "/data", "elsewhere"):
        job = Job.load(EXAMPLE, sets=[f"memory.ssd={directory}"])
        busy_s.append(job.plan(cluster, nproc=1).figures["drive"]["busy_s"])
    assert busy_s[0] > 10 * busy_s[1]
    assert busy_s[1] == busy_s[2]


def test_plans_and_dry_runs_say_bytes_per_day(commands: Commands) -> None:
    figures = planned(DISK.format(read=1e9))
    tiers = figures["memory_tiers"]
    assert tiers["host_bytes"] == 225_000_000
    assert figures["memory_per_rank"]["peak_bytes"] <= tiers["host_bytes"]
    plan = ["plan", str(EXAMPLE), "--cluster", "cluster.toml", "--nproc", "1", "--out", "plan.json"]
    rows = []
    for line in (plan, [*DRY_RUN, "--plan", "plan.json"], DRY_RUN):
        text = commands.output(line)
        rows.append(re.findall(r"^(?:memory budget|expert state|drive) {2,}(.*)", text, re.M))
    assert rows[0] == rows[1]
    assert [re.sub("; .* takes .* and all", "", row) for row in rows[2]] == [
        re.sub("; .* takes .* and all", "", row) for row in rows[0]
    ]
    assert "per day if a step takes a second and all experts have tokens" in rows[2][2]


def test_a_slow_file_system_is_warned_of_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    (tmp_path / "mounts").write_text("1 0 0:1 / / rw - tmpfs none rw\n")
    monkeypatch.setattr("moesaic.base.file_system._MOUNTS", tmp_path / "mounts")
    words = "warning: memory.ssd = 'build/memory/scratch' is on tmpfs, which is memory itself: "
    assert commands.run(DRY_RUN).err.startswith(words)


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


@pytest.mark.parametrize("residency", ["next-use", "lru"])
def test_groups_that_repeat_are_skipped_to_the_same_figures(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, residency: str
) -> None:
    sets = ("train.batch=32", "train.micro_batches=16", f"memory.residency={residency}")
    arguments = [word for one in sets for word in ("--set", one)]
    smallest = dry_run(commands, *arguments)["memory_tiers"]["smallest_budget_bytes"]
    arguments += ["--set", f"memory.host={smallest + 40_000_000}B"]
    skipped, groups = list[dict[str, Any]](), list[int]()
    pass_group = memory_replay._Replay._group

    def count(replay: Any, *arguments: Any, **options: Any) -> Any:
        groups[-1] += 1
        return pass_group(replay, *arguments, **options)

    monkeypatch.setattr(memory_replay._Replay, "_group", count)
    for repeating in (memory_replay._REPEATING, ()):
        monkeypatch.setattr(memory_replay, "_REPEATING", repeating)
        groups.append(0)
        skipped.append(dry_run(commands, *arguments)["memory_tiers"])
    assert skipped[0] == skipped[1]
    assert skipped[0]["micro_batches_together"] < 8
    assert groups[0] < 0.7 * groups[1]


def test_training_refuses_what_exceeds_the_machine_and_warns_of_what_exceeds_its_rest(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("job.toml").write_text(RUN_JOB)
    Path("text.txt").write_text("words and more words " * 40)
    monkeypatch.setattr(memory_here, "free_memory_bytes", lambda: 2**16)
    line = "train job.toml --out run"
    verdict = commands.run(f"{line} --dry-run", status=3).out.splitlines()[0]
    assert verdict.startswith("DOES NOT FIT: ")
    with monkeypatch.context() as patch:
        patch.setattr(memory_here, "memory_limit_bytes", lambda: 2**16)
        assert commands.run(line, status=3).err.endswith(f"error: {verdict}\n")
        assert not Path("run").exists()
        with pytest.raises(DoesNotFitError):
            Job.load("job.toml").train(out="run", output=None)
    with monkeypatch.context() as patch:  # Every line of progress is due, on a terminal.
        clock = SimpleNamespace(monotonic=partial(next, itertools.count(1e9, 1e3)))
        patch.setattr(plan_search, "time", clock)
        patch.setattr(memory_here, "memory_limit_bytes", lambda: 2**16)
        words = "searching for a change that fits: "
        assert words not in commands.run(line, status=3).err
        patch.setenv("FORCE_COLOR", "1")
        shown = commands.run(line, status=3)
        assert words in shown.err
        assert words not in shown.out
        with pytest.raises(DoesNotFitError):
            Job.load("job.toml").train(out="run", output=None)
        assert words not in capfd.readouterr().err
    assert f"warning: {verdict}. Training starts" in commands.run(line).err
    with monkeypatch.context() as patch:
        patch.setattr(memory_here, "memory_limit_bytes", lambda: 2**16)
        resumed = commands.run("train --out run --resume --change --set train.steps=6", status=3)
    assert verdict.split(";")[0] in resumed.err
