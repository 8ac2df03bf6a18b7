"""`moesaic plan`: predictions for clusters that do not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from commands import Commands
from moesaic import Cluster, ConfigError, Job
from moesaic.cli.calibrate import _text_of
from moesaic.cli.main import main
from moesaic.facts.plan import load_plan
from moesaic.policy.plan.predict import PlannedJob

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

USABLE = (
    r"of 68.8 GiB per rank \(5.73 of 74.5 GiB are kept for driver, collectives and "
    r"fragmentation\)"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


LINE = ["plan", "job.toml", "--cluster", "cluster.toml"]


def layout_sets(items: str) -> list[str]:
    """Return flags for keys of [layout]: "ep=2,pp=2"."""
    return [f"--set=layout.{item}" for item in items.split(",")]


def predict(layout: str, *sets: str, nproc: int = 16) -> dict[str, Any]:
    """Return the figures of a plan; `layout` has keys of [layout]."""
    items = [*(f"layout.{item}" for item in layout.split(",")), *sets]
    planned = Job.load("job.toml", sets=items).plan(Cluster.load("cluster.toml"), nproc=nproc)
    return planned.figures


def test_output_names_the_bottleneck_and_a_timeline_is_written(
    place: Path, commands: Commands
) -> None:
    (place / "cluster.toml").write_text(CLUSTER.replace("replicas = 2", "replicas = 4"))
    text = commands.output([*LINE, "--trace", "step.json"])
    verdict, layout, *_ = text.splitlines()
    assert re.fullmatch(rf"fits: [0-9.]+ {USABLE}", verdict)
    assert layout.startswith("two nodes (32 x NVIDIA H100 SXM5): 32 ranks, experts over 8, ")
    assert layout.endswith("; predicted for even routing, not measured")
    basis = "by 15 published runs of other trainers in bf16; calibrate with your own"
    time = "[0-9.]+ m?s"
    assert re.search(rf"\nstep +{time} \([0-9.]+ to {time} {basis}\), of which\n", text)
    assert "\nranks              32, one a device of the cluster; --nproc N for fewer\n" in text
    assert "\nranks " not in commands.output([*LINE, "--nproc", "16"])
    peak = verdict.removeprefix("fits: ").partition(" per rank")[0]
    assert f"\nmemory per rank    peak {peak}, of which\n" in text
    assert re.search(r"\ntokens +[1-9][0-9],?[0-9]?0,?000 per second\n", text)
    assert "bottleneck         elementwise: " in text
    assert "parameters         6,919,161,856, 1,282,017,280 active per token\n" in text
    assert re.search(rf"whole run +10 steps in {time} \([0-9.]+ to {time}\)\n", text)
    assert " GiB on the host that writes most; time unknown: the cluster file has no disk" in text
    assert "% of the peak matmul rate of its device\n" in text
    assert re.search(r"\n  layers\.\*\.attention +[0-9.]+ m?s, 16 blocks\n", text)
    assert text.endswith("timeline           step.json, for ui.perfetto.dev\n")
    events = json.loads((place / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))


def test_it_writes_the_plan(place: Path, commands: Commands) -> None:
    line = [*LINE, *layout_sets("ep=4,dp_shard=2"), "--set", "train.recompute=true"]
    train = "moesaic train job.toml --set train.recompute=true --plan plan.json\n"
    text = commands.output([*line, "--out", "plan.json"])
    assert text.endswith(f"next               {train}")
    plan = load_plan(place / "plan.json")
    assert (plan.ranks, plan.ep, plan.dp_shard, plan.recompute, plan.micro_batches) == (
        16, 4, 2, True, 2,
    )  # fmt: skip
    assert [place.host for place in plan.places] == ["node-0"] * 8 + ["node-1"] * 8
    assert {place.kind for place in plan.places} == {"gpu"}
    facts = commands.facts(line)
    assert plan.predictions is not None
    assert plan.predictions.cluster == "two nodes"
    assert plan.predictions.step_s == pytest.approx(facts["step_s"], rel=1e-4)
    assert plan.predictions.phases_s.keys() == facts["phases_s"].keys()
    assert plan.predictions.used_bytes_by_kind["peak"] == facts["memory_per_rank"]["peak_bytes"]


METHODS = ["dispatch=all_to_all", "dispatch=dedup"]
BY_HOST = [*METHODS, *(f"{method},dispatch_hosts=2" for method in METHODS)]
CHUNKS = [
    f"chunks={num},overlap_local={local}" for num in (1, 2, 4, 8) for local in ("false", "true")
]
COLUMNS = ["embedding=whole", "embedding=columns"]
PLAIN = "chunks=1,overlap_local=false"
DEDUP = "ep=16,dispatch=dedup,dispatch_hosts=2"


@pytest.mark.parametrize(
    ("layout", "sets", "nproc", "options"),
    [
        (f"ep=16,{PLAIN}", "", 16, BY_HOST),
        (f"ep=8,{PLAIN}", "", 16, METHODS),
        (f"ep=16,pp=2,schedule=interleaved,{PLAIN}", "", 32, BY_HOST),
        (DEDUP, "train.batch=512 train.micro_batches=16 model.layers=4", 16, CHUNKS),
        pytest.param(
            f"{DEDUP},pp=2,schedule=1f1b", "train.batch=512 train.micro_batches=16", 32, CHUNKS,
            marks=pytest.mark.soak,
        ),
        (f"ep=16,{PLAIN},dispatch=all_to_all", "", 16, COLUMNS),
        ("pp=2,schedule=gpipe", "model.tied=true", 16, COLUMNS),
        ("dp_shard=16", "", 16, COLUMNS),
    ],
)  # fmt: skip
def test_the_fastest_open_settings_are_chosen(
    place: Path, layout: str, sets: str, nproc: int, options: list[str]
) -> None:
    if nproc > 16:
        (place / "cluster.toml").write_text(CLUSTER.replace("replicas = 2", "replicas = 4"))
    key = "other_embedding" if options == COLUMNS else "other_dispatch"
    pinned = {
        option: predict(f"{layout},{option}", *sets.split(), nproc=nproc) for option in options
    }
    free = predict(layout, *sets.split(), nproc=nproc)
    steps_s = {option: facts["step_s"] for option, facts in pinned.items()}
    assert len(set(steps_s.values())) == len(options)
    best = min(options, key=lambda option: steps_s[option])
    assert free["step_s"] == steps_s[best]
    for name, value in (item.split("=") for item in best.split(",")):
        assert str(free["plan"][name]).lower() == value
    assert not any(facts[key] for facts in pinned.values())
    others = free[key] if key == "other_dispatch" else [free[key]]
    extra_s = [step_s - steps_s[best] for step_s in steps_s.values()]
    for other in others:
        assert any(other["extra_s"] == pytest.approx(one, rel=0.2) for one in extra_s)
    assert len(others) == (1 if options == CHUNKS else len(options) - 1)


def test_settings_that_stay_open_are_chosen_under_pinned_ones() -> None:
    more = ("train.batch=1024", "train.micro_batches=32")
    assert predict(f"{DEDUP},chunks=2", *more)["plan"]["chunks"] == 2
    assert predict(f"{DEDUP},overlap_local=true", *more)["plan"]["overlap_local"] is True


def test_alternatives_are_printed(commands: Commands) -> None:
    text = commands.output([*LINE, "--nproc", "16", *layout_sets(f"ep=16,{PLAIN}")])
    assert re.search(r"\ndispatch +tokens once per .*; alternatives: once per .* \+", text)
    assert re.search(r"\nembedding +.*; alternative: .* \+", text)


BEYOND = (
    "layout.dispatch_hosts = 8, but expert-parallel ranks are on one host, or unevenly on several: "
    "tokens are sent directly, as without it; remove layout.dispatch_hosts\n"
)


@pytest.mark.parametrize(
    ("layout", "sets", "words"),
    [
        ("schedule=gpipe", "", "layout.schedule has no effect: layout.pp = 1 makes no pipeline"),
        ("ep=16,dispatch=dedup,dispatch_hosts=4", "", "ranks are on 2 hosts: the prediction"),
        ("ep=8,dispatch=dedup,dispatch_hosts=8", "", BEYOND),
        ("ep=8,dispatch=all_to_all,dispatch_hosts=8", "", BEYOND),
        ("ep=1,dispatch_hosts=2", "", "layout.dispatch_hosts has no effect: layout.ep = 1"),
        (
            "ep=8", "train.micro_batches=8",
            "warning: 8 of 16 ranks have no sample in a micro-batch (train.batch = 64, "
            "train.micro_batches = 8): lower train.micro_batches, use fewer ranks, or raise "
             "train.batch to 128",
        ),
    ],
)  # fmt: skip
def test_warnings(layout: str, sets: str, words: str, commands: Commands) -> None:
    """On stderr, with JSON output too."""
    flags = [f"--set={item}" for item in sets.split()]
    status = 3 if layout.startswith("ep=1,") else 0
    captured = commands.run([*LINE, "--json", *layout_sets(layout), *flags], status=status)
    assert json.loads(captured.out)["plan"]["ranks"] == 16
    assert words in captured.err


def test_gpu_kernels_are_refused_on_cpus_and_stay_in_the_train_command(
    place: Path, commands: Commands
) -> None:
    (place / "cpu.toml").write_text(
        'name = "here"\n[[hosts]]\nname = "here"\nmemory_bytes = 1e12\n[[hosts.devices]]\n'
        'kind = "cpu"\nmodel = "8 cores"\ncount = 8\nmemory_bytes = 1e12\nmemory_bandwidth = 1e10\n'
        'matmul = [{ dtype = "bf16", flops = 1e12 }, { dtype = "fp32", flops = 1e12 }]\n'
        '[[links]]\nends = ["here", "here"]\nkind = "loopback"\nlatency_s = 1e-5\nbandwidth = 1e9\n'
    )
    on_cpu = ["plan", "job.toml", "--cluster", "cpu.toml", "--nproc", "8", *layout_sets("ep=8")]
    commands.run([*on_cpu, "--set", "kernels.grouped_mm=torch"])
    words = 'kernels.grouped_mm = "triton" needs GPUs, but rank 0 is on 8 cores'
    assert words in commands.refusal([*on_cpu, "--set", "kernels.grouped_mm=triton"])
    (place / "nowhere").write_text("some text " * 500)
    line = [*LINE, "--nproc", "8", "--set", "train.batch=32"]
    text = commands.output([*line, "--set", "kernels.grouped_mm=triton", "--out", "triton.json"])
    (next_line,) = [x for x in text.splitlines() if x.startswith("next ")]
    assert "--set train.batch=32 --set kernels.grouped_mm=triton --plan" in next_line
    more = ["--set", "data.format=text", "--dry-run"]
    assert main([*next_line.split()[2:], *more]) in (0, 3)  # It may not fit here.


def test_an_edited_plan_is_predicted(place: Path, commands: Commands) -> None:
    commands.run([*LINE, "--nproc", "8", *layout_sets("ep=4"), "--out", "plan.json"])
    raw = json.loads((place / "plan.json").read_text())
    before_s = raw["predictions"]["step_s"]
    raw["recompute"], raw["expert_placement"] = True, raw["expert_placement"][::-1]
    (place / "edited.json").write_text(json.dumps(raw))
    text, warnings = commands.run([*LINE, "--plan", "edited.json", "--out", "new.json"])
    assert "two nodes (8 x NVIDIA H100 SXM5): 8 ranks" in text
    assert "experts over 4" in text
    assert "predictions are for another job or by another version, or the plan was ed" in warnings
    new = load_plan(place / "new.json")
    assert new.predictions is not None
    assert new.predictions.step_s > before_s
    assert (new.recompute, new.expert_placement) == (True, raw["expert_placement"])
    facts = commands.facts([*LINE, "--plan", "new.json"])
    assert facts["step_s"] == pytest.approx(new.predictions.step_s, rel=1e-4)
    (place / "other.toml").write_text(CLUSTER.replace("h100-8", "a100-8"))
    for flags, words in (
        (["--nproc", "4"], "plan 'edited.json' is for 8 ranks, but nproc is 4: leave out nproc"),
        ([*layout_sets("ep=2")], "layout.ep=2 beside plan 'edited.json', which has ep = 4"),
        (["--cluster", "other.toml"], "rank 0 is planned for a 'NVIDIA H100 SXM5', but it "),
    ):
        assert words in commands.run([*LINE, "--plan", "edited.json", *flags], status=2).err


def test_a_plan_has_timelines(place: Path) -> None:
    slow = '\n[[hosts]]\nname = "slow"\npreset = "a100-8"\n'
    uneven = CLUSTER.replace("replicas = 2\n", slow)
    (place / "uneven.toml").write_text(uneven)
    for cluster, ranks in (("cluster.toml", [0]), ("uneven.toml", [8, 0])):
        (place / "plan.json").unlink(missing_ok=True)
        line = ["plan", "job.toml", "--cluster", cluster, "--out", "plan.json"]
        # The gradient reduction of a whole table comes last and is exposed.
        line += ["--set", "train.micro_batches=4", "--set", "layout.embedding=whole"]
        assert main(line) == 0
        predictions = load_plan(place / "plan.json").predictions
        assert predictions is not None
        assert [timeline.rank for timeline in predictions.timeline] == ranks
        last, *others = predictions.timeline
        assert last.seconds == pytest.approx(predictions.step_s, rel=1e-4)
        for phase, seconds in predictions.phases_s.items():
            (phase_s,) = (one.seconds for one in last.phases if one.phase == phase)
            assert phase_s == pytest.approx(seconds, rel=1e-4)
        assert [one.phase for one in last.phases] == [
            "data", "forward", "backward", "reduce", "clip", "optimizer", "log",
        ]  # fmt: skip
        assert all(any(one.waiting_s for one in other.phases) for other in others)


@pytest.mark.parametrize(
    ("schedule", "ideal"),
    [("gpipe", 3 / 11), ("1f1b", 3 / 11), ("interleaved", 3 / 19), ("zero-bubble", 3 / 27)],
)
def test_a_pipeline_has_a_bubble(
    place: Path, commands: Commands, schedule: str, ideal: float
) -> None:
    line = [*LINE, *layout_sets(f"pp=4,ep=4,schedule={schedule}"), "--set", "train.micro_batches=8"]
    facts = commands.facts(line)
    assert facts["pipeline"]["ideal"] == pytest.approx(ideal)
    # The last pipeline rank has the head too, so the others wait for it.
    assert ideal < facts["pipeline"]["bubble"] < 0.6
    assert list(facts["phases_s"]) == ["data", "pipeline", "reduce", "clip", "optimizer", "log"]
    assert sum(facts["phases_s"].values()) == pytest.approx(facts["step_s"])
    assert len(facts["blocks_s"]) == 1 + 2 * 16 + 2
    assert min(facts["blocks_s"].values()) > 0
    text = commands.output([*line, "--trace", "step.json", "--out", "plan.json"])
    bubble = f"bubble {facts['pipeline']['bubble']:.0%} (ideal {ideal:.0%})"
    assert f"pipeline           4 pipeline ranks, {schedule}, 8 micro-batches: {bubble}\n" in text
    events = json.loads((place / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))
    names = {event["name"] for event in events}
    assert {"embed forward 0", "layers.15.moe forward 7", "step activations 0"} <= names
    predictions = load_plan(place / "plan.json").predictions
    assert predictions is not None
    assert predictions.phases_s["pipeline"] == pytest.approx(
        facts["phases_s"]["pipeline"], rel=1e-4
    )
    first = predictions.timeline[-1]
    assert first.rank == 0
    pipeline_s = sum(one.seconds for one in first.phases if one.phase == "pipeline")
    assert pipeline_s == pytest.approx(predictions.phases_s["pipeline"], rel=1e-4)


def test_json_has_every_figure(commands: Commands) -> None:
    facts = commands.facts([*LINE, "--nproc", "8"])
    assert facts["plan"]["ranks"] == 8
    assert [place["host"] for place in facts["plan"]["places"]] == ["node-0"] * 8
    assert facts["parameters"]["total"] == 6_919_161_856
    assert sum(facts["phases_s"].values()) == pytest.approx(facts["step_s"])
    assert sum(facts["blocks_s"].values()) == pytest.approx(facts["step_s"])
    assert facts["tokens_per_s"] == pytest.approx(64 * 4096 / facts["step_s"])
    assert facts["price_per_million_tokens"] is None
    # Six flops per active parameter and token, less for the embedding, plus a quarter for
    # attention over 4,096 tokens.
    flops = 6 * 1_282_017_280 * 64 * 4096 / 8
    assert 0.9 < facts["utilisation"] * facts["step_s"] * 9.9e14 / flops < 1.5


def test_a_job_that_does_not_fit_gets_a_remedy(commands: Commands) -> None:
    line = [*LINE, *layout_sets("ep=1")]
    captured = commands.run([*line, "--json"], status=3)
    facts = json.loads(captured.out)
    assert not facts["fits"]
    speeds = ("step_s", "phases_s", "tokens_per_s", "price", "price_per_million_tokens")
    assert [facts[name] for name in speeds] == [None] * 5
    words = r"memory: rank 0 needs [0-9.]+ GiB, and may use 68\.8 GiB of its NVIDIA H100[^;]*; "
    assert re.match(words, facts["bottleneck"])
    assert captured.err == f"warning: the plan does not fit: {facts['bottleneck']}\n"
    remedy = facts["remedy"]
    assert remedy["fits"]
    needed = remedy["peak_bytes"] / 2**30
    assert remedy["changes"].keys() == {"layout.ep"}
    change = f"layout.ep = {remedy['changes']['layout.ep']}"
    advice = rf"; the smallest change that fits: {change} \({needed:.3g} of 68.8 GiB\)"
    assert re.search(f"{advice}$", facts["bottleneck"])
    captured = commands.run(line, status=3)
    assert captured.err == ""
    verdict, _, _, *rows = captured.out.splitlines()
    assert re.fullmatch(rf"DOES NOT FIT: [0-9.]+ {USABLE}{advice}", verdict)
    assert [row.split()[0] for row in rows[:3]] == ["ranks", "parameters", "memory"]
    changes = [f"--set={key}={value}" for key, value in remedy["changes"].items()]
    assert (
        commands.facts([*LINE, *changes])["memory_per_rank"]["peak_bytes"] == remedy["peak_bytes"]
    )


def test_a_plan_that_needs_the_reserve_does_not_fit(place: Path, commands: Commands) -> None:
    pinned = layout_sets(f"tp=1,pp=1,dp_shard=1,embedding=whole,dispatch=all_to_all,{PLAIN}")
    line = [*LINE, "--search", *pinned, "--set", "train.recompute=false"]
    peak = commands.facts(line)["memory_per_rank"]["peak_bytes"]
    for changes, fits in (
        (f"memory_bytes = {peak + 1e9}", False),
        (f"memory_bytes = {peak + 1e9}, reserved_bytes = 1e9", True),
        (f"memory_bytes = {peak + 1e9}, reserved_bytes = {1e9 + 1}", False),
        (f"memory_bytes = {(peak + 2.0**31) / 0.95 + 1}", True),
    ):
        own = CLUSTER.replace("replicas", f"devices = {{ {changes} }}\nreplicas")
        (place / "cluster.toml").write_text(own)
        text = commands.run(line, status=0 if fits else 3).out
        assert text.startswith("fits, barely: " if fits else "DOES NOT FIT: ")
        assert " are kept for driver" in text.splitlines()[0]


def plan_within(memory: float, *sets: str, plan: Path | None = None) -> PlannedJob:
    """Return the plan on devices with so much memory, all of which plans may use."""
    changes = f"devices = {{ memory_bytes = {memory}, reserved_bytes = 0 }}"
    Path("own.toml").write_text(CLUSTER.replace("replicas", f"{changes}\nreplicas"))
    pins = [f"layout.{one}" for one in (*PLAIN.split(","), "embedding=whole")]
    job = Job.load("job.toml", sets=[*pins, "layout.dispatch=all_to_all", *sets])
    return job.plan(Cluster.load("own.toml"), plan=plan)


def test_a_plan_warns_of_replicas_that_may_not_fit() -> None:
    figures = plan_within(8e10).figures
    peak, most = figures["memory_per_rank"]["peak_bytes"], figures["balance"]["max_bytes"]
    assert most > 0
    for free, warns in ((-1, False), (0, True), (most - 1, True), (most, False)):
        planned = plan_within(peak + free)
        assert planned.figures["fits"] == (free >= 0)
        told = [one for one in planned.warnings if one.startswith("uneven experts may need ")]
        assert len(told) == warns, free
    none = plan_within(peak, "balance.max_replicas=0")
    assert none.figures["fits"]
    assert none.warnings == []


def test_a_plan_file_may_fit_with_other_stage_boundaries(place: Path) -> None:
    sets = ["layout.pp=2", "train.micro_batches=8"]
    even = plan_within(8e10, *sets)
    raw = json.loads(even.plan.to_json())
    first, second = raw["stages"]
    edited = place / "edited.json"
    edited.write_text(
        json.dumps({**raw, "stages": [first + second[:4], second[4:]], "predictions": None})
    )
    needs = [
        one.figures["memory_per_rank"]["peak_bytes"]
        for one in (even, plan_within(8e10, *sets, plan=edited))
    ]
    unfit = plan_within(sum(needs) / 2, *sets, plan=edited)
    assert not unfit.figures["fits"]
    assert unfit.figures["remedy"]["peak_bytes"] == needs[0]
    words = r"; the same layout fits with other stage boundaries \([0-9.]+ of [0-9.]+ GiB\)"
    assert re.search(f"{words}$", unfit.figures["bottleneck"])
    assert plan_within(sum(needs) / 2, *sets).figures["fits"]


def test_a_job_that_never_fits(commands: Commands) -> None:
    sharded = [*layout_sets("ep=16,dp_shard=all"), "--set", "train.recompute=true"]
    long = [f"--set={key}=99999999" for key in ("data.sequence", "model.max_positions")]
    text = commands.run([*LINE, *sharded, *long, "--out", "plan.json"], status=3).out
    assert re.match(r"DOES NOT FIT: .* per rank .*; no change was found with which it fits", text)
    assert "\nnext" not in text


def test_a_plan_needs_no_data_and_names_every_mistake(place: Path, commands: Commands) -> None:
    short = JOB.replace('[data]\npath = "nowhere"\nsequence = 4096\n', "")
    (place / "job.toml").write_text(short.replace("steps = 10\n", ""))
    captured = commands.run([*LINE, "--json", "--nproc", "8", *layout_sets(PLAIN)])
    figures = json.loads(captured.out)
    assert figures["fits"]
    assert figures["steps"] == 100_000
    assert captured.err == (
        "warning: job.toml has no data.sequence: 4096 tokens a sample are assumed; for another "
        "length: --set data.sequence=N\n"
        "warning: job.toml has no train.steps: 100,000 are assumed for the whole run; for another "
        "number: --set train.steps=N\n"
    )
    words = (
        "training needs data.path (the training text), data.sequence (tokens per sample) and "
        "train.steps (steps of the whole run), and only plans do without: add them to the job"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        Job.load("job.toml", sets=["layout.ep=1"]).train(nproc=1)
    (place / "job.toml").write_text(short)
    words = "job.toml: data is missing: add [data] with path and sequence"
    assert words in commands.refusal("train job.toml --dry-run --set layout.ep=1")
    sets = ["--set", "model.experts_per_token=2", "--set", "train.steps=x"]
    captured = commands.run([*LINE, *sets], status=2)
    assert captured.err.splitlines() == [
        "error: job.toml: 2 mistakes",
        "  model.experts_per_token=2: unknown key 'model.experts_per_token': did you mean "
        "'model.top_k'?",
        '  train.steps=x: train.steps = "x": give an integer from 1 and below 2^31',
    ]


def test_assumed_steps_hold_those_that_the_job_writes(place: Path) -> None:
    """A number that the job does not have is in no mistake."""
    (place / "job.toml").write_text(JOB.replace("steps = 10\n", ""))
    cases = {"schedule.warmup": 200_000, "checkpoint.every": 300_000, "schedule.kind": None}
    for key, steps in cases.items():
        job = Job.load("job.toml", sets=[] if steps is None else [f"{key}={steps}"])
        assert job.config.train.steps == (steps or 100_000)
        assert [one for one in job.warnings if "train.steps" in one] == [
            f"job.toml has no train.steps: {steps or 100_000:,} are assumed for the whole run; for "
            "another number: --set train.steps=N"
        ]
    never = Job.load("job.toml", sets=["checkpoint.every=9999999999"])
    assert never.config.train.steps == 2**31 - 1
    with pytest.raises(ConfigError, match=r'schedule.warmup = "x": give an integer'):
        Job.load("job.toml", sets=["schedule.warmup=x"])


def test_implausible_units_cause_warnings(place: Path, commands: Commands) -> None:
    slow = re.sub(r"bandwidth = [0-9.e]+", "bandwidth = 12.5", CLUSTER)
    (place / "cluster.toml").write_text(slow)
    warnings = commands.run([*LINE, "--json"]).err
    assert "warning: bandwidth = 12.5 of the link of ['" in warnings
    assert "is read as 12.5 bytes/s: check the unit" in warnings


def test_memory_is_compared_with_each_ranks_device(place: Path, commands: Commands) -> None:
    """The slow host has much memory; the fast one, on no critical path, has little."""
    slow = "devices = { count = 1, memory_bytes = 1e13, memory_bandwidth = 1e10 }"
    fast = "devices = { count = 1, memory_bytes = 3.6e10 }"
    hosts = "".join(
        f'[[hosts]]\nname = "{name}"\npreset = "h100-8"\n{devices}\n'
        for name, devices in (("slow", slow), ("fast", fast))
    )
    link = CLUSTER[CLUSTER.index("[[links]]") :]
    (place / "unlike.toml").write_text(f'name = "unlike"\n{hosts}\n{link}')
    line = ["plan", "job.toml", "--cluster", "unlike.toml", *layout_sets("ep=2")]
    line += ["--set", "model.layers=2"]
    facts = commands.facts(line, status=3)
    assert (facts["fits"], facts["memory_rank"], facts["device_memory_bytes"]) == (False, 1, 3.6e10)
    assert "rank 1 needs" in facts["bottleneck"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "JOB.toml is missing"),
        ("job.toml", "--cluster is missing"),
        ("job.toml --cluster no.toml", "'no.toml' cannot be read (No such file"),
        (
            "job.toml --cluster 2xh10-8",
            "'2xh10-8' is neither a file nor a preset of a cluster: did you mean \"2xh100-8\"",
        ),
        ("job.toml --cluster h10-8", 'did you mean "h100-8"'),
        ("job.toml --cluster lonely.toml", "error: lonely.toml: no link joins the"),
        ("job.toml --cluster endless.toml --out a", "a step on cluster 'two nodes' would"),
        ("CLUSTER --nproc 64", "error: cluster.toml: cluster"),
        ("CLUSTER --set layout.ep=3", "error: layout.ep = 3 does not"),
        (
            "CLUSTER --set layout.pp=2 --set layout.schedule=zero-bubble "
            "--set train.recompute=true",
            "error: train.recompute = true with layout.schedule =",
        ),
        ("CLUSTER --out no/where.json", "'no/where.json' is in a directory that"),
        ("CLUSTER --out .", "--out '.' is a directory: name a file"),
        ("CLUSTER --out job.toml", "--out 'job.toml' already exists"),
        ("CLUSTER --out /dev/null", "is not a plain file: name another"),
        ("CLUSTER --out a --trace no/b", "--trace 'no/b' is in a directory that does not exist"),
        ("CLUSTER --out a --trace ./a", "are both 'a': name two file"),
    ],
)
def test_mistakes(line: str, words: str, place: Path, commands: Commands) -> None:
    (place / "lonely.toml").write_text(CLUSTER.partition("[[links]]")[0])
    (place / "endless.toml").write_text(CLUSTER.replace("5e-6", "1e308"))
    before = set(place.iterdir())
    line = f"plan {line}".replace("CLUSTER", "job.toml --cluster cluster.toml")
    assert words in commands.refusal(line)
    assert set(place.iterdir()) == before


STUDENTS = """
[[student]]
name = "small"
teacher = "assistant"
model = { preset = "tiny-dense", layers = 2 }
losses = { attention = 1.0, logits = 0.5, text = 1.0 }

