"""Theme `facts`: what was predicted beside what was measured, and what simulations say.

A fresh probe goes before every few cases, and each case is predicted from the latest one before it
is measured: no figure of a measured step reaches a prediction. facts.md says what bounds them.
"""

from __future__ import annotations

import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measure, simulated
from benchmarks.training import UniformSamples, olmoe
from moesaic.dist import device as devices
from moesaic.dist.probe.links import collective
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster, load_cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import memory
from moesaic.models.initial import InitialSource
from moesaic.policy.cost.step import Costs
from moesaic.sim.timeline import run as simulate
from moesaic.testing.memory import most_allocated
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

MIXTRAL = {
    "family": "mixtral", "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "experts": 8,
    "top_k": 2,
}  # fmt: skip
DENSE = {"family": "llama", "ffn": 1408, "experts": 0, "top_k": 0}
WIDE = {**DENSE, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 16384}
RANKS = 2
STEPS = 11
WARM_UP = 3
CASES_A_PROBE = 3
PROBE_S = 12
PRODUCTS = 32
MESSAGES = 24
SEED = 7
STEP_BARS = {"median": "<= 0.10", "worst": "<= 0.20"}


@dataclass(frozen=True)
class Case:
    """A job on some ranks, which share this machine's cores."""

    name: str
    ranks: int
    job: Job


