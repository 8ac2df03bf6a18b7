"""Events of pipelines: order of each pipeline rank, stage transfers, and once-per-step work."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import SCHEDULES, UNIT, block, cluster, pipeline, simulate
from slow_timeline import unfold

from moesaic.facts.cluster import place_ranks
from moesaic.facts.job import Job
from moesaic.facts.job.train import PipelineSchedule
from moesaic.facts.plan import Action, pipeline_actions, plan_from_job
from moesaic.facts.workload import (
    GROUPED_MM,
    STEP,
    Block,
    BlockSpec,
    BlockWork,
    CollectiveCall,
    MatmulShape,
    Op,
    workload,
)
from moesaic.policy.cost.cluster_costs import ClusterCosts
from moesaic.policy.cost.event import PIPELINE, SegmentRun
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.pipeline import (
    action_work,
    merge_schedules,
    pipeline_step,
    prerequisite,
)
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_step
from moesaic.testing.jobs import tiny_job


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(num_ranks=st.integers(2, 6), rounds=st.integers(1, 4), each=st.integers(1, 3))
def test_merged_schedules_respect_order_and_dependencies(
    schedule: PipelineSchedule, num_ranks: int, rounds: int, each: int
) -> None:
    micro_batches, each = num_ranks * rounds, each if schedule == "interleaved" else 1
    found, done = list(merge_schedules(schedule, num_ranks, each, micro_batches)), set[Action]()
    for action in found:
        before = prerequisite(action, num_ranks * each - 1)
        assert before is None or before in done
        done.add(action)
    for part in range(num_ranks):
        own = [action for action in found if action.stage % num_ranks == part]
        assert own == pipeline_actions(schedule, num_ranks, each, micro_batches, part)


def test_a_rank_waits_for_transfers() -> None:
    """One micro-batch: forward takes 1 + 0.5 + 1 seconds, backward 2 + 0.5 + 2."""
    found = simulate("gpipe", 2, 1, latency_s=0.5)
    assert found.end_s.tolist() == pytest.approx([7.0, 4.5])
    assert [found.waiting_s(rank) for rank in (0, 1)] == pytest.approx([3.5, 1.0])
    received = [
        (rank, span.event.name, span.micro_batch, span.end_s)
        for rank in (0, 1)
        for span in found.spans(rank)
        if span.event.receives is not None
    ]
    assert received == [(0, "gradients", 0, 5.0), (1, "activations", 0, 1.5)]


def test_eager_transfers_overlap_with_computing() -> None:
    """The second activations are sent at 2, and their receiver computes until 6.

    Received only then, as in torch's single-stage schedules, they arrive at 8.
    """
    late, early = (simulate(schedule, 2, 2, 2.0, each=1) for schedule in ("1f1b", "interleaved"))
    arrived = [
        [span.end_s for span in found.spans(1) if span.event.receives is not None]
        for found in (late, early)
    ]
    assert arrived == [[3.0, 8.0], [3.0, 6.0]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_senders_do_not_wait(schedule: PipelineSchedule) -> None:
    """The first part computes the forwards before its first backward one after another."""
    found = simulate(schedule, 2, 4, latency_s=0.25)
    forwards = [span for span in found.spans(0) if span.event.name == "forward"]
    num_warmup = 4 if schedule == "gpipe" else 2
    gaps = [after.arrive_s - before.end_s for before, after in pairwise(forwards[:num_warmup])]
    assert gaps == pytest.approx([0.0] * (num_warmup - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_a_stage_run_only_its_events(schedule: PipelineSchedule) -> None:
    narrow, wide = (simulate(schedule, 3, 6, 0.25, span=span) for span in (1, 4))
    for part in range(3):
        assert wide.end_s[4 * part : 4 * part + 4].tolist() == [narrow.end_s[part]] * 4
    work = [
        sum(span.end_s - span.begin_s for span in wide.spans(rank) if span.event.receives is None)
        for rank in range(12)
    ]
    stages = 2 if schedule == "interleaved" else 1
    assert work == pytest.approx([6 * 3.0 * stages] * 12)


def split_backward(one: Block) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Return the operations of both halves of a split backward."""
    inputs, weights = (action_work(one, kind, is_first_stage=False) for kind in ("input", "weight"))
    return inputs.ops, weights.ops


