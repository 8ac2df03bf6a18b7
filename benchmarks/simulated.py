"""Simulated steps: how long a thousand devices take to simulate, and a published table foretold.

The table is SE-MoE's of training against DeepSpeed: five sizes of one model on 8 to 128 GPUs. Three
figures are calibrated on some of its rows for each system, the other rows are foretold; no row is
used both ways. docs/plan.md says what is assumed, and what that is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure
from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster, Device
from moesaic.facts.cluster.file import resolve
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, lay_out
from moesaic.facts.workload import memory
from moesaic.policy.cost.step import Costs
from moesaic.sim.timeline import Timeline, run

TABLE = "SE-MoE (arXiv 2205.10034), table of training on A100-80G"
DEEPSPEED, SE_MOE = "DeepSpeed", "SE-MoE"
TOKENS_PER_S = {
    DEEPSPEED: {8: 24165, 16: 43691, 32: 82957, 64: 157728, 128: 283706},
    SE_MOE: {8: 31085, 16: 59136, 32: 113456, 64: 209970, 128: 376968},
}
"""Published, by system and number of GPUs, which is that of experts and of samples in a batch."""
BILLIONS = {8: 13.9, 16: 26.8, 32: 52.6, 64: 104.1, 128: 207.2}
"""Published parameters, by number of GPUs."""
PUBLISHED_GB = {
    DEEPSPEED: {8: 68.9, 128: 66.4},
    SE_MOE: {8: 56.8, 128: 54.3},
}
"""Published memory of a GPU, in GB."""
SPLITS = (((8, 32, 128), (16, 64)), ((8, 16, 32), (64, 128)))
"""GPUs of the rows that are calibrated on, and of those that are foretold: between and beyond."""
NEAR = "<= 0.05"

SEQUENCE = 1024
NETWORK = 200e9
"""Bytes a second of a host, one way: eight adapters of 200 Gbit/s, as in NVIDIA's DGX A100."""
LARGE = {1_000: "<= 1.0", 10_000: "<= 5.0"}
"""Bars in seconds, by devices."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """What data sheets do not say of a system, as shares of what they do say, and one latency."""

    device: float = 1.0
    """Speed of products and of memory, where 1 is what is taken of an unmeasured device."""
    links: float = 1.0
    """Bandwidth of links, inside hosts and between them, where 1 is the data sheet's."""
    turn_s: float = 5e-6
    """Latency of a turn between hosts."""


def rows(rounds: int = 5) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    for devices, bar in LARGE.items():
        yield simulator(devices, bar, rounds if devices <= 1_000 else min(rounds, 3))
    for system in TOKENS_PER_S:
        yield from uncalibrated(system)
    for known, wanted in SPLITS:
        found = {system: calibrate(step_times(system, known)) for system in TOKENS_PER_S}
        for system, calibration in found.items():
            yield from foretold(system, calibration, known, wanted)
        yield from ratios(found, known, wanted)
    yield from memories()


def simulator(devices: int, bar: str, rounds: int) -> measure.Row:
    """Seconds to cost and simulate a step of many devices."""
    job, plan, cluster = large(devices)
    times = measure.interleave({"simulate": lambda: simulate(job, plan, cluster)}, rounds, warmup=1)
    return measure.row(
        f"cost and simulate a step on {devices:,} devices", times.median("simulate"), "s", bar=bar,
        against="limit; hosts of preset h100-8, ep 8, shard 8, 24 layers",
        interval=measure.bootstrap(times.seconds["simulate"]), repeats=rounds,
    )  # fmt: skip


