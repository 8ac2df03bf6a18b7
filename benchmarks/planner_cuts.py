"""Part `cuts` of the theme `planner`: stage boundaries of a model with a wide vocabulary.

Its head takes as long as six layers. An even cut of the layers between two pipeline ranks leaves
the second one with most of the work. The search cuts by predicted seconds; every cut is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from benchmarks import measure
from benchmarks.facts import PROBE_S, probed
from benchmarks.planner_choice import DENSE, NARROW, Shape, job_of, noise
from benchmarks.planner_layouts import (
    RANKS,
    Layout,
    Timed,
    best_of,
    find,
    index_of,
    layout_of,
    split,
    timed,
)
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, block_names, plan_from_layout, stage_blocks
from moesaic.facts.workload import workload
from moesaic.testing.ranks import RankPool

ROUNDS = 12
CEILING = 1.3
"""Speed-up of perfect balance over the even cut that the job must allow."""
DEEP: Shape = (
    {**NARROW, **DENSE, "layers": 8, "vocab": 20480, "ffn": 704}, 8, 96, 8,
)  # fmt: skip
BARS = {"even": ">= 1.15", "best": ">= 0.95"}


def pipeline_job(shape: Shape = DEEP) -> Job:
    """Return the job with two pipeline ranks, whose stages the search cuts."""
    job = job_of(shape)
    layout = type(job.layout)(**job.layout.model_dump(exclude_unset=True), pp=RANKS)
    return job.model_copy(update={"layout": layout})


def every_cut(job: Job, plan: Plan) -> list[Layout]:
    """Return the layouts of every stage boundary, with a block or more on each side."""
    names = block_names(job.model)
    return [
        layout_of(
            job, plan.model_copy(update={"stages": [names[:at], names[at:]]}), f"{at} blocks first"
        )
        for at in range(1, len(names))
    ]


def ceiling(job: Job) -> float:
    """Return the speed-up of perfectly balanced stages over even ones by operations, in 1F1B."""
    alone = plan_from_layout(type(job.layout)(), job.model, 1)
    plan = plan_from_layout(job.layout, job.model, RANKS)
    stages = [
        sum(
            block.forward.flops + block.backward.flops
            for block in workload(job, alone, 0)
            if block.spec.model_block in names
        )
        for names in stage_blocks(plan, job.model)
    ]
    waits, total = job.train.micro_batches - 1, sum(stages)
    return (waits * max(stages) + total) / (waits * total / RANKS + total)


def cuts(rounds: int) -> Iterator[measure.Row]:
    """Measure the plan's cut against the even one, and against the best of all cuts."""
    job = pipeline_job()
    most = ceiling(job)
    assert most >= CEILING, most
    cluster = probed(PROBE_S)
    plan = find(job, cluster)[0].plan
    among = every_cut(job, plan)
    with closing(RankPool()) as pool:
        own = timed(pool, among, min(rounds, ROUNDS))
    yield from cut_rows(job, among, index_of(plan, among), own, most)


def cut_rows(
    job: Job, among: Sequence[Layout], chosen: int, own: Timed, most: float
) -> Iterator[measure.Row]:
    """Yield the speed of the chosen cut over the even one, and over the best one."""
    even_stages = stage_blocks(plan_from_layout(job.layout, job.model, RANKS), job.model)
    even = [one.plan.stages for one in among].index(even_stages)
    picked, judged = split(own.seconds)
    best = best_of(picked)
    middle = np.median(own.seconds, axis=1)
    against = {
        "even": f"{among[even].name}, {middle[even]:.3f} s; chosen: {among[chosen].name}, "
        f"{middle[chosen]:.3f} s; ceiling by operations {most:.2f}; {noise(own)}",
        "best": f"{among[best].name}, chosen on half of the rounds and judged on the others, of "
        f"{len(among)} cuts",
    }
    series = {
        "even": own.seconds[even] / own.seconds[chosen], "best": judged[best] / judged[chosen],
    }  # fmt: skip
    words = {"even": "the even cut", "best": "the best cut measured"}
    yield from measure.joint(
        "speed of the plan's stage boundaries, 2 pipeline ranks, a wide vocabulary",
        [
            measure.row(
                f"stage boundaries: speed of the plan's cut over {words[name]}",
                float(np.median(ratios)), "ratio", bar=BARS[name], against=against[name],
                interval=measure.bootstrap(ratios), repeats=len(ratios),
            )
            for name, ratios in series.items()
        ],
    )  # fmt: skip


PARTS = {"cuts": cuts}
