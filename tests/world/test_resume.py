"""Resume: bit-identical in the same layout, the same results in any other one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import ASKING, SIGMOID, sparing, worst_element
from table import FAMILIES, SMALL

from moesaic.api.run import Run, failure_in
from moesaic.base.errors import DivergedError, UserError
from moesaic.base.events import read_events
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.world import World
from moesaic.facts.job.model import PRESETS
from moesaic.models.hf.origin import open_origin
from moesaic.serve.loading import load_model
from moesaic.testing.progress import RecordingProgress
from moesaic.testing.ranks import RankFailed, RankPool
from moesaic.testing.runs import text_job, train_text
from moesaic.testing.states import read_checkpoint
from moesaic.train.job_file import LoadedJob
from moesaic.train.lm import LanguageModelKind
from moesaic.train.stop_request import StopRequest
from moesaic.train.trainer import train

LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2 x 2, sharded": (4, {"ep": 2, "dp_shard": "all"}),
    "sharded": (2, {"dp_shard": 2}),
    "tp": (4, {"tp": 2, "ep": 2, "dp_shard": 2}),
    "etp": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp, sharded": (4, {"pp": 2, "dp_shard": 2, "schedule": "zero-bubble"}),
    "columns": (4, {"ep": 2, "dp_shard": 2, "embedding": "columns"}),
}


def run_job(
    world: World, text: str, out: str, layout: dict[str, Any], resume: str | None,
    changes: dict[str, Any],
) -> list[float]:  # fmt: skip
    """Train on one rank; return its losses."""
    data = {"validation_share": 0.1, **changes.get("data", {})}
    tables = {"layout": layout, **changes, "data": data}
    return train_text(world, Path(text), Path(out), resume, **tables).losses


def middle(out: Path) -> str:
    return str(out / "checkpoints" / "step-00000002")


def end(out: Path) -> Path:
    return out / "checkpoints" / "step-00000004"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("one", "bf16"), ("ep2", "fp32"), ("ep2 x 2, sharded", "bf16"), ("etp", "fp32"),
        ("pp, sharded", "fp32"), ("columns", "fp32"),
    ],
)  # fmt: skip
def test_same_layout_is_bit_identical(
    ranks: RankPool, text: Path, tmp_path: Path, name: str, precision: str
) -> None:
    size, layout = LAYOUTS[name]
    changes = {"train": {"precision": precision, "recompute": name == "ep2"}}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = ranks.run(size, run_job, str(text), str(straight), layout, None, changes)
    rest = ranks.run(size, run_job, str(text), str(resumed), layout, middle(straight), changes)
    assert all(losses == whole[0] for losses in whole)
    assert rest[0] == whole[0][2:]
    a, b = (read_checkpoint(end(out)) for out in (straight, resumed))
    assert all(np.array_equal(a[key], b[key]) for key in a)
    assert Checkpoint.open(end(straight)).counters == Checkpoint.open(end(resumed)).counters


def test_a_resumed_run_keeps_its_measured_costs(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    changes = {
        "train": {"precision": "fp32", "batch": 32},
        "balance": {"policy": "quota", "min_replica_tokens": 4},
    }  # fmt: skip
    straight, resumed, other = (tmp_path / name for name in ("straight", "resumed", "other"))
    size, layout = LAYOUTS["ep2"]
    whole = ranks.run(size, run_job, str(text), str(straight), layout, None, changes)
    rest = ranks.run(size, run_job, str(text), str(resumed), layout, middle(straight), changes)
    size, layout = LAYOUTS["ep4"]
    ranks.run(size, run_job, str(text), str(other), layout, middle(straight), changes)
    outs = (straight, resumed)
    costs = [json.loads((out / "plan.json").read_text())["balance_costs"] for out in outs]
    assert costs[0] is not None
    assert costs[0] == costs[1]
    decided, kept = (
        [one["outcome"] for one in event["decisions"] if "bytes_per_s" in one["outcome"]]
        for out in outs
        for event in read_events(out / "events" / "rank-0.jsonl")
        if event["event"] == "run_start"
    )
    assert (decided, kept) == ([costs[0]], [])
    assert json.loads((other / "plan.json").read_text())["balance_costs"] != costs[0]
    assert rest[0] == whole[0][2:]
    a, b = (read_checkpoint(end(out)) for out in (straight, resumed))
    assert all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("ep2", "quota"), [("ep2", "pro-prophet"), ("one", "none")]),
        (("ep2 x 2, sharded", "eplb"), [("ep2 x 2, sharded", "none"), ("ep4", "faster-moe")]),
    ],
)
def test_another_policy_resumes_with_the_same_results(
    ranks: RankPool,
    text: Path,
    tmp_path: Path,
    first: tuple[str, str],
    then: list[tuple[str, str]],
) -> None:
    def run(name: str, policy: str, resume: str | None = None) -> tuple[list[float], Path]:
        out = tmp_path / f"{name} {policy} {resume is not None}"
        balance = {**ASKING, "policy": policy}
        size, layout = LAYOUTS[name]
        changes = {"balance": balance}
        losses = ranks.run(size, run_job, str(text), str(out), layout, resume, changes)[0]
        if size > 1:
            events = (out / "events" / "rank-0.jsonl").read_text().splitlines()
            replicas = sum(json.loads(line).get("replicas", 0) for line in events)
            assert (replicas > 0) == (policy != "none")
        return losses, out

    losses, plain = run("one", "none")
    expected = read_checkpoint(end(plain))
    whole, start = run(*first)
    assert whole == pytest.approx(losses, rel=1e-9)
    for name, policy in then:
        rest, out = run(name, policy, middle(start))
        assert rest == pytest.approx(losses[2:], rel=1e-9), policy
        assert worst_element(read_checkpoint(end(out)), expected) < 1e-9, policy


@pytest.mark.parametrize(("name", "precision"), [("one", "fp32"), ("ep2 x 2, sharded", "fp64")])
def test_router_biases_are_resumed(
    ranks: RankPool, text: Path, tmp_path: Path, name: str, precision: str
) -> None:
    size, layout = LAYOUTS[name]
    changes = {**SIGMOID, "train": {"precision": precision}}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = ranks.run(size, run_job, str(text), str(straight), layout, None, changes)
    rest = ranks.run(size, run_job, str(text), str(resumed), layout, middle(straight), changes)
    assert rest[0] == whole[0][2:]
    a, b = (read_checkpoint(end(out)) for out in (straight, resumed))
    assert all(np.array_equal(a[key], b[key]) for key in a)
    assert all(a[f"parameter/layers.{layer}.moe.router.bias"].any() for layer in (1, 2))
    if size > 1:
        return
    origin = open_origin(straight)
    model = load_model(origin, torch.device("cpu"), "bf16").model
    for layer, router in model.sigmoid_routers():
        name = f"layers.{layer}.moe.router.bias"
        assert np.array_equal(router.bias.numpy(), a[f"parameter/{name}"])
        assert origin.tensors.dtype(name) == torch.float32


def test_another_layout_resumes_with_the_same_results(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    """Each layout resumes from the resumed run of the previous one, a step later."""
    last = len(LAYOUTS)
    losses: list[float] = []
    expected: dict[str, np.ndarray] = {}
    start = None
    for step, (name, (size, layout)) in enumerate(LAYOUTS.items()):
        out = tmp_path / str(step)
        every = {"every": step + 1, "keep": last}
        changes = {"train": {"steps": last}, "checkpoint": every}
        rest = ranks.run(size, run_job, str(text), str(out), layout, start, changes)[0]
        state = read_checkpoint(out / "checkpoints" / f"step-{last:08d}")
        losses, expected = losses or rest, expected or state
        assert rest == pytest.approx(losses[step:], rel=1e-9), name
        assert worst_element(state, expected) < 1e-9, name
        start = str(out / "checkpoints" / f"step-{step + 1:08d}")


class StoppingProgress(RecordingProgress):
    """Progress that asks this rank for the end after its second step."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def step(self, figures: Mapping[str, float]) -> None:
        """Record the figures of a step."""
        super().step(figures)
        assert len(self.figures) != 2 or self.stop.make()


