"""Simulated steps: time to simulate a thousand devices, and a published table predicted.

The table is SE-MoE's of training against DeepSpeed: five sizes of one model on 8 to 128 GPUs. Three
figures are calibrated on some of its rows for each system, and the other rows are predicted; no row
is used both ways. docs/plan.md says what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure
from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster, Device
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import Timeline, simulate_step

TABLE = "SE-MoE (arXiv 2205.10034), table of training on A100-80G"
DEEPSPEED, SE_MOE = "DeepSpeed", "SE-MoE"
TOKENS_PER_S = {
    DEEPSPEED: {8: 24165, 16: 43691, 32: 82957, 64: 157728, 128: 283706},
    SE_MOE: {8: 31085, 16: 59136, 32: 113456, 64: 209970, 128: 376968},
}
"""Published, by system and number of GPUs, which is that of experts and of samples in a batch."""
BILLIONS = {8: 13.9, 16: 26.8, 32: 52.6, 64: 104.1, 128: 207.2}
"""Published parameters, by number of GPUs."""
SPLITS = (((8, 32, 128), (16, 64)), ((8, 16, 32), (64, 128)))
"""GPUs of the rows calibrated on, and of those predicted: between and beyond."""
NEAR = "<= 0.05"

SEQUENCE = 1024
NETWORK = 200e9
"""Bytes a second of a host, one way: eight adapters of 200 Gbit/s, as in NVIDIA's DGX A100."""
LARGE = {1_000: "<= 1.0", 10_000: "<= 5.0"}
"""Bars in seconds, by devices."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Figures of a system that data sheets lack: shares of theirs, and one latency."""

    device: float = 1.0
    """Speed of matmuls and memory; 1: the default of an unmeasured device."""
    links: float = 1.0
    """Bandwidth of links, inside hosts and between them; 1: the data sheet's."""
    turn_s: float = 5e-6
    """Latency of a message between hosts."""


def rows(rounds: int) -> Iterator[measure.Row]:
    """Time the simulator and predict the table; claims are the worst predictions."""
    for devices, bar in LARGE.items():
        yield simulator(devices, bar, min(rounds, 5 if devices <= 1_000 else 3))
    errors, apart = list[measure.Row](), list[measure.Row]()
    for known, wanted in SPLITS:
        found = {system: calibrate(step_times(system, known)) for system in TOKENS_PER_S}
        for system, calibration in found.items():
            errors += predicted(system, calibration, known, wanted)
        apart += ratios(found, known, wanted)
    yield measure.worst(
        f"error of tokens/s predicted for a published table, worst of {len(errors)} rows", errors,
        NEAR,
    )  # fmt: skip
    yield measure.worst(
        f"error of {SE_MOE} / {DEEPSPEED} predicted for a published table, worst of {len(apart)} "
        "rows", apart, NEAR,
    )  # fmt: skip
    for system in TOKENS_PER_S:
        yield measure.worst(
            f"tokens/s by data sheets alone / published, {system}, least of {len(BILLIONS)} sizes",
            list(uncalibrated(system)),
        )  # fmt: skip


def simulator(devices: int, bar: str, rounds: int) -> measure.Row:
    """Time costing and simulating a step of many devices."""
    job, plan, cluster = large(devices)
    times = measure.interleave({"simulate": lambda: simulate(job, plan, cluster)}, rounds, warmup=1)
    return measure.row(
        f"cost and simulate a step on {devices:,} devices", times.median("simulate"), "s", bar=bar,
        against="limit; hosts of preset h100-8, ep 8, shard 8, 24 layers",
        interval=measure.bootstrap(times.seconds["simulate"]), repeats=rounds,
    )  # fmt: skip


