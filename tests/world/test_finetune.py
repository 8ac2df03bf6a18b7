"""Fine-tuning under any layout: the same numbers, frozen tensors untouched, resumed anywhere."""

from __future__ import annotations

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
    sparing,
    worst_element,
)

from moesaic.base.errors import UserError
from moesaic.dist.state import FIRST_MOMENT, PARAMETER, SECOND_MOMENT
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.workload import Parameter, memory, parameters
from moesaic.facts.workload.parameters import adapters, trainable_parameters
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankFailed, RankPool
from moesaic.testing.runs import start_run, train_text
from moesaic.testing.states import live_values, read_checkpoint, whole_shard

LORA = {"method": "lora", "rank": 3, "alpha": 6.0}
EVERY = ["attention", "experts", "ffn", "shared"]
JOBS: dict[str, dict[str, Any]] = {
    "lora": {"finetune": LORA, "train": {"micro_batches": 4}},
    "lora of everything, routers too": {
        **SIGMOID, "finetune": {**LORA, "targets": EVERY, "router": "train"},
        "train": {"micro_batches": 2, "recompute": True},
    },
    "lora of experts alone, none in the first layer": {
        **SIGMOID, "finetune": {**LORA, "targets": ["experts"]}, "train": {"micro_batches": 2},
    },
    "mixtral": {"model": {"family": "mixtral", "renormalise": True}, "finetune": LORA},
    "qwen3_moe": {"model": {"family": "qwen3_moe"}, "finetune": LORA},
    "routers frozen": {**SIGMOID, "finetune": {}, "train": {"micro_batches": 2}},
    "dense, tied": {
        "model": {"family": "llama", "experts": 0, "top_k": 0, "tied": True},
        "finetune": {**LORA, "targets": ["attention", "ffn"]}, "train": {"micro_batches": 2},
    },
}  # fmt: skip
STEPS = 3


def everything(job: Job) -> list[Parameter]:
    return [*parameters(job.model), *adapters(job.model, job.finetune)]


def initial(job: Job) -> dict[str, np.ndarray]:
    """Initial values by logical name."""
    pieces = [
        whole_shard(p.name, torch.empty(p.shape, dtype=torch.float64)) for p in everything(job)
    ]
    InitialSource(job.seed, job.model.init_std).fill(pieces)
    return {piece.key: live_values(piece).numpy() for piece in pieces}


def check_what_changed(job: Job, result: Outcome) -> None:
    """What learns has changed and has moments; not a bit of anything else has, nor has it any."""
    names = {p.name for p in trainable_parameters(job)}
    before = initial(job)
    moments = {f"{kind}/{name}" for kind in (FIRST_MOMENT, SECOND_MOMENT) for name in names}
    assert result.state.keys() == before.keys() | moments
    assert {key.partition("/")[2] for key in result.gradients} == names
    biases = job.finetune is not None and job.finetune.router == "train"
    for parameter in everything(job):
        key = f"{PARAMETER}/{parameter.name}"
        changes = parameter.name in names or (parameter.kind == "bias" and biases)
        assert np.array_equal(result.state[key], before[key]) != changes, key