def test_split_backward_separates_input_and_weight_matmuls() -> None:
    """Weight gradients have as many flops as forward; those of dense weights sum over tokens."""
    latent = {"kv_lora_rank": 9, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 10}
    for model in (
        {},
        {"family": "deepseek_v3", "kv_heads": 4, "shared_experts": 1, "latent": latent},
    ):
        job = tiny_job(model=model)
        tokens = job.train.batch * job.data.sequence
        for one in workload(job, plan_from_job(job, 1))[:-2]:
            inputs, weights = split_backward(one)
            linear = [op for op in one.forward.ops if op.kind in ("", GROUPED_MM)]
            assert sum(op.flops for op in weights) == sum(op.flops for op in linear)
            assert sum(op.flops for op in (*inputs, *weights)) == one.backward.flops
            dense = [op for op in weights if op.name != "experts"]
            assert all(product.inner == tokens for op in dense for product in op.matmuls)
            assert len(weights) - len(dense) == one.name.endswith("moe")
        assert not split_backward(workload(job, plan_from_job(job, 1))[-2])[1], (
            "forward has the head's done"
        )


def test_frozen_experts_have_weight_matmuls_of_adapters_only() -> None:
    """This holds for any shape: here input gradients are as large as forward matmuls."""
    finetune = {"method": "lora", "rank": 3, "targets": ["experts"]}
    job = tiny_job(model={"hidden": 32, "ffn": 16, "head_dim": 8}, finetune=finetune)
    (block,) = [one for one in workload(job, plan_from_job(job, 1)) if one.name == "layers.1.moe"]
    inputs, weights = split_backward(block)
    assert {3} == {min(one.columns, one.inner) for op in weights for one in op.matmuls}
    assert sum(op.flops for op in (*inputs, *weights)) == block.backward.flops


def test_the_first_stage_runs_its_whole_backward_as_weight_action() -> None:
    found = simulate("zero-bubble", 3, 6)
    spent: Counter[tuple[int, str]] = Counter()
    for part in range(3):
        for one in found.events(part):
            spent[part, one.event.name] += round(one.elapsed_s - one.waiting_s)
    assert [spent[part, "input"] for part in range(3)] == [0, 6, 6]
    assert [spent[part, "weight"] for part in range(3)] == [12, 6, 6]
    assert [spent[part, "forward"] for part in range(3)] == [6, 6, 6]


def with_update(name: str, ranks: tuple[int, ...], *more: CollectiveCall) -> list[Block]:
    """Return a stage of one layer with its once-per-step work."""
    added = Op("accumulate", (MatmulShape(2, 3, 4, 3),))
    messages = (
        CollectiveCall("targets", "all_reduce", ranks, 8),
        CollectiveCall("dense gradients", "all_reduce", ranks, 100),
        *more,
        CollectiveCall("norm", "all_reduce", tuple(range(6)), 8),
        CollectiveCall("losses", "all_reduce", tuple(range(6)), 32),
    )  # fmt: skip
    return [
        block(name, update=BlockWork((added, Op("adamw", (UNIT,))))),
        Block(BlockSpec(STEP, "other"), update=BlockWork((Op("reduce", (UNIT,)),), messages)),
    ]


def updated() -> list[SegmentRun]:
    """Return a step of three pipeline ranks with two ranks each, with gradient and scalar
    reductions."""
    plan, traffic, _ = pipeline("1f1b", 3, 3, span=2)
    work = {
        first: with_update(
            f"layers.{first // 2}.ffn", (first, first + 1),
            *((CollectiveCall("ends", "all_reduce", (0, 4), 64),) if first != 2 else ()),
        )
        for first in (0, 2, 4)
    }  # fmt: skip
    where = cluster(count=6)
    places = place_ranks(where, 6)
    costs = ClusterCosts(plan, where, places, NetworkModel(where, places))
    return pipeline_step(costs, traffic, work, {first: [first, first + 1] for first in work})