[[student]]
name = "assistant"
model = { preset = "tiny-mixtral" }
"""


@pytest.mark.parametrize("frozen", ["false", "true"])
def test_students_are_added_up(place: Path, commands: Commands, frozen: str) -> None:
    """The step is that of the parts; only a frozen teacher costs less than without students."""
    alone = predict("dp_shard=2", "model.layers=4")
    (place / "job.toml").write_text(JOB + STUDENTS)
    (place / "nowhere").write_text("text " * 1000)
    sets = ("layout.dp_shard=2", f"distill.frozen={frozen}", "data.format=text", "model.layers=4")
    items = [f"--set={one}" for one in sets]
    facts = commands.facts([*LINE, *items, "--nproc", "16", "--out", "plan.json"])
    teacher, assistant, small = facts["parts"]
    assert [one["name"] for one in facts["parts"]] == ["model", "assistant", "small"]
    assert [one["teacher"] for one in facts["parts"]] == [None, "model", "assistant"]
    assert facts["step_s"] == pytest.approx(sum(one["step_s"] for one in facts["parts"]))
    assert (teacher["step_s"] == pytest.approx(alone["step_s"])) is (frozen == "false")
    if frozen == "true":
        assert 0.15 < teacher["step_s"] / alone["step_s"] < 0.5
    assert sum(facts["blocks_s"].values()) == pytest.approx(facts["step_s"])
    blocks = [name for name in facts["blocks_s"] if name.startswith("students.small.")]
    assert {"students.small.layers.1.ffn", "students.small.auxiliary"} < set(blocks)
    needs = facts["memory_per_rank"]
    parts_bytes = sum(one["memory_bytes"] for one in facts["parts"])
    assert needs["peak_bytes"] == parts_bytes + needs["working_bytes"]
    assert teacher["parameters"] == alone["parameters"]["total"] > assistant["parameters"]
    assert min(assistant["auxiliary_parameters"], small["auxiliary_parameters"]) > 0
    text = commands.output([*LINE, *items, "--plan", "plan.json"])
    assert re.search(r"\n  small +assistant +[0-9,]+ \+ [0-9,]+ auxiliary ", text)
    learns_from = "nothing, frozen" if frozen == "true" else "text"
    assert re.search(rf"\n  model +{learns_from} ", text)
    items += ["--set=model.preset=tiny-olmoe", "--set=data.sequence=64"]
    dry = commands.facts(["train", "job.toml", *items, "--nproc", "16", "--dry-run"])
    assert [one["name"] for one in dry["parts"]] == ["model", "assistant", "small"]


def test_a_step_with_an_interval_is_the_mean_of_steps(place: Path, commands: Commands) -> None:
    """It averages a step with all losses and the others, those of an endless interval."""
    (place / "nowhere").write_text("text " * 1000)
    items = ["--set", "distill.frozen=true", "--set=data.format=text", "--nproc", "16"]
    found = []
    for interval in (1, 4, 10**9):
        students = STUDENTS.replace("teacher =", f"interval = {interval}\nteacher =").replace(
            'model = { preset = "tiny-mixtral" }',
            f'model = {{ preset = "tiny-mixtral" }}\ninterval = {interval}',
        )
        (place / "job.toml").write_text(JOB + students)
        found.append(commands.facts([*LINE, *items]))
    every, fourth, never = found
    assert every["memory_per_rank"] == fourth["memory_per_rank"] == never["memory_per_rank"]
    for block, seconds in fourth["blocks_s"].items():
        whole, rest = (one["blocks_s"][block] for one in (every, never))
        assert seconds == pytest.approx(whole / 4 + rest * 3 / 4), block
        is_teacher = not block.startswith("students.") and block != "step"
        is_rare = is_teacher or block.endswith(".auxiliary")
        assert (rest < whole / 2) if is_rare else (rest == pytest.approx(whole)), block
    assert fourth["step_s"] == pytest.approx(every["step_s"] / 4 + never["step_s"] * 3 / 4)
    for kind in ("matmul", "elementwise"):
        whole, part, rest = (one["seconds_by_kind"][kind] for one in found)
        assert part == pytest.approx(whole / 4 + rest * 3 / 4)


def test_a_calibrated_preset_becomes_a_file(tmp_path: Path) -> None:
    preset = Cluster.named("2xh100-8")
    (tmp_path / "cluster.toml").write_text(_text_of("2xh100-8", preset))
    written = Cluster.load(tmp_path / "cluster.toml")
    assert written.facts == preset.facts.model_copy(update={"calibration": None})
