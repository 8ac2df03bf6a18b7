"""Largest models: SE-MoE's equations by hand, and moesaic's storage beside the engine's budget."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import plan_from_job
from moesaic.facts.workload import count_parameters
from moesaic.policy.plan.budget import budget_facts, smallest_budget
from moesaic.policy.plan.capacity import (
    Capacity,
    RankStorage,
    active_fraction,
    largest_model,
    se_moe_limits,
)

EXPERT = 3 * 128 * 256
"""Parameters of an expert of tiny-mixtral."""


def job(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Job:
    train = {"steps": 1, "batch": 8, "recompute": True, "clip": 0.0, **sections.pop("train", {})}
    raw = {
        "model": {**PRESETS["tiny-mixtral"], **(model or {})},
        "data": {"path": "x", "sequence": 64}, "train": train, "memory": {"ssd": "scratch"},
        **sections,
    }  # fmt: skip
    return parse(Job, raw, "job.toml")


def cpus(memory_bytes: float, ranks: int = 1, hosts: int = 1) -> Cluster:
    """Return hosts that ranks share, with so much memory each."""
    device = {
        "kind": "cpu", "model": "a CPU", "count": ranks, "memory_bytes": memory_bytes / ranks,
        "memory_bandwidth": 1e10, "matmul": [{"dtype": "fp32", "flops": 1e11}],
    }  # fmt: skip
    host = {"name": "n", "memory_bytes": memory_bytes, "devices": [device], "replicas": hosts}
    return resolve_cluster({"name": "here", "hosts": [host]}, "cluster.toml")


def experts(figures: dict[str, Any]) -> dict[str, int]:
    """Return the experts per layer of each limit of moesaic's."""
    return {
        one["resource"]: one["experts"] for one in figures["limits"] if one["method"] == "moesaic"
    }


# SE-MoE's equations.


def test_equations_for_the_papers_model() -> None:
    """GPT with 12 layers of width 4096 on one machine of 8 GPUs with 80 GB, all experts active.

    D = 12 * 4 * 4096^2 + 50304 * 4096 = 1,011,351,552, so GPUs have 640 GB - 16.18 GB for
    4 S / 12. The host with 1 TB holds 16 bytes, the drive with 3 TB 12 bytes of a parameter.
    """
    dense = 12 * 4 * 4096**2 + 50304 * 4096
    assert dense == 1_011_351_552
    limits = se_moe_limits(Capacity(640e9, 1e12, 3e12), dense, 1.0, 12)
    assert limits == pytest.approx(
        {"GPU memory": 1.871455e12, "host memory": 6.25e10, "drive": 2.5e11}, rel=1e-6
    )


def test_active_fraction_relaxes_gpus_and_hosts_only() -> None:
    capacity = Capacity(640e9, 1e12, 3e12)
    full, quarter = (se_moe_limits(capacity, 10**9, alpha, 12) for alpha in (1.0, 0.25))
    assert quarter["GPU memory"] == pytest.approx(4 * full["GPU memory"])
    assert quarter["host memory"] == 2.5e11 == 4 * full["host memory"]
    assert quarter["drive"] == full["drive"] == 2.5e11


def test_without_gpus_the_host_has_the_dense_state() -> None:
    """1 TB less 16 GB leaves 984 GB for 16 bytes a parameter."""
    limits = se_moe_limits(Capacity(None, 1e12, 3e12), 10**9, 1.0, 12)
    assert limits == {"host memory": 6.15e10, "drive": 2.5e11}


def test_dense_state_that_does_not_fit_leaves_nothing() -> None:
    assert se_moe_limits(Capacity(16e9, 1e12, 3e12), 2 * 10**9, 1.0, 12)["GPU memory"] == 0


@pytest.mark.parametrize("tier", Capacity._fields)
def test_more_of_a_tier_raises_its_limit_only(tier: str) -> None:
    less = Capacity(640e9, 1e12, 3e12)
    more = less._replace(**{tier: 2 * getattr(less, tier)})
    before, after = (se_moe_limits(one, 10**9, 0.5, 12) for one in (less, more))
    raised = [name for name in before if after[name] > before[name]]
    assert raised == [list(before)[Capacity._fields.index(tier)]]


def test_active_fraction_by_hand() -> None:
    """Two of eight experts per token: 1 - (3/4)^tokens; all eight: 1."""
    one_sample = job(train={"batch": 1}, data={"path": "x", "sequence": 3})
    assert active_fraction(one_sample) == pytest.approx(1 - 0.75**3)
    assert active_fraction(job({"top_k": 8})) == 1.0


# moesaic's storage.


def storage(settings: Job, ranks: int = 1) -> RankStorage:
    return RankStorage(settings, plan_from_job(settings, ranks))


def test_drive_by_hand() -> None:
    """Four layers of eight experts, each with four blocks of 98,304 numbers, 96 pages in fp32."""
    assert storage(job()).drive_bytes(8) == 4 * 8 * 4 * EXPERT * 4
    assert storage(job(layout={"ep": 2}), 2).drive_bytes(8) == 4 * 4 * 4 * EXPERT * 4
    assert storage(job(train={"precision": "fp64"})).drive_bytes(8) == 4 * 8 * 4 * EXPERT * 8
    odd = storage(job({"ffn": 250}))  # 96,000 numbers are 93.75 pages.
    assert odd.drive_bytes(1) == 4 * 4 * 94 * 4096