def diverge(
    world: World, text: str, out: str, resume: str | None, lr: float, asynchronous: bool
) -> str:
    """Train on one rank with a save after each step; return the error that ends it."""
    tables = {
        "optimizer": {"lr": lr}, "schedule": {"warmup": 0},
        "checkpoint": {"every": 1, "asynchronous": asynchronous},
    }  # fmt: skip
    steps = 4 if resume is None else 12
    try:
        train_text(world, Path(text), Path(out), resume, train={"steps": steps}, **tables)
    except DivergedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_in_progress_ends_before_a_diverged_run(
    ranks: RankPool, text: Path, tmp_path: Path, asynchronous: bool
) -> None:
    """It may be the way back."""
    out = tmp_path / "run"
    assert ranks.run(2, diverge, str(text), str(out), None, 1e-3, asynchronous) == ["", ""]
    first, second = ranks.run(2, diverge, str(text), str(out), "auto", 1e30, asynchronous)
    assert first == second
    assert first.startswith("step 6: the gradient's norm is ")
    found = failure_in(Run(out).summary())
    assert found is not None
    assert f"Go back to step 4: moesaic train --resume {end(out)} --change " in found
    assert (out / "checkpoints" / "step-00000005" / "COMMIT").is_file()


def run_until_asked(
    world: World, text: str, out: str, layout: dict[str, Any]
) -> tuple[list[float], str]:
    """Train; the last rank alone is asked to end. Return losses and the reason of the end."""
    stop = StopRequest()
    assert not stop.make()
    progress = StoppingProgress(stop) if world.rank == world.size - 1 else RecordingProgress()
    job = text_job(Path(text), train={"steps": 9}, checkpoint={"every": 0}, layout=layout)
    last = train(
        LoadedJob(job, "", []), Path(out), None, world, progress, LanguageModelKind(), stop=stop
    )
    return progress.losses, last["reason"]


