"""Experts that change their ranks for good: the numbers of one process, moments and all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import (
    SIGMOID,
    Outcome,
    assert_same,
    outcome,
    put_together,
    sparing,
    worst_element,
)  # fmt: skip

from moesaic.cli.replay import ReplayConfig, replayed
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.checkpoint.manifest import DTYPES
from moesaic.dist.state import ROWS, Piece
from moesaic.dist.world import World
from moesaic.facts.plan import Plan, lay_out
from moesaic.facts.workload import expert_bytes
from moesaic.models.initial import InitialSource
from moesaic.policy.balance import homes_of
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.testing.watch import Silent
from moesaic.train import rehoming
from moesaic.train.assemble import assemble
from moesaic.train.jobfile import LoadedJob
from moesaic.train.trainer import train

STEPS = 5
FREE = {"rows_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "hides": True}
"""Prices at which any row fewer of a busy rank pays."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}
HOMES = {2: [[5, 2, 7, 0], [1, 6, 4, 3]], 4: [[5, 2], [7, 0], [1, 6], [4, 3]]}
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity": 1.5, "balance_loss": 1.0},
}
LORA = {"finetune": {"method": "lora", "targets": ["attention", "experts"], "router": "train"}}
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two": (2, {"ep": 2}, {}),
    "four, visits": (4, {"ep": 4, "dispatch": "visits"}, DROPS),
    "replicas": (4, {"ep": 2}, {}),
    "four by two, local first": (8, {"ep": 4, "dispatch": "visits", "local": "first"}, {}),
    "hosts": (4, {"ep": 4, "dispatch": "visits", "hosts": 2, "chunks": 2}, {}),
    "sharded": (4, {"ep": 2, "shard": 4}, {"train": {"recompute": True}}),
    "slices": (4, {"ep": 2, "tp": 2, "etp": 2}, {"model": {"vocab": 64}}),
    "pipeline": (
        4, {"ep": 2, "pp": 2, "schedule": "1f1b"}, {**SIGMOID, "train": {"micro_batches": 4}},
    ),
    "adapters": (2, {"ep": 2}, LORA),
}  # fmt: skip
_references: dict[str, Outcome] = {}


def moving(tables: dict[str, Any], every: int = 2, policy: str = "none") -> dict[str, Any]:
    balance = {"policy": policy, "rehome_every": every, "prices": FREE, "least_rows": 1}
    return {**tables, "balance": balance}


def alone(ranks: Ranks, tables: dict[str, Any]) -> Outcome:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    return _references[key]


def without_rows(found: Outcome) -> Outcome:
    """What is decided by is of those alone who decide."""
    state = {key: one for key, one in found.state.items() if not key.startswith(f"{ROWS}/")}
    assert len(state) < len(found.state)
    return Outcome(found.steps, found.gradients, state)


def assert_moved(found: Outcome) -> None:
    """In the second step and in the fourth, and never else."""
    assert [bool(step["moved"]) for step in found.steps] == [False, True, False, True, False]


@pytest.mark.parametrize("name", WAYS)
def test_the_numbers_of_one_process(ranks: Ranks, name: str) -> None:
    size, layout, tables = WAYS[name]
    job = tiny_job(**moving({**tables, "layout": layout}))
    found = outcome(ranks, size, job, STEPS, homes=HOMES[layout["ep"]])
    assert_moved(found)
    assert_same(without_rows(found), alone(ranks, tables))


@pytest.mark.parametrize("name", ["four, visits", "slices", "pipeline"])
def test_with_copies_at_random(ranks: Ranks, name: str) -> None:
    size, layout, tables = WAYS[name]
    job = tiny_job(**moving({**tables, "layout": layout}))
    found = outcome(ranks, size, job, STEPS, shaken=3)
    assert_moved(found)
    assert_same(without_rows(found), alone(ranks, tables))


@pytest.mark.parametrize("policy", ["quota", "pro-prophet", "eplb"])
def test_with_a_policy_of_copies(ranks: Ranks, policy: str) -> None:
    """Copies that are kept for longer are not, if experts move."""
    tables = moving({"layout": {"ep": 4}}, policy=policy)
    kept = {"replan_every": 100} if policy == "eplb" else {}
    job = tiny_job(**{**tables, "balance": {**tables["balance"], **kept}})
    found = outcome(ranks, 4, job, STEPS)
    assert_moved(found)
    assert sum(step["copies"] for step in found.steps) > 0
    assert_same(without_rows(found), alone(ranks, {}))


