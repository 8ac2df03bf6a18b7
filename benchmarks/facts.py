"""Theme `facts`: what was predicted beside what was measured, and what simulations say.

Every case has a probe of its own, taken amid its steps, as machines change their speed by the
minute; no figure of a measured step reaches a prediction, but in the rows that say "calibrated",
those of all other cases. facts.md says what bounds them.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, simulated
from benchmarks.training import UniformSamples, olmoe
from moesaic.dist import device as devices
from moesaic.dist.collectives import gather, sum_
from moesaic.dist.probe.links import COLLECTIVES, chore, collective
from moesaic.dist.probe.timing import together
from moesaic.dist.products import product
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster, load_cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import memory
from moesaic.models.initial import InitialSource
from moesaic.policy.cost.calibrate import BARE, Observed, left_out
from moesaic.sim.observe import observe
from moesaic.testing.memory import most_allocated
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.data import Batch

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
"""What the same work may take from its quickest to its slowest, amid the steps of a case."""
ATTEMPTS = 4
FALSE_STARTS = 12
"""Of a case, given up before their probe as the machine was unsteady from the first."""
PART_ROUNDS = 5
PART_TRIES = 10
"""Rounds at most, of which the steadiest count."""
PART_PROBE_S = 20
PRODUCTS = 32
MESSAGES = 24
MESSAGE_S = 0.6
SEED = 7
DRAWS = 2000
"""Of rounds, for an interval."""
Takes = tuple[list[float], list[float]]
"""Seconds of single products, and of messages."""
MEMORY_STEPS = 6
"""Whose peaks are counted, on each rank."""
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
        packing = tables.pop("packing", "stream")
        tables["data"] = {"path": "unused", "sequence": sequence, "packing": packing}
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
        case("dense, 8 x 256, two documents a sample", 1, 8, 256, model=DENSE, packing="documents"),
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
    yield from operations(rounds)
    yield from predicted_memory(cases())
    yield from simulated_rows()


simulated_rows = simulated.rows
"""Those of the simulator, which may be taken alone."""


def predicted_steps(chosen: Sequence[Case], steps: int) -> Iterator[measure.Row]:
    """Predicted over measured time of a step, by case; then the median error and the worst."""
    observed = list[Observed]()
    for case in chosen:
        cluster, measured, unsteady = steps_around_a_probe(case, steps)
        plan = lay_out(case.job.layout, case.job.model, case.ranks)
        middle_s = statistics.median(taken.seconds for taken in measured)
        one = observe(case.name, middle_s, case.job, plan, cluster)
        observed.append(one)
        foretold_s = one.predict_s(BARE)
        ratios = [foretold_s / taken.seconds for taken in measured]
        ratio = foretold_s / middle_s
        yield measure.row(
            f"step, predicted over measured: {case.name}", ratio, "ratio", bar="",
            against=f"the step itself; the machine's speed moved by {unsteady - 1:.0%}",
            interval=measure.bootstrap(ratios), repeats=len(ratios),
        )  # fmt: skip
    yield from step_errors(observed, steps)


def step_errors(observed: Sequence[Observed], steps: int) -> Iterator[measure.Row]:
    """The median error and the worst, by the probes alone and calibrated by all other cases."""
    bare, others = [BARE] * len(observed), left_out(observed)
    for words, bars, factors in (("", STEP_BARS, bare), (", calibrated by all others", {}, others)):
        errors = [abs(one.error(by)) for one, by in zip(observed, factors, strict=True)]
        for name, value in (("median", statistics.median(errors)), ("worst", max(errors))):
            yield measure.row(
                f"error of a step's predicted time{words}, {name} of {len(errors)} cases", value,
                "share", bar=bars.get(name, ""), against="the steps themselves, measured",
                repeats=steps,
            )  # fmt: skip


def probe(path: Path, seconds: int = PROBE_S) -> None:
    """This machine, measured now as users measure it, in the numbers that all cases compute in."""
    command = [sys.executable, "-m", "moesaic", "probe", "--nproc", str(RANKS)]
    settings = (f"seconds={seconds}", f"repeats={REPEATS}", "disks=[]", NUMBERS)
    flags = [word for item in settings for word in ("--set", item)]
    flags += ["--out", str(path)]
    subprocess.run([*command, *flags], check=True, capture_output=True)


def probed(seconds: int) -> Cluster:
    """What a probe finds now."""
    measure.wait_for_quiet()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "cluster.toml"
        probe(path, seconds)
        return load_cluster(path)


class Documents(UniformSamples):
    """Samples of two documents each, where the job keeps them apart, else of one."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._apart = job.data.packing == "documents"

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """The samples of `indices`."""
        batch = super().batch(indices, shuffled=shuffled)
        second = batch.positions >= batch.positions.shape[1] // 2
        return replace(batch, documents=second.int()) if self._apart else batch


