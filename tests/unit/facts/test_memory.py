"""Memory with TP and PP: properties that need no rank processes."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import memory, parameters, workload
from moesaic.testing.jobs import tiny_job

DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3", "vocab": 64, "kv_heads": 4, "layers": 4, "dense_layers": 1,
    "dense_ffn": 48, "shared_experts": 2,
    "latent": {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 4, "v_head_dim": 8},
}  # fmt: skip
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (8, {"tp": 2, "ep": 4, "dp_shard": 2}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (4, {"pp": 2, "schedule": "interleaved", "dp_shard": 2}),
    (4, {"pp": 2, "schedule": "zero-bubble", "ep": 2}),
    (8, {"pp": 2, "tp": 2, "ep": 2, "dp_shard": 2}),
    (8, {"tp": 4, "etp": 2, "ep": 2}),
]


def make_job(layout: dict[str, Any], *, tied: bool = False, **train: Any) -> Job:
    return tiny_job(
        model={**DEEPSEEK, "tied": tied}, layout=layout,
        train={"batch": 8, "micro_batches": 4, **train},
    )  # fmt: skip


@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_store_every_replica(size: int, layout: dict[str, Any], tied: bool) -> None:
    """A tied weight counts twice in a pipeline; checkpoints have everything once."""
    job = make_job(layout, tied=tied)
    plan = plan_from_layout(job.layout, job.model, size)
    memories = [memory(job, plan, rank) for rank in range(size)]
    expected = checkpointed = biases = 0
    for p in parameters(job.model):
        if p.kind == "bias":
            biases += 4 * p.size
            continue
        checkpointed += p.size
        if p.expert is not None:
            expected += p.size * plan.ranks_per_stage // (plan.ep * plan.etp)
            continue
        replicas = plan.dp // plan.dp_shard * (1 if p.tp_dim is not None else plan.tp)
        expected += p.size * replicas * (2 if tied and plan.pp > 1 and p.kind == "embedding" else 1)
    assert sum(each.moments_bytes for each in memories) == 2 * 8 * expected
    staged = sum(each.staging_bytes for each in memories)
    assert staged == pytest.approx(3 * 8 * checkpointed + biases, abs=size)  # Each is rounded.


def bytes_in_flight(schedule: str, micro_batches: int, rank: int) -> int:
    """Return activation bytes on `rank` of two pipeline ranks, with one sample per micro-batch."""
    job = make_job(
        {"pp": 2, "schedule": schedule}, micro_batches=micro_batches, batch=micro_batches
    )
    return memory(job, plan_from_layout(job.layout, job.model, 2), rank).activations_bytes


def test_schedule_determines_micro_batches_in_flight() -> None:
    job = make_job({"pp": 2, "schedule": "gpipe"}, batch=4)
    plan = plan_from_layout(job.layout, job.model, 2)
    saved = sum(block.saved_bytes for block in workload(job, plan, 0))
    stream = job.data.sequence * job.model.hidden * 8
    assert bytes_in_flight("gpipe", 8, 0) - bytes_in_flight("gpipe", 4, 0) > 4 * (saved + stream)
    # 1f1b has two in flight on the first rank and one on the last; only buffers grow further.
    for rank in (0, 1):
        extra = bytes_in_flight("1f1b", 8, rank) - bytes_in_flight("1f1b", 4, rank)
        assert extra < 4 * 2 * stream
    assert bytes_in_flight("1f1b", 8, 0) > bytes_in_flight("1f1b", 8, 1)
    assert bytes_in_flight("interleaved", 8, 0) > bytes_in_flight("1f1b", 8, 0)
    assert bytes_in_flight("zero-bubble", 8, 1) > bytes_in_flight("1f1b", 8, 1)


def test_stage_without_layers() -> None:
    """Stages cut by hand: the embedding alone, the head alone."""
    job = make_job({"pp": 2, "schedule": "interleaved"})
    default_plan = plan_from_layout(job.layout, job.model, 2)
    names = [f"layers.{index}" for index in range(4)]
    cut_plan = default_plan.model_copy(
        update={"stages": [["embed"], names[:3], names[3:], ["head"]]}
    )
    cut, default = (
        [memory(job, plan, rank) for rank in (0, 1)] for plan in (cut_plan, default_plan)
    )
    assert sum(m.parameters_bytes for m in cut) == sum(m.parameters_bytes for m in default)
    # The first rank has one layer, not two.
    assert cut[0].activations_bytes < default[0].activations_bytes