def cases() -> list[Case]:
    """Every layout and shape that is measured."""

    def case(name: str, ranks: int, batch: int, sequence: int, **tables: Any) -> Case:
        model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **tables.pop("model", {})}
        train = {"steps": 1_000_000, "batch": batch, "clip": 1.0, "device": "cpu"}
        tables["train"] = {**train, **tables.get("train", {})}
        # Every sample is one document: attention has no mask.
        tables["data"] = {"path": "unused", "sequence": sequence, "packing": "stream"}
        job = olmoe(batch, sequence, model=model, checkpoint={"asynchronous": False}, **tables)
        return Case(name, ranks, job)

    def layout(ep: int = 1, shard: int = 1) -> dict[str, int]:
        return {"ep": ep, "shard": shard}

    # Predictions take routing to be even; untrained routers are not, which two ranks would feel.
    even = {"router": "balanced", "balance_loss": 0.0}
    again, parts = {"recompute": True}, {"micro_batches": 4}
    return [
        case("OLMoE-shaped, 4 x 128", 1, 4, 128),
        case("OLMoE-shaped, 8 x 256", 1, 8, 256),
        case("OLMoE-shaped, 8 x 128, 4 micro-batches", 1, 8, 128, train=parts),
        case("OLMoE-shaped, 8 x 128, recompute", 1, 8, 128, train=again),
        case("Mixtral-shaped, 8 x 256", 1, 8, 256, model=MIXTRAL),
        case("dense, 8 x 256", 1, 8, 256, model=DENSE),
        case("dense, 4 x 512, wide vocabulary", 1, 4, 512, model=WIDE),
        case("OLMoE-shaped, 8 x 128, 2 ranks, ep 2, even", 2, 8, 128, layout=layout(2),
             routing=even),
        case("OLMoE-shaped, 8 x 256, 2 ranks, ep 2, even, recompute", 2, 8, 256,
             layout=layout(2), routing=even, train=again),
        case("OLMoE-shaped, 8 x 128, 2 ranks, ep 2, even, shard 2", 2, 8, 128,
             layout=layout(2, 2), routing=even),
        case("OLMoE-shaped, 8 x 128, 2 ranks, copies", 2, 8, 128),
        case("Mixtral-shaped, 8 x 256, 2 ranks, ep 2, even, 4 micro-batches", 2, 8, 256,
             model=MIXTRAL, layout=layout(2), routing=even, train=parts),
        case("Mixtral-shaped, 8 x 256, 2 ranks, shard 2", 2, 8, 256, model=MIXTRAL,
             layout=layout(1, 2)),
        case("dense, 8 x 256, 2 ranks, copies", 2, 8, 256, model=DENSE),
        case("dense, 8 x 256, 2 ranks, shard 2, recompute", 2, 8, 256, model=DENSE,
             layout=layout(1, 2), train=again),
    ]  # fmt: skip


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure of the theme, as it comes."""
    steps = min(rounds, STEPS)
    yield from predicted_steps(cases(), steps)
    yield from predicted_parts()
    yield from predicted_memory(cases())
    yield from simulated.rows()


def predicted_steps(chosen: Sequence[Case], steps: int) -> Iterator[measure.Row]:
    """Predicted over measured time of a step, by case; then the median error and the worst."""
    errors = []
    for index, case in enumerate(chosen):
        if index % CASES_A_PROBE == 0:
            cluster = probe()
        foretold_s = predict_s(case, cluster)
        measured = times_of(case, steps)
        ratios = [foretold_s / seconds for seconds in measured]
        ratio = statistics.median(ratios)
        errors.append(abs(ratio - 1.0))
        yield measure.row(
            f"step, predicted over measured: {case.name}", ratio, "ratio", bar="",
            against="the step itself, measured", interval=measure.bootstrap(ratios), repeats=steps,
        )  # fmt: skip
    for name, value in (("median", statistics.median(errors)), ("worst", max(errors))):
        yield measure.row(
            f"error of a step's predicted time, {name} of {len(errors)} cases", value, "share",
            bar=STEP_BARS[name], against="the steps themselves, measured", repeats=steps,
        )  # fmt: skip


def probe() -> Cluster:
    """This machine, measured now as users measure it."""
    measure.wait_for_quiet()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "cluster.toml"
        command = [sys.executable, "-m", "moesaic", "probe", "--nproc", str(RANKS)]
        flags = ["--set", f"seconds={PROBE_S}", "--set", "disks=[]", "--out", str(path)]
        subprocess.run([*command, *flags], check=True, capture_output=True)
        return load_cluster(path)


def predict_s(case: Case, cluster: Cluster) -> float:
    """Seconds of a step."""
    plan = lay_out(case.job.layout, case.job.model, case.ranks)
    return simulate(Costs.of(case.job, plan, cluster).events(), case.ranks).step_s


def times_of(case: Case, steps: int) -> list[float]:
    """Seconds of `steps` steps, after a few more."""
    pool = Ranks(case.ranks)
    try:
        measure.wait_for_quiet()
        times: list[float] = pool.run(case.ranks, take_steps, case.job, steps, timeout_s=600.0)[0]
    finally:
        pool.close()
    return times


def take_steps(world: World, job: Job, steps: int) -> list[float]:
    """On each rank: the seconds of each of `steps` steps."""
    torch.set_num_threads(devices.num_cores() // world.size)
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples, times = UniformSamples(job), []
    for step in range(WARM_UP + steps):
        began = time.perf_counter()
        run.step(samples)
        if step >= WARM_UP:
            times.append(time.perf_counter() - began)
    run.close()
    return times


def predicted_parts() -> Iterator[measure.Row]:
    """Median errors of single products and collectives, at sizes between those of the probe."""
    cluster = probe()
    (host,) = cluster.hosts
    draw = random.Random(SEED)
    shapes = [tuple(round(2 ** draw.uniform(5, 10)) for _ in range(3)) for _ in range(PRODUCTS)]
    torch.set_num_threads(devices.num_cores())
    grid = next(d for d in host.devices if d.count == 1).speed("fp32").products
    assert grid is not None
    errors = [abs(grid.at(*shape) / product_s(*shape) - 1.0) for shape in shapes]
    yield measure.row(
        f"error of a product's predicted time, median of {PRODUCTS} between the probe's",
        statistics.median(errors), "share", bar="<= 0.05", against="torch.mm, fp32, both cores",
        interval=measure.bootstrap(errors), repeats=PRODUCTS,
    )  # fmt: skip
    (link,) = cluster.links
    sizes = [4 * RANKS * round(2 ** draw.uniform(9, 20)) for _ in range(MESSAGES)]
    asked = [
        (one.name, size) for size, one in zip(sizes, link.collectives * MESSAGES, strict=False)
    ]
    pool = Ranks(RANKS)
    try:
        times = pool.run(RANKS, take_messages, asked)[0]
    finally:
        pool.close()
    curves = {one.name: one.times for one in link.collectives}
    errors = [
        abs(curves[name].at(size) / seconds - 1.0)
        for (name, size), seconds in zip(asked, times, strict=True)
    ]
    yield measure.row(
        f"error of a collective's predicted time, median of {MESSAGES} between the probe's",
        statistics.median(errors), "share", bar="<= 0.10", against=f"gloo, {RANKS} ranks",
        interval=measure.bootstrap(errors), repeats=MESSAGES,
    )  # fmt: skip


def product_s(rows: int, columns: int, inner: int) -> float:
    """Median seconds of one product of a layer, whose weight is in no cache."""
    weights = itertools.cycle(
        torch.rand(max(1, (64 << 20) // (4 * columns * inner)), inner, columns)
    )
    left, out = torch.rand(rows, inner), torch.rand(rows, columns)

    def multiply() -> None:
        torch.mm(left, next(weights), out=out)

    return statistics.median(_seconds(multiply, 10) for _ in range(15))


def take_messages(world: World, asked: Sequence[tuple[str, int]]) -> list[float]:
    """Median seconds of each operation of so many bytes."""
    group = world.everyone
    assert group is not None
    times = []
    for name, size in asked:
        work = collective(name, size, world.size, world.device, group)
        dist.barrier(group)
        times.append(statistics.median(_seconds(work, 5) for _ in range(9)))
    return times


def _seconds(work: Any, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def predicted_memory(chosen: Sequence[Case]) -> Iterator[measure.Row]:
    """Predicted over measured peak of what torch allocates, by case; then the largest error."""
    errors = []
    for case in chosen:
        pool = Ranks(case.ranks)
        try:
            allocated, resident = pool.run(case.ranks, peak_bytes, case.job, timeout_s=600.0)[-1]
        finally:
            pool.close()
        needs = memory(case.job, lay_out(case.job.layout, case.job.model, case.ranks))
        ratio = needs.peak_bytes / allocated
        errors.append(abs(ratio - 1.0))
        yield measure.row(
            f"peak memory, predicted over allocated: {case.name}", ratio, "ratio", bar="",
            against=f"torch's own count; {resident / allocated:.2f} times as much was resident",
            repeats=1,
        )  # fmt: skip
    yield measure.row(
        f"error of predicted peak memory, largest of {len(errors)} cases", max(errors), "share",
        bar="<= 0.02", against="torch's own count", repeats=len(errors),
    )  # fmt: skip


def peak_bytes(world: World, job: Job) -> tuple[int, int]:
    """Most bytes that torch's tensors held in two steps, and that the process held."""
    torch.set_num_threads(1)
    plan = lay_out(job.layout, job.model, world.size)

    def train() -> None:
        run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
        samples = UniformSamples(job)
        for _ in range(2):
            run.step(samples)
        run.close()

    return most_allocated(train), devices.peak_bytes(world.device)
