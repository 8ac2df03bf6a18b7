"""What copies of experts cost where nobody has measured it: by hand, of usual machines and of a
cluster's file; and that both say the same each time."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from moesaic.facts.balance import Ints
from moesaic.facts.cluster import Calibration, Cluster
from moesaic.facts.cluster.file import resolve
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, lay_out
from moesaic.facts.workload import Product
from moesaic.policy.balance import Rank, copy_rows, planned, setting_of, usual
from moesaic.policy.balance.model import Rows, times_of
from moesaic.policy.cost.compute import product_s
from moesaic.policy.cost.step import Costs
from moesaic.testing.jobs import tiny_job

FAST, SLOW = 1e13, 1e12
SLICED: dict[str, Any] = {"ep": 2, "tp": 2, "etp": 2}
WAYS: list[dict[str, Any]] = [{"ep": 2}, {"ep": 4}, SLICED, {"ep": 2, "pp": 2}]


def laid_out(**layout: Any) -> tuple[Job, Plan]:
    job = tiny_job(
        model={"hidden": 256, "ffn": 512, "kv_heads": 4, "vocab": 64}, layout=layout,
        data={"sequence": 256}, train={"precision": "fp32", "batch": 16, "micro_batches": 2},
    )  # fmt: skip
    return job, lay_out(job.layout, job.model, 4)


def at(host: str, kind: str = "cpu", threads: int = 1) -> Rank:
    return Rank(host, kind, threads)


def test_usual_prices_by_hand() -> None:
    job, plan = laid_out(ep=2)
    flops = 6 * 256 * 512
    one = usual(job, plan, [at("a")] * 4)
    assert one.rows_per_s == pytest.approx(5e10 / flops)
    assert (one.bytes_per_s, one.hides, one.handling_s) == (3e9, False, 0)
    assert one.matrices_s == pytest.approx(job.model.experts / 2 * 3 * 256 * 512 * 4 / 5e9)
    threads = usual(job, plan, [at("a", threads=8), *[at("a", threads=4)] * 3])
    assert threads.rows_per_s == pytest.approx(4 * one.rows_per_s)  # The slowest counts.
    apart = usual(job, plan, [at("a"), at("b"), at("a"), at("b")])
    assert (apart.bytes_per_s, apart.hides) == (pytest.approx(1.1e8 / 2), True)
    assert apart.handling_s > 0  # Whoever computes works the sockets.
    assert apart.latency_s > one.latency_s
    gpus = usual(job, plan, [at("a", "gpu")] * 4)
    assert (gpus.hides, gpus.handling_s) == (True, 0)
    assert gpus.rows_per_s > 100 * one.rows_per_s
    mixed = usual(job, plan, [at("a", "gpu"), *[at("a")] * 3])
    assert mixed == one


def test_groups_within_hosts_are_not_apart() -> None:
    job, plan = laid_out(ep=2)
    assert usual(job, plan, [at("a"), at("a"), at("b"), at("b")]) == usual(job, plan, [at("a")] * 4)


def test_slices_of_experts_take_more_rows() -> None:
    whole, sliced = (usual(*laid_out(**layout), [at("a")] * 4) for layout in ({"ep": 2}, SLICED))
    assert sliced.rows_per_s == pytest.approx(2 * whole.rows_per_s)


def cluster(*flops: float, kind: str = "gpu", learnt: float | None = None) -> Cluster:
    """A host with one device for each of `flops`."""
    hosts = [
        {
            "name": f"h{index}", "memory_bytes": 1e12,
            "link": {"kind": "bus", "latency_s": 1e-5, "bandwidth": 1e10},
            "devices": [
                {"kind": kind, "model": f"{speed:g}", "count": 1, "memory_bytes": 1e10,
                 "memory_bandwidth": 1e14, "call_s": 1e-9,
                 "matmul": [{"dtype": "fp32", "flops": speed}]}
            ],
        }
        for index, speed in enumerate(flops)
    ]  # fmt: skip
    net = {"ends": ["*", "*"], "kind": "ether", "latency_s": 5e-5, "bandwidth": 1e9}
    made = resolve({"name": "test", "hosts": hosts, "links": [net]}, "test")
    if learnt is None:
        return made
    calibration = Calibration(products=1, passes=1, messages=learnt, devices=["other"], runs=1)
    return made.model_copy(update={"calibration": calibration})


@pytest.mark.parametrize("layout", WAYS, ids=str)
def test_planned_prices_are_those_of_products_and_links(layout: dict[str, Any]) -> None:
    job, plan = laid_out(**layout)
    made = cluster(FAST, FAST, SLOW, FAST)
    prices = planned(Costs.of(job, plan, made))
    device = made.hosts[2].devices[0]
    ffn = 512 // plan.etp
    rows = 8 * 256 * 2 // plan.span * plan.ep * plan.etp // job.model.experts
    row_s = sum(
        product_s(device, "fp32", product) for product in (
            Product(rows, 2 * ffn, 256), Product(rows, 256, ffn),
        )
    ) / rows  # fmt: skip
    assert prices.rows_per_s == pytest.approx(1 / row_s, rel=0.05)  # Passes and calls besides.
    groups = plan.ranks // plan.ep
    assert prices.latency_s == pytest.approx((plan.ep - 1) * 5e-5, rel=1e-3)
    assert prices.bytes_per_s == pytest.approx(1e9, rel=1e-2), groups
    assert (prices.hides, prices.handling_s) == (True, 0)
    processors = planned(Costs.of(job, plan, cluster(FAST, FAST, SLOW, FAST, kind="cpu")))
    assert processors.hides
    assert processors.handling_s > 0
    assert prices == planned(Costs.of(job, plan, made))


def test_ranks_without_experts_have_no_prices() -> None:
    """A part of a pipeline may have dense layers alone."""
    job = tiny_job(
        model={
            "family": "deepseek_v3", "kv_heads": 4, "layers": 2, "dense_layers": 1, "dense_ffn": 64,
            "latent": {"width": 10, "queries": 12, "rotary": 4, "value": 6},
        },
        layout={"ep": 2, "pp": 2},
        train={"precision": "fp32", "micro_batches": 2, "batch": 16},
    )  # fmt: skip
    plan = lay_out(job.layout, job.model, 4)
    prices = planned(Costs.of(job, plan, cluster(FAST, FAST, FAST, FAST)))
    assert 0 < prices.rows_per_s < float("inf")


def test_what_runs_have_shown_counts() -> None:
    job, plan = laid_out(ep=4)
    bare, slow = (
        planned(Costs.of(job, plan, cluster(FAST, FAST, FAST, FAST, learnt=learnt)))
        for learnt in (None, 2.0)
    )
    assert slow.bytes_per_s == pytest.approx(bare.bytes_per_s / 2)
    assert slow.latency_s == pytest.approx(2 * bare.latency_s)
    assert slow.rows_per_s == bare.rows_per_s


def test_ranks_that_share_memory_hide_nothing() -> None:
    job, plan = laid_out(ep=4)
    host = {
        "name": "a", "memory_bytes": 1e12,
        "link": {"kind": "bus", "latency_s": 1e-5, "bandwidth": 1e10},
        "devices": [
            {"kind": "cpu", "model": "x", "count": 4, "memory_bytes": 1e10,
             "memory_bandwidth": 1e11, "matmul": [{"dtype": "fp32", "flops": 1e12}]}
        ],
    }  # fmt: skip
    assert not planned(Costs.of(job, plan, resolve({"name": "c", "hosts": [host]}, "c"))).hides


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(("hosts", "there"), [(1, 2), (2, 4)])
def test_rows_that_nobody_would_send_but_for_them(top_k: int, hosts: int, there: int) -> None:
    """Of all choices of a token, those of one of the last experts that have no other of its ranks,
    or of its host, beside it: four ranks of two experts."""
    model = {"experts": 8, "top_k": top_k}
    job = tiny_job(model=model, layout={"ep": 4, "dispatch": "visits", "hosts": hosts})
    plan = lay_out(job.layout, job.model, 4)
    prices = usual(job, plan, [at("a")] * 4)
    visits = setting_of(job, plan, job.balance, prices, 0).row_bytes
    rows = setting_of(job, plan.model_copy(update={"dispatch": "rows"}), job.balance, prices, 0)
    choices = [one for one in combinations(range(8), top_k) if 7 in one]
    lonely = sum(sum(expert >= 8 - there for expert in one) == 1 for one in choices)
    assert visits == pytest.approx(rows.row_bytes * lonely / len(choices))


def test_rows_that_make_up_for_a_copy() -> None:
    """By what the model makes of one that takes as many rows as that off the busiest rank."""
    job, plan = laid_out(ep=2)
    prices = usual(job, plan, [at("a")] * 4)
    setting = setting_of(job, plan, job.balance, prices, 0)._replace(rows_per_s=1e9)
    none, one = np.zeros(setting.ranks, np.int64), np.eye(setting.ranks, dtype=np.int64)

    def whole_s(more: int, sent: Ints, received: Ints) -> float:
        """Of a layer whose busiest rank computes so many rows more than a billion."""
        rows = Rows(one[0] * (10**9 + more), none, none)
        return times_of(rows, sent, received, setting).whole

    number, there_s = copy_rows(setting), whole_s(0, none, none)
    assert number > 1e5
    assert whole_s(-round(1.01 * number), one[0], one[1]) < there_s
    assert whole_s(-round(0.99 * number), one[0], one[1]) > there_s
    # Of a link that goes both ways at a time, a rank that sends has all of it to send.
    more = copy_rows(setting._replace(hides=True)) - number
    assert more == pytest.approx(setting.expert_bytes / setting.bytes_per_s / 3 * 1e9)
    # A link that is faster than the processor that works it counts as fast as that.
    worked = setting._replace(hides=True, handling_s=10 / setting.bytes_per_s, latency_s=0.0)
    link = setting._replace(hides=True, latency_s=0.0)
    assert copy_rows(worked) == pytest.approx(10 * copy_rows(link))