@dataclass(frozen=True)
class Taken:
    """One measured step."""

    seconds: float
    phases: dict[str, float]


def steps_around_a_probe(case: Case, steps: int) -> tuple[Cluster, list[Taken], float]:
    """`steps` steps of `case` before a probe and as many after it, and how steady the machine was.

    All of it is taken again where the same work, timed amid them, shows another machine: without
    waiting for the end where that shows before the probe.
    """
    found: list[tuple[Cluster, list[Taken], float]] = []
    starts = 0
    while len(found) < ATTEMPTS and not (found and found[-1][2] <= STEADY):
        starts += 1
        pool = Ranks()
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "cluster.toml"
            measure.wait_for_quiet()
            try:
                taken, references = pool.run(
                    case.ranks, take_steps, case.job, steps, path, starts > FALSE_STARTS,
                    timeout_s=600.0,
                )[0]  # fmt: skip
            finally:
                pool.close()
            if path.exists():
                found.append((load_cluster(path), taken, max(references) / min(references)))
    return min(found, key=lambda one: one[2])


def reference_s() -> float:
    """Seconds of some work that is always the same: products and copies."""
    left, target = torch.rand(768, 768), torch.empty(8 << 20)
    source = torch.rand_like(target)

    def work() -> None:
        torch.mm(left, left)
        target.copy_(source)

    return statistics.median(_seconds(work, 1) for _ in range(15))


