"""Pipeline parallelism equals one process, with every schedule."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from layouts import SIGMOID, assert_same, outcome, reference, worst_tensor

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run

STEPS = 2
BASE: dict[str, Any] = {"model": {"layers": 4}, "train": {"micro_batches": 4}}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen3_moe, tied": {
        "model": {"family": "qwen3_moe", "renormalise": True, "window": 5, "tied": True}
    },
    "deepseek_v3": {**SIGMOID, "model": {**SIGMOID["model"], "layers": 4}},
}  # fmt: skip


def tables(name: str, **more: Any) -> dict[str, Any]:
    """Return the tables of a family's job with the changes `more`."""
    result = {table: dict(keys) for table, keys in BASE.items()}
    for changes in (FAMILIES[name], more):
        for table, keys in changes.items():
            result[table] = {**result.get(table, {}), **keys}
    return result


def check(ranks: RankPool, size: int, name: str, **more: Any) -> None:
    """Compare a layout of a family's job with one rank."""
    job = tiny_job(**tables(name, **more))
    assert_same(outcome(ranks, size, job, STEPS), reference(ranks, STEPS, **tables(name)))


@pytest.mark.parametrize("other_axes", [{"ep": 2}, {"dp_shard": 2}])
def test_recompute(ranks: RankPool, other_axes: dict[str, int]) -> None:
    layout = {"pp": 2, "schedule": "interleaved", **other_axes}
    check(ranks, 4, "deepseek_v3", layout=layout, train={"recompute": True})


def test_ranks_without_tokens(ranks: RankPool, tmp_path: Path) -> None:
    """With micro-batches of one sample, half of the replicas have no tokens and no routing."""
    few = {"batch": 2, "micro_batches": 2}
    FAMILIES["olmoe, few"] = {"train": few}
    check(ranks, 4, "olmoe, few", layout={"pp": 2, "ep": 2})
    one = tiny_job(**tables("olmoe, few"))
    several = tiny_job(**tables("olmoe, few", layout={"pp": 2, "ep": 2}))
    recorded = outcome(ranks, 4, several, STEPS, record=str(tmp_path))
    replayed = outcome(ranks, 1, one, STEPS, replay=str(tmp_path))
    assert_same(replayed, recorded)
    assert sum(step["num_replay_mismatches"] for step in replayed.steps) == 0


def test_custom_stages(ranks: RankPool) -> None:
    """Stages may be uneven or without a layer."""
    layers = [f"layers.{index}" for index in range(4)]
    cut = [["embed"], layers[:3], layers[3:], ["head"]]
    name = "qwen3_moe, tied"
    job = tiny_job(**tables(name, layout={"pp": 2, "schedule": "interleaved"}))
    check(ranks, 1, name)
    assert_same(outcome(ranks, 2, job, STEPS, stages=cut), reference(ranks, STEPS, **tables(name)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_column_sharded_tied_embedding_on_both_end_stages(
    ranks: RankPool, dp_shard: int, schedule: str
) -> None:
    layout = {"pp": 2, "schedule": schedule, "dp_shard": dp_shard, "embedding": "columns"}
    check(ranks, 4, "qwen3_moe, tied", layout=layout)


def test_a_pipeline_rank_with_an_embedding_shard_alone(ranks: RankPool) -> None:
    """FSDP has nothing to shard on that rank."""
    layers = [f"layers.{index}" for index in range(4)]
    cut = [["embed"], layers[:3], layers[3:], ["head"]]
    name = "qwen3_moe, tied"
    for schedule, stages in (("interleaved", cut), ("1f1b", [["embed"], [*layers, "head"]])):
        layout = {"pp": 2, "schedule": schedule, "dp_shard": 2, "embedding": "columns"}
        job = tiny_job(**tables(name, layout=layout))
        check(ranks, 1, name)
        found = outcome(ranks, 4, job, STEPS, stages=stages)
        assert_same(found, reference(ranks, STEPS, **tables(name)))


def test_routing_is_recorded_and_replayed(ranks: RankPool, tmp_path: Path) -> None:
    """One rank replays the record of a pipeline, and vice versa, without a mismatch."""
    one, several = tiny_job(**tables("olmoe")), tiny_job(**tables("olmoe", layout={"pp": 2}))
    for number, (size, job, others, other) in enumerate(
        ((1, one, 2, several), (2, several, 1, one))
    ):
        record = str(tmp_path / str(number))
        recorded = outcome(ranks, size, job, STEPS, record=record)
        replayed = outcome(ranks, others, other, STEPS, replay=record)
        assert_same(replayed, recorded)
        assert sum(step["num_replay_mismatches"] for step in replayed.steps) == 0


def test_bf16_equals_one_rank(ranks: RankPool) -> None:
    """A pipeline uses the precisions of one rank, so gradients differ by rounding alone."""
    train = {"precision": "bf16"}
    one = outcome(ranks, 1, tiny_job(**tables("olmoe", train=train)), 1)
    layout = {"pp": 2, "schedule": "zero-bubble"}
    several = outcome(ranks, 2, tiny_job(**tables("olmoe", train=train, layout=layout)), 1)
    assert worst_tensor(several.gradients, one.gradients) < 1e-5


class LogCollector(logging.Handler):
    """Handler that keeps all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fail(world: World, job: Job) -> tuple[type, list[str]]:
    """Return the exception and the log of a step that fails on every pipeline rank."""
    calls: list[int] = []

    def fail_in_forward(*_: Any) -> None:
        calls.append(1)
        if len(calls) + world.rank == 2:  # The first stage has sent a micro-batch by then.
            raise DataError("an error")

    run, collector = start_run(job, world), LogCollector()
    run.part.model.layers[0].register_forward_hook(fail_in_forward)
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    logger.addHandler(collector)
    with pytest.raises(DataError) as caught:
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    logger.removeHandler(collector)
    return caught.type, collector.lines


def test_a_failed_step_raises_and_logs_nothing(ranks: RankPool) -> None:
    job = tiny_job(**tables("olmoe", layout={"pp": 2, "schedule": "zero-bubble"}))
    assert ranks.run(2, fail, job) == [(DataError, [])] * 2


def validate(
    world: World, job: Job, limits: list[int]
) -> list[tuple[float, int, dict[str, float]]]:
    """Return losses and figures of validations before, between and after steps."""
    run = start_run(job, world)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    found = []
    for limit in limits:
        found.append(run.validate(samples, limit))
        run.step(samples)
    run.close()
    return found


def test_validation_on_a_pipeline(ranks: RankPool) -> None:
    """The last batch has fewer samples than ranks."""
    limits, name = [8, 3, 1], "qwen3_moe, tied"
    (one,) = ranks.run(1, validate, tiny_job(**tables(name)), limits)
    for size, layout in (
        (2, {"pp": 2}),
        (4, {"pp": 2, "dp_shard": 2, "schedule": "interleaved"}),
        (4, {"pp": 4, "schedule": "zero-bubble"}),
        (4, {"embedding": "columns"}),
        (4, {"pp": 2, "embedding": "columns"}),
    ):
        for found in ranks.run(size, validate, tiny_job(**tables(name, layout=layout)), limits):
            for (loss, targets, _), (expected, counted, _) in zip(found, one, strict=True):
                assert targets == counted
                assert loss == pytest.approx(expected, rel=1e-9)
