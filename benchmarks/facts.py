"""Theme `facts`: predictions of time and memory against measurement, and simulated clusters.

Each case has its own probe, taken amid its steps, as machines change their speed by the minute. No
measured step enters a prediction, but in rows that say "calibrated": those of all other cases.
facts.md says what bounds the figures.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, simulated
from benchmarks.on_ranks import alone, on_ranks
from benchmarks.training import UniformSamples, olmoe
from moesaic.dist.collectives import all_gather, all_reduce_
from moesaic.dist.probe.links import COLLECTIVES, make_collective, make_filler_compute
from moesaic.dist.probe.timing import time_collective
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster, load_cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.facts.workload import memory
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import matmul
from moesaic.models.init import InitialSource
from moesaic.policy.cost.calibrate import (
    UNCALIBRATED,
    Observation,
    fit_leave_one_out,
    observe_step,
)
from moesaic.testing.memory import peak_allocated
from moesaic.testing.ranks import RankPool
from moesaic.train.assemble import LMRun, assemble
from moesaic.train.data.batch import Batch

MIXTRAL = {
    "family": "mixtral", "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "experts": 8,
    "top_k": 2,
}  # fmt: skip
DENSE = {"family": "llama", "ffn": 1408, "experts": 0, "top_k": 0}
WIDE = {**DENSE, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 16384}
RANKS = 2
STEPS = 7
WARM_UP = 2
PROBE_S = 16
NUMBERS = 'dtypes=["fp32"]'
PATIENCE_S = 120.0
REPEATS = 3
STEADY = 1.15
"""Slowest over quickest time of the same work amid the steps of a case, at most."""
ATTEMPTS = 2
PART_ROUNDS = 5
PART_TRIES = 10
"""Rounds at most; the steadiest count."""
PART_PROBE_S = 20
PRODUCTS = 32
MESSAGES = 24
MESSAGE_S = 0.6
SEED = 7
DRAWS = 2000
"""Draws of rounds for an interval."""
Takes = tuple[list[float], list[float]]
"""Seconds of matmuls and of collectives."""
MEMORY_STEPS = 6
"""Steps on each rank whose peaks are counted."""
STEP_BARS = {"median": "<= 0.06", "worst": "<= 0.18"}


@dataclass(frozen=True)
class Case:
    """A job on some ranks that share this machine's cores."""

    name: str
    ranks: int
    job: Job


def cases() -> list[Case]:
    """Return every layout and shape that is measured."""

    def case(name: str, ranks: int, batch: int, sequence: int, **tables: Any) -> Case:
        model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **tables.pop("model", {})}
        train = {"steps": 1_000_000, "batch": batch, "clip": 1.0, "device": "cpu"}
        tables["train"] = {**train, **tables.get("train", {})}
        packing = tables.pop("packing", "stream")
        tables["data"] = {"path": "unused", "sequence": sequence, "packing": packing}
        job = olmoe(batch, sequence, model=model, checkpoint={"asynchronous": False}, **tables)
        return Case(name, ranks, job)

    def layout(ep: int = 1, shard: int = 1) -> dict[str, int]:
        return {"ep": ep, "dp_shard": shard}

    # Predictions assume even routing, and untrained routers are uneven.
    even = {"router": "balanced", "balance_loss": 0.0}
    again, micro = {"recompute": True}, {"micro_batches": 4}
    return [
        case("OLMoE-shaped, 4 x 128", 1, 4, 128),
        case("OLMoE-shaped, 8 x 256", 1, 8, 256),
        case("OLMoE-shaped, 8 x 128, 4 micro-batches", 1, 8, 128, train=micro),
        case("OLMoE-shaped, 8 x 128, recompute", 1, 8, 128, train=again),
        case("Mixtral-shaped, 8 x 256", 1, 8, 256, model=MIXTRAL),
        case("dense, 8 x 256", 1, 8, 256, model=DENSE),
        case("dense, 4 x 512, wide vocabulary", 1, 4, 512, model=WIDE),
        case("dense, 8 x 256, two documents a sample", 1, 8, 256, model=DENSE, packing="documents"),
        case("OLMoE-shaped, 8 x 128, 2 ranks, ep 2, even", 2, 8, 128, layout=layout(2),
             routing=even),
        case("OLMoE-shaped, 8 x 256, 2 ranks, ep 2, even, recompute", 2, 8, 256,
             layout=layout(2), routing=even, train=again),
        case("OLMoE-shaped, 8 x 128, 2 ranks, ep 2, even, shard 2", 2, 8, 128,
             layout=layout(2, 2), routing=even),
        case("OLMoE-shaped, 8 x 128, 2 ranks, replicas", 2, 8, 128),
        case("Mixtral-shaped, 8 x 256, 2 ranks, ep 2, even, 4 micro-batches", 2, 8, 256,
             model=MIXTRAL, layout=layout(2), routing=even, train=micro),
        case("Mixtral-shaped, 8 x 256, 2 ranks, shard 2", 2, 8, 256, model=MIXTRAL,
             layout=layout(1, 2)),
        case("dense, 8 x 256, 2 ranks, replicas", 2, 8, 256, model=DENSE),
        case("dense, 8 x 256, 2 ranks, shard 2, recompute", 2, 8, 256, model=DENSE,
             layout=layout(1, 2), train=again),
    ]  # fmt: skip


