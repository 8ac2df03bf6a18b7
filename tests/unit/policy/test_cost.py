"""Cost model: cases by hand, and properties for any figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_timeline import simulate_events, unfold

from moesaic.facts.cluster import (
    AttentionTimes,
    Calibration,
    Cluster,
    Curve,
    Device,
    ElementwiseKernel,
    Grid,
    Matmul,
)
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import GROUPED_MM, BlockWork, CollectiveCall, MatmulShape, Op, workload
from moesaic.facts.workload.sizes import LOSS_CHUNK_TOKENS
from moesaic.facts.workload.traced import TracedMatmul, TracedOp
from moesaic.policy.cost.compute import PEAK_FRACTION, elementwise_s, matmul_s, op_s
from moesaic.policy.cost.step import JobCosts, replicated_step
from moesaic.policy.cost.timeline import simulate_step
from moesaic.testing.clusters import make_cluster, make_device
from moesaic.testing.jobs import tiny_job

SIZES = st.integers(1, 5000)


def device(**changes: Any) -> Device:
    return Device(**make_device(**changes))


def test_a_weight_gradient_is_looked_up_by_the_shape_of_its_layer() -> None:
    """The grid's times are means over the three matmuls of a weight, so they add up to all."""
    grid = Grid(rows=[2, 8], columns=[3, 5], inner=[3, 7], seconds=[1, 2, 3, 4, 5, 6, 7, 8])
    speed = Matmul.model_validate({"dtype": "fp32", "flops": 1e9, "times": grid})
    one = device(matmul=[speed])
    forward, gradient = MatmulShape(8, 5, 3), MatmulShape(5, 3, 8, is_weight_gradient=True)
    assert matmul_s(one, "fp32", forward) == matmul_s(one, "fp32", gradient) == 7
    assert matmul_s(one, "fp32", replace(gradient, is_weight_gradient=False)) != 7


def test_large_matmuls_run_at_peak_flops_and_thin_ones_at_memory_bandwidth() -> None:
    large, thin = MatmulShape(4096, 4096, 4096), MatmulShape(1, 4096, 4096, count=3)
    assert matmul_s(device(), "fp32", large) == pytest.approx(2 * 4096**3 / (PEAK_FRACTION * 1e12))
    touched = 4 * (4096 + 4096**2 + 4096)
    assert matmul_s(device(), "fp32", thin) == pytest.approx(3 * touched / 1e11)
    assert matmul_s(device(), "fp32", MatmulShape(0, 5, 5)) == 0.0


def test_measured_grids_take_precedence() -> None:
    grid = Grid(rows=[1, 4], columns=[8], inner=[8], seconds=[1e-3, 2e-3])
    measured = device(matmul=[Matmul(dtype="fp32", flops=1e12, times=grid)])
    assert matmul_s(measured, "fp32", MatmulShape(4, 8, 8, count=5)) == pytest.approx(1e-2)
    memory_times = Curve(bytes=[1e3, 1e6], seconds=[1e-6, 1e-3])
    assert elementwise_s(device(memory_times=memory_times), 4e4, 4) == pytest.approx(4e-5)
    assert elementwise_s(device(memory_times=memory_times, launch_s=1e-5), 4e3, 4) == pytest.approx(
        4e-5
    )
    norms = ElementwiseKernel(kind="norm", times=Curve(bytes=[1e4], seconds=[1.0]))
    unlike = device(memory_times=memory_times, elementwise=[norms])
    assert elementwise_s(unlike, 4e4, 4, "norm") == pytest.approx(4.0)
    assert elementwise_s(unlike, 4e4, 4, "adamw") == pytest.approx(4e-5)
    assert elementwise_s(device(), 1e11, 1) == pytest.approx(1.0, rel=1e-4)


