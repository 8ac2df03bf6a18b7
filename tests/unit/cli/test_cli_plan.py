"""`moesaic plan`: a job on machines that are not there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli import outlook
from moesaic.cli.main import main
from moesaic.facts.plan import load_plan

JOB = """
[model]
preset = "olmoe-1b-7b"

[layout]
ep = 8

[data]
path = "nowhere"
sequence = 4096

[train]
steps = 10
batch = 64
micro_batches = 2
precision = "bf16"
"""

CLUSTER = """
name = "two nodes"

[[hosts]]
name = "node"
preset = "h100-8"
replicas = 2

[[links]]
ends = ["*", "*"]
kind = "infiniband"
latency_s = 5e-6
bandwidth = 4e11
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


FACTS: dict[str, Any] = {
    "step_s": 1.0, "phases_s": {"forward": 1.0}, "memory_bytes": 1, "calibration": None,
    "memory_per_rank": {"peak_bytes": 1},
}  # fmt: skip
LINE = ["plan", "job.toml", "--cluster", "cluster.toml"]


def test_what_a_job_says_for_nothing_is_told(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On stderr, beside facts as JSON too; of a plan's own decisions nothing is."""
    said = "layout.schedule has no effect: layout.pp = 1 makes no pipeline"
    for more in ([], ["--json"]):
        assert main([*LINE, *more, "--set", "layout.schedule=gpipe"]) == 0
        assert said in capfd.readouterr().err.replace("\n", " ")
        assert main([*LINE, *more, "--layout", "pp=2,schedule=gpipe"]) == 0
        assert "has no effect" not in capfd.readouterr().err


def test_it_says_what_binds_and_writes_a_timeline(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "cluster.toml").write_text(CLUSTER.replace("replicas = 2", "replicas = 4"))
    assert main([*LINE, "--trace", "step.json"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("32 ranks on two nodes (NVIDIA H100")
    assert "computed, not measured" in said
    assert "binds              passes over memory: " in said
    assert re.search(r"\nmessages +\d+ a step, 60 of them sums of gradients\n", said)
    assert "parameters         6,919,161,856, 1,282,017,280 for a token\n" in said
    assert "whole run          10 steps in " in said
    assert " GiB by the host that writes most, and not every host has a disk in the" in said
    assert "% of what its device multiplies at best\n" in said
    assert said.endswith("timeline           step.json, for ui.perfetto.dev\n")
    events = json.loads((place / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))
    assert main([*LINE, "--out", "never.json", "--trace", "never too.json", "--dry-run"]) == 0
    assert not list(place.glob("never*"))


def test_it_writes_the_plan(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = [*LINE, "--layout", "ep=4, shard=2", "--set", "train.recompute=true"]
    assert main([*line, "--out", "plan.json"]) == 0
    said = capfd.readouterr().out
    train = "moesaic train job.toml --set train.recompute=true --plan plan.json\n"
    assert said.endswith(f"next               {train}")
    plan = load_plan(place / "plan.json")
    assert (plan.ranks, plan.ep, plan.shard, plan.recompute, plan.micro_batches) == (
        16, 4, 2, True, 2,
    )  # fmt: skip
    assert [one.host for one in plan.places] == ["node-0"] * 8 + ["node-1"] * 8
    assert {one.kind for one in plan.places} == {"gpu"}
    assert main([*line, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert plan.predictions is not None
    assert plan.predictions.cluster == "two nodes"
    assert plan.predictions.step_s == pytest.approx(facts["step_s"], rel=1e-4)
    assert plan.predictions.phases_s.keys() == facts["phases_s"].keys()
    assert plan.predictions.memory_bytes["peak"] == facts["memory_per_rank"]["peak_bytes"]


@pytest.mark.parametrize("layout", ["ep=16", "ep=8", "ep=16,pp=2,schedule=interleaved"])
def test_tokens_travel_in_the_way_that_is_shortest(
    place: Path, capfd: pytest.CaptureFixture[str], layout: str
) -> None:
    del place

    def told(*more: str) -> dict[str, Any]:
        words = ",".join((layout, *more))
        assert main([*LINE, "--layout", words, "--nproc", "16" if "pp" not in layout else "32",
                     "--json"]) == 0  # fmt: skip
        facts: dict[str, Any] = json.loads(capfd.readouterr().out)
        return facts

    if "pp" in layout:
        Path("cluster.toml").write_text(CLUSTER.replace("replicas = 2", "replicas = 4"))
    ways = ["dispatch=rows", "dispatch=visits"]
    if "ep=16" in layout:
        ways += [f"{way},hosts=2" for way in ways]
    whole = "chunks=1", "local=along"
    free, pinned = told(*whole), [told(way, *whole) for way in ways]
    steps_s = sorted(one["step_s"] for one in pinned)
    assert free["step_s"] == steps_s[0]
    assert len(set(steps_s)) == len(pinned)
    more_s = sorted(way["more_s"] for way in free["other_ways"])
    assert more_s == pytest.approx([one - steps_s[0] for one in steps_s[1:]], rel=0.2)
    assert not any(one["other_ways"] for one in pinned)


@pytest.mark.parametrize(
    "pipeline", ["", pytest.param(",pp=2,schedule=1f1b", marks=pytest.mark.soak)]
)
def test_tokens_go_in_as_many_parts_and_beside_as_much_as_is_shortest(
    place: Path, capfd: pytest.CaptureFixture[str], pipeline: str
) -> None:
    del place
    if pipeline:
        Path("cluster.toml").write_text(CLUSTER.replace("replicas = 2", "replicas = 4"))
    layout = f"ep=16,dispatch=visits,hosts=2{pipeline}"
    parts = 16 if pipeline else 32
    larger = ["--set", f"train.batch={32 * parts}", "--set", f"train.micro_batches={parts}"]

    def told(*more: str) -> str:
        line = [*LINE, *larger, "--layout", ",".join((layout, *more))]
        assert main([*line, "--nproc", "32" if pipeline else "16", *as_json]) == 0
        return capfd.readouterr().out

    as_json = ["--json"]
    facts = {
        (num, local): json.loads(told(f"chunks={num}", f"local={local}"))
        for num in (1, 2, 4, 8)
        for local in ("along", "first")
    }
    steps_s = {way: one["step_s"] for way, one in facts.items()}
    assert len(set(steps_s.values())) == len(steps_s)
    best = min(steps_s, key=lambda way: steps_s[way])
    assert best != (1, "along")
    free = json.loads(told())
    assert (free["plan"]["chunks"], free["plan"]["local"]) == best
    assert free["step_s"] == steps_s[best]
    (other,) = free["other_ways"]
    assert [other[key] for key in ("dispatch", "hosts", "chunks", "local")] == [
        "visits", 2, 1, "along",
    ]  # fmt: skip
    assert other["more_s"] == pytest.approx(steps_s[1, "along"] - steps_s[best], rel=0.2)
    assert not any(one["other_ways"] for one in facts.values())
    for pinned, choices in (("chunks=2", [2]), ("local=first", [1, 2, 4, 8])):
        plan = json.loads(told(pinned))["plan"]
        left = {way: s for way, s in steps_s.items() if way[0] in choices}
        if "local" in pinned:
            left = {way: s for way, s in left.items() if way[1] == "first"}
        assert (plan["chunks"], plan["local"]) == min(left, key=lambda way: left[way])
    as_json = []
    parts, beside = f" in {best[0]} parts" * (best[0] > 1), best[1] == "first"
    words = f"once to each of 2 hosts{parts}{' while local ones are computed' * beside}"
    (line,) = [line for line in told().splitlines() if line.startswith("tokens travel")]
    assert f" {words}; longer by about " in line
    one, along = " in one part" * (best[0] > 1), " together with local ones" * beside
    assert line.endswith(f" if once to each of 2 hosts{one}{along}")


@pytest.mark.parametrize("layout", ["ep=16", "pp=2,schedule=gpipe", "shard=16"])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_have_as_much_of_the_embedding_as_is_shortest(
    place: Path, capfd: pytest.CaptureFixture[str], layout: str, tied: bool
) -> None:
    del place
    pinned = layout + ",chunks=1,local=along,dispatch=rows" * ("ep" in layout)

    def told(*more: str) -> str:
        line = [*LINE, "--nproc", "16", "--set", f"model.tied={str(tied).lower()}", *as_json]
        assert main([*line, "--layout", ",".join((pinned, *more))]) == 0
        return capfd.readouterr().out

    as_json = ["--json"]
    facts = {one: json.loads(told(f"embedding={one}")) for one in ("whole", "columns")}
    steps_s = {one: found["step_s"] for one, found in facts.items()}
    assert steps_s["whole"] != steps_s["columns"]
    free = json.loads(told())
    assert free["plan"]["embedding"] == min(steps_s, key=lambda one: steps_s[one])
    assert free["step_s"] == min(steps_s.values())
    as_json = []
    said = f", the embedding's columns over {8 if 'pp' in layout else 16}"
    assert said in told("embedding=columns")
    assert said not in told("embedding=whole")
    other = free["other_embedding"]
    assert {free["plan"]["embedding"], other["embedding"]} == {"whole", "columns"}
    assert other["fits"]
    assert other["more_s"] == pytest.approx(max(steps_s.values()) - free["step_s"])
    assert all(one["other_embedding"] is None for one in facts.values())
    (line,) = [line for line in told().splitlines() if line.startswith("embedding  ")]
    words = {"whole": "whole on every rank", "columns": "columns of it on each rank"}
    assert f" {words[free['plan']['embedding']]}; longer by about " in line
    assert line.endswith(f" if {words[other['embedding']]}")


def test_hosts_that_are_not_there_are_told(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    del place
    line = [*LINE, "--nproc", "16", "--set", "layout.chunks=1",
            "--set", "layout.local=along", "--layout"]  # fmt: skip
    assert main([*line, "ep=16,dispatch=visits,hosts=2"]) == 0
    said = capfd.readouterr()
    assert "tokens travel      once to each of 2 hosts\n" in said.out
    assert "hosts =" not in said.err
    assert main([*line, "ep=16,dispatch=visits,hosts=4"]) == 0
    assert "hosts = 4, but the ranks that share out the experts are on 2 hosts" in (
        capfd.readouterr().err
    )
    assert main([*line, "ep=8,dispatch=visits,hosts=2"]) == 0
    assert "on one host, or unevenly on several" in capfd.readouterr().err
    for dispatch in ("rows", "visits"):
        assert main([*line, f"ep=8,dispatch={dispatch},hosts=8"]) == 0
        assert (
            "hosts = 8, but the ranks that share out the experts are on one host, or unevenly on "
            "several: tokens go straight, as without it, so leave layout.hosts out\n"
        ) in capfd.readouterr().err
    assert main([*line, "ep=16,hosts=1"]) == 0
    for layout, words in (
        ("ep=16,hosts=2", 'layout.hosts = 2 with layout.dispatch = "auto", which finds the hosts'),
        (
            "ep=8,dispatch=rows,hosts=3",
            "does not divide layout.ep = 8, and each host has as many of",
        ),
    ):
        assert main([*line, layout]) == 2
        assert words in capfd.readouterr().err
    for layout in ("ep=1,dispatch=rows,hosts=2", "ep=1,hosts=2"):
        assert main([*line, layout]) == 0
        assert "layout.hosts has no effect: layout.ep = 1" in capfd.readouterr().err.replace(
            "\n", " "
        )


def test_kernels_are_for_gpus_and_eight_bits_are_the_jobs(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks on a CPU have none; the command that trains by a plan says eight bits again."""
    (place / "cpu.toml").write_text(
        'name = "here"\n[[hosts]]\nname = "here"\nmemory_bytes = 1e12\n[[hosts.devices]]\n'
        'kind = "cpu"\nmodel = "8 cores"\ncount = 8\nmemory_bytes = 1e12\nmemory_bandwidth = 1e10\n'
        'matmul = [{ dtype = "bf16", flops = 1e12 }, { dtype = "fp32", flops = 1e12 }]\n'
        '[[links]]\nends = ["here", "here"]\nkind = "loopback"\nlatency_s = 1e-5\nbandwidth = 1e9\n'
    )
    on_cpu = ["plan", "job.toml", "--cluster", "cpu.toml", "--nproc", "8", "--layout", "ep=8"]
    assert main([*on_cpu, "--set", "kernels.grouped_mm=torch"]) == 0
    capfd.readouterr()
    for by in ("triton", "fp8"):
        assert main([*on_cpu, "--set", f"kernels.grouped_mm={by}"]) == 2
        words = f'kernels.grouped_mm = "{by}" is for GPUs, and rank 0 would compute on 8 cores'
        assert words in capfd.readouterr().err.replace("\n", " ")
    (place / "nowhere").write_text("some text")
    line = [*LINE, "--nproc", "8", "--set", "train.batch=32"]
    assert main([*line, "--set", "kernels.grouped_mm=fp8", "--out", "fp8.json"]) == 0
    (said,) = [one for one in capfd.readouterr().out.splitlines() if one.startswith("next ")]
    assert "--set train.batch=32 --set kernels.grouped_mm=fp8 --plan" in said
    assert main([*said.split()[2:], "--dry-run"]) == 0, capfd.readouterr().err


def test_a_plan_that_was_edited_is_costed(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As it stands, on the cluster that it was made for, by the layout that it decides."""
    assert main([*LINE, "--nproc", "8", "--layout", "ep=4", "--out", "plan.json"]) == 0
    raw = json.loads((place / "plan.json").read_text())
    before_s = raw["predictions"]["step_s"]
    raw["recompute"], raw["homes"] = True, raw["homes"][::-1]
    (place / "edited.json").write_text(json.dumps(raw))
    assert main([*LINE, "--plan", "edited.json", "--out", "new.json"]) == 0
    said = capfd.readouterr().out
    assert "8 ranks on two nodes" in said
    assert "experts over 4" in said
    new = load_plan(place / "new.json")
    assert new.predictions is not None
    assert new.predictions.step_s > before_s
    assert (new.recompute, new.homes_by_rank) == (True, raw["homes"])
    assert main([*LINE, "--plan", "new.json", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["step_s"] == pytest.approx(
        new.predictions.step_s, rel=1e-4
    )
    (place / "other.toml").write_text(CLUSTER.replace("h100-8", "a100-8"))
    for flags, words in (
        (["--nproc", "4"], "--plan 'edited.json' is for 8 ranks, and --nproc is 4: leave --npr"),
        (["--layout", "ep=2"], "--set layout.ep=2 beside --plan 'edited.json', which has ep = 4"),
        (["--cluster", "other.toml"], "rank 0 is planned for a 'NVIDIA H100 SXM5', but it "),
    ):
        assert main([*LINE, "--plan", "edited.json", *flags]) == 2
        assert words in capfd.readouterr().err


def test_many_blocks_stand_in_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--nproc", "8"]) == 0
    said = capfd.readouterr().out
    assert "\n  layers.*.attention " in said
    assert " ms each, 16 of them\n" in said
    assert said.count("\n  layers.") <= 4
    blocks = {f"layers.{index}.moe": 1e-3 * (40 - index) for index in range(40)}
    outlook.tell("Some", FACTS | {"blocks_s": blocks}, {})
    said = capfd.readouterr().out
    assert "  layers.0.moe     40.00 ms\n" in said
    assert said.count("\n  layers.") == 16
    assert "  others           less; 24 more lines, see --json\n" in said


def test_a_plan_tells_the_step_on_a_clock(place: Path) -> None:
    slow = '\n[[hosts]]\nname = "slow"\npreset = "a100-8"\n'
    uneven = CLUSTER.replace("replicas = 2\n", slow)
    (place / "uneven.toml").write_text(uneven)
    for cluster, ranks in (("cluster.toml", [0]), ("uneven.toml", [8, 0])):
        (place / "plan.json").unlink(missing_ok=True)
        line = ["plan", "job.toml", "--cluster", cluster, "--out", "plan.json"]
        # Of a table that every rank has, sums are the last, and somebody waits for them.
        line += ["--set", "train.micro_batches=4", "--set", "layout.embedding=whole"]
        assert main(line) == 0
        found = load_plan(place / "plan.json").predictions
        assert found is not None
        assert [told.rank for told in found.timeline] == ranks
        last, *others = found.timeline
        assert last.seconds == pytest.approx(found.step_s, rel=1e-4)
        for phase, seconds in found.phases_s.items():
            told = sum(span.seconds for span in last.spans if span.phase == phase)
            assert told == pytest.approx(seconds, rel=1e-4)
        assert list(dict.fromkeys(span.phase for span in last.spans)) == [
            "data", "forward", "backward", "reduce", "clip", "optimizer", "log",
        ]  # fmt: skip
        assert max(span.micro_batches for span in last.spans) == 3
        assert all(any(span.waiting_s for span in other.spans) for other in others)
        lines = (place / "plan.json").read_text().splitlines()
        spans = sum(len(told.spans) for told in found.timeline)
        assert sum(line.strip().startswith('{"phase": ') for line in lines) == spans


@pytest.mark.parametrize(
    ("schedule", "form"),
    [("gpipe", 3 / 11), ("1f1b", 3 / 11), ("interleaved", 3 / 19), ("zero-bubble", 3 / 27)],
)
def test_a_pipeline_says_how_much_of_it_is_waiting(
    place: Path, capfd: pytest.CaptureFixture[str], schedule: str, form: float
) -> None:
    line = [*LINE, "--layout", f"pp=4,ep=4,schedule={schedule}", "--set", "train.micro_batches=8"]
    assert main([*line, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["pipeline"]["closed_form"] == pytest.approx(form)
    # The last part has the head too, and all others wait for it.
    assert form < facts["pipeline"]["bubble"] < 0.6
    assert list(facts["phases_s"]) == ["data", "pipeline", "reduce", "clip", "optimizer", "log"]
    assert sum(facts["phases_s"].values()) == pytest.approx(facts["step_s"])
    assert len(facts["blocks_s"]) == 1 + 2 * 16 + 2
    assert min(facts["blocks_s"].values()) > 0
    assert main([*line, "--trace", "step.json", "--out", "plan.json"]) == 0
    bubble = f"bubble {facts['pipeline']['bubble']:.0%} (closed form {form:.0%})"
    assert f"pipeline           4 parts, {schedule}, 8 micro-batches: {bubble}\n" in (
        capfd.readouterr().out
    )
    events = json.loads((place / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))
    names = {event["name"] for event in events}
    assert {"embed forward 0", "layers.15.moe forward 7", "step activations 0"} <= names
    found = load_plan(place / "plan.json").predictions
    assert found is not None
    assert found.phases_s["pipeline"] == pytest.approx(facts["phases_s"]["pipeline"], rel=1e-4)
    first = found.timeline[-1]
    assert first.rank == 0
    told = sum(span.seconds for span in first.spans if span.phase == "pipeline")
    assert told == pytest.approx(found.phases_s["pipeline"], rel=1e-4)


def test_a_trace_of_a_pipeline_has_ranks_of_every_part(place: Path) -> None:
    (place / "cluster.toml").write_text(CLUSTER.replace("replicas = 2", "replicas = 8"))
    line = [*LINE, "--layout", "pp=2,ep=8", "--set", "train.micro_batches=4"]
    assert main([*line, "--trace", "step.json"]) == 0
    events = json.loads((place / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {*range(8), *range(32, 40)}


def test_matrices_in_slices_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--layout", "tp=2"]) == 0
    assert ", dense parameters on every rank, matrices over 2; computed" in capfd.readouterr().out


def test_json_has_every_figure(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--json", "--nproc", "8"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["plan"]["ranks"] == 8
    assert [one["host"] for one in facts["plan"]["places"]] == ["node-0"] * 8
    assert facts["parameters"]["total"] == 6_919_161_856
    assert sum(facts["phases_s"].values()) == pytest.approx(facts["step_s"])
    assert sum(facts["blocks_s"].values()) == pytest.approx(facts["step_s"])
    assert facts["tokens_per_s"] == pytest.approx(64 * 4096 / facts["step_s"])
    assert facts["price_per_billion_tokens"] == 0.0
    # Six flops for each active parameter and token, but for the embedding, and a quarter for
    # attention over 4,096 tokens in full.
    flops = 6 * 1_282_017_280 * 64 * 4096 / 8
    assert 0.9 < facts["utilisation"] * facts["step_s"] * 9.9e14 / flops < 1.5


def test_a_job_that_does_not_fit_is_told_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--json", "--set", "layout.ep=1"]) == 0
    told = capfd.readouterr()
    facts = json.loads(told.out)
    assert facts["fits"] is False
    assert facts["binds"].startswith("memory: rank 0 needs ")
    assert "; it fits with layout." in facts["binds"]
    assert told.err == f"warning: it does not fit: {facts['binds']}\n"
    assert main([*LINE, "--json", "--set", "train.batch=1024", "--layout", "ep=4"]) == 0
    found = json.loads(capfd.readouterr().out)["binds"]
    remedies = re.search(r"; it fits with (.*) \(([0-9.]+) GiB\)$", found)
    assert remedies is not None
    said = {"train.batch": "1024", "layout.ep": "4"}
    said |= dict(change.replace('"', "").split(" = ") for change in remedies[1].split(" and "))
    assert main([*LINE, "--json", *(f"--set={key}={value}" for key, value in said.items())]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["fits"]
    needed = facts["memory_per_rank"]["peak_bytes"] / 2**30
    assert needed == pytest.approx(float(remedies[2]), abs=0.05)
    done = ["--layout", "ep=16,shard=all", "--set", "train.recompute=true"]
    long = [f"--set={key}=100000000" for key in ("data.sequence", "model.max_positions")]
    assert main([*LINE, *done, *long, "--out", "plan.json"]) == 0
    said = capfd.readouterr().out
    assert "; take devices with more memory, or more ranks for layout.pp to cut" in said
    assert "\nnext" not in said


def test_a_pipeline_whose_slices_have_no_samples(capfd: pytest.CaptureFixture[str]) -> None:
    line = [*LINE, "--json", "--layout", "ep=1,pp=2,tp=2,schedule=gpipe"]
    line += ["--set", "train.batch=1", "--set", "train.micro_batches=1"]
    assert main(line) == 0
    assert "have no sample in a micro-batch" in capfd.readouterr().err


def test_figures_in_other_units_are_doubted(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = re.sub(r"bandwidth = [0-9.e]+", "bandwidth = 12.5", CLUSTER)
    (place / "cluster.toml").write_text(slow)
    assert main([*LINE, "--json"]) == 0
    said = capfd.readouterr().err
    assert "warning: bandwidth = 12.5 of the link of ['" in said
    assert "is read as 12.5 bytes/s: is it meant so?" in said


def test_ranks_without_tokens_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--json", "--set", "train.micro_batches=8"]) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["idle_ranks"] == 8
    assert (
        "warning: 8 of 16 ranks have no sample in a micro-batch (train.batch = 64, "
        "train.micro_batches = 8): lower train.micro_batches to 4, or raise train.batch to 128\n"
    ) in told.err


def test_every_rank_is_held_against_its_own_device(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The slow host has room for all; the fast one, which nobody waits for, has hardly any."""
    slow = "devices = { count = 1, memory_bytes = 1e13, memory_bandwidth = 1e10 }"
    fast = "devices = { count = 1, memory_bytes = 1e9 }"
    hosts = "".join(
        f'[[hosts]]\nname = "{name}"\npreset = "h100-8"\n{devices}\n'
        for name, devices in (("slow", slow), ("fast", fast))
    )
    link = CLUSTER[CLUSTER.index("[[links]]") :]
    (place / "unlike.toml").write_text(f'name = "unlike"\n{hosts}\n{link}')
    line = ["plan", "job.toml", "--cluster", "unlike.toml", "--json", "--layout", "ep=2"]
    assert main(line) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["fits"], facts["memory_rank"], facts["memory_bytes"]) == (False, 1, 1e9)
    assert "rank 1 needs" in facts["binds"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan", "JOB.toml is missing"),
        ("plan job.toml", "--cluster is missing"),
        ("plan job.toml --cluster no.toml", "there is no file 'no.toml'"),
        ("plan job.toml --cluster cluster.toml --nproc 64", "error: cluster.toml: cluster"),
        ("plan job.toml --cluster cluster.toml --set layout.ep=3", "layout.ep = 3 does not divide"),
        (
            "plan job.toml --cluster cluster.toml --layout pp=2,schedule=zero-bubble --set "
            "train.recompute=true",
            "pieces that would each compute a layer again: set one of them otherwise",
        ),
        ("plan job.toml --cluster lonely.toml", "error: lonely.toml: no links lead fr"),
        (
            "plan job.toml --cluster cluster.toml --out no/where.json",
            "'no/where.json' is in a directory that",
        ),
        ("plan job.toml --cluster cluster.toml --out .", "--out '.' is a directory: name a file"),
        ("plan job.toml --cluster cluster.toml --out job.toml", "--out 'job.toml' is there alread"),
        ("plan job.toml --cluster cluster.toml --trace job.toml", "--trace 'job.toml' is there al"),
        (
            "plan job.toml --cluster cluster.toml --layout ep=2,ep=4",
            "--layout 'ep=2,ep=4' says ep twice: leave one out",
        ),
        ("plan job.toml --cluster cluster.toml --out /dev/null", "is no plain file: name another"),
        ("plan job.toml --cluster endless.toml --out a", "a step on cluster 'two nodes' would"),
        (
            "plan job.toml --cluster cluster.toml --out a --trace no/b",
            "--trace 'no/b' is in a directory that is not there: make it first",
        ),
        ("plan job.toml --cluster cluster.toml --out a --trace ./a", "are both 'a': name two file"),
        ("plan job.toml --cluster cluster.toml --nproc 0", "invalid value for '--nproc': Input"),
        ("plan job.toml --cluster cluster.toml --nproc -8", "invalid value for '--nproc': Input"),
        ("plan job.toml --cluster cluster.toml --layout ep", "--layout 'ep' is not of the form"),
        ("plan job.toml --cluster cluster.toml --layout ep=3", "layout.ep = 3 does not divide"),
        (
            "plan job.toml --cluster cluster.toml --layout ep=2 --set layout.ep=4",
            "--layout ep=2 and --set layout.ep=4 say the same key: leave one out",
        ),
        ("plan job.toml --cluster cluster.toml --layout eq=3", "'layout' has the keys ep, shard"),
        ("plan job.toml --cluster cluster.toml --trace no/where.json", "--trace 'no/where.json'"),
        (
            "plan job.toml --cluster cluster.toml --set train.precision=fp64 --set model.experts=0",
            "experts",
        ),
    ],
)
def test_mistakes(line: str, words: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lonely = CLUSTER.partition("[[links]]")[0]
    (place / "lonely.toml").write_text(lonely)
    (place / "endless.toml").write_text(CLUSTER.replace("5e-6", "1e308"))
    assert main(line.split()) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    written = {one.name for one in place.iterdir()}
    assert written == {"job.toml", "cluster.toml", "lonely.toml", "endless.toml"}
