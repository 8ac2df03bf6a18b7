"""`moesaic plan --search` and its questions, `plan = "auto"` in a job, and `replay --search`."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import Commands
from moesaic import Cluster, ConfigError, Job, Run
from moesaic.api import plan_search
from moesaic.base.events import read_events
from moesaic.cli import searched
from moesaic.facts.plan import load_plan
from moesaic.kernels import device as devices
from moesaic.policy.plan.remedy import remedy_text

JOB = """
[model]
preset = "tiny-mixtral"
layers = 2
hidden = 64
head_dim = 16
ffn = 32

[data]
path = "text.txt"
sequence = 32

[train]
steps = 4
batch = 8
device = "cpu"

[schedule]
kind = "constant"

[log]
tensorboard = false
"""

CPUS = """
name = "here"

[[hosts]]
name = "here"
memory_bytes = 4e9
price_per_hour = 0.5
{devices}

[[links]]
ends = ["here", "here"]
kind = "loopback"
latency_s = 3e-5
bandwidth = 1e9
"""
DEVICE = """
[[hosts.devices]]
kind = "cpu"
model = "{model}"
count = {count}
memory_bytes = {memory}
memory_bandwidth = 1e10
reference_s = 1e-9
matmul = [{{ dtype = "fp32", flops = {flops} }}]
"""
REFERENCE_S = 1e-9
"""Seconds of the reference work in the file: so few that runs repeat it after every step."""
PINS = [
    f"--set=layout.{one}"
    for one in ("chunks=1", "dispatch=all_to_all", "overlap_local=false", "tp=1", "embedding=whole")
]
"""Pins that leave a small space."""
LINE = ["plan", "job.toml", "--cluster", "cluster.toml"]


def write_cluster(path: str = "cluster.toml", memory: float = 2e9) -> None:
    import torch

    model = devices.model(torch.device("cpu"))
    listed = [
        DEVICE.format(model=model, count=count, memory=memory, flops=1e11 / count)
        for count in (1, 2)
    ]
    Path(path).write_text(CPUS.format(devices="".join(listed)))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("words and more words " * 60)
    write_cluster()
    return tmp_path


def run_start(run: str) -> dict[str, Any]:
    events = read_events(Path(run) / "events" / "rank-0.jsonl")
    return [event for event in events if event["event"] == "run_start"][-1]


def test_a_search_keeps_what_the_job_writes(commands: Commands) -> None:
    figures = commands.facts([*LINE, "--search"])
    search = figures["search"]
    assert figures["fits"]
    assert search["is_proven"]
    assert search["pins"] == {"train.micro_batches": 1}
    assert len(search["runners_up"]) > 1
    losses = [one["loses_s"] for one in search["runners_up"]]
    assert losses == sorted(losses)
    pinned = commands.facts([*LINE, "--search", "--set", "layout.ep=2"])
    assert pinned["plan"]["ep"] == 2
    assert pinned["search"]["pins"]["layout.ep"] == 2
    assert pinned["step_s"] >= figures["step_s"] * (1 - 1e-9)
    planned = Job.load("job.toml").plan(Cluster.load("cluster.toml"), search=True)
    assert planned.plan.decisions() == figures["plan"]
    assert planned.found is not None
    assert planned.found.best is not None
    assert planned.found.best.estimate.step_s == pytest.approx(figures["step_s"], rel=1e-9)
    per_million = 0.5 / 3600 / figures["tokens_per_s"] * 1e6
    assert figures["price_per_million_tokens"] == pytest.approx(per_million)
    text = commands.output([*LINE, "--search"])
    assert text.startswith("fits: ")
    assert "proven: no layout is faster by prediction" in text
    assert "\nrunner-up " in text
    assert " per million tokens, " in text


def test_micro_batches_are_free_only_if_the_job_says_so(commands: Commands) -> None:
    line = [*LINE, "--search", "--set", "train.micro_batches=auto", *PINS]
    figures = commands.facts([*line, "--out", "plan.json"])
    assert "train.micro_batches" in figures["search"]["chosen"]
    assert load_plan(Path("plan.json")).micro_batches == figures["plan"]["micro_batches"]
    words = 'train.micro_batches = "auto" needs a search'
    assert words in commands.refusal([*LINE, "--set", "train.micro_batches=auto"])
    refusal = commands.refusal(
        ["train", "job.toml", "--set", "train.micro_batches=auto", "--set", "layout.ep=1"]
    )
    assert words in refusal


def test_nothing_fits(commands: Commands) -> None:
    """The status is 3, and the change that is named makes the job fit."""
    write_cluster(memory=6e6)
    line = [*LINE, "--search", "--set", "train.batch=64", *PINS]
    captured = commands.run(line, status=3)
    assert captured.out.startswith("DOES NOT FIT: ")
    figures = json.loads(commands.run([*line, "--json"], status=3).out)
    short = figures["search"]["shortfall"]
    assert not figures["fits"]
    assert short["short_bytes"] > 0
    remedy = figures["remedy"]
    assert remedy["fits"]
    sets = [f"--set={key}={json.dumps(value)}" for key, value in remedy["changes"].items()]
    assert all(f"{key} = " in captured.out for key in remedy["changes"])
    changed = commands.facts([*line, *sets])
    assert changed["memory_per_rank"]["peak_bytes"] == remedy["peak_bytes"]


def test_questions(commands: Commands) -> None:
    """Reasons for a block, two layouts side by side, the largest model."""
    why = commands.facts([*LINE, "--search", "--why", "layers.0.moe", *PINS])
    assert sum(one["busy_s"] + one["waiting_s"] for one in why["events"]) == pytest.approx(
        why["seconds"]
    )
    assert why["others"]
    assert 'did you mean "layers.0.moe"' in commands.refusal([*LINE, "--why", "layers.0.mow"])
    both = commands.facts([*LINE, "--compare", "ep=2", "dp_shard=2"])
    assert both["settings"]["ep"] == [2, 1]
    layouts = [["--set", f"layout.{one}"] for one in ("ep=2", "dp_shard=2")]
    steps_s = [commands.facts([*LINE, *one])["step_s"] for one in layouts]
    assert both["step_s"] == steps_s
    assert both["speedup"] == pytest.approx(steps_s[0] / steps_s[1])
    kinds = both["seconds_by_kind"].values()
    assert [sum(seconds) for seconds in zip(*kinds, strict=True)] == pytest.approx(steps_s)
    alike = commands.output([*LINE, "--compare", "ep=2", "ep=2,dp_shard=1"])
    assert alike.startswith("both fit and are equally fast; ")
    assert "same" in alike
    faster = commands.output([*LINE, "--compare", "ep=2", "dp_shard=2"])
    assert re.match(r"both fit: \S+ is [0-9.]+ times as fast as \S+, mostly by ", faster)
    assert "is neither a plan file nor a layout" in commands.refusal([*LINE, "--compare", "a", "b"])
    write_cluster(memory=1.5e7)
    largest = commands.facts([*LINE, "--fit", "model", "--nproc", "1"])
    assert largest["size"] > largest["own"]
    sets = ["--set", f"model.experts={largest['next_size']}", "--nproc", "1"]
    commands.run([*LINE, "--search", *sets], status=3)


def test_layouts_that_do_not_fit_are_compared_by_memory(commands: Commands) -> None:
    """The verdict comes first, and a dash stands for what cannot be reached."""
    line = [*LINE, "--set", "train.batch=64", *PINS, "--compare", "ep=2", "dp_shard=2"]
    peaks = sorted(commands.facts(line)["peak_bytes"])
    write_cluster(memory=sum(peaks) / 2)
    one = commands.facts(line)
    assert sorted(one["fits"]) == [False, True]
    for pair in (one["step_s"], one["price_per_million_tokens"], *one["seconds_by_kind"].values()):
        assert [value is not None for value in pair] == one["fits"]
    assert one["speedup"] is None
    verdict, *rows = commands.output(line).splitlines()
    assert re.fullmatch(r"DOES NOT FIT: (\S+); (?!\1)\S+ fits", verdict)
    cells = next(row.split() for row in rows if row.startswith("  step "))[1:]
    assert [cell == "-" for cell in cells if cell not in ("s", "ms")].count(True) == 1
    write_cluster(memory=peaks[0] / 2)
    told = commands.run(line, status=3).out
    both = json.loads(commands.run([*line, "--json"], status=3).out)
    at = both["peak_bytes"].index(min(both["peak_bytes"]))
    words = f"nearer is {both['names'][at]}; {remedy_text(both['remedy'][at])}"
    assert told.startswith(f"DOES NOT FIT: ep=2 and dp_shard=2; {words}\n")
    for fits in (True, False):  # A remedy that fits counts more than memory.
        remedies = list(both["remedy"])
        remedies[at] = {**remedies[at], "fits": fits}
        words = searched._nearer(both["names"], {**both, "remedy": remedies})
        assert words.startswith(f"nearer is {both['names'][at if fits else 1 - at]}; ")
    changes = [f"--set={key}={value}" for key, value in both["remedy"][at]["changes"].items()]
    own = "layout.ep=2" if at == 0 else "layout.dp_shard=2"
    commands.run([*line[: line.index("--compare")], f"--set={own}", *changes])
    assert "  step " not in told
    assert "tokens per second" not in told
    assert len(re.findall(r"[0-9.]+ of [0-9.]+ MiB \(too much\)", told)) == 2


def test_parts_of_a_cluster(commands: Commands) -> None:
    """The cheapest part per hour has its fastest plan; all parts are searched for --min-cost."""
    part = commands.facts([*LINE, "--fit", "cluster"])
    assert part["plan"]["ranks"] == 2
    (only,) = part["cluster_parts"]
    fastest = commands.facts([*LINE, "--search", "--nproc", "2"])
    assert only["tokens_per_s"] == pytest.approx(fastest["tokens_per_s"])
    told = commands.output([*LINE, "--fit", "cluster"])
    assert "for the least price per token ask --min-cost" in told.splitlines()[0]
    reached = commands.facts([*LINE, "--min-cost", "--floor", "10", *PINS])
    prices = [one["price_per_million_tokens"] for one in reached["cluster_parts"]]
    assert reached["price_per_million_tokens"] == pytest.approx(min(prices))
    told = commands.output([*LINE, "--min-cost", "--floor", "10", *PINS]).splitlines()[0]
    ties = sum(price <= 1.05 * min(prices) for price in prices) - 1
    assert "the least price per token of the parts below with 10 tokens/s or more" in told
    assert told.endswith(" within 5% of it") == (ties > 0)
    unpriced = [*LINE[:-1], "h100-8"]
    assert "--min-cost needs prices" in commands.refusal([*unpriced, "--min-cost", *PINS])
    beyond = commands.run([*LINE, "--min-cost", "--floor", "1e12", *PINS], status=3)
    assert beyond.out.startswith("no part reaches 1,000,000,000,000 tokens/s; the most is ")
    write_cluster(memory=6e6)
    wide = [*LINE, "--set", "train.batch=64", *PINS]
    unfit = commands.run([*wide, "--fit", "cluster"], status=3).out
    assert "does not fit" in unfit
    assert "within its work" not in unfit


@pytest.mark.parametrize("question", ["--fit cluster", "--min-cost"])
def test_progress_names_the_part_that_is_searched(
    question: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the layouts of each part anew. Every line is due."""
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(1e9, 1e3)))
    monkeypatch.setattr(plan_search, "time", clock)
    text = commands.run([*LINE, *question.split(), *PINS]).err
    found = re.findall(r"^searching (.*): ([0-9,]+) layouts? simulated in [0-9]+ s", text, re.M)
    parts = list(dict.fromkeys(part for part, _ in found))
    one = ["2 ranks on here"]
    assert parts == (one if question == "--fit cluster" else [*one, "1 rank on here"])
    for part in parts:
        numbers = [int(number) for name, number in found if name == part]
        assert numbers[0] <= 1 < len(numbers)
        assert numbers[-1] >= 1