@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"ep": 2, "dp_shard": "all"}])
def test_memory_is_the_smallest_budget_of_a_job_with_more_experts(layout: dict[str, Any]) -> None:
    ranks = layout.get("ep", 1)
    larger = job({"experts": 64}, layout=layout)
    facts = budget_facts(larger, plan_from_job(larger, ranks), ranks - 1, 10**7)
    own = storage(job(layout=layout), ranks)
    assert own.memory_bytes(64) == smallest_budget(facts)
    assert own.facts(64, 1e7) == facts


def test_largest_model_is_the_last_that_fits() -> None:
    settings, room = job(), 10**9
    figures, own = largest_model(settings, cpus(1e9), room), storage(settings)
    most = experts(figures)["drive"]
    assert own.drive_bytes(most) <= room < own.drive_bytes(most + 1)
    (limit,) = (one for one in figures["largest"] if one["method"] == "moesaic")
    assert (limit["resource"], limit["experts"]) == ("drive", most)
    larger = settings.model.model_copy(update={"experts": most})
    assert limit["parameters"] == count_parameters(larger).total
    most = experts(largest_model(settings, cpus(3e8), room))["memory per rank"]
    assert own.memory_bytes(most) <= 2.4e8 < own.memory_bytes(most + 1)
    assert figures["divided"]["group_size"] == 1


def test_experts_come_in_multiples_of_ep() -> None:
    figures = largest_model(job(layout={"ep": 2}), cpus(1e9, ranks=2), 10**9)
    assert all(number % 2 == 0 for number in experts(figures).values())
    one_host = experts(largest_model(job(layout={"ep": 2}), cpus(1e9, 2, 1), 10**9))
    two_hosts = experts(largest_model(job(layout={"ep": 4}), cpus(1e9, 2, 2), 10**9))
    assert two_hosts["drive"] == pytest.approx(2 * one_host["drive"], abs=4)


def test_more_memory_and_drive_never_mean_fewer_experts() -> None:
    by_drive = [experts(largest_model(job(), cpus(1e9), room)) for room in (0, 1e8, 1e9, 1e13)]
    drives = [found["drive"] for found in by_drive]
    assert drives == sorted(drives)
    assert (drives[0], drives[-1]) == (0, 32767)
    budgets = [2e6, 1e8, 3e8, 1e9]
    by_memory = [experts(largest_model(job(), cpus(size), 1e9)) for size in budgets]
    memories = [found["memory per rank"] for found in by_memory]
    assert memories == sorted(memories)
    assert memories[0] == 0 < memories[-1]


def remedy(settings: Job, cluster: Cluster, room: float) -> str:
    """Return what moesaic says about a larger model."""
    text: str = largest_model(settings, cluster, room)["largest"][1]["remedy"]
    return text


def test_remedies() -> None:
    assert remedy(job(), cpus(1e9), 1e13).startswith("raise model.layers or model.ffn")
    assert remedy(job(), cpus(1e9), 1e9).startswith("add space on the drives")
    text = remedy(job(train={"recompute": False}), cpus(1.6e8), 1e9)
    assert re.fullmatch(r"more experts need 128\.\d MiB of 122\.1 MiB per rank, 11\d\.\d MiB with "
                        r"train\.recompute = true", text)  # fmt: skip
    text = remedy(job(), cpus(5e6), 1e9)
    assert text.endswith("with train.micro_batches = 2; use fewer ranks per host, or more memory")
    short = job(data={"path": "x", "sequence": 2}, layout={"ep": 2})
    assert 'with layout.dp_shard = "all"' in remedy(short, cpus(1e7, ranks=2), 1e9)


def test_each_expert_has_one_owner() -> None:
    with pytest.raises(ConfigError, match=r"layout\.ep = 1 on 2 ranks .* set layout\.ep = 2 or"):
        largest_model(job(), cpus(1e9, ranks=2), 1e9)


def test_gpus_hold_no_expert_state_on_a_drive() -> None:
    gpus = resolve_cluster({"name": "x", "hosts": [{"name": "n", "preset": "h100-8"}]}, "x")
    figures = largest_model(job(layout={"ep": 8}), gpus, 1e12)
    assert experts(figures) == {"CPU ranks": 0}
    assert figures["largest"][1]["remedy"].endswith("give a cluster of hosts without GPUs")
    assert figures["divided"] is None


def test_a_budget_of_the_job_counts() -> None:
    figures = largest_model(job(memory={"ssd": "x", "host": "100MB"}), cpus(1e9), 1e9)
    assert figures["budget_bytes"] == 1e8
    with pytest.raises(ConfigError, match=r'memory\.host = "2GB" is more than the 953\.7 MiB'):
        largest_model(job(memory={"ssd": "x", "host": "2GB"}), cpus(1e9), 1e9)


def test_a_job_without_memory_is_refused() -> None:
    without = job().model_copy(update={"memory": None})
    with pytest.raises(ConfigError, match=r"job.toml: .* add it .*--set memory.ssd="):
        largest_model(without, cpus(1e9), 1e9, origin="job.toml")
