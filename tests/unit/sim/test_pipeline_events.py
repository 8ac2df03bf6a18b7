"""Pipelines as events: parts in their order, what stages hand on, and what is done once a step."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import SCHEDULES, UNIT, block, cluster, pipeline, simulate

from moesaic.facts.cluster import place
from moesaic.facts.job import Job
from moesaic.facts.job.train import Schedule
from moesaic.facts.plan import Action, order, planned
from moesaic.facts.workload import SLOTS, STEP, Block, Message, Op, Product, Work, workload
from moesaic.policy.cost.event import PIPELINE, Event
from moesaic.policy.cost.lanes import Lanes
from moesaic.policy.cost.pipeline import awaited, halves, in_turn, pipelined
from moesaic.policy.cost.step import Costs
from moesaic.policy.cost.traffic import Traffic
from moesaic.sim.timeline import run
from moesaic.testing.jobs import tiny_job


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(parts=st.integers(2, 6), rounds=st.integers(1, 4), each=st.integers(1, 3))
def test_in_turn_keeps_orders_and_waits(
    schedule: Schedule, parts: int, rounds: int, each: int
) -> None:
    micro_batches, each = parts * rounds, each if schedule == "interleaved" else 1
    found, done = list(in_turn(schedule, parts, each, micro_batches)), set[Action]()
    for action in found:
        before = awaited(action, parts * each - 1)
        assert before is None or before in done
        done.add(action)
    for part in range(parts):
        own = [action for action in found if action.stage % parts == part]
        assert own == order(schedule, parts, each, micro_batches, part)


def test_a_part_waits_for_what_is_on_its_way() -> None:
    """Of one micro-batch: there in 1 + 0.5 + 1 seconds, back in 2 + 0.5 + 2."""
    found = simulate("gpipe", 2, 1, latency_s=0.5)
    assert found.end_s.tolist() == pytest.approx([7.0, 4.5])
    assert [found.waiting_s(rank) for rank in (0, 1)] == pytest.approx([3.5, 1.0])
    taken = [span for span in found.spans if span.event.takes is not None]
    assert [span.event.name for span in taken] == ["activations 0", "gradients 0"]
    assert [span.end_s.tolist() for span in taken] == [[1.0, 1.5], [5.0, 4.5]]


def test_what_was_asked_for_ahead_travels_while_its_rank_computes() -> None:
    """The second activations leave at 2, and who takes them computes until 6.

    Asked for only then, as torch's schedules of one stage do, they come at 8.
    """
    late, early = (simulate(schedule, 2, 2, 2.0, each=1) for schedule in ("1f1b", "interleaved"))
    arrived = [
        {
            span.event.name: float(span.end_s[1])
            for span in found.spans
            if span.event.takes is not None and 1 in span.event.takes.receivers
        }
        for found in (late, early)
    ]
    assert arrived[0] == {"activations 0": 3.0, "activations 1": 8.0}
    assert arrived[1] == {"activations 0": 3.0, "activations 1": 6.0}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_hands_on_does_not_wait(schedule: Schedule) -> None:
    """The first part computes the forwards before its first backward one after another."""
    found = simulate(schedule, 2, 4, latency_s=0.25)
    own = [span for span in found.spans if span.end_s[0] > span.start_s[0]]
    forwards = [span for span in own if span.event.name.startswith("forward")]
    ahead = 4 if schedule == "gpipe" else 2
    gaps = [
        float(after.start_s[0] - before.end_s[0]) for before, after in pairwise(forwards[:ahead])
    ]
    assert gaps == pytest.approx([0.0] * (ahead - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_a_part_do_the_same_and_nothing_of_others(schedule: Schedule) -> None:
    narrow, wide = (simulate(schedule, 3, 6, 0.25, span=span) for span in (1, 4))
    for part in range(3):
        assert wide.end_s[4 * part : 4 * part + 4].tolist() == [narrow.end_s[part]] * 4
    work = sum((span.end_s - span.begin_s) * (span.event.takes is None) for span in wide.spans)
    stages = 2 if schedule == "interleaved" else 1
    assert np.asarray(work).tolist() == pytest.approx([6 * 3.0 * stages] * 12)


def test_halves_of_a_backward_are_the_products_for_inputs_and_for_weights() -> None:
    """A weight's are as many flops as forward; of a dense one over all tokens."""
    latent = {"width": 9, "rotary": 4, "value": 6, "queries": 10}
    for model in ({}, {"family": "deepseek_v3", "kv_heads": 4, "shared": 1, "latent": latent}):
        job = tiny_job(model=model)
        tokens = job.train.batch * job.data.sequence
        for one in workload(job, planned(job, 1))[:-2]:
            inputs, weights = halves(one)
            linear = [op for op in one.forward.ops if op.kind in ("", SLOTS)]
            assert sum(op.flops for op in weights) == sum(op.flops for op in linear)
            assert sum(op.flops for op in (*inputs, *weights)) == one.backward.flops
            dense = [op for op in weights if op.name != "experts"]
            assert all(product.inner == tokens for op in dense for product in op.products)
            assert len(weights) - len(dense) == one.name.endswith("moe")
        assert not halves(workload(job, planned(job, 1))[-2])[1], "forward has the head's done"