def test_grouped_matmuls_take_their_own_measurement() -> None:
    """Without a grouped measurement, each matmul has its own launch."""
    products = (MatmulShape(4, 8, 8, count=5),)
    alone, together = Op("one", products), Op("one", products, kind=GROUPED_MM)
    grid, many = (Grid(rows=[4], columns=[8], inner=[8], seconds=[each]) for each in (2e-3, 1e-3))
    measured = device(matmul=[Matmul(dtype="fp32", flops=1e12, times=grid, grouped_times=many)])
    assert [op_s(measured, op) for op in (alone, together)] == pytest.approx([1e-2, 5e-3])
    unmeasured = device(matmul=[Matmul(dtype="fp32", flops=1e12, times=grid)])
    assert op_s(unmeasured, together) == pytest.approx(op_s(unmeasured, alone) + 5e-6)
    assert op_s(device(), together) == pytest.approx(op_s(device(), alone) + 5e-6)


def test_attention_takes_its_own_measurement() -> None:
    scores = MatmulShape(128, 128, 64, 6)
    heads = AttentionTimes(
        head_dim=32, lengths=[64, 128], forward=[1e-4, 4e-4], backward=[2e-4, 8e-4]
    )
    measured = device(matmul=[Matmul(dtype="fp32", flops=1e12, attention=heads)])
    causal = 0.5 + 0.5 / 128
    forward = Op("attend", (scores, scores), kind="attention", causal_fraction=causal)
    assert op_s(measured, forward) == pytest.approx(6 * 2 * 4e-4)
    backward = Op("attend", (scores,) * 5, kind="attention backward", causal_fraction=causal)
    assert op_s(measured, backward) == pytest.approx(6 * 2 * 8e-4)
    masked = Op("attend", (scores, scores), kind="attention")
    assert op_s(measured, masked) == pytest.approx(6 * 2 * 4e-4 / causal)
    known = heads.model_copy(update={"masked_forward": [3e-4, 5e-4]})
    told = device(matmul=[Matmul(dtype="fp32", flops=1e12, attention=known)])
    assert op_s(told, masked) == pytest.approx(6 * 2 * 5e-4)
    assert heads.at(256, 32, backward=False) == pytest.approx(16e-4)
    assert op_s(measured, Op("attend", (MatmulShape(0, 0, 64),), kind="attention")) == 0.0


def test_latent_attention_costs_as_heads_of_its_larger_dimension() -> None:
    heads = AttentionTimes(
        head_dim=32, lengths=[64, 128], forward=[1e-4, 4e-4], backward=[2e-4, 8e-4]
    )
    measured = device(matmul=[Matmul(dtype="fp32", flops=1e12, attention=heads)])
    for value, times in ((4, 1), (8, 1), (12, 1.5)):
        latent = {"kv_lora_rank": 9, "qk_rope_head_dim": 4, "v_head_dim": value}
        job = tiny_job(
            model={"family": "deepseek_v3", "kv_heads": 4, "head_dim": 8, "latent": latent},
            data={"sequence": 128, "packing": "stream"}, train={"precision": "fp32", "batch": 3},
        )  # fmt: skip
        block = workload(job, plan_from_layout(job.layout, job.model, 1))[1]
        ways = ((block.forward, 4e-4), (block.backward, 8e-4))
        for work, each in ways:
            (op,) = (op for op in work.ops if op.name == "attend")
            alone = replace(op, moved_bytes=0, num_kernels=0, num_transcendentals=0)
            assert op_s(measured, alone) == pytest.approx(3 * 4 * each * times * 8 / 32)


def test_transcendentals_add_their_time() -> None:
    plain, special = (
        Op("gate", moved_bytes=1000),
        Op("gate", moved_bytes=1000, num_transcendentals=10**6),
    )
    slow = device(transcendental_s=1e-9)
    assert op_s(slow, special) - op_s(slow, plain) == pytest.approx(1e-3)
    assert op_s(device(), special) == op_s(device(), plain)


def test_masked_attention_scores_cost_nothing() -> None:
    whole = Op("attend", (MatmulShape(1024, 1024, 1024),))
    half = Op("attend", (MatmulShape(1024, 1024, 1024),), causal_fraction=0.5)
    assert op_s(device(), half) == pytest.approx(op_s(device(), whole) / 2)