def predicted_steps(rounds: int) -> Iterator[measure.Row]:
    """Compare predicted with measured time of a step: the median error, the worst, each case."""
    steps = min(rounds, STEPS)
    observed, details = list[Observation](), list[measure.Row]()
    for case in cases():
        cluster, measured, unsteady = steps_around_a_probe(case, steps)
        plan = plan_from_layout(case.job.layout, case.job.model, case.ranks)
        middle_s = statistics.median(measured)
        one = observe_step(case.name, middle_s, case.job, plan, cluster)
        observed.append(one)
        predicted_s = one.predict_s(UNCALIBRATED)
        ratios = [predicted_s / seconds for seconds in measured]
        details.append(
            measure.row(
                f"step, predicted over measured: {case.name}", predicted_s / middle_s, "ratio",
                bar="", against=f"the step itself; the machine's speed moved by {unsteady - 1:.0%}",
                interval=measure.bootstrap(ratios), repeats=len(ratios),
            )
        )  # fmt: skip
    yield from step_errors(observed, steps)
    yield from details


def step_errors(observed: Sequence[Observation], steps: int) -> Iterator[measure.Row]:
    """Yield the median error and the worst, by the probes alone and calibrated by other cases."""
    bare, others = [UNCALIBRATED] * len(observed), fit_leave_one_out(observed)
    for words, bars, factors in (("", STEP_BARS, bare), (", calibrated by all others", {}, others)):
        errors = [abs(one.relative_error(by)) for one, by in zip(observed, factors, strict=True)]
        for name, value in (("median", statistics.median(errors)), ("worst", max(errors))):
            yield measure.row(
                f"error of a step's predicted time{words}, {name} of {len(errors)} cases", value,
                "share", bar=bars.get(name, ""), against="the steps themselves, measured",
                repeats=steps,
            )  # fmt: skip


def probe(path: Path, seconds: int = PROBE_S) -> None:
    """Probe this machine as users do, in the dtype of all cases."""
    command = [sys.executable, "-m", "moesaic", "probe", "--nproc", str(RANKS)]
    settings = (f"seconds={seconds}", f"repeats={REPEATS}", "disks=[]", NUMBERS)
    flags = [word for item in settings for word in ("--set", item)]
    flags += ["--out", str(path)]
    subprocess.run([*command, *flags], check=True, capture_output=True)


def probed(seconds: int) -> Cluster:
    """Return what a probe finds now."""
    measure.wait_for_quiet()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "cluster.toml"
        probe(path, seconds)
        return load_cluster(path)


class Documents(UniformSamples):
    """Samples of two documents each if the job packs documents, else of one."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._apart = job.data.packing == "documents"

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of `indices`."""
        batch = super().batch(indices, shuffled=shuffled)
        second = batch.positions >= batch.positions.shape[1] // 2
        return replace(batch, documents=second.int()) if self._apart else batch


def steps_around_a_probe(case: Case, steps: int) -> tuple[Cluster, list[float], float]:
    """Take `steps` steps before a probe and as many after it; return how steady the machine was.

    It repeats all of it if the same work, timed amid them, moved too much.
    """
    found: list[tuple[Cluster, list[float], float]] = []
    while len(found) < ATTEMPTS and not (found and found[-1][2] <= STEADY):
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "cluster.toml"
            measure.wait_for_quiet()
            seconds, references = on_ranks(case.ranks, take_steps, case.job, steps, path)
            found.append((load_cluster(path), seconds, max(references) / min(references)))
    return min(found, key=lambda one: one[2])


def reference_s() -> float:
    """Return seconds of work that is always the same: matmuls and copies."""
    left, target = torch.rand(768, 768), torch.empty(8 << 20)
    source = torch.rand_like(target)

    def work() -> None:
        torch.mm(left, left)
        target.copy_(source)

    return statistics.median(_seconds(work, 1) for _ in range(15))