@pytest.mark.parametrize("name", ["ep2", "pp, sharded"])
def test_ranks_agree_to_end_after_the_same_step(
    ranks: RankPool, text: Path, tmp_path: Path, name: str
) -> None:
    """The request comes after step 2 of one rank, so the sum of step 3 tells all of them."""
    size, layout = LAYOUTS[name]
    found = ranks.run(size, run_until_asked, str(text), str(tmp_path / "run"), layout)
    assert [(len(losses), reason) for losses, reason in found] == [(3, "ended by SIGTERM")] * size
    events = list(read_events(tmp_path / "run" / "events" / "rank-0.jsonl"))
    assert (events[-1]["event"], events[-1]["step"]) == ("run_end", 3)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*/COMMIT")
    assert Checkpoint.open(saved.parent).counters["step"] == 3


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_any_other_layout_resumes_with_the_same_results(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    for name, (size, layout) in LAYOUTS.items():
        ranks.run(size, run_job, str(text), str(tmp_path / name), layout, None, {})
    expected = read_checkpoint(end(tmp_path / "one"))
    for before, after in permutations(LAYOUTS, 2):
        size, layout = LAYOUTS[after]
        out = tmp_path / f"{before} to {after}"
        ranks.run(size, run_job, str(text), str(out), layout, middle(tmp_path / before), {})
        assert worst_element(read_checkpoint(end(out)), expected) < 1e-9, out.name


def test_a_tied_embedding_resumes_whole_and_in_columns(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    """From whole to column-sharded and back, and between shards of other widths."""
    sizes: dict[str, Any] = {"model": {"tied": True}}
    columns = {"embedding": "columns"}
    (losses,) = ranks.run(1, run_job, str(text), str(tmp_path / "one"), {}, None, sizes)
    expected = read_checkpoint(end(tmp_path / "one"))
    ranks.run(4, run_job, str(text), str(tmp_path / "four"), columns, None, sizes)
    parts = {"pp": 2, "dp_shard": 2, **columns}
    for number, (size, layout, start) in enumerate((
        (2, columns, "one"), (2, columns, "four"), (2, {"dp_shard": 2}, "four"), (4, parts, "four"),
        (1, {}, "four"),
    )):  # fmt: skip
        out = tmp_path / str(number)
        begin = middle(tmp_path / start)
        rest = ranks.run(size, run_job, str(text), str(out), layout, begin, sizes)
        assert rest[0] == pytest.approx(losses[2:], rel=1e-9)
        assert worst_element(read_checkpoint(end(out)), expected) < 1e-9


@pytest.mark.parametrize("family", sparing([*FAMILIES], 2))
def test_every_family_resumes_in_another_layout(
    ranks: RankPool, text: Path, tmp_path: Path, family: str
) -> None:
    given = FAMILIES[family]
    sizes = {**PRESETS[family], **SMALL, **given["model"], "vocab": 260}
    changes = {"model": sizes, "routing": given.get("routing", {})}
    ep = 2 if sizes["experts"] else 1
    (losses,) = ranks.run(1, run_job, str(text), str(tmp_path / "one"), {}, None, changes)
    first, out = tmp_path / "tp", tmp_path / "pp"
    layout = {"tp": 2, "ep": ep, "dp_shard": 2}
    ranks.run(4, run_job, str(text), str(first), layout, None, changes)
    layout = {"pp": 2, "ep": ep}
    rest = ranks.run(2 * ep, run_job, str(text), str(out), layout, middle(first), changes)
    assert rest[0] == pytest.approx(losses[2:], rel=1e-9)
    expected, found = (read_checkpoint(end(tmp_path / name)) for name in ("one", "pp"))
    assert worst_element(found, expected) < 1e-9


@pytest.fixture(scope="module")
def single_run(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of one rank, shared by tests that do not change it."""
    out = tmp_path_factory.mktemp("single") / "run"
    ranks.run(1, run_job, str(text), str(out), {}, None, {})
    return out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"sequence": 24}}, "other samples"),
        ({"train": {"steps": 2}}, "has done 2 steps already"),
        ({"model": {"ffn": 28}}, "model.ffn = 24, the job has 28: restore it, or start a new run"),
        ({"model": {"layers": 1}}, "model.layers = 2"),
        ({"model": {"tied": True}}, "model.tied = false, the job has true"),
        ({"model": {"clip_qkv": 8.0}}, "model.clip_qkv = unset, the job has 8.0"),
        (
            {"model": {"rope_scaling": {"kind": "linear", "factor": 2.0}}},
            'model.rope_scaling.kind = unset, the job has "linear"',
        ),
        ({"optimizer": {"moments": "8bit"}}, 'optimizer.moments = "full", the job has "8bit"'),
    ],
)
def test_an_incompatible_job_is_rejected_with_the_reason(
    ranks: RankPool,
    text: Path,
    single_run: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises((UserError, RankFailed), match=words):
        ranks.run(1, run_job, str(text), str(tmp_path / "x"), {}, middle(single_run), changes)
    assert not (tmp_path / "x").exists()