@given(SIZES, SIZES, SIZES, SIZES)
def test_more_rows_never_take_less_time(rows: int, more: int, columns: int, inner: int) -> None:
    few, many = MatmulShape(rows, columns, inner), MatmulShape(rows + more, columns, inner)
    assert matmul_s(device(), "fp32", few) <= matmul_s(device(), "fp32", many)


def cluster(hosts: int = 1, count: int = 8, kind: str = "gpu") -> Cluster:
    return make_cluster(*[{"kind": kind, "count": count}] * hosts)


def step_s(
    job: Job, ranks: int, where: Cluster, loads: Sequence[Sequence[float]] | None = None
) -> float:
    plan = plan_from_layout(job.layout, job.model, ranks)
    return simulate_step(JobCosts.from_job(job, plan, where, loads).step(), ranks).step_s


def test_one_rank_takes_the_sum_of_its_ops() -> None:
    job = tiny_job(train={"micro_batches": 4})
    plan = plan_from_layout(job.layout, job.model, 1)
    blocks, one = workload(job, plan, on_cpu=False), device()
    each = sum(op_s(one, op) for b in blocks for work in (b.forward, b.backward) for op in work.ops)
    once = sum(op_s(one, op) for block in blocks for op in block.update.ops)
    assert step_s(job, 1, cluster()) == pytest.approx(4 * each + once)


def test_a_kernel_is_launched_once() -> None:
    """A matmul of the formulas and a traced one are one kernel each; all attention heads are one
    kernel."""
    product = MatmulShape(8, 8, 8, count=4)
    free = device(memory_bandwidth=1e30, matmul=[Matmul(dtype="fp32", flops=1e30)], launch_s=1.0)
    assert op_s(free, Op("heads", (product,), num_kernels=1)) == pytest.approx(1.0)
    traced = TracedOp(
        name="matmul", num_kernels=4,
        matmuls=[TracedMatmul(rows=8, columns=8, inner=8, count=4)],
    )  # fmt: skip
    assert op_s(free, traced.op()) == pytest.approx(4.0)


@pytest.mark.parametrize(("ranks", "ep", "batch"), [(16, 2, 27), (8, 4, 9), (6, 3, 7)])
def test_equal_ranks_receive_equal_tokens(ranks: int, ep: int, batch: int) -> None:
    job = tiny_job(layout={"ep": ep}, model={"experts": 12}, train={"batch": batch})
    plan, where = plan_from_layout(job.layout, job.model, ranks), cluster(ranks)
    costs = JobCosts.from_job(job, plan, where)
    alone = {rank: [rank] for rank in range(ranks)}
    work = {rank: workload(job, plan, rank, on_cpu=False) for rank in alone}
    each = simulate_step(costs.step_from_blocks(work, alone), ranks)
    assert simulate_step(costs.step(), ranks).end_s == pytest.approx(each.end_s)


@pytest.mark.parametrize("layout", [{}, {"ep": 4}, {"dp_shard": 2}, {"ep": 2, "dp_shard": 4}])
def test_every_layout_has_a_timeline(layout: dict[str, int]) -> None:
    job = tiny_job(layout=layout)
    plan = plan_from_layout(job.layout, job.model, 4)
    step = JobCosts.from_job(job, plan, cluster()).step()
    events, found = unfold(step), simulate_step(step, 4)
    phases = [phase for phase, _ in groupby(event.phase for event in events)]
    assert phases == ["data", "forward", "backward", "reduce", "clip", "optimizer", "log"]
    assert set(found.seconds_by_phase(0)) == set(phases)
    assert all(len(event.seconds) == 4 and (event.seconds >= 0).all() for event in events)
    collectives = {event.name for event in events if event.groups}
    assert ("tokens" in collectives) == ("ep" in layout)
    assert ("parameters" in collectives) == ("dp_shard" in layout)


def test_counts_of_a_dispatch_by_hosts_are_gathered_in_the_whole_group() -> None:
    job = tiny_job(layout={"ep": 4, "dispatch": "dedup", "dispatch_hosts": 2})
    plan = plan_from_layout(job.layout, job.model, 8)
    events = unfold(JobCosts.from_job(job, plan, cluster(hosts=4, count=2)).step())
    groups = {event.name: list(event.groups) for event in events}
    assert groups["counts"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("batch", "sequence"), [(2, 64), (3, 1024)])
