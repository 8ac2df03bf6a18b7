"""A pipeline gives the same numbers as one process, whatever its schedule and whatever is in it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from layouts import SIGMOID, Outcome, assert_same, outcome, worst_tensor

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

STEPS = 2
BASE: dict[str, Any] = {"model": {"layers": 4}, "train": {"micro_batches": 4}}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen3_moe, tied": {
        "model": {"family": "qwen3_moe", "renormalise": True, "window": 5, "tied": True}
    },
    "deepseek_v3": {**SIGMOID, "model": {**SIGMOID["model"], "layers": 4}},
}  # fmt: skip
_references: dict[str, Outcome] = {}


def tables(name: str, **more: Any) -> dict[str, Any]:
    """The tables of a family's job, under `more`."""
    result = {table: dict(keys) for table, keys in BASE.items()}
    for changes in (FAMILIES[name], more):
        for table, keys in changes.items():
            result[table] = {**result.get(table, {}), **keys}
    return result


def check(ranks: Ranks, size: int, name: str, **more: Any) -> None:
    """Hold a layout of a family's job against one rank."""
    if name not in _references:
        _references[name] = outcome(ranks, 1, tiny_job(**tables(name)), STEPS)
    job = tiny_job(**tables(name, **more))
    assert_same(outcome(ranks, size, job, STEPS), _references[name])


@pytest.mark.parametrize("beside", [{"ep": 2}, {"shard": 2}])
def test_layers_that_are_computed_again(ranks: Ranks, beside: dict[str, int]) -> None:
    layout = {"pp": 2, "schedule": "interleaved", **beside}
    check(ranks, 4, "deepseek_v3", layout=layout, train={"recompute": True})


def test_ranks_without_a_token(ranks: Ranks, tmp_path: Path) -> None:
    """Micro-batches of one sample over two replicas: half of a part has none, nor any routes."""
    few = {"batch": 2, "micro_batches": 2}
    FAMILIES["olmoe, few"] = {"train": few}
    check(ranks, 4, "olmoe, few", layout={"pp": 2, "ep": 2})
    one = tiny_job(**tables("olmoe, few"))
    several = tiny_job(**tables("olmoe, few", layout={"pp": 2, "ep": 2}))
    recorded = outcome(ranks, 4, several, STEPS, record=str(tmp_path))
    replayed = outcome(ranks, 1, one, STEPS, replay=str(tmp_path))
    assert_same(replayed, recorded)
    assert sum(step["flips"] for step in replayed.steps) == 0


def test_a_cut_by_hand(ranks: Ranks) -> None:
    """Stages may be uneven, and need not have a layer."""
    layers = [f"layers.{index}" for index in range(4)]
    cut = [["embed"], layers[:3], layers[3:], ["head"]]
    name = "qwen3_moe, tied"
    job = tiny_job(**tables(name, layout={"pp": 2, "schedule": "interleaved"}))
    check(ranks, 1, name)
    assert_same(outcome(ranks, 2, job, STEPS, stages=cut), _references[name])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("shard", [1, 2])
def test_both_ends_have_columns_of_a_tied_weight(ranks: Ranks, shard: int, schedule: str) -> None:
    layout = {"pp": 2, "schedule": schedule, "shard": shard, "embedding": "columns"}
    check(ranks, 4, "qwen3_moe, tied", layout=layout)


def test_a_part_may_have_nothing_but_columns(ranks: Ranks) -> None:
    """Then FSDP has nothing there to share out."""
    layers = [f"layers.{index}" for index in range(4)]
    cut = [["embed"], layers[:3], layers[3:], ["head"]]
    name = "qwen3_moe, tied"
    for schedule, stages in (("interleaved", cut), ("1f1b", [["embed"], [*layers, "head"]])):
        layout = {"pp": 2, "schedule": schedule, "shard": 2, "embedding": "columns"}
        job = tiny_job(**tables(name, layout=layout))
        check(ranks, 1, name)
        assert_same(outcome(ranks, 4, job, STEPS, stages=stages), _references[name])


def test_routes_are_recorded_and_replayed(ranks: Ranks, tmp_path: Path) -> None:
    """What a pipeline records one rank replays, and the other way round, without a flip."""
    one, several = tiny_job(**tables("olmoe")), tiny_job(**tables("olmoe", layout={"pp": 2}))
    for number, (size, job, others, other) in enumerate(
        ((1, one, 2, several), (2, several, 1, one))
    ):
        record = str(tmp_path / str(number))
        recorded = outcome(ranks, size, job, STEPS, record=record)
        replayed = outcome(ranks, others, other, STEPS, replay=record)
        assert_same(replayed, recorded)
        assert sum(step["flips"] for step in replayed.steps) == 0


def test_bf16_is_computed_in_bf16_forward_only(ranks: Ranks) -> None:
    """A pipeline computes in the precision that one rank does; so gradients differ by as little."""
    train = {"precision": "bf16"}
    one = outcome(ranks, 1, tiny_job(**tables("olmoe", train=train)), 1)
    layout = {"pp": 2, "schedule": "zero-bubble"}
    several = outcome(ranks, 2, tiny_job(**tables("olmoe", train=train, layout=layout)), 1)
    assert worst_tensor(several.gradients, one.gradients) < 1e-5


class Loud(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fail(world: World, job: Job) -> tuple[type, list[str]]:
    """A step in which every part meets a mistake: what ends it, and what is logged."""
    met: list[int] = []

    def meet(*_: Any) -> None:
        met.append(1)
        if len(met) + world.rank == 2:  # The first part has sent something by then.
            raise DataError("a mistake")

    plan, loud = lay_out(job.layout, job.model, world.size), Loud()
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    run.model.layers[0].register_forward_hook(meet)
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    logger.addHandler(loud)
    with pytest.raises(DataError) as caught:
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    logger.removeHandler(loud)
    return caught.type, loud.lines


def test_a_mistake_is_all_that_is_said_of_a_step_that_fails(ranks: Ranks) -> None:
    job = tiny_job(**tables("olmoe", layout={"pp": 2, "schedule": "zero-bubble"}))
    assert ranks.run(2, fail, job) == [(DataError, [])] * 2


def validate(world: World, job: Job, limits: list[int]) -> list[tuple[float, int]]:
    """Validation losses before, between and after steps."""
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    found = []
    for limit in limits:
        found.append(run.validate(samples, limit))
        run.step(samples)
    run.close()
    return found


def test_validation_goes_through_the_stages(ranks: Ranks) -> None:
    """The last batch is partial, and of one sample on four ranks, which leaves some without."""
    limits, name = [8, 3, 1], "qwen3_moe, tied"
    (one,) = ranks.run(1, validate, tiny_job(**tables(name)), limits)
    for size, layout in (
        (2, {"pp": 2}),
        (4, {"pp": 2, "shard": 2, "schedule": "interleaved"}),
        (4, {"pp": 4, "schedule": "zero-bubble"}),
        (4, {"embedding": "columns"}),
        (4, {"pp": 2, "embedding": "columns"}),
    ):
        for found in ranks.run(size, validate, tiny_job(**tables(name, layout=layout)), limits):
            for (loss, targets), (expected, counted) in zip(found, one, strict=True):
                assert targets == counted
                assert loss == pytest.approx(expected, rel=1e-9)