def large(devices: int) -> tuple[Job, Plan, Cluster]:
    """A job of 24 layers on hosts with eight H100 each."""
    raw = {
        "seed": 0,
        "model": {
            "family": "olmoe", "vocab": 50304, "hidden": 2048, "layers": 24, "heads": 16,
            "kv_heads": 16, "head_dim": 128, "ffn": 1024, "experts": 64, "top_k": 8,
        },
        "data": {"path": "unused", "sequence": 2048},
        "train": {"steps": 1, "batch": devices, "precision": "bf16"},
        "layout": {"ep": 8, "shard": 8},
    }  # fmt: skip
    job = parse(Job, raw, "benchmark")
    hosts = [{"name": "a", "preset": "h100-8", "replicas": devices // 8}]
    return job, lay_out(job.layout, job.model, devices), resolve(_network(hosts, 5e-6), "benchmark")


def simulate(job: Job, plan: Plan, cluster: Cluster) -> Timeline:
    """A step on a clock."""
    return run(Costs.of(job, plan, cluster).events(), plan.ranks)


def published_job(gpus: int) -> Job:
    """The table's model on `gpus` GPUs: an expert, and a sample of a batch, for each of them.

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
        "layout": {"ep": gpus, "shard": "all"},
    }  # fmt: skip
    return parse(Job, raw, "benchmark")


def published_cluster(gpus: int, calibration: Calibration) -> Cluster:
    """Hosts with eight A100 of 80 GB on one network, as fast as `calibration` makes them."""
    hosts = [{"name": "a", "preset": "a100-8", "replicas": gpus // 8}]
    cluster = resolve(_network(hosts, calibration.turn_s), "benchmark")
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
    """Seconds of a step of the table's model on `gpus` GPUs."""
    job = published_job(gpus)
    plan = lay_out(job.layout, job.model, gpus)
    return simulate(job, plan, published_cluster(gpus, calibration)).step_s


def step_times(system: str, gpus: Sequence[int]) -> dict[int, float]:
    """Published seconds of a step, by number of GPUs."""
    return {n: n * SEQUENCE / TOKENS_PER_S[system][n] for n in gpus}


def calibrate(seconds: dict[int, float]) -> Calibration:
    """The calibration that brings simulated steps to `seconds`, by GPUs: least squares of logs.

    Levenberg and Marquardt on the logarithms of the three figures, from those of the data sheets.
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
    """Speed by data sheets alone, as a ratio to what was published."""
    for gpus, seconds in step_times(system, list(BILLIONS)).items():
        yield measure.row(
            f"tokens/s by data sheets alone / published, {system}, {gpus} GPUs",
            seconds / step_s(gpus, Calibration()), "ratio", bar="", against=TABLE, repeats=1,
            simulated=True,
        )  # fmt: skip


def foretold(
    system: str, calibration: Calibration, known: Sequence[int], wanted: Sequence[int]
) -> Iterator[measure.Row]:
    """What was calibrated, and how far off the other rows are."""
    words = f"{system}, calibrated on {_listed(known)} GPUs"
    figures = (
        (
            "speed of a device, 1: as of any that was not measured",
            calibration.device,
            "ratio",
        ),
        ("bandwidth of links, 1: the data sheet's", calibration.links, "ratio"),
        ("latency of a turn between hosts", calibration.turn_s * 1e6, "us"),
    )
    for name, value, unit in figures:
        yield measure.row(
            f"{name}: {words}", value, unit, bar="", against=TABLE, repeats=1, simulated=True
        )
    for gpus, seconds in step_times(system, wanted).items():
        error = abs(seconds / step_s(gpus, calibration) - 1.0)
        yield measure.row(
            f"error of tokens/s foretold for {gpus} GPUs: {words}", error, "ratio", bar=NEAR,
            against=TABLE, repeats=1, simulated=True,
        )  # fmt: skip
        error = abs(seconds / parabola(step_times(system, known), gpus) - 1.0)
        yield measure.row(
            f"the same error of a parabola through the same rows, {gpus} GPUs: {words}", error,
            "ratio", bar="", against=TABLE, repeats=1, simulated=True,
        )  # fmt: skip


def parabola(seconds: dict[int, float], gpus: int) -> float:
    """Three figures that know nothing of models or machines: a curve over the logarithm of GPUs."""
    through = np.polyfit(np.log2(list(seconds)), list(seconds.values()), 2)
    return float(np.polyval(through, np.log2(gpus)))


def ratios(
    found: dict[str, Calibration], known: Sequence[int], wanted: Sequence[int]
) -> Iterator[measure.Row]:
    """How far off the ratio of the two systems is, each by its own calibration."""
    for gpus in wanted:
        ours, theirs = (step_s(gpus, found[system]) for system in (SE_MOE, DEEPSPEED))
        published = TOKENS_PER_S[SE_MOE][gpus] / TOKENS_PER_S[DEEPSPEED][gpus]
        yield measure.row(
            f"error of {SE_MOE} / {DEEPSPEED} foretold for {gpus} GPUs, calibrated on "
            f"{_listed(known)} GPUs", abs(theirs / ours / published - 1.0), "ratio", bar=NEAR,
            against=TABLE, repeats=1, simulated=True,
        )  # fmt: skip


def memories() -> Iterator[measure.Row]:
    """How much less a GPU holds when 128 share the dense state, not 8; nothing is calibrated."""
    few, many = (peak_gb(gpus) for gpus in (8, 128))
    for system, published in PUBLISHED_GB.items():
        yield measure.row(
            f"memory of a GPU computed / published, {system}, 128 GPUs", many / published[128],
            "ratio", bar="", against=TABLE, repeats=1, simulated=True,
        )  # fmt: skip
        fall = published[8] - published[128]
        yield measure.row(
            f"memory that a GPU of 128 holds less than one of 8, computed / published, {system}",
            (few - many) / fall, "ratio", bar="", against=TABLE, repeats=1, simulated=True,
        )  # fmt: skip


def peak_gb(gpus: int) -> float:
    """Computed memory of a GPU at its fullest."""
    job = published_job(gpus)
    return memory(job, lay_out(job.layout, job.model, gpus), on_cpu=False).peak_bytes / 1e9


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