def take_steps(
    world: World, job: Job, steps: int, path: Path, root: int
) -> tuple[list[float], list[float]]:
    """On each rank: take `steps` steps, a probe by rank 0 alone, and `steps` more.

    Between them rank 0 alone does the reference work. A step that other programs disturb is
    repeated, with patience. Return seconds of the steps and of the reference work.
    """
    torch.set_num_threads(devices.num_cores() // world.size)
    plan = plan_from_layout(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples, taken, references = Documents(job), list[float](), list[float]()

    def pause(name: str) -> None:
        if name == "probe":
            probe(path)
        references.append(reference_s())

    alone(world, "begin", partial(pause, "begin"))
    for half, moments in enumerate((("middle", "probe"), ("end",))):
        for _ in range(WARM_UP):
            run.step(samples)
        until = time.perf_counter() + PATIENCE_S
        while len(taken) < (half + 1) * steps:
            watch, began = measure.Watch(root), time.perf_counter()
            run.step(samples)
            seconds = time.perf_counter() - began
            disturbed = watch.foreign_share() > measure.FOREIGN_SHARE and began < until
            if not int(all_reduce_(torch.tensor([int(disturbed)]), world.group)):
                taken.append(seconds)
        for moment in moments:
            alone(world, moment, partial(pause, moment))
    run.close()
    return taken, references


def operations(rounds: int) -> Iterator[measure.Row]:
    """Measure errors of single matmuls and collectives, at sizes between those of the probe."""
    draw, pool = random.Random(SEED), RankPool()
    shapes = [(draw.randrange(16, 1025), *_widths(draw)) for _ in range(PRODUCTS)]
    asked = [
        (COLLECTIVES[i % len(COLLECTIVES)], 4 * RANKS * round(2 ** draw.uniform(9, 20)))
        for i in range(MESSAGES)
    ]

    def take() -> Takes:
        measure.wait_for_quiet()
        return products_s(shapes), pool.run(RANKS, take_messages, asked, timeout_s=600.0)[0]

    wanted = min(rounds, PART_ROUNDS)
    taken: list[tuple[float, Cluster, Takes, Takes]] = []
    try:
        while len(taken) < PART_TRIES and sum(one[0] <= STEADY for one in taken) < wanted:
            references = [reference_s()]
            before, cluster, after = take(), probed(PART_PROBE_S), take()
            references.append(reference_s())
            taken.append((max(references) / min(references), cluster, before, after))
    finally:
        pool.close()
    steadiest = sorted(taken, key=lambda one: one[0])[:wanted]
    products, messages = list[list[float]](), list[list[float]]()
    for _, cluster, before, after in steadiest:
        (host,), (link,) = cluster.hosts, cluster.links
        grid = next(d for d in host.devices if d.count == 1).matmul_speed("fp32").times
        curves = {str(one.name): one.times for one in link.collectives}
        assert grid is not None
        predicted_s = [grid.at(*shape) for shape in shapes]
        products.append(over_measured(predicted_s, before[0], after[0]))
        predicted_s = [curves[name].at(size) for name, size in asked]
        messages.append(over_measured(predicted_s, before[1], after[1]))
    words = (
        f"{len(steadiest)} probes, each between two takes, the steadiest of {len(taken)}, in "
        f"which the same work moved by up to {steadiest[-1][0] - 1:.0%}"
    )
    yield error_row(
        f"a matmul's predicted time, median of {PRODUCTS}", "<= 0.05",
        f"the mean of a layer's three matmuls, fp32, {devices.num_cores()} threads; {words}",
        products,
    )  # fmt: skip
    yield error_row(
        f"a collective's predicted time, median of {MESSAGES}", "<= 0.10",
        f"gloo, all-to-all through memory, {RANKS} ranks, from when the last rank comes; {words}",
        messages,
    )  # fmt: skip


def _widths(draw: random.Random) -> tuple[int, int]:
    """Draw columns and inner size, multiples of 32 as widths of models are."""
    return draw.randrange(64, 1025, 32), draw.randrange(64, 1025, 32)


def over_measured(
    predicted: Sequence[float], before: Sequence[float], after: Sequence[float]
) -> list[float]:
    """Return a probe's predictions over the mean of operations before it and after it."""
    return [2 * one / (b + a) for one, b, a in zip(predicted, before, after, strict=True)]


def error_row(of: str, bar: str, against: str, rounds: Sequence[Sequence[float]]) -> measure.Row:
    """Return the median error of single probes; operations of one probe are off together, so the
    interval draws whole rounds."""
    return measure.row(
        f"error of {of}, by one probe", single_error(rounds), "share", bar=bar, against=against,
        interval=_by_round(rounds), repeats=len(rounds),
    )  # fmt: skip


def single_error(rounds: Sequence[Sequence[float]]) -> float:
    """Return the median distance of ratios from one, over all operations of all probes."""
    return statistics.median(abs(ratio - 1.0) for ratios in rounds for ratio in ratios)


def _by_round(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95% interval of the error if whole rounds are drawn."""
    draw = random.Random(SEED)
    values = sorted(single_error(draw.choices(rounds, k=len(rounds))) for _ in range(DRAWS))
    tail, value = DRAWS // 40, single_error(rounds)
    return min(values[tail], value), max(values[-tail - 1], value)


def products_s(shapes: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return median seconds of matmuls as in layers: weights and their gradients are not cached."""
    torch.set_num_threads(devices.num_cores())
    arena = torch.rand(16 << 20)
    return [_product_s(arena, *shape) for shape in shapes]


def _product_s(arena: torch.Tensor, rows: int, columns: int, inner: int) -> float:
    step = columns * max(rows, inner)
    starts = itertools.cycle(range(0, len(arena) - step + 1, step))
    x, tall, wide = (torch.rand(*size) for size in ((rows, inner), (inner, rows), (inner, columns)))

    def place(size: int) -> torch.Tensor:
        at = next(starts)
        return arena[at : at + size]

    def multiply() -> None:
        matmul(x, place(columns * inner).view(columns, inner), transposed=True)
        matmul(x, place(columns * inner).view(inner, columns), transposed=False)
        torch.mm(tall.T, wide, out=place(rows * columns).view(rows, columns))

    return statistics.median(_seconds(multiply, 3) for _ in range(15)) / 3


def take_messages(world: World, asked: Sequence[tuple[str, int]]) -> list[float]:
    """Return mean seconds of each collective of so many bytes, between matmuls."""
    carrier = world.transport([range(world.size)])
    assert carrier is not None
    group = carrier.group

    def agree(count: int) -> int:
        return int(all_gather(torch.tensor([count]), group).min())

    compute, times = make_filler_compute(world.device, agree), []
    for name, size in asked:
        work = make_collective(name, size, world.device, carrier)
        met = time_collective(work, time.perf_counter, agree, MESSAGE_S, compute)
        # The rank that comes last does not wait.
        times.append(float(all_gather(torch.tensor(met.calls_s), group).amin(dim=0).mean()))
    return times


def _seconds(work: Any, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def predicted_memory(rounds: int) -> Iterator[measure.Row]:
    """Compare predicted peak memory with what torch allocates; the claim is the largest error.

    A thread of gloo may free a message late in some steps: the figure is the median of all steps.
    """
    del rounds
    errors: dict[str, float] = {}
    for case in cases():
        pool = RankPool()
        try:
            found = pool.run(case.ranks, peak_bytes, case.job, timeout_s=600.0)
        finally:
            pool.close()
        needs = memory(
            case.job, plan_from_layout(case.job.layout, case.job.model, case.ranks)
        ).peak_bytes
        ratio = statistics.median(needs / peak for peaks in found for peak in peaks)
        errors[case.name] = abs(ratio - 1.0)
    yield measure.row(
        f"error of predicted peak memory, largest of {len(errors)} cases", max(errors.values()),
        "share", bar="<= 0.02", against="torch's own count, the median of all steps",
        repeats=MEMORY_STEPS,
    )  # fmt: skip


def peak_bytes(
    world: World, job: Job, plan: Plan | None = None, steps: int = MEMORY_STEPS
) -> list[int]:
    """Return the peak bytes of torch's tensors in each of some steps; the plan is that of the job's
    layout by default."""
    torch.set_num_threads(1)
    plan = plan or plan_from_layout(job.layout, job.model, world.size)
    samples, runs = Documents(job), list[LMRun]()

    def start() -> None:
        runs.append(assemble(job, plan, world, InitialSource(job.seed, job.model.init_std)))

    def step() -> None:
        runs[0].step(samples)

    _, *found = peak_allocated(start, *[step] * steps)
    runs[0].close()
    return found


PARTS = {
    "steps": predicted_steps, "operations": operations, "memory": predicted_memory,
    "simulated": simulated.rows,
}  # fmt: skip