@pytest.mark.parametrize("question", ["", "--compare ep=1 tp=2", "dry run"])
def test_a_terminal_shows_that_a_remedy_is_searched(
    question: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, and beside JSON, nothing is shown. Every line is due."""
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(1e9, 1e3)))
    monkeypatch.setattr(plan_search, "time", clock)
    write_cluster(memory=3e6)
    line = [*LINE, *question.split()]
    if question == "dry run":
        line = ["train", "job.toml", "--dry-run", "--cluster", "cluster.toml", "--set=plan=layout"]
    words = "searching for a change that fits: "
    assert words not in commands.run(line, status=3).err
    monkeypatch.setenv("FORCE_COLOR", "1")  # So says a terminal.
    shown = commands.run(line, status=3)
    assert re.search(rf"{words}[0-9]+ s", shown.err)
    assert words not in shown.out
    assert words not in commands.run([*line, "--json"], status=3).err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--search --plan plan.json", "--search cannot be combined with --plan: remove one"),
        ("--method mcmc", "--method mcmc belongs to --search: add it, or remove --method"),
        ("--search --method guess", 'method = "guess" is not known'),
        ("--floor 5", "--floor 5.0 belongs to --min-cost: add it, or remove --floor"),
        ("--fit cluster --nproc 2", "--fit cluster cannot be combined with --nproc"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, words: str, commands: Commands) -> None:
    assert words in commands.refusal([*LINE, *flags.split()])


def test_presets_name_clusters(commands: Commands) -> None:
    text = commands.output(["plan", "job.toml", "--cluster", "2xcpu", "--nproc", "2"])
    assert text.splitlines()[1].startswith("2 x cpu (2 x Xeon")
    missing = commands.refusal(["plan", "job.toml"])
    assert "--cluster is missing: give a cluster file" in missing
    assert "h100-8" in missing


def check_reference(commands: Commands, losses: list[float]) -> None:
    """The ranks of `run` did the reference work, and no bit of it depends on that."""
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["predictions"]["reference_s"] == REFERENCE_S
    facts = Run.open("run").summary()["prediction"]
    assert facts["machine_ratio"] == pytest.approx(facts["measured"]["reference_s"] / REFERENCE_S)
    assert " during the run than in the probe; the rest, " in facts["text"]
    del plan["predictions"]
    Path("unpredicted.json").write_text(json.dumps(plan))
    without = ["train", "job.toml", "--plan", "unpredicted.json", "--out", "without"]
    commands.output(without)
    assert Run.open("without").steps()["loss"].to_pylist() == losses
    for run, steps in (("run", [1, 2, 3, 4]), ("without", [])):
        for rank in (0, 1):
            events = read_events(Path(run) / "events" / f"rank-{rank}.jsonl")
            timed = [one for one in events if "reference_s" in one]
            assert [one["step"] for one in timed] == steps
            assert all(one["reference_s"] > 0 for one in timed)


def test_a_run_searches_and_keeps_its_plan(commands: Commands) -> None:
    """The numbers are those of one rank. Pins make the space small."""
    alone = Job.load("job.toml").train(out="alone", output=None)
    train = ["train", "job.toml", "--nproc", "2", "--cluster", "cluster.toml", "--out", "run"]
    assert Job.load("job.toml").prepare(nproc=2).task.search
    assert not Job.load("job.toml").prepare(nproc=1).task.search
    text = commands.output([*train, "--set=plan=auto", *PINS])
    said = [line for line in text.splitlines() if line.startswith("plan: ")]
    assert said[0].startswith("plan: chosen ")
    step = r"plan: predicted step [0-9.]+ m?s \(not calibrated: may be off by 2x\), "
    assert re.match(
        rf"{step}[1-9][0-9],?[0-9]?0*,?0* tokens/s, [0-9.]+ MiB of 1.86 GiB per", said[1]
    )
    assert "; next " in said[2]
    assert "  predicted " in text
    assert " a step, measured " in text
    (decision,) = (one for one in run_start("run")["decisions"] if "pins" in one["facts"])
    assert "layout.tp" in decision["facts"]["pins"]
    assert "layout.ep" not in decision["facts"]["pins"]
    plan, kept = load_plan(Path("run/plan.json")), json.loads(Path("run/plan.json").read_text())
    assert plan.predictions is not None
    assert plan.ep == decision["outcome"]["best"]["plan"]["ep"]
    losses = [run.steps()["loss"].to_pylist() for run in (alone, Run.open("run"))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    check_reference(commands, losses[1])
    replayed = commands.facts(["replay", "run", "--search"])
    by_method = {one["method"]: one for one in replayed["methods"]}
    assert by_method["exhaustive"]["step_s"] == pytest.approx(by_method["best-first"]["step_s"])
    assert min(one["step_s"] for one in replayed["methods"]) == by_method["best-first"]["step_s"]
    log = Path("run/events/rank-0.jsonl")
    log.write_text(log.read_text().replace('"max_work": ', '"limit_s": '))  # As older runs did.
    assert len(commands.facts(["replay", "run", "--search"])["methods"]) == len(by_method)
    assert "has not searched for its layout" in commands.refusal("replay alone --search")
    for more, is_kept in (
        ([], True), (["plan=auto"], True), ([f"layout.ep={plan.ep}", "plan=auto"], True),
        ([f"layout.ep={3 - plan.ep}", "plan=auto"], False),
    ):  # fmt: skip
        resumed = Job.load("job.toml", sets=["train.steps=8", *more])
        prepared = resumed.prepare(out="run", resume="auto", nproc=2, change=True)
        assert prepared.task.plan == (kept if is_kept else None)
        assert prepared.task.search is not is_kept
    alone = Job.load(None, run=Path("run")).prepare(out="run", resume="auto")
    assert (alone.ranks, alone.task.plan, alone.plan.ep) == (2, kept, plan.ep)


def test_a_run_does_not_search_for_hosts_that_its_ranks_are_not_on(commands: Commands) -> None:
    """A search leaves out the host of the ranks, which has no speed for the precision."""
    text = Path("cluster.toml").read_text()
    start, link = text.index("[[hosts]]"), text.index("[[links]]")
    here = text[start:link]
    other = here.replace('name = "here"', 'name = "other"').replace('model = "', 'model = "not ')
    own = here.replace('dtype = "fp32"', 'dtype = "fp64"')
    between = '[[links]]\nends = ["*", "*"]\nkind = "ethernet"\nlatency_s = 1e-4\nbandwidth = 1e9\n'
    Path("both.toml").write_text(f"{text[:start]}{own}{other}{text[link:]}{between}")
    line = ["train", "job.toml", "--nproc", "2", "--cluster", "both.toml", "--set", "plan=auto"]
    refusal = commands.refusal([*line, "--out", "run"])
    assert "rank 0 is planned for a 'not " in refusal
    assert "(host here is left out: no matmul speed for train.precision" in refusal
    assert refusal.rstrip().endswith("the hosts of the ranks alone, in their order")


def test_a_job_says_where_its_layout_comes_from(commands: Commands) -> None:
    line = ["train", "job.toml", "--nproc", "2", "--dry-run"]
    on_cluster = [*line, "--cluster", "cluster.toml", "--set", "layout.ep=2"]
    facts = commands.facts([*on_cluster, "--set", "plan=auto"])
    assert facts["plan"]["ep"] == 2
    assert facts["plan"]["places"][0]["host"] == "here"
    assert 'set plan = "auto", which keeps its keys' in commands.refusal(on_cluster)
    fixed = commands.facts([*line, "--set", "plan=layout"])
    assert (fixed["plan"]["ep"], fixed["plan"]["places"]) == (1, [])
    cluster = Cluster.load("cluster.toml")
    planned = Job.load("job.toml").plan(cluster, search=True)
    with pytest.raises(ConfigError, match="cluster beside the plan, which has its places already"):
        Job.load("job.toml").prepare(plan=planned, cluster=cluster)