def test_tp_ranks_with_fewer_tokens_skip_collectives(batch: int, sequence: int) -> None:
    """Head chunks: ranks with fewer tokens skip collectives, and wait for no rank."""
    job = tiny_job(
        layout={"tp": 2}, model={"vocab": 64}, train={"batch": batch}, data={"sequence": sequence}
    )
    plan = plan_from_layout(job.layout, job.model, 8)
    events = unfold(JobCosts.from_job(job, plan, cluster()).step())
    log_sum_exps = [event for event in events if event.name == "log-sum-exp"]
    rows = [len(plan.sample_range(rank, batch)) * sequence for rank in range(8)]
    assert [len(event.groups) for event in log_sum_exps] == [
        sum(count > chunk * LOSS_CHUNK_TOKENS for count in rows[::2])
        for chunk in range(-(-max(rows) // LOSS_CHUNK_TOKENS))
    ]
    for event in log_sum_exps:
        idle = set(range(8)) - {rank for group in event.groups for rank in group}
        assert not event.seconds[sorted(idle)].any()
    assert simulate_events(events, 8).step_s > 0


def test_slower_links_make_longer_steps_and_equal_ranks_do_not_wait() -> None:
    job = tiny_job(layout={"ep": 8})
    near, far = cluster(hosts=1, count=8), cluster(hosts=4, count=2)
    assert step_s(job, 8, near) < step_s(job, 8, far)
    plan = plan_from_layout(job.layout, job.model, 8)
    found = simulate_step(JobCosts.from_job(job, plan, near).step(), 8)
    assert found.waiting_s(7) == pytest.approx(found.waiting_s(1), abs=1e-6)


def test_a_thousand_equal_devices_take_the_sum_of_their_events() -> None:
    """Work is equal except for the norm, which the first owners compute.

    Ranks wait only for their own gradient reductions that are under way.
    """
    job = tiny_job(layout={"ep": 8, "dp_shard": 8}, train={"batch": 2000})
    plan = plan_from_layout(job.layout, job.model, 1000)
    step = JobCosts.from_job(job, plan, cluster(hosts=125, kind="cpu")).step()
    events, found = unfold(step), simulate_step(step, 1000)
    assert found.end_s.shape == (1000,)
    own_s = sum(float(event.seconds.max()) for event in events if event.launches is None)
    queueing_s = found.queueing_s(0)
    assert found.step_s == pytest.approx(own_s + queueing_s)
    assert found.waiting_s(0) == pytest.approx(queueing_s, abs=1e-9)


def test_equal_work_is_computed_once() -> None:
    """Large clusters stay fast: layers share arrays."""
    job = tiny_job(layout={"ep": 8}, train={"batch": 64})
    plan = plan_from_layout(job.layout, job.model, 64)
    events = unfold(JobCosts.from_job(job, plan, cluster(hosts=8)).step())
    arrays = {id(event.seconds) for event in events}
    groups = {id(event.groups) for event in events if event.groups}
    assert len(arrays) < len(events) / job.model.layers
    assert len(groups) <= 5


@pytest.mark.parametrize("layout", [{}, {"ep": 4}, {"ep": 2}, {"ep": 2, "dp_shard": 4}])
def test_uneven_loads_make_ranks_wait(layout: dict[str, int]) -> None:
    job = tiny_job(layout=layout, data={"sequence": 256})
    where, even = cluster(hosts=2, count=2), step_s(job, 4, cluster(hosts=2, count=2))
    assert step_s(job, 4, where, [[3.0] * 8] * 2) == even
    assert step_s(job, 4, where, [[9.0, 5.0, *[1.0] * 6]] * 2) > even
    plan = plan_from_layout(job.layout, job.model, 4)
    costs = JobCosts.from_job(job, plan, where, [[9.0, *[1.0] * 7]] * 2)
    hot = simulate_step(costs.step(), 4)
    waiting_by_owner = [hot.waiting_s(rank) for rank in range(job.layout.ep)]
    assert min(waiting_by_owner) == waiting_by_owner[0]
    assert (max(waiting_by_owner) > 1.01 * waiting_by_owner[0]) == (job.layout.ep > 1)


def test_the_rank_that_receives_most_sets_the_time_of_an_exchange() -> None:
    job = tiny_job(layout={"ep": 2}, data={"sequence": 4096})
    plan = plan_from_layout(job.layout, job.model, 4)
    times, latency_s = [], 1e-5
    for loads in (None, [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2):
        events = unfold(JobCosts.from_job(job, plan, cluster(count=4), loads).step())
        times.append(next(event.seconds for event in events if event.name == "tokens"))
    assert times[1] - latency_s == pytest.approx(2 * (times[0] - latency_s))


def test_a_norm_is_one_kernel_on_a_gpu_and_row_blocks_on_a_cpu() -> None:
    """The input has 4096 tokens by 2048 in fp32, 32 MiB; a CPU takes half a MiB at a time."""
    model = {"hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "layers": 1}
    job = tiny_job(model=model, data={"sequence": 4096}, train={"batch": 1, "precision": "fp32"})
    plan = plan_from_layout(job.layout, job.model, 1)
    for on_cpu, calls, back, least in ((True, 7 * 64, 12 * 64 + 2, 5), (False, 1, 3, 2)):
        attention = workload(job, plan, on_cpu=on_cpu)[1]
        (ahead,) = [op for op in attention.forward.ops if op.name == "norm"]
        (behind,) = [op for op in attention.backward.ops if op.name == "norm"]
        assert (ahead.num_kernels, behind.num_kernels - behind.num_kernels % 1) == (calls, back + 2)
        assert ahead.moved_bytes == pytest.approx(least * 4096 * 2048 * 4, rel=0.02)
    gpu = cluster()
    norms = [
        event for event in unfold(JobCosts.from_job(job, plan, gpu).step()) if event.name == "norm"
    ]
    assert max(norms[0].seconds) == pytest.approx(2 * 4096 * 2048 * 4 / 1e11, rel=0.01)


def test_calibration_multiplies_times() -> None:
    job, where = tiny_job(layout={"ep": 4, "dp_shard": 2}), cluster(hosts=2, count=2, kind="cpu")

    def calibrated(device: str = "one", **factors: float) -> float:
        given = {"matmul": 1.0, "elementwise": 1.0, "collectives": 1.0, **factors}
        calibration = Calibration(runs=1, devices=[device], **given)
        return step_s(job, 4, where.model_copy(update={"calibration": calibration}))

    plain = step_s(job, 4, where)
    assert calibrated() == plain
    assert calibrated(matmul=2, elementwise=2, collectives=2) == pytest.approx(2 * plain)
    assert calibrated("another", matmul=2, elementwise=2) == plain
    more = [calibrated(**{kind: 2}) - plain for kind in ("matmul", "elementwise", "collectives")]
    assert min(more) > 0
    assert sum(more) == pytest.approx(plain)


def test_replicated_ranks_wait_only_for_reductions() -> None:
    blocks = workload(
        tiny_job(), plan_from_layout(tiny_job().layout, tiny_job().model, 1), on_cpu=False
    )
    alone = simulate_step(replicated_step(blocks, 1, cluster()), 1)
    assert alone.step_s == pytest.approx(step_s(tiny_job(), 1, cluster()))
    summed = CollectiveCall("dense gradients", "all_reduce", (0, 1, 2, 3), 10**8)
    *inner, last = blocks
    blocks = [*inner, replace(last, update=BlockWork(last.update.ops, (summed,)))]
    step = replicated_step(blocks, 4, cluster())
    events = unfold(step)
    (dense,) = (event for event in events if event.name == "dense gradients")
    assert (dense.phase, dense.groups) == ("reduce", [[0, 1, 2, 3]])
    together = simulate_step(step, 4)
    assert together.step_s == pytest.approx(alone.step_s + dense.seconds[0])
    assert dense.seconds[0] > 1e-3
    assert together.waiting_s(3) == 0.0
