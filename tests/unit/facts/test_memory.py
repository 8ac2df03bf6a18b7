"""What ranks hold under slices and in pipelines: laws that need no rank."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import memory, parameters
from moesaic.facts.workload.kept import activations
from moesaic.testing.jobs import tiny_job

DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3", "vocab": 64, "kv_heads": 4, "layers": 4, "dense_layers": 1,
    "dense_ffn": 48, "shared": 2, "latent": {"width": 12, "queries": 20, "rotary": 4, "value": 8},
}  # fmt: skip
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (8, {"tp": 2, "ep": 4, "shard": 2}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (4, {"pp": 2, "schedule": "interleaved", "shard": 2}),
    (4, {"pp": 2, "schedule": "zero-bubble", "ep": 2}),
    (8, {"pp": 2, "tp": 2, "ep": 2, "shard": 2}),
    (8, {"tp": 4, "etp": 2, "ep": 2}),
]


def make_job(layout: dict[str, Any], *, tied: bool = False, **train: Any) -> Job:
    return tiny_job(
        model={**DEEPSEEK, "tied": tied}, layout=layout,
        train={"batch": 8, "micro_batches": 4, **train},
    )  # fmt: skip


@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_hold_each_parameter_as_often_as_there_are_copies(
    size: int, layout: dict[str, Any], tied: bool
) -> None:
    """A tied weight twice in a pipeline; and a checkpoint has everything once."""
    job = make_job(layout, tied=tied)
    plan = lay_out(job.layout, job.model, size)
    needs = [memory(job, plan, rank) for rank in range(size)]
    expected = whole = biases = 0
    for p in parameters(job.model):
        if p.kind == "bias":
            biases += 4 * p.size
            continue
        whole += p.size
        if p.expert is not None:
            expected += p.size * plan.span // (plan.ep * plan.etp)
            continue
        copies = plan.replicas // plan.shard * (1 if p.cut is not None else plan.tp)
        expected += p.size * copies * (2 if tied and plan.pp > 1 and p.kind == "embedding" else 1)
    assert sum(one.moments_bytes for one in needs) == 2 * 8 * expected
    assert sum(one.staging_bytes for one in needs) == 3 * 8 * whole + biases


@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_there_at_one_time_is_no_more_than_all(
    size: int, layout: dict[str, Any], recompute: bool
) -> None:
    recompute &= layout.get("schedule") != "zero-bubble"
    job = make_job(layout, recompute=recompute)
    plan = lay_out(job.layout, job.model, size)
    for rank in range(size):
        needs = memory(job, plan, rank)
        assert 0 < needs.peak_bytes <= needs.total_bytes


def under_way(schedule: str, micro_batches: int, rank: int) -> int:
    """Bytes of activations on `rank` of two parts, with one sample a micro-batch."""
    job = make_job(
        {"pp": 2, "schedule": schedule}, micro_batches=micro_batches, batch=micro_batches
    )
    return memory(job, lay_out(job.layout, job.model, 2), rank).activations_bytes


def test_a_schedule_says_how_many_micro_batches_are_under_way() -> None:
    job = make_job({"pp": 2, "schedule": "gpipe"}, batch=4)
    plan = lay_out(job.layout, job.model, 2)
    kept = activations(job, plan, 0)
    stream = job.data.sequence * job.model.hidden * 8
    each = sum(kept.values()) - job.data.sequence**2  # Forward lets go of masks.
    each += 2 * stream  # The result, and what its gradient comes in.
    assert under_way("gpipe", 4, 0) == 4 * each + job.data.sequence**2
    # Of 1f1b, two on the first part and one on the last, but for what all of them leave.
    angles = job.data.sequence * job.model.turned * 8
    for rank in (0, 1):
        more = under_way("1f1b", 8, rank) - under_way("1f1b", 4, rank)
        assert more == 4 * (stream + angles)
    assert under_way("1f1b", 8, 0) > under_way("1f1b", 8, 1)
    assert under_way("interleaved", 8, 0) > under_way("1f1b", 8, 0)
    assert under_way("zero-bubble", 8, 1) > under_way("1f1b", 8, 1)


def test_slices_share_out_what_products_keep() -> None:
    """Four slices keep less than half of what one rank does: norms a run, products their heads."""
    alone, sliced = make_job({}), make_job({"tp": 4})
    one = memory(alone, lay_out(alone.layout, alone.model, 1))
    some = memory(sliced, lay_out(sliced.layout, sliced.model, 4))
    assert some.activations_bytes < 0.5 * one.activations_bytes
    assert some.head_bytes < 0.5 * one.head_bytes


def test_a_pipeline_shares_out_layers() -> None:
    alone, cut = make_job({}), make_job({"pp": 2})
    one = memory(alone, lay_out(alone.layout, alone.model, 1))
    parts = [memory(cut, lay_out(cut.layout, cut.model, 2), rank) for rank in (0, 1)]
    assert sum(part.parameters_bytes for part in parts) == one.parameters_bytes
    assert parts[0].head_bytes == 0
    assert parts[1].head_bytes == one.head_bytes


def test_a_stage_need_not_have_a_layer() -> None:
    """A cut by hand: the embedding alone, the head alone."""
    job = make_job({"pp": 2, "schedule": "interleaved"})
    even = lay_out(job.layout, job.model, 2)
    names = [f"layers.{index}" for index in range(4)]
    by_hand = even.model_copy(update={"stages": [["embed"], names[:3], names[3:], ["head"]]})
    cut, uncut = ([memory(job, plan, rank) for rank in (0, 1)] for plan in (by_hand, even))
    assert sum(m.parameters_bytes for m in cut) == sum(m.parameters_bytes for m in uncut)
    assert cut[0].activations_bytes < uncut[0].activations_bytes  # One layer, not two.
    assert all(0 < m.peak_bytes <= m.total_bytes for m in cut)