def test_once_per_step_events_follow_the_pipeline() -> None:
    step = updated()
    events = unfold(step)
    phases = [phase for phase, _ in groupby(event.phase for event in events)]
    assert phases == ["data", PIPELINE, "reduce", "clip", "optimizer", "log"]
    groups: dict[str, list[list[list[int]]]] = {}
    for event in events:
        if event.groups:
            groups.setdefault(event.name, []).append([list(group) for group in event.groups])
    everyone = [[list(range(6))]]
    own = [[[0, 1]], [[2, 3]], [[4, 5]]]
    ends = [[[0, 4], [1, 5]]]
    assert groups == {
        "targets": own, "dense gradients": own, "ends": ends, "norm": everyone, "losses": everyone,
    }  # fmt: skip
    found = simulate_step(step, 6)
    assert found.end_s.tolist() == [found.step_s] * 6


def test_gradients_accumulate_in_backward() -> None:
    """Accumulation takes three seconds over three micro-batches, next to 3 + 6 seconds of
    computing."""
    found = simulate_step(updated(), 6)
    for rank in range(6):
        own = [one for one in found.events(rank) if one.event.phase == PIPELINE]
        busy = [one.elapsed_s - one.waiting_s for one in own if one.event.receives is None]
        assert sum(busy) == pytest.approx(12.0)
    backs = [event for event in unfold(updated()) if event.name == "backward 1"]
    assert [event.seconds.max() for event in backs] == pytest.approx([3.0] * 3)


def test_fsdp_gathers_before_and_reduces_after_a_stage() -> None:
    plan, traffic, work = pipeline("interleaved", 2, 4, span=2)
    names = ("unshard", "reshard")
    for first, blocks in work.items():
        ranks = (first, first + 1)
        collectives = (
            CollectiveCall("parameters", "all_gather", ranks, 10),
            CollectiveCall("gradients", "reduce_scatter", ranks, 10),
        )
        once = BlockWork(tuple(Op(name, (UNIT,)) for name in names), collectives)
        work[first] = [block(one.name, update=once) for one in blocks[:-1]] + blocks[-1:]
    where = cluster(count=4)
    places = place_ranks(where, 4)
    costs = ClusterCosts(plan, where, places, NetworkModel(where, places))
    step = pipeline_step(costs, traffic, work, {first: [first, first + 1] for first in work})
    events = unfold(step)
    for stage in range(4):
        own = [event.name for event in events if event.block == f"layers.{stage}.ffn"]
        assert own[:3] == ["unshard", "parameters", "forward 0"]
        assert own[-3:] == ["backward 3", "reshard", "gradients"]
        assert Counter(own).most_common(1)[0][1] == 1


def jobs(schedule: PipelineSchedule, **layout: Any) -> Job:
    """Return a tiny job with two pipeline ranks."""
    return tiny_job(
        model={"layers": 4, "vocab": 64}, layout={"pp": 2, "schedule": schedule, **layout},
        train={"batch": 16, "micro_batches": 4},
    )  # fmt: skip


