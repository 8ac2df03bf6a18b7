"""Default and predicted costs of replicas: by hand, and deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from moesaic.facts.balance import IntArray
from moesaic.facts.cluster import Calibration, Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import BalanceCosts, Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.facts.workload import MatmulShape
from moesaic.policy.balance import (
    BalanceCostFacts,
    RankDevice,
    break_even_tokens,
    default_balance_costs,
    layer_problem,
    predict_balance_costs,
)
from moesaic.policy.balance.cost_model import RankTokens, layer_times_from_tokens
from moesaic.policy.cost.compute import matmul_s
from moesaic.policy.cost.step import JobCosts
from moesaic.testing.clusters import make_cluster
from moesaic.testing.jobs import tiny_job

FAST, SLOW = 1e13, 1e12
EXPERT_TP: dict[str, Any] = {"ep": 2, "tp": 2, "etp": 2}
LAYOUTS: list[dict[str, Any]] = [{"ep": 2}, {"ep": 4}, EXPERT_TP, {"ep": 2, "pp": 2}]


def job_and_plan(**layout: Any) -> tuple[Job, Plan]:
    job = tiny_job(
        model={"hidden": 256, "ffn": 512, "kv_heads": 4, "vocab": 64}, layout=layout,
        data={"sequence": 256}, train={"precision": "fp32", "batch": 16, "micro_batches": 2},
    )  # fmt: skip
    return job, plan_from_layout(job.layout, job.model, 4)


def at(host: str, kind: str = "cpu", threads: int = 1) -> RankDevice:
    return RankDevice(host, kind, threads)


def default_costs(job: Job, plan: Plan, ranks: Sequence[RankDevice]) -> BalanceCosts:
    return default_balance_costs(BalanceCostFacts.of_job(job, plan, ranks))


def predicted_costs(job: Job, plan: Plan, made: Cluster) -> BalanceCosts:
    return predict_balance_costs(JobCosts.from_job(job, plan, made))


def test_default_costs_by_hand() -> None:
    job, plan = job_and_plan(ep=2)
    flops = 6 * 256 * 512
    one = default_costs(job, plan, [at("a")] * 4)
    assert one.expert_tokens_per_s == pytest.approx(5e10 / flops)
    assert (one.bytes_per_s, one.overlaps, one.cpu_s_per_byte) == (3e9, False, 0)
    assert one.weight_read_s == pytest.approx(job.model.experts / 2 * 3 * 256 * 512 * 4 / 5e9)
    threads = default_costs(job, plan, [at("a", threads=8), *[at("a", threads=4)] * 3])
    assert threads.expert_tokens_per_s == pytest.approx(
        4 * one.expert_tokens_per_s
    )  # The slowest counts.
    spread = default_costs(job, plan, [at("a"), at("b"), at("a"), at("b")])
    assert (spread.bytes_per_s, spread.overlaps) == (pytest.approx(1.1e8 / 2), True)
    assert spread.cpu_s_per_byte > 0  # Ranks that compute also serve the sockets.
    assert spread.latency_s > one.latency_s
    gpus = default_costs(job, plan, [at("a", "gpu")] * 4)
    assert (gpus.overlaps, gpus.cpu_s_per_byte) == (True, 0)
    assert gpus.expert_tokens_per_s > 100 * one.expert_tokens_per_s
    mixed = default_costs(job, plan, [at("a", "gpu"), *[at("a")] * 3])
    assert mixed == one
    grouped = default_costs(job, plan, [at("a"), at("a"), at("b"), at("b")])
    assert grouped == one  # Each group is inside a host.
    sliced = default_costs(*job_and_plan(**EXPERT_TP), [at("a")] * 4)
    assert sliced.expert_tokens_per_s == pytest.approx(2 * one.expert_tokens_per_s)


def cluster(*flops: float, kind: str = "gpu", factor: float | None = None) -> Cluster:
    """Return a cluster of one host with one device for each of `flops`."""
    devices = [
        {"kind": kind, "model": f"{speed:g}", "memory_bandwidth": 1e14, "launch_s": 1e-9,
         "matmul": [{"dtype": "fp32", "flops": speed}]}
        for speed in flops
    ]  # fmt: skip
    made = make_cluster(*devices)
    if factor is None:
        return made
    calibration = Calibration(
        matmul=1, elementwise=1, collectives=factor, devices=["other"], runs=1
    )
    return made.model_copy(update={"calibration": calibration})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_predicted_costs_follow_matmuls_and_links(layout: dict[str, Any]) -> None:
    job, plan = job_and_plan(**layout)
    made = cluster(FAST, FAST, SLOW, FAST)
    costs = predicted_costs(job, plan, made)
    device = made.hosts[2].devices[0]
    ffn = 512 // plan.etp
    rows = 8 * 256 * 2 // plan.ranks_per_stage * plan.ep * plan.etp // job.model.experts
    row_s = sum(
        matmul_s(device, "fp32", product) for product in (
            MatmulShape(rows, 2 * ffn, 256), MatmulShape(rows, 256, ffn),
        )
    ) / rows  # fmt: skip
    assert costs.expert_tokens_per_s == pytest.approx(
        1 / row_s, rel=0.05
    )  # The rest is elementwise.
    groups = plan.ranks // plan.ep
    assert costs.latency_s == pytest.approx((plan.ep - 1) * 5e-5, rel=1e-3)
    assert costs.bytes_per_s == pytest.approx(1e9, rel=1e-2), groups
    assert (costs.overlaps, costs.cpu_s_per_byte) == (True, 0)
    cpus = predicted_costs(job, plan, cluster(FAST, FAST, SLOW, FAST, kind="cpu"))
    assert cpus.overlaps
    assert cpus.cpu_s_per_byte > 0
    assert costs == predicted_costs(job, plan, made)


def test_ranks_without_experts_have_no_costs() -> None:
    """A pipeline rank may consist of dense layers only."""
    job = tiny_job(
        model={
            "family": "deepseek_v3", "kv_heads": 4, "layers": 2, "dense_layers": 1, "dense_ffn": 64,
            "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4,
                       "v_head_dim": 6},
        },
        layout={"ep": 2, "pp": 2},
        train={"precision": "fp32", "micro_batches": 2, "batch": 16},
    )  # fmt: skip
    plan = plan_from_layout(job.layout, job.model, 4)
    costs = predicted_costs(job, plan, cluster(FAST, FAST, FAST, FAST))
    assert 0 < costs.expert_tokens_per_s < float("inf")


def test_calibration_scales_predicted_costs() -> None:
    job, plan = job_and_plan(ep=4)
    uncalibrated, slow = (
        predicted_costs(job, plan, cluster(FAST, FAST, FAST, FAST, factor=factor))
        for factor in (None, 2.0)
    )
    assert slow.bytes_per_s == pytest.approx(uncalibrated.bytes_per_s / 2)
    assert slow.latency_s == pytest.approx(2 * uncalibrated.latency_s)
    assert slow.expert_tokens_per_s == uncalibrated.expert_tokens_per_s


def test_noise_in_measured_times_gives_no_absurd_bandwidth() -> None:
    """In a noisy probe a small all-to-all may take longer than a large one."""
    job, plan = job_and_plan(ep=4)
    costs = JobCosts.from_job(job, plan, cluster(FAST, FAST, FAST, FAST))
    link = costs.cluster.links[0]
    times = {"bytes": [4096.0, 4194304.0], "seconds": [3e-3, 1e-3]}
    noisy = {"name": "all_to_all", "ranks": 4, "times": times}
    made = costs.cluster.model_dump() | {"links": [link.model_dump() | {"collectives": [noisy]}]}
    costs = predicted_costs(job, plan, resolve_cluster(made, "c"))
    assert costs.latency_s == pytest.approx(0.9e-3)
    assert costs.bytes_per_s == pytest.approx(0.75 * 4194304 / 0.1e-3)


def test_cpu_ranks_on_one_host_do_not_overlap() -> None:
    job, plan = job_and_plan(ep=4)
    cpus = make_cluster({"kind": "cpu", "count": 4})
    assert not predict_balance_costs(JobCosts.from_job(job, plan, cpus)).overlaps


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(("hosts", "experts_there"), [(1, 2), (2, 4)])
def test_deduplicated_traffic_per_routed_token(top_k: int, hosts: int, experts_there: int) -> None:
    """Count a token's choices of the last expert without another expert on its rank, or host.

    There are four ranks of two experts.
    """
    model = {"experts": 8, "top_k": top_k}
    job = tiny_job(model=model, layout={"ep": 4, "dispatch": "dedup", "dispatch_hosts": hosts})
    plan = plan_from_layout(job.layout, job.model, 4)
    costs = default_costs(job, plan, [at("a")] * 4)
    deduplicated = layer_problem(job, plan, job.balance, costs, 0).token_bytes
    rows = layer_problem(
        job, plan.model_copy(update={"dispatch": "all_to_all"}), job.balance, costs, 0
    )
    choices = [one for one in combinations(range(8), top_k) if 7 in one]
    alone = sum(sum(expert >= 8 - experts_there for expert in one) == 1 for one in choices)
    assert deduplicated == pytest.approx(rows.token_bytes * alone / len(choices))


def test_break_even_tokens_of_a_replica() -> None:
    """By what the model makes of one that takes as many rows as that off the busiest rank."""
    job, plan = job_and_plan(ep=2)
    costs = default_costs(job, plan, [at("a")] * 4)
    problem = layer_problem(job, plan, job.balance, costs, 0)._replace(expert_tokens_per_s=1e9)
    none, one = np.zeros(problem.num_ranks, np.int64), np.eye(problem.num_ranks, dtype=np.int64)

    def whole_s(more: int, sent: IntArray, received: IntArray) -> float:
        """Return the layer's seconds if the busiest rank computes `more` tokens above a billion."""
        rows = RankTokens(one[0] * (10**9 + more), none, none)
        return layer_times_from_tokens(rows, sent, received, problem).total_s

    number, base_s = break_even_tokens(problem), whole_s(0, none, none)
    assert number > 1e5
    assert whole_s(-round(1.01 * number), one[0], one[1]) < base_s
    assert whole_s(-round(0.99 * number), one[0], one[1]) > base_s
    # On a full-duplex link, a rank that sends spends the whole transfer on it.
    more = break_even_tokens(problem._replace(overlaps=True)) - number
    assert more == pytest.approx(problem.expert_bytes / problem.bytes_per_s / 3 * 1e9)
    # The CPU limits a link that is faster.
    worked = problem._replace(overlaps=True, cpu_s_per_byte=10 / problem.bytes_per_s, latency_s=0.0)
    link = problem._replace(overlaps=True, latency_s=0.0)
    assert break_even_tokens(worked) == pytest.approx(10 * break_even_tokens(link))