HALVES, COLUMNS = {"pp": 2, "schedule": "zero-bubble"}, {"embedding": "columns"}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}), (2, {"dp_shard": 2}), (4, {"ep": 2, "dp_shard": 2}), (2, HALVES),
    (2, {"ep": 2, **COLUMNS}), (4, {**HALVES, **COLUMNS}),
]  # fmt: skip
TP_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}), (4, {"tp": 2, "ep": 2, "dp_shard": 2}),
    (4, {"tp": 2, "pp": 2, "schedule": "gpipe", "ep": 2}),
]  # fmt: skip
EXPERTS_ALONE = "lora of experts alone, none in the first layer"
NOTHING_TO_LEARN: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (4, {"pp": 2, "dp_shard": 2, "schedule": "zero-bubble"}),
    (8, {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 2, "schedule": "gpipe"}),
]
"""Layouts with ranks or stages that train nothing, if experts alone are adapted."""
_alone: dict[str, Outcome] = {}


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [
        *sparing([[name, *layout] for layout in LAYOUTS for name in JOBS], 3),
        *sparing([[name, *layout] for name in JOBS if name != EXPERTS_ALONE
                  for layout in TP_LAYOUTS], 4),
        *([EXPERTS_ALONE, *layout] for layout in NOTHING_TO_LEARN),
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_numbers(
    ranks: RankPool, name: str, size: int, layout: dict[str, Any]
) -> None:
    """With TP, a matrix sharded by rows has a sharded B, and one sharded by columns a sharded A."""
    tables = {**JOBS[name], "model": {**JOBS[name].get("model", {}), "vocab": 60}}
    job = tiny_job(**tables)
    if name not in _alone:
        _alone[name] = outcome(ranks, 1, job, STEPS)
        check_what_changed(job, _alone[name])
    if not job.model.experts:
        layout = {key: value for key, value in layout.items() if key != "ep"}
    if job.train.recompute and "pp" in layout:
        layout = {**layout, "schedule": "gpipe"}
    assert_same(outcome(ranks, size, tiny_job(**tables, layout=layout), STEPS), _alone[name])


def test_bf16_stays_close_to_fp32(ranks: RankPool) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        tables = {"finetune": {**LORA, "targets": EVERY[:2]}, "train": {"precision": precision}}
        for ep in (1, 2):
            result = outcome(ranks, ep, tiny_job(**tables, layout={"ep": ep}), STEPS)
            losses[precision, ep] = [step["loss"] for step in result.steps]
    for ep in (1, 2):
        assert losses["bf16", ep] == pytest.approx(losses["fp32", ep], rel=0.01)


def held_and_predicted(world: World, job: Job) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of parameters, gradients and moments: those of one rank, and as predicted."""
    run = start_run(job, world)
    run.compute_gradients(RandomSamples(job.model.vocab, job.data.sequence))
    alone = {
        id(one) for b in run.part.buckets.buckets if len(b.parameters) == 1 for one in b.parameters
    }
    shared = {id(one) for b in run.part.buckets.buckets for one in b.parameters} - alone
    flat = {  # With what lies between gradients.
        item.grad.untyped_storage().data_ptr(): item.grad.untyped_storage().nbytes()
        for item in run.part.trainable
        if id(item.parameter) in shared
    }
    held = (
        sum(item.local.nbytes for item in (*run.part.trainable, *run.part.frozen)),
        sum(item.grad.nbytes for item in run.part.trainable if id(item.parameter) not in shared)
        + sum(flat.values()),
        sum(one.nbytes for pair in run.part.optimizer.moments.values() for one in pair),
    )
    assert all(item.parameter.grad is None for item in run.part.frozen)
    run.close()
    needs = memory(job, run.plan, world.rank)
    return held, (needs.parameters_bytes, needs.gradients_bytes, needs.moments_bytes)


@pytest.mark.parametrize("finetune", [LORA, {"router": "frozen"}])
def test_memory_follows_what_learns(ranks: RankPool, finetune: dict[str, Any]) -> None:
    for size, layout in ((1, {}), (2, {"ep": 2}), (2, {"ep": 2, "dp_shard": 2})):
        tables = {"model": {"vocab": 64}, "finetune": {**finetune, "rank": 4}, "layout": layout}
        job = tiny_job(**tables)
        for held, predicted in ranks.run(size, held_and_predicted, job):
            parameters, gradients, moments = predicted
            assert (parameters, moments) == (held[0], held[2])
            assert gradients <= held[1]  # At the peak, some may not be there.


def run_job(
    world: World, out: str, layout: dict[str, Any], resume: str | None, changes: dict[str, Any]
) -> tuple[list[float], list[str]]:
    """One rank of a run over the text beside `out`; losses, and what was said."""
    text = Path(out).parent / "text.txt"
    tables = {"layout": layout, "finetune": LORA, **changes}
    progress = train_text(world, text, Path(out), resume, **tables)
    return progress.losses, progress.messages


def test_any_layout_resumes_in_any_other(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    layouts = {"one": (1, {}), "two": (2, {"ep": 2}), "both": (4, {"ep": 2, "dp_shard": 2})}
    layouts["sliced"] = (4, {"tp": 2, "ep": 2, "dp_shard": 2})
    whole: dict[str, list[float]] = {}
    for name, (size, layout) in layouts.items():
        results = ranks.run(size, run_job, str(tmp_path / name), layout, None, {})
        whole[name], said = results[0]
        assert any(line.startswith("trains 9,408 of ") for line in said), said
        assert "  layers.*.moe.experts.*.gate.lora_*: 2,688" in said
    expected = read_checkpoint(tmp_path / "one/checkpoints/step-00000004")
    for before, after in (
        ("one", "one"), ("one", "both"), ("both", "two"), ("two", "sliced"), ("sliced", "one"),
    ):  # fmt: skip
        size, layout = layouts[after]
        start = str(tmp_path / before / "checkpoints/step-00000002")
        out = tmp_path / f"{before}-{after}"
        rest, _ = ranks.run(size, run_job, str(out), layout, start, {})[0]
        exact = before == after
        assert rest == (whole["one"][2:] if exact else pytest.approx(whole["one"][2:], rel=1e-9))
        state = read_checkpoint(out / "checkpoints/step-00000004")
        assert worst_element(state, expected) <= (0.0 if exact else 1e-9)
    for changes, words in (
        ({**LORA, "alpha": 7.0}, "finetune.alpha = 6.0, the job has 7.0"),
        ({}, 'finetune.method = "lora", the job has "full"'),
    ):
        other = {"finetune": changes}
        with pytest.raises((UserError, RankFailed), match=f"trained with {words}"):
            ranks.run(1, run_job, str(tmp_path / "x"), {}, start, other)
    assert not (tmp_path / "x").exists()