LAYOUTS = [{}, {"ep": 2}, {"dp_shard": 2}, {"tp": 2}, {"tp": 2, "ep": 4}, {"tp": 2, "dp_shard": 2}]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pipeline_layout_has_a_timeline(
    schedule: PipelineSchedule, layout: dict[str, int]
) -> None:
    job = jobs(schedule, **layout)
    plan, where = plan_from_job(job, 8), cluster(hosts=2, count=4, latency_s=0.01)
    step = JobCosts.from_job(job, plan, where).step()
    events = unfold(step)
    phases = [phase for phase, _ in groupby(event.phase for event in events)]
    assert phases == ["data", PIPELINE, "reduce", "clip", "optimizer", "log"]
    assert all(len(event.seconds) == 8 and (event.seconds >= 0).all() for event in events)
    transfers = sum(event.receives is not None for event in events)
    stages = 4 if schedule == "interleaved" else 2
    assert transfers == 2 * 4 * (stages - 1)
    collectives = {event.name for event in events if event.groups}
    assert ("tokens" in collectives) == ("ep" in layout)
    assert ("parameters" in collectives) == ("dp_shard" in layout)
    assert ("gather sequence" in collectives) == ("tp" in layout)
    assert simulate_step(step, 8).end_s.max() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_flops_of_a_job_are_counted(layout: dict[str, int]) -> None:
    job = jobs("1f1b", **layout)
    plan, where = plan_from_job(job, 8), cluster(hosts=2, count=4)
    spent = np.zeros(8)
    for event in unfold(JobCosts.from_job(job, plan, where).step()):
        if not event.is_communication:
            spent += event.seconds
    for rank in range(8):
        blocks = workload(job, plan, rank)
        once = sum(one.forward.flops + one.backward.flops for one in blocks)
        again = sum(one.update.flops for one in blocks)
        share = sum(
            op.flops * (1 - op.causal_fraction)
            for one in blocks
            for op in (*one.forward.ops, *one.backward.ops)
        )
        assert spent[rank] == pytest.approx((4 * (once - share) + again) / UNIT.flops)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_ranks_receive_equal_tokens(
    schedule: PipelineSchedule, layout: dict[str, int]
) -> None:
    job = jobs(schedule, **layout)
    plan, where = plan_from_job(job, 8), cluster(hosts=2, count=4, latency_s=0.01)
    costs = JobCosts.from_job(job, plan, where)
    work = {rank: workload(job, plan, rank) for rank in range(8)}
    each = simulate_step(costs.step_from_blocks(work, {rank: [rank] for rank in range(8)}), 8)
    assert simulate_step(costs.step(), 8).end_s == pytest.approx(each.end_s)


def test_tied_embeddings_are_reduced_over_both_end_stages() -> None:
    job = tiny_job(
        model={"family": "qwen3_moe", "renormalise": True, "tied": True, "layers": 4},
        layout={"pp": 4}, train={"batch": 16, "micro_batches": 4},
    )  # fmt: skip
    events = unfold(JobCosts.from_job(job, plan_from_job(job, 8), cluster(latency_s=0.5)).step())
    (ends,) = (event for event in events if event.name == "tied embedding")
    assert (ends.phase, ends.groups) == ("reduce", [[0, 6], [1, 7]])
    assert ends.seconds.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    (loads,) = (event for event in events if event.name == "loads")
    assert (loads.phase, loads.groups) == ("log", [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_recomputation_lengthens_a_pipeline() -> None:
    where = cluster(count=8)
    once, again = (
        tiny_job(
            model={"layers": 4}, layout={"pp": 2},
            train={"batch": 16, "micro_batches": 4, "recompute": recompute},
        )
        for recompute in (False, True)
    )  # fmt: skip
    step_s = [
        simulate_step(JobCosts.from_job(job, plan_from_job(job, 8), where).step(), 8).step_s
        for job in (once, again)
    ]
    assert 1.2 * step_s[0] < step_s[1] < 1.4 * step_s[0]


def test_stage_transfers_carry_a_sequence_shard() -> None:
    """Bytes in the dtype of weights: half of 2 samples of 12 tokens, 32 channels, 8 bytes each."""
    job = jobs("1f1b", tp=2)
    slow = cluster(count=8)
    link = slow.links[0].model_copy(update={"bandwidth": 1.0})
    slow = slow.model_copy(update={"links": [link]})
    events = unfold(JobCosts.from_job(job, plan_from_job(job, 8), slow).step())
    transfers = [event for event in events if event.receives is not None]
    assert all(set(event.seconds.tolist()) == {0.0, 2 * 12 // 2 * 32 * 8.0} for event in transfers)


def test_equal_work_is_computed_once() -> None:
    job = jobs("1f1b", ep=2)
    events = unfold(JobCosts.from_job(job, plan_from_job(job, 8), cluster(count=8)).step())
    arrays = {id(event.seconds) for event in events}
    groups = {id(event.groups) for event in events if event.groups}
    assert len(arrays) < len(events) / 4
    assert len(groups) <= 10