def go(world: World, tables: dict[str, Any], layout: dict[str, Any]) -> Any:
    """Steps; the state as bits, the homes of every layer, and what was sent."""
    job = tiny_job(**{**tables, "layout": layout})
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples, moved = RandomSamples(job.model.vocab, job.data.sequence), []
    sent = list[int]()
    exchange = rehoming._exchange

    def counted(carrier: Any, share: Any, leaving: Any, device: Any) -> Any:
        arrived = exchange(carrier, share, leaving, device)
        sent.append(arrived.nbytes)
        return arrived

    rehoming._exchange = counted
    try:
        for _ in range(STEPS):
            moved += run.step(samples).moved
    finally:
        rehoming._exchange = exchange
    state = [
        (piece.key, piece.shape, piece.offset, piece.tensor.view(piece.tensor.dtype).numpy().copy())
        for piece in run.state().pieces
        if piece.kind != ROWS
    ]
    homes = {layer: list(moe.bank.experts) for layer, moe in run.model.expert_layers()}
    for layer, moe in run.model.expert_layers() if len(run.plan.homes_by_rank) > 1 else ():
        policy = moe.balancer._policy
        assert policy.setting.homes.tolist() == homes_of(run.plan, layer).tolist()
    said = {layer: list(run.plan.homes(world.rank, layer)) for layer in homes}
    run.close()
    return (
        state,
        (homes, said),
        (sum(sent), [one.num_bytes for one in moved], expert_bytes(job, plan)),
    )


@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 2, "shard": 4}, {"ep": 4}])
def test_moments_of_eight_bits_are_the_same_bits(ranks: Ranks, layout: dict[str, Any]) -> None:
    """Every row is rounded by itself, wherever it is: all codes are those of one process."""
    tables = {
        "model": {"hidden": 136, "ffn": 20, "heads": 4, "kv_heads": 2, "head_dim": 8},
        "optimizer": {"moments": "8bit", "lr": 0.01}, "train": {"micro_batches": 2},
    }  # fmt: skip
    size = layout.get("shard", layout["ep"])
    results = ranks.run(size, go, moving(tables, policy="quota"), layout)
    found = put_together([state for state, _, _ in results])
    (single,) = ranks.run(1, go, tables, {})
    expected = put_together([single[0]])
    assert found.keys() == expected.keys()
    codes = [key for key in found if found[key].dtype in (np.int8, np.uint8)]
    assert sum(".experts." in key for key in codes) == 2 * 8 * 3 * 2
    assert all(np.array_equal(found[key], expected[key]) for key in codes)
    scales = [key for key in found if found[key].dtype == np.float32]
    assert all(np.allclose(found[key], expected[key], rtol=1e-6, atol=0) for key in scales)
    rest = found.keys() - {*codes, *scales}
    assert worst_element({k: found[k] for k in rest}, {k: expected[k] for k in rest}) < 1e-9
    for _, (homes, said), _ in results:
        assert homes == said
    each = results[0][2]
    assert sum(sent for _, _, (sent, _, _) in results) == sum(each[1]) > 0
    assert not sum(each[1]) % each[2]


def run_job(
    world: World, text: str, out: str, layout: dict[str, Any], resume: str | None,
    changes: dict[str, Any], plan: dict[str, Any] | None = None,
) -> tuple[list[float], list[str]]:  # fmt: skip
    """One rank of a training run; losses of its steps, and what it says."""
    tables: dict[str, Any] = {
        "model": {"vocab": 260}, "layout": layout,
        "data": {"path": text, "sequence": 16, "cache": str(Path(text).parent / "cache")},
        "train": {"steps": 6, "batch": 8, "micro_batches": 2, "precision": "fp32"},
        "checkpoint": {"every": 2, "keep": 9}, "log": {"tensorboard": False},
        "balance": {"policy": "none", "rehome_every": 3, "prices": FREE},
    }  # fmt: skip
    for table, keys in changes.items():
        tables[table] = {**tables.get(table, {}), **keys}
    watch = Silent()
    given = None if plan is None else Plan.model_validate(plan)
    loaded = LoadedJob(tiny_job(**tables), "", [], given)
    train(loaded, Path(out), resume, world, watch)
    return [figures["loss"] for figures in watch.figures], watch.messages