def test_experts_that_do_not_learn_have_no_half_for_weights_but_that_of_their_adapters() -> None:
    """Whatever their shape: here gradients of rows are as large as the products for results."""
    finetune = {"method": "lora", "rank": 3, "targets": ["experts"]}
    job = tiny_job(model={"hidden": 32, "ffn": 16, "head_dim": 8}, finetune=finetune)
    (block,) = [one for one in workload(job, planned(job, 1)) if one.name == "layers.1.moe"]
    inputs, weights = halves(block)
    assert {3} == {min(one.columns, one.inner) for op in weights for one in op.products}
    assert sum(op.flops for op in (*inputs, *weights)) == block.backward.flops


def test_the_first_stage_has_all_of_its_backward_in_the_second_half() -> None:
    found = simulate("zero-bubble", 3, 6)
    spent: Counter[tuple[int, str]] = Counter()
    for span in found.spans:
        kind = span.event.name.partition(" ")[0]
        for part in range(3):
            if span.event.takes is None:
                spent[part, kind] += round(float(span.end_s[part] - span.begin_s[part]))
    assert [spent[part, "input"] for part in range(3)] == [0, 6, 6]
    assert [spent[part, "weight"] for part in range(3)] == [12, 6, 6]
    assert [spent[part, "forward"] for part in range(3)] == [6, 6, 6]


def with_update(name: str, ranks: tuple[int, ...], *more: Message) -> list[Block]:
    """A stage of one layer, and what its ranks do once a step."""
    added = Op("accumulate", (Product(2, 3, 4, 3),))
    messages = (
        Message("targets", "all_reduce", ranks, 8), Message("dense", "all_reduce", ranks, 100),
        *more,
        Message("norm", "all_reduce", tuple(range(6)), 8),
        Message("losses", "all_reduce", tuple(range(6)), 32),
    )  # fmt: skip
    return [
        block(name, update=Work((added, Op("adamw", (UNIT,))))),
        Block(STEP, Work(), Work(), Work((Op("reduce", (UNIT,)),), messages)),
    ]


def updated() -> list[Event]:
    """A step of three parts of two ranks, with sums of gradients and of single numbers."""
    plan, flow, _ = pipeline("1f1b", 3, 3, span=2)
    work = {
        first: with_update(
            f"layers.{first // 2}.ffn", (first, first + 1),
            *((Message("ends", "all_reduce", (0, 4), 64),) if first != 2 else ()),
        )
        for first in (0, 2, 4)
    }  # fmt: skip
    where = cluster(count=6)
    places = place(where, 6)
    lanes = Lanes(plan, where, places, Traffic(where, places))
    return pipelined(lanes, flow, work, {first: [first, first + 1] for first in work})


def test_after_the_pipeline_comes_what_a_step_does_once() -> None:
    events = updated()
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
        "targets": own, "dense": own, "ends": ends, "norm": everyone, "losses": everyone,
    }  # fmt: skip
    found = run(events, 6)
    assert found.end_s.tolist() == [found.step_s] * 6


def test_gradients_are_added_up_in_backward() -> None:
    """Three seconds of it, in three micro-batches of each part, beside 3 + 6 of its own."""
    found = run(updated(), 6)
    busy = np.zeros(6)
    for span in found.spans:
        if span.event.phase == PIPELINE and span.event.takes is None:
            busy += span.end_s - span.begin_s
    assert busy.tolist() == pytest.approx([12.0] * 6)
    backs = [span.event for span in found.spans if span.event.name == "backward 1"]
    assert [event.seconds.max() for event in backs] == pytest.approx([3.0] * 3)


def test_parameters_of_shards_come_together_before_a_stage_and_go_apart_after_it() -> None:
    plan, flow, work = pipeline("interleaved", 2, 4, span=2)
    names = ("unshard", "reshard")
    for first, blocks in work.items():
        ranks = (first, first + 1)
        said = (
            Message("parameters", "all_gather", ranks, 10),
            Message("gradients", "reduce_scatter", ranks, 10),
        )
        once = Work(tuple(Op(name, (UNIT,)) for name in names), said)
        work[first] = [block(one.name, update=once) for one in blocks[:-1]] + blocks[-1:]
    where = cluster(count=4)
    places = place(where, 4)
    lanes = Lanes(plan, where, places, Traffic(where, places))
    events = pipelined(lanes, flow, work, {first: [first, first + 1] for first in work})
    for stage in range(4):
        own = [event.name for event in events if event.block == f"layers.{stage}.ffn"]
        assert own[:3] == ["unshard", "parameters", "forward 0"]
        assert own[-3:] == ["backward 3", "reshard", "gradients"]
        assert Counter(own).most_common(1)[0][1] == 1


