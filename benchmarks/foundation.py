"""Theme `foundation`: training speed against transformers, expert parallelism, checkpoints.

`rows` takes every figure of the theme; foundation.md says what bounds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
import torch.distributed as dist

from benchmarks import bench_checkpoint, measure
from benchmarks.apart import Apart
from benchmarks.training import PEER, Ours, dense_limit, olmoe
from moesaic.dist.world import World
from moesaic.testing.ranks import Ranks

SHAPES = ((4, 128), (8, 256))
FIRST_STEPS = 3
TOLERANCE = 1e-4


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure of the theme, as it comes."""
    for batch, sequence in SHAPES:
        yield from training(batch, sequence, rounds)
    yield expert_parallel(rounds)
    facts = {"commit": measure.commit(), "hardware": measure.hardware()}
    for row in bench_checkpoint.rows():
        yield measure.Row(**{**row, **facts})


def training(batch: int, sequence: int, rounds: int) -> Iterator[measure.Row]:
    """Tokens/s of one process against transformers and against the dense limit."""
    ours = Ours(olmoe(batch, sequence), World.solo())
    with closing(ours.run), closing(Apart(ours, "grouped_mm")) as theirs:
        yield from race(ours, theirs, rounds)


def race(ours: Ours, theirs: Apart, rounds: int) -> Iterator[measure.Row]:
    """Ours and theirs, which begin with the same weights, and the dense limit, in turn."""
    job = ours.run.job
    batch, sequence = job.train.batch, job.data.sequence
    shape = f"{batch} x {sequence} tokens"
    apart = max(abs(ours.step() - theirs.step()) for _ in range(FIRST_STEPS))
    yield measure.row(
        f"difference of the two losses, first {FIRST_STEPS} steps, {shape}", apart, "nat",
        bar=f"<= {TOLERANCE}", against=PEER, repeats=FIRST_STEPS,
    )  # fmt: skip
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours.step, "theirs": theirs.step, "dense": dense_limit(job),
    }  # fmt: skip
    times = measure.interleave(contenders, rounds)
    threads = f"{torch.get_num_threads()} threads"
    ratio, interval = times.ratio("theirs", "ours")
    yield measure.row(
        f"training tokens/s, {shape}", ratio, "ratio", bar=">= 1.0", interval=interval,
        against=f"{PEER}, same weights and batches, a process of its own, {threads}",
        repeats=rounds,
    )  # fmt: skip
    share, interval = times.ratio("dense", "ours")
    yield measure.row(
        f"share of the dense limit, training, {shape}", share, "ratio", bar="", interval=interval,
        against="limit: the step's matrix flops in torch.mm of 1024 x 1024 (ceiling 1.0)",
        repeats=rounds,
    )  # fmt: skip
    tokens = batch * sequence
    low, high = measure.bootstrap(times.seconds["ours"])
    yield measure.row(
        f"training tokens/s, {shape}, absolute", tokens / times.median("ours"), "tokens/s", bar="",
        against=f"nothing; {threads}", interval=(tokens / high, tokens / low), repeats=rounds,
    )  # fmt: skip


def expert_parallel(rounds: int) -> measure.Row:
    """Tokens/s of two ranks with expert parallelism against one rank, one thread each."""
    pool = Ranks()
    try:
        times, _ = pool.run(2, take_turns, rounds, os.getpid(), timeout_s=3600.0)
    finally:
        pool.close()
    ratio, interval = times.ratio("one rank", "two ranks")
    return measure.row(
        "training tokens/s, two ranks with expert parallelism, 8 x 256 tokens", ratio, "ratio",
        bar="", against="moesaic on one rank; one thread a rank (ceiling 2.0)", interval=interval,
        repeats=rounds,
    )  # fmt: skip


def take_turns(world: World, rounds: int, root: int) -> measure.Times | None:
    """On each of two ranks: rank 0 times a run of its own and one that both share."""
    shared = Ours(olmoe(8, 256, layout={"ep": 2}), world)
    again = torch.ones(1)
    if not world.leads:
        while True:
            dist.broadcast(again, 0, group=world.everyone)
            if not again:
                return None
            shared.step()
    own = Ours(olmoe(8, 256), World.solo())

    def together() -> None:
        dist.broadcast(again, 0, group=world.everyone)
        shared.step()

    contenders: dict[str, Callable[[], object]] = {"one rank": own.step, "two ranks": together}
    times = measure.interleave(contenders, rounds, root=root)
    again.zero_()
    dist.broadcast(again, 0, group=world.everyone)
    return times