def large(devices: int) -> tuple[Job, Plan, Cluster]:
    """Return a job of 24 layers on hosts with eight H100 each."""
    raw = {
        "seed": 0,
        "model": {
            "family": "olmoe", "vocab": 50304, "hidden": 2048, "layers": 24, "heads": 16,
            "kv_heads": 16, "head_dim": 128, "ffn": 1024, "experts": 64, "top_k": 8,
        },
        "data": {"path": "unused", "sequence": 2048},
        "train": {"steps": 1, "batch": devices, "precision": "bf16"},
        "layout": {"ep": 8, "dp_shard": 8},
    }  # fmt: skip
    job = parse(Job, raw, "benchmark")
    hosts = [{"name": "a", "preset": "h100-8", "replicas": devices // 8}]
    return (
        job,
        plan_from_layout(job.layout, job.model, devices),
        resolve_cluster(_network(hosts, 5e-6), "benchmark"),
    )


def simulate(job: Job, plan: Plan, cluster: Cluster) -> Timeline:
    """Simulate one step."""
    return simulate_step(JobCosts.from_job(job, plan, cluster).step(), plan.ranks)


def published_job(gpus: int) -> Job:
    """Return the table's model on `gpus` GPUs: an expert and a sample of the batch for each.

    Its experts are two matrices of 4096 x 16384, ours three of 4096 x `ffn`: as many parameters.
    """
    raw = {
        "seed": 0,
        "model": {
            "family": "mixtral", "vocab": 50304, "hidden": 4096, "layers": 12, "heads": 64,
            "kv_heads": 64, "head_dim": 64, "ffn": 2 * 16384 // 3 + 1, "experts": gpus,
            "top_k": 2, "tied": True,
        },
        "data": {"path": "unused", "sequence": SEQUENCE},
        "train": {"steps": 1, "batch": gpus, "precision": "bf16", "recompute": True},
        "layout": {"ep": gpus, "dp_shard": "all"},
    }  # fmt: skip
    return parse(Job, raw, "benchmark")


def published_cluster(gpus: int, calibration: Calibration) -> Cluster:
    """Return hosts with eight A100 of 80 GB on one network, calibrated."""
    hosts = [{"name": "a", "preset": "a100-8", "replicas": gpus // 8}]
    cluster = resolve_cluster(_network(hosts, calibration.turn_s), "benchmark")
    devices = [_slower(device, calibration.device) for device in cluster.hosts[0].devices]
    changed = [host.model_copy(update={"devices": devices}) for host in cluster.hosts]
    links = [
        link.model_copy(update={"bandwidth": link.bandwidth * calibration.links})
        for link in cluster.links
    ]
    return cluster.model_copy(update={"hosts": changed, "links": links})


def _network(hosts: list[dict[str, object]], turn_s: float) -> dict[str, object]:
    net = {"ends": ["*", "*"], "kind": "infiniband", "latency_s": turn_s, "bandwidth": NETWORK}
    return {"name": "benchmark", "hosts": hosts, "links": [net]}


def _slower(device: Device, share: float) -> Device:
    matmul = [one.model_copy(update={"flops": one.flops * share}) for one in device.matmul]
    bandwidth = device.memory_bandwidth * share
    return device.model_copy(update={"matmul": matmul, "memory_bandwidth": bandwidth})


def step_s(gpus: int, calibration: Calibration) -> float:
    """Simulate a step of the table's model on `gpus` GPUs; return seconds."""
    job = published_job(gpus)
    plan = plan_from_layout(job.layout, job.model, gpus)
    return simulate(job, plan, published_cluster(gpus, calibration)).step_s


def step_times(system: str, gpus: Sequence[int]) -> dict[int, float]:
    """Return published seconds of a step, by number of GPUs."""
    return {n: n * SEQUENCE / TOKENS_PER_S[system][n] for n in gpus}


def calibrate(seconds: dict[int, float]) -> Calibration:
    """Calibrate simulated steps to `seconds`, by GPUs: least squares of logarithms.

    Levenberg-Marquardt on the logarithms of the three figures, from those of the data sheets.
    """

    def misses(at: Vector) -> Vector:
        guess = Calibration(*np.exp(at).tolist())
        return np.array([np.log(step_s(n, guess) / s) for n, s in seconds.items()])

    at, damping, width = np.log(astuple(Calibration())), 1e-3, 0.02
    now = misses(at)
    while damping < 1e3 and now @ now > 1e-10:
        moves = np.eye(len(at)) * width
        slopes = np.array([(misses(at + move) - now) / width for move in moves]).T
        normal = slopes.T @ slopes + damping * np.eye(len(at))
        there = at + np.clip(np.linalg.solve(normal, -slopes.T @ now), -0.7, 0.7)
        missed = misses(there)
        if missed @ missed < now @ now:
            at, now, damping = there, missed, damping / 10
        else:
            damping *= 10
    return Calibration(*np.exp(at).tolist())


def uncalibrated(system: str) -> Iterator[measure.Row]:
    """Yield speed by data sheets alone over the published one."""
    for gpus, seconds in step_times(system, list(BILLIONS)).items():
        yield measure.row(
            f"tokens/s by data sheets alone / published, {system}, {gpus} GPUs",
            seconds / step_s(gpus, Calibration()), "ratio", bar="", against=TABLE, repeats=1,
            simulated=True,
        )  # fmt: skip


def predicted(
    system: str, calibration: Calibration, known: Sequence[int], wanted: Sequence[int]
) -> Iterator[measure.Row]:
    """Yield how far off the rows are that were not calibrated on."""
    for gpus, seconds in step_times(system, wanted).items():
        error = abs(seconds / step_s(gpus, calibration) - 1.0)
        yield measure.row(
            f"error of tokens/s predicted for {gpus} GPUs: {system}, calibrated on "
            f"{_listed(known)} GPUs", error, "ratio", bar="", against=TABLE, repeats=1,
            simulated=True,
        )  # fmt: skip


def ratios(
    found: dict[str, Calibration], known: Sequence[int], wanted: Sequence[int]
) -> Iterator[measure.Row]:
    """Yield how far off the ratio of the two systems is, each by its own calibration."""
    for gpus in wanted:
        ours, theirs = (step_s(gpus, found[system]) for system in (SE_MOE, DEEPSPEED))
        published = TOKENS_PER_S[SE_MOE][gpus] / TOKENS_PER_S[DEEPSPEED][gpus]
        yield measure.row(
            f"error of {SE_MOE} / {DEEPSPEED} predicted for {gpus} GPUs, calibrated on "
            f"{_listed(known)} GPUs", abs(theirs / ours / published - 1.0), "ratio", bar="",
            against=TABLE, repeats=1, simulated=True,
        )  # fmt: skip


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