def jobs(schedule: Schedule, **layout: Any) -> Job:
    """A tiny job in a pipeline of two parts."""
    return tiny_job(
        model={"layers": 4, "vocab": 64}, layout={"pp": 2, "schedule": schedule, **layout},
        train={"batch": 16, "micro_batches": 4},
    )  # fmt: skip


LAYOUTS = [{}, {"ep": 2}, {"shard": 2}, {"tp": 2}, {"tp": 2, "ep": 4}, {"tp": 2, "shard": 2}]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_job_has_its_timeline(schedule: Schedule, layout: dict[str, int]) -> None:
    job = jobs(schedule, **layout)
    plan, where = planned(job, 8), cluster(hosts=2, count=4, latency_s=0.01)
    events = Costs.of(job, plan, where).events()
    phases = [phase for phase, _ in groupby(event.phase for event in events)]
    assert phases == ["data", PIPELINE, "reduce", "clip", "optimizer", "log"]
    assert all(len(event.seconds) == 8 and (event.seconds >= 0).all() for event in events)
    handed = sum(event.takes is not None for event in events)
    stages = 4 if schedule == "interleaved" else 2
    assert handed == 2 * 4 * (stages - 1)
    spoken = {event.name for event in events if event.groups}
    assert ("tokens" in spoken) == ("ep" in layout)
    assert ("parameters" in spoken) == ("shard" in layout)
    assert ("join runs" in spoken) == ("tp" in layout)
    assert run(events, 8).end_s.max() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_work_of_a_job_is_lost(layout: dict[str, int]) -> None:
    job = jobs("1f1b", **layout)
    plan, where = planned(job, 8), cluster(hosts=2, count=4)
    spent = np.zeros(8)
    for event in Costs.of(job, plan, where).events():
        if not event.is_message:
            spent += event.seconds
    for rank in range(8):
        blocks = workload(job, plan, rank)
        once = sum(one.forward.flops + one.backward.flops for one in blocks)
        again = sum(one.update.flops for one in blocks)
        share = sum(
            op.flops * (1 - op.causal_share)
            for one in blocks
            for op in (*one.forward.ops, *one.backward.ops)
        )
        assert spent[rank] == pytest.approx((4 * (once - share) + again) / UNIT.flops)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_are_alike_only_if_all_that_comes_to_them_is(
    schedule: Schedule, layout: dict[str, int]
) -> None:
    job = jobs(schedule, **layout)
    plan, where = planned(job, 8), cluster(hosts=2, count=4, latency_s=0.01)
    costs = Costs.of(job, plan, where)
    work = {rank: workload(job, plan, rank) for rank in range(8)}
    each = run(costs.events_of(work, {rank: [rank] for rank in range(8)}), 8)
    assert run(costs.events(), 8).end_s == pytest.approx(each.end_s)


def test_both_ends_of_a_tied_model_add_up_its_weight() -> None:
    job = tiny_job(
        model={"family": "qwen3_moe", "renormalise": True, "tied": True, "layers": 4},
        layout={"pp": 4}, train={"batch": 16, "micro_batches": 4},
    )  # fmt: skip
    events = Costs.of(job, planned(job, 8), cluster(latency_s=0.5)).events()
    (ends,) = (event for event in events if event.name == "ends")
    assert (ends.phase, ends.groups) == ("reduce", [[0, 6], [1, 7]])
    assert ends.seconds.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    (loads,) = (event for event in events if event.name == "loads")
    assert (loads.phase, loads.groups) == ("log", [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_what_is_computed_again_takes_a_pipeline_longer() -> None:
    where = cluster(count=8)
    once, again = (
        tiny_job(
            model={"layers": 4}, layout={"pp": 2},
            train={"batch": 16, "micro_batches": 4, "recompute": recompute},
        )
        for recompute in (False, True)
    )  # fmt: skip
    took = [run(Costs.of(job, planned(job, 8), where).events(), 8).step_s for job in (once, again)]
    assert 1.2 * took[0] < took[1] < 1.4 * took[0]


def test_what_is_handed_on_is_a_slices_run_of_a_replicas_tokens() -> None:
    """In the type of weights: half of 2 samples of 12 tokens, 32 channels, 8 bytes each."""
    job = jobs("1f1b", tp=2)
    slow = cluster(count=8)
    link = slow.links[0].model_copy(update={"bandwidth": 1.0})
    slow = slow.model_copy(update={"links": [link]})
    events = Costs.of(job, planned(job, 8), slow).events()
    handed = [event for event in events if event.takes is not None]
    assert all(set(event.seconds.tolist()) == {0.0, 2 * 12 // 2 * 32 * 8.0} for event in handed)


def test_equal_work_is_worked_out_once() -> None:
    job = jobs("1f1b", ep=2)
    events = Costs.of(job, planned(job, 8), cluster(count=8)).events()
    arrays = {id(event.seconds) for event in events}
    groups = {id(event.groups) for event in events if event.groups}
    assert len(arrays) < len(events) / 4
    assert len(groups) <= 10
