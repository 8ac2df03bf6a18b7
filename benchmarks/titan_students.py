"""Parts of the theme `titan`: three students beside a teacher that trains.

`passes` compares their step with training the teacher first, and the students later. Each later
pass runs the frozen teacher again, one pass a student or one for all. `ranks` compares the step of
an expert-parallel teacher and its students with the parts alone, and with the plan's prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import facts, measure
from benchmarks.on_ranks import Unlike, in_turn, on_ranks
from benchmarks.training import Ours
from moesaic.base.config import parse
from moesaic.dist.world import World
from moesaic.facts.job import Job, student_job
from moesaic.facts.plan import plan_from_layout, student_plan
from moesaic.facts.workload import workload
from moesaic.kernels import device as devices
from moesaic.policy.cost.calibrate import UNCALIBRATED, observe_step

NAMES = ("first", "second", "third")
BATCH, SEQUENCE = 8, 256
LOSSES = {"text": 1.0, "attention": 1.0}
"""Losses of a student without settings of its own."""
TEACHER = {
    "family": "llama", "vocab": 8192, "hidden": 512, "layers": 6, "heads": 4, "kv_heads": 4,
    "head_dim": 128, "ffn": 1536,
}  # fmt: skip
STUDENT = {
    "family": "llama", "vocab": 8192, "hidden": 192, "layers": 3, "heads": 3, "kv_heads": 3,
    "head_dim": 64, "ffn": 560,
}  # fmt: skip
EXPERTS = {**TEACHER, "family": "mixtral", "ffn": 768, "experts": 8, "top_k": 2}
RANKS = 2
PATIENCE_S = 180.0
TOLERANCE = 1e-4
"""Relative difference of a loss in the first step, on all sides."""
Seconds = NDArray[np.float64]


def distillation(
    names: Sequence[str] = NAMES,
    losses: dict[str, float] = LOSSES,
    *,
    frozen: bool = False,
    teacher: dict[str, Any] = TEACHER,
    **tables: dict[str, Any],
) -> Job:
    """Return the job of a teacher with these students, which are equal but for their values."""
    raw: dict[str, object] = {
        "model": teacher, "distill": {"frozen": frozen}, "balance": {"policy": "none"},
        "student": [{"name": name, "model": STUDENT, "losses": losses} for name in names],
        "data": {"path": "unused", "sequence": SEQUENCE}, "schedule": {"kind": "constant"},
        "train": {"steps": 1_000_000, "batch": BATCH, "clip": 1.0, "device": "cpu"},
        "checkpoint": {"asynchronous": False}, **tables,
    }  # fmt: skip
    return parse(Job, raw, "benchmark")


def flops(job: Job) -> int:
    """Return the operations of a step of the job's own model."""
    plan = plan_from_layout(job.layout, job.model, 1)
    return sum(block.forward.flops + block.backward.flops for block in workload(job, plan, 0))


def first_losses(ours: Ours) -> dict[str, float]:
    """Take the first step; return the losses of the teacher and of each student."""
    stats = ours.run.step(ours.samples)
    found = {"teacher": stats.loss}
    for name, student in stats.students.items():
        found |= student.figures(name)
    return found


def check_losses(whole: Ours, others: Sequence[Ours]) -> None:
    """Raise unless the first step of `others` has the losses of that of `whole`."""
    expected = first_losses(whole)
    for one in others:
        for name, value in first_losses(one).items():
            if abs(value - expected[name]) > TOLERANCE * abs(expected[name]):
                raise Unlike(f"{name} is {value} on one side, and {expected[name]} online")


