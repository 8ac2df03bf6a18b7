"""The public names: jobs, clusters, runs and models."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moesaic
from moesaic import Cluster, ConfigError, Job, MoesaicError, Run
from moesaic.base.errors import StoreError
from moesaic.base.events import read_events
from moesaic.facts.plan import load_plan

TABLES: dict[str, Any] = {
    "model": {"preset": "tiny-olmoe", "layers": 1, "hidden": 32, "head_dim": 8, "ffn": 16},
    "data": {"path": "text.txt", "sequence": 16, "cache": "cache"},
    "train": {"steps": 5, "batch": 4, "device": "cpu"},
    "log": {"tensorboard": False, "loads_every": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("api")
    (place / "text.txt").write_text("words and more words " * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Job.load(TABLES).train(out="run", output=None)
    return place


@pytest.fixture(autouse=True)
def _chdir(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_importing_is_quick_and_needs_no_torch() -> None:
    program = """
import sys, time
began = time.perf_counter()
import moesaic
assert time.perf_counter() - began < 0.2
sys.modules["torch"] = None
assert set(moesaic.__all__) < set(dir(moesaic))
[getattr(moesaic, name) for name in ("Cluster", "Engine", "Job", "Model", "Run", "load", "save")]
moesaic.Job.load({"model": {"preset": "olmoe-1b-7b"}, "data": {"path": "x", "sequence": 64},
                  "train": {"steps": 1, "batch": 16}}).plan(moesaic.Cluster.preset("h100-8"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (Path(moesaic.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        moesaic.nothing  # noqa: B018


@pytest.mark.parametrize(("nproc", "stop"), [(None, torch.tensor(False)), (2, np.bool_(False))])
def test_a_callback_ends_a_run_on_all_ranks(nproc: int | None, stop: object) -> None:
    out, losses = Path(f"stopped-{nproc}"), list[float]()

    def on_step(figures: dict[str, float]) -> object:
        losses.append(figures["loss"])
        return None if figures["step"] < 3 else stop

    job = Job.load({**TABLES, "layout": {"ep": 1}})
    run = job.train(out=out, nproc=nproc, on_step=on_step, output=None)
    assert len(losses) == 3
    assert run.steps()["loss"].to_pylist() == losses
    assert run.summary()["status"] == "stopped early"
    assert "stopped early \N{MIDDLE DOT} step 3 of " in run.report().read_text()
    for rank in range(nproc or 1):
        events = read_events(out / "events" / f"rank-{rank}.jsonl")
        assert sum(event["event"] == "rank_step" for event in events) == 3
    resumed = job.train(out=out, resume="auto", output=None)  # One rank continues two.
    whole = Run.open("run").steps()["loss"].to_pylist()
    assert resumed.steps()["loss"].to_pylist() == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("nproc", [None, 2])
def test_an_error_in_a_callback_reaches_the_caller(nproc: int | None) -> None:
    def on_step(figures: dict[str, float]) -> None:
        raise LookupError("mine")

    job = Job.load({**TABLES, "layout": {"ep": 1}})
    with pytest.raises(LookupError, match="mine"):
        job.train(out=f"broken-{nproc}", nproc=nproc, on_step=on_step, output=None)


def test_a_run_that_diverges_says_so() -> None:
    """In the words of the report, with a way back, also if each loss is finite."""
    job = Job.load(TABLES, sets=["train.steps=12", "optimizer.lr=10"])
    with pytest.warns(UserWarning, match=r"the loss diverged from step .* = 10 is far"):
        run = job.train(out="high", output=None)
    assert run.summary()["status"] == "diverged"
    worse = Job.load(TABLES, sets=["optimizer.lr=1e300"])
    with pytest.raises(MoesaicError, match=r"the loss diverged .* start anew with --out NEW"):
        worse.train(out="worse", output=None)


def test_a_dict_and_its_file_are_one_job() -> None:
    job = Job.load(TABLES)
    assert Job.load("run/job.toml").config == job.config
    assert Job.load(TABLES, sets=["seed=3"]).config.seed == 3
    table = {**TABLES, "data": {**TABLES["data"], "path": Path("text.txt")}}
    assert Job.load(table).config == job.config


def test_a_plan_is_trained_by(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job.load({**TABLES, "layout": {"ep": 1}})
    cluster = Cluster.preset("cpu")
    planned = job.plan(cluster, nproc=1)
    assert planned.figures["fits"]
    plan = planned.plan.model_copy(update={"places": []})
    run = job.train(plan=planned._replace(plan=plan), out="planned", output=None)
    assert load_plan(run.directory / "plan.json").predictions == plan.predictions
    assert capfd.readouterr() == ("", "")


def test_clusters() -> None:
    cluster = Cluster.preset("h100-8", nodes=2, bandwidth=1e11)
    assert [host.name for host in cluster.facts.hosts] == ["node-0", "node-1"]
    cluster.save("cluster.toml")
    assert Cluster.load("cluster.toml").facts == cluster.facts
    assert Cluster.named("2xh100-8").facts.links[0].bandwidth == 400e9
    assert Cluster.preset("2xh100-8").facts == Cluster.preset("h100-8", nodes=2).facts
    with pytest.raises(ConfigError, match="two numbers: leave out nodes"):
        Cluster.preset("2xh100-8", nodes=3)
    with pytest.raises(ConfigError, match="no-such"):
        Cluster.preset("no-such")
    with pytest.raises(StoreError, match=r"'cache' cannot be written \("):
        cluster.save("cache")


def test_words_of_the_command_line_name_a_cluster(tmp_path: Path) -> None:
    job = Job.load({**TABLES, "layout": {"ep": 1}})
    two = Cluster.preset("h100-8", nodes=2)
    two.save(tmp_path / "two.toml")
    named = [job.plan(one).figures for one in (two, "2xh100-8", tmp_path / "two.toml")]
    assert [one["devices"] for one in named] == [{"NVIDIA H100 SXM5": 16}] * 3
    assert named[1]["step_s"] == named[0]["step_s"]
    with pytest.raises(ConfigError, match='did you mean "h100-8"'):
        job.train(cluster="h100_8")


def documented_keys(title: str) -> set[str]:
    """Return the keys that docs/python.md lists for `title`."""
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    rows = itertools.takewhile(
        lambda row: row.startswith("| `"), page.partition(f"| **`{title}`**")[2].splitlines()[1:]
    )
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_figures_are_documented() -> None:
    assert set(Run.open("run").summary()) == documented_keys("run.summary()")
    figures = Job.load({**TABLES, "layout": {"ep": 1}}).plan(Cluster.preset("cpu"), nproc=1).figures
    assert set(figures) == documented_keys("job.plan(...).figures")


def test_tables_of_a_run() -> None:
    run = Run.open("run")
    steps, loads = run.steps(), run.loads()
    assert steps["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert {"loss", "step_s", "forward_s"} <= set(steps.column_names)
    assert loads.num_rows == 5
    assert [np.sum(counts) for counts in loads["counts"].to_pylist()] == [4 * 16 * 4] * 5
    assert run.decisions().num_rows == 0
    assert run.report() == Path("run/report.html")
    with pytest.raises(ConfigError, match=r"layout\.ep = 1"):
        run.replay(policy="eplb")


def test_decisions_of_a_run(tmp_path: Path) -> None:
    balance = {"policy": "eplb", "as_published": True, "costs": {
        "expert_tokens_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "overlaps": True,
    }}  # fmt: skip
    tables = {**TABLES, "layout": {"ep": 2}, "balance": balance}
    run = Job.load(tables).train(out=tmp_path / "run", nproc=2, output=None)
    decisions = run.decisions()
    assert set(decisions["step"].to_pylist()) == {1, 2, 3, 4, 5}
    assert set(decisions["kind"].to_pylist()) == {"balance"}
    assert decisions["replicas"].to_pylist()[-1]
    with pytest.warns(UserWarning, match=r"^min_replica_tokens has no effect: policy = "):
        facts = run.replay(policy="none", min_replica_tokens=2)
    assert facts["speedup"] == 1.0
    assert set(facts) == documented_keys("run.replay(...)")


def test_a_model_is_loaded_changed_and_saved() -> None:
    model = moesaic.load("run", device="cpu")
    (answer,) = model.generate("words", max_tokens=4, temperature=0)
    assert answer.prompt_tokens == list(b"words")
    with torch.no_grad():
        model.module.embed.weight.zero_()
    moesaic.save(model, "saved")
    saved = moesaic.load("saved", device="cpu")
    assert not saved.module.embed.weight.any()
    assert saved.tokenizer.decode(answer.tokens) == answer.text
    assert moesaic.load("run/checkpoints/step-00000005", device="cpu").generate(
        "words", max_tokens=4, temperature=0
    ) == [answer]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Job.load("nowhere.toml"), "'nowhere.toml' cannot be read"),
        (lambda: Job.load({**TABLES, "trian": {}}), "unknown key 'trian'"),
        (lambda: Job.load(TABLES, sets=["train.device=gpu"]), "'gpu' is not a device; use auto"),
        (lambda: Job.load(TABLES).train(out="run"), "'run' already holds a run: resume it"),
        (lambda: Job.load(TABLES).train(out="cache"), "is not empty and holds no run"),
        (lambda: Job.load(TABLES).train(nproc=0), "nproc = 0: give a number from 1"),
        (lambda: Job.load(TABLES).train(plan="none.json"), "'none.json' cannot be read"),
        (lambda: Job.load(TABLES).train(resume="auto"), "of its run: give --out DIR (out=DIR"),
        (lambda: Run.open("cache"), "there is no run directory 'cache'"),
        (lambda: moesaic.load("cache"), "'cache' "),
        (lambda: moesaic.load("run", precision="fp23"), 'precision = "fp23" is not known'),
        (lambda: moesaic.load("run").generate("x", max_tokens=0), "max_tokens = 0: give"),
        (lambda: moesaic.load("run").generate(""), 'prompt "" has no tokens'),
        (lambda: Run.open("run").replay(policy="quotas"), 'policy = "quotas" is not known'),
    ],
)  # fmt: skip
def test_mistakes_are_config_errors(mistake: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mistake()
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)