def take_steps(
    world: World, job: Job, steps: int, path: Path, whatever: bool
) -> tuple[list[Taken], list[float]]:
    """On each rank: `steps` steps, a probe by rank 0 alone, and `steps` more.

    Between them rank 0 alone does the work of reference. A step that other programs disturb is
    taken again, with patience. There is no probe where the machine was unsteady until then, unless
    it is to be taken `whatever` it was.
    """
    torch.set_num_threads(devices.num_cores() // world.size)
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples, taken, references = Documents(job), list[Taken](), list[float]()

    def alone(name: str) -> None:
        if world.leads:
            if name == "probe":
                probe(path)
            references.append(reference_s())
            world.store.set(name, "")
        world.await_words(world.store, [name])  # Costs no core, as waiting in gloo would.

    alone("begin")
    for half, then in enumerate(("middle", "end")):
        for _ in range(WARM_UP):
            run.step(samples)
        until = time.perf_counter() + PATIENCE_S
        while len(taken) < (half + 1) * steps:
            watch, began = measure.Watch(os.getppid()), time.perf_counter()
            facts = run.step(samples)
            seconds = time.perf_counter() - began
            disturbed = watch.foreign_share() > measure.FOREIGN_SHARE and began < until
            if not int(sum_(torch.tensor([int(disturbed)]), world.everyone)):
                taken.append(Taken(seconds, facts.phases))
        alone(then)
        if then == "middle":
            steady = not world.leads or max(references) / min(references) <= STEADY
            if not whatever and int(sum_(torch.tensor([int(not steady)]), world.everyone)):
                break
            alone("probe")
    run.close()
    return taken, references


def operations(rounds: int) -> Iterator[measure.Row]:
    """Median errors of single products and collectives, at sizes between those of the probe."""
    draw, pool = random.Random(SEED), Ranks()
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
    products, messages = Part(), Part()
    for _, cluster, before, after in steadiest:
        (host,), (link,) = cluster.hosts, cluster.links
        grid = next(d for d in host.devices if d.count == 1).speed("fp32").products
        curves = {str(one.name): one.times for one in link.collectives}
        assert grid is not None
        products.add([grid.at(*shape) for shape in shapes], before[0], after[0])
        messages.add([curves[name].at(size) for name, size in asked], before[1], after[1])
    words = (
        f"{len(steadiest)} probes, each between two takes, the steadiest of {len(taken)}, in "
        f"which the same work moved by up to {steadiest[-1][0] - 1:.0%}"
    )
    yield from products.rows(
        f"a product's predicted time, median of {PRODUCTS}", "<= 0.05",
        f"the mean of a layer's three ways, fp32, {devices.num_cores()} threads; {words}",
    )  # fmt: skip
    yield from messages.rows(
        f"a collective's predicted time, median of {MESSAGES}", "<= 0.10",
        f"gloo, rows to all through memory, {RANKS} ranks, from when the last one comes; {words}",
    )  # fmt: skip


PARTS = {"operations": operations}


def _widths(draw: random.Random) -> tuple[int, int]:
    """Columns and inner size, which are multiples of 32 as the widths of models are."""
    return draw.randrange(64, 1025, 32), draw.randrange(64, 1025, 32)


@dataclass(frozen=True)
class Part:
    """Single operations, foretold by several probes, each between two takes."""

    ratios: list[list[float]] = field(default_factory=list)
    """Of each probe: predicted over measured, operation by operation."""
    moved: list[list[float]] = field(default_factory=list)
    """The later take over the one before the probe, likewise."""

    def add(
        self, foretold: Sequence[float], before: Sequence[float], after: Sequence[float]
    ) -> None:
        """What one probe says of operations that took so long before it, and so long after."""
        pairs = list(zip(before, after, strict=True))
        self.ratios.append([2 * one / (b + a) for one, (b, a) in zip(foretold, pairs, strict=True)])
        self.moved.append([a / b for b, a in pairs])

    def rows(self, of: str, bar: str, against: str) -> Iterator[measure.Row]:
        """The median error: of single probes, of each operation's median ratio, where what probes
        miss to either side cancels; and what it would be if a take were foretold by another one.

        Operations of one probe are off together, so that rounds are what is drawn for intervals.
        """
        repeats = len(self.ratios)
        for name, rounds, error, its_bar in (
            (f"error of {of}, each by one probe", self.ratios, single_error, bar),
            (f"error of {of}, each the median ratio of {repeats} probes", self.ratios,
             median_error, bar),
            (f"where the take before foretells the one after: error of {of}", self.moved,
             single_error, ""),
        ):  # fmt: skip
            yield measure.row(
                name, error(rounds), "share", bar=its_bar, against=against,
                interval=_by_round(rounds, error), repeats=repeats,
            )  # fmt: skip
        each = [statistics.median(ratios) for ratios in self.ratios]
        yield measure.row(
            f"predicted over measured: {of}, probe by probe", statistics.median(each), "ratio",
            bar="", against=f"{against}; the interval is from the least to the most of them",
            interval=(min(each), max(each)), repeats=repeats,
        )  # fmt: skip


def single_error(rounds: Sequence[Sequence[float]]) -> float:
    """How far ratios are from one in the median, every probe by itself."""
    return statistics.median(abs(ratio - 1.0) for ratios in rounds for ratio in ratios)


def median_error(rounds: Sequence[Sequence[float]]) -> float:
    """How far each operation's median ratio is from one, in the median."""
    each = zip(*rounds, strict=True)
    return statistics.median(abs(statistics.median(ratios) - 1.0) for ratios in each)


def _by_round(
    rounds: Sequence[Sequence[float]], error: Callable[[Sequence[Sequence[float]]], float]
) -> tuple[float, float]:
    """95% of `error` where whole rounds are drawn."""
    draw = random.Random(SEED)
    values = sorted(error(draw.choices(rounds, k=len(rounds))) for _ in range(DRAWS))
    tail, value = DRAWS // 40, error(rounds)
    return min(values[tail], value), max(values[-tail - 1], value)


def products_s(shapes: Sequence[tuple[int, int, int]]) -> list[float]:
    """Median seconds of products as layers ask for them, whose weights, and gradients of weights,
    are in no cache."""
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
        product(x, place(columns * inner).view(columns, inner), transposed=True)
        product(x, place(columns * inner).view(inner, columns), transposed=False)
        torch.mm(tall.T, wide, out=place(rows * columns).view(rows, columns))

    return statistics.median(_seconds(multiply, 3) for _ in range(15)) / 3


def take_messages(world: World, asked: Sequence[tuple[str, int]]) -> list[float]:
    """Mean seconds of each operation of so many bytes, between products."""
    carrier = world.carrier([range(world.size)])
    assert carrier is not None
    group = carrier.group

    def agree(count: int) -> int:
        return int(gather(torch.tensor([count]), group).min())

    compute, times = chore(world.device, agree), []
    for name, size in asked:
        work = collective(name, size, world.device, carrier)
        met = together(work, time.perf_counter, agree, MESSAGE_S, compute)
        # Whoever comes last waits for nobody.
        times.append(float(gather(torch.tensor(met.calls_s), group).amin(dim=0).mean()))
    return times


def _seconds(work: Any, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def predicted_memory(chosen: Sequence[Case]) -> Iterator[measure.Row]:
    """Predicted over measured peak of what torch allocates, by case; then the largest error.

    A thread of gloo may let go of a message late, in some steps and not in others: the figure is
    the median of all steps of all ranks, and the interval has every one of them.
    """
    errors = []
    for case in chosen:
        pool = Ranks()
        try:
            found = pool.run(case.ranks, peak_bytes, case.job, timeout_s=600.0)
        finally:
            pool.close()
        needs = memory(case.job, lay_out(case.job.layout, case.job.model, case.ranks)).peak_bytes
        ratios = [needs / peak for peaks, _ in found for peak in peaks]
        allocated, resident = statistics.median(found[0][0]), found[0][1]
        ratio = statistics.median(ratios)
        errors.append(abs(ratio - 1.0))
        yield measure.row(
            f"peak memory, predicted over allocated: {case.name}", ratio, "ratio", bar="",
            against=f"torch's own count; {resident / allocated:.2f} times as much was resident",
            interval=(min(ratios), max(ratios)), repeats=len(ratios),
        )  # fmt: skip
    yield measure.row(
        f"error of predicted peak memory, largest of {len(errors)} cases", max(errors), "share",
        bar="<= 0.02", against="torch's own count, the median of all steps",
        repeats=MEMORY_STEPS,
    )  # fmt: skip


def peak_bytes(world: World, job: Job) -> tuple[list[int], int]:
    """Most bytes that torch's tensors held in each of some steps, and that the process held."""
    torch.set_num_threads(1)
    plan = lay_out(job.layout, job.model, world.size)
    samples, runs = Documents(job), []

    def start() -> None:
        runs.append(assemble(job, plan, world, InitialSource(job.seed, job.model.init_std)))

    def step() -> None:
        runs[0].step(samples)

    _, *steps = most_allocated(start, *[step] * MEMORY_STEPS)
    runs[0].close()
    return steps, devices.peak_bytes(world.device)