def passes(rounds: int) -> Iterator[measure.Row]:
    """Measure students beside their teacher over the teacher and later passes."""
    solo = World.solo()
    job = distillation()
    online, teacher = Ours(job, solo), Ours(distillation(()), solo)
    own = [Ours(distillation([name], frozen=True), solo) for name in NAMES]
    shared = Ours(distillation(frozen=True), solo)
    student = Ours(student_job(job, job.student[0]), solo)
    check_losses(online, [teacher, *own, shared])
    contenders: dict[str, Callable[[], object]] = {
        "online": online.step, "T": teacher.step, "S": student.step, "shared": shared.step,
        "F": partial(teacher.run.validate, teacher.samples, BATCH),
        "own": lambda: [one.step() for one in own],
    }  # fmt: skip
    times = measure.interleave(contenders, rounds, warmup=1, patience_s=PATIENCE_S)
    seconds = {name: np.array(spent) for name, spent in times.seconds.items()}
    T, F, S = (seconds[name] for name in "TFS")
    share = flops(student_job(job, job.student[0])) / flops(job)
    parts = ", ".join(f"{name} {times.median(name):.3f} s" for name in "TFS")
    for name, words, formula, ceiling in (
        ("own", "a later pass each", "(T+3(F+S))/(T+3S)", (T + 3 * (F + S)) / (T + 3 * S)),
        ("shared", "one later pass", "(T+F+3S)/(T+3S)", (T + F + 3 * S) / (T + 3 * S)),
    ):
        speed_up = (T + seconds[name]) / seconds["online"]
        against = (
            f"{formula} = {np.median(ceiling):.3f} of measured parts, {parts}; speed-up "
            f"{np.median(speed_up):.3f}; a student has {share:.3f} of the teacher's flops; "
            f"{torch.get_num_threads()} threads"
        )
        title = f"students: speed-up of 3 over {words}, over its ceiling"
        yield ratio_row(title, speed_up / ceiling, ">= 0.95", against, times)


def ratio_row(
    name: str, ratios: Seconds, bar: str, against: str, times: measure.Times
) -> measure.Row:
    """Return the median of ratios by round."""
    noise = f"; {times.disturbed} rounds disturbed" * (times.disturbed > 0)
    return measure.row(
        name, float(np.median(ratios)), "ratio", bar=bar, against=against + noise,
        interval=measure.bootstrap(ratios), repeats=times.rounds,
    )  # fmt: skip


def expert_parallel() -> Job:
    """Return the job of a teacher whose experts are split over two ranks.

    Predictions assume even routing, and untrained routers are uneven.
    """
    even = {"router": "balanced", "balance_loss": 0.0}
    return distillation(teacher=EXPERTS, layout={"ep": RANKS}, routing=even)


def ranks(rounds: int) -> Iterator[measure.Row]:
    """Measure a teacher with experts on two ranks, and three students."""
    job = expert_parallel()
    times = on_ranks(RANKS, parts_in_turn, rounds)
    seconds = {name: np.array(spent) for name, spent in times.seconds.items()}
    parts = ", ".join(f"{name} {times.median(name):.3f} s" for name in times.seconds)
    yield ratio_row(
        f"students: step of an expert-parallel teacher and 3, {RANKS} ranks, over its parts alone",
        seconds["all"] / (seconds["T"] + len(NAMES) * seconds["S"]), "<= 1.05",
        f"the teacher's step and three times a student's, {parts}", times,
    )  # fmt: skip
    case = facts.Case("students", RANKS, job)
    cluster, measured, unsteady = facts.steps_around_a_probe(case, min(rounds, facts.STEPS))
    plan = plan_from_layout(job.layout, job.model, RANKS)
    middle_s = statistics.median(measured)
    predicted_s = observe_step(case.name, middle_s, job, plan, cluster).predict_s(UNCALIBRATED)
    yield measure.row(
        f"students: error of the predicted step of all parts, {RANKS} ranks",
        abs(predicted_s / middle_s - 1), "share", bar="<= 0.10",
        against=f"the step, {middle_s:.3f} s, after a probe amid the steps; predicted "
        f"{predicted_s:.3f} s; the machine's speed moved by {unsteady - 1:.0%}",
        repeats=len(measured),
    )  # fmt: skip


def parts_in_turn(world: World, rounds: int, root: int) -> measure.Times | None:
    """On each rank: time all parts together, the teacher alone and a student alone."""
    torch.set_num_threads(devices.num_cores() // world.size)
    job = expert_parallel()
    plan = plan_from_layout(job.layout, job.model, world.size)
    alone, _ = student_plan(plan, job, job.student[0])
    sides = {
        "all": Ours(job, world),
        "T": Ours(job.model_copy(update={"student": ()}), world),
        "S": Ours(alone, world),
    }
    return in_turn(world, {name: one.step for name, one in sides.items()}, rounds, root)


PARTS = {"passes": passes, "ranks": ranks}