def at(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def everything(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, and where its experts lived."""
    checkpoint = Checkpoint.open(path)
    found: dict[str, Any] = {}
    for key, record in checkpoint.tensors.items():
        tensor = torch.empty(record.shape, dtype=TYPES[record.dtype])
        kind, _, name = key.partition("/")
        checkpoint.fill([Piece(kind, name, record.shape, (0,) * tensor.dim(), tensor, (0,))])
        found[key] = tensor.numpy()
    return {**found, "homes": checkpoint.facts["plan"]["homes_of_layers"]}


def events(out: Path, name: str) -> list[dict[str, Any]]:
    lines = (out / "events" / "rank-0.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert np.array_equal(value, b[key]) if key != "homes" else value == b[key], key


@pytest.mark.parametrize(
    ("name", "moments"),
    sparing(
        [
            [name, moments]
            for name in ("replicas", "sharded", "four, visits", "pipeline")
            for moments in ("8bit", "full")
        ],
        2,
    ),
)
def test_going_on_is_as_never_having_stopped(
    ranks: Ranks, text: Path, tmp_path: Path, name: str, moments: str
) -> None:
    """From before the first time that experts move, with rows that had come till then, and from
    between that and the second."""
    size, layout, tables = WAYS[name]
    more = {"optimizer": {"moments": moments}, **{k: v for k, v in tables.items() if k != "train"}}
    straight = tmp_path / "straight"
    whole = ranks.run(size, run_job, str(text), str(straight), layout, None, more)
    expected = everything(at(straight, 6))
    assert expected["homes"]
    assert everything(at(straight, 2))["homes"] == {}
    assert everything(at(straight, 4))["homes"] not in ({}, expected["homes"])
    for step in (2, 4):
        out = tmp_path / str(step)
        start = str(at(straight, step))
        rest = ranks.run(size, run_job, str(text), str(out), layout, start, more)
        assert rest[0][0] == whole[0][0][step:]
        assert_equal(everything(at(out, 6)), expected)


def test_another_layout_goes_on_with_the_same_numbers(
    ranks: Ranks, text: Path, tmp_path: Path
) -> None:
    exact = {"train": {"precision": "fp64"}}
    ((losses, _),) = ranks.run(1, run_job, str(text), str(tmp_path / "one"), {}, None, exact)
    first = tmp_path / "first"
    ranks.run(4, run_job, str(text), str(first), {"ep": 2}, None, exact)
    plain, expected = (everything(at(tmp_path / name, 6)) for name in ("one", "first"))
    rows = {key for key in expected if key.startswith(f"{ROWS}/")}
    assert rows
    for number, (size, layout) in enumerate([(4, {"ep": 4}), (2, {"ep": 2}), (1, {})]):
        out, start = tmp_path / str(number), str(at(first, 4))
        rest = ranks.run(size, run_job, str(text), str(out), layout, start, exact)
        assert rest[0][0] == pytest.approx(losses[4:], rel=1e-9)
        found = everything(at(out, 6))
        same = found.keys() - rows - {"homes"}
        assert same == plain.keys() - {"homes"}
        assert worst_element({k: found[k] for k in same}, {k: plain[k] for k in same}) < 1e-9


def test_what_a_run_says_of_it(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (_, said), *_ = ranks.run(4, run_job, str(text), str(out), {"ep": 2, "pp": 2}, None, {})
    told = events(out, "rehomed")
    assert {one["step"] for one in told} == {3, 6}
    assert {one["layer"] for one in told} == {0, 1}
    for one in told:
        assert all(source != target for _, source, target in one["moves"])
        assert one["gain_s"] > 0
        assert one["busiest_after"] < one["busiest_before"]
        assert (one["seconds"] is None) == (one["layer"] == 1), "rank 0 has the first layer"
        assert one["bytes"] > 0
    lines = [line for line in said if "have moved for good" in line]
    assert [line.partition(":")[0] for line in lines] == ["step 3", "step 6"]
    assert any(line.startswith("balance: no copies; experts may move every 3") for line in said)


def test_whose_homes_a_run_begins_with(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    """Those of the checkpoint, but where a plan says others and experts do not move."""
    out = tmp_path / "first"
    ranks.run(2, run_job, str(text), str(out), {"ep": 2}, None, {})
    left = everything(at(out, 4))["homes"]
    kept = Checkpoint.open(at(out, 4)).facts["plan"]
    given = {**kept, "homes": HOMES[2], "homes_of_layers": {}}
    still = {"balance": {"rehome_every": 0}}
    for number, (more, plan_, expected) in enumerate((
        ({}, None, left), (still, None, left), ({}, given, left), (still, given, {}),
    )):  # fmt: skip
        here = tmp_path / str(number)
        start = str(at(out, 4))
        ranks.run(2, run_job, str(text), str(here), {"ep": 2}, start, more, plan_)
        (began,) = events(here, "run_start")
        assert began["plan"]["homes_of_layers"] == expected
        if more is still:
            assert everything(at(here, 6))["homes"] == expected
            assert not events(here, "rehomed")


def test_a_checkpoint_without_rows_begins_anew(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    """Experts may move from then on, by rows from then on."""
    out, later = tmp_path / "first", tmp_path / "later"
    still = {"balance": {"rehome_every": 0}}
    ranks.run(2, run_job, str(text), str(out), {"ep": 2}, None, still)
    assert not any(key.startswith(ROWS) for key in everything(at(out, 4)))
    ranks.run(2, run_job, str(text), str(later), {"ep": 2}, str(at(out, 4)), {})
    assert {one["step"] for one in events(later, "rehomed")} == {6}


def test_a_run_without_prices_is_replayed_with_those_that_it_would_have_had(
    ranks: Ranks, text: Path, tmp_path: Path
) -> None:
    """What is usual of the devices that its record names."""
    said = []
    for every in (6, 0):
        out, balance = tmp_path / str(every), {"prices": None, "rehome_every": every}
        more = {"balance": balance, "log": {"loads_every": 1, "tensorboard": False}}
        ranks.run(2, run_job, str(text), str(out), {"ep": 2}, None, more)
        said.append(replayed(out, ReplayConfig(policy="quota")))
    assert said[0]["prices_from"] == "of the run"
    assert re.fullmatch(
        r"usual of such devices: cpu, \d+ threads? a rank, one host", said[1]["prices_from"]
    )
    assert said[0]["prices"] == said[1]["prices"]
