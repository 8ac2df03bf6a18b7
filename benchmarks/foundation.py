"""Theme `foundation`: training speed against transformers, expert parallelism, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

from benchmarks import checkpoint, measure, own_loop
from benchmarks.on_ranks import in_turn, on_ranks
from benchmarks.race import TOLERANCE, Apart, race
from benchmarks.training import Ours, olmoe
from moesaic.dist.world import World

SHAPES = ((4, 128), (8, 256))
FIRST_STEPS = 3


def training(rounds: int) -> Iterator[measure.Row]:
    """Race one process against transformers; claims are the worse of two batches."""
    losses, speeds = list[measure.Row](), list[measure.Row]()
    for batch, sequence in SHAPES:
        ours = Ours(olmoe(batch, sequence), World.solo())
        with closing(ours.run), closing(Apart(ours, "grouped_mm")) as theirs:
            loss, speed = race(ours, {"grouped_mm": theirs}, rounds, same=FIRST_STEPS)
        losses.append(loss)
        speeds.append(speed)
    title = f"difference of the losses, first {FIRST_STEPS} steps, worst of {len(SHAPES)} batches"
    yield measure.worst(title, losses, f"<= {TOLERANCE}")
    title = f"training tokens/s against transformers, worst of {len(SHAPES)} batches"
    yield from measure.claim(title, ">= 1.0", speeds)


def two_ranks(rounds: int) -> Iterator[measure.Row]:
    """Measure two ranks with expert parallelism against one rank, one thread each."""
    times = on_ranks(2, timed, rounds)
    yield measure.compare(
        "training tokens/s, two ranks with expert parallelism, 8 x 256 tokens", times, "one rank",
        "two ranks", against="moesaic on one rank; one thread a rank (ceiling 2.0)",
    )  # fmt: skip


def timed(world: World, rounds: int, root: int) -> measure.Times | None:
    """On each of two ranks: time a run of rank 0 alone and one that both share, in turn."""
    shared = Ours(olmoe(8, 256, layout={"ep": 2}), world)
    calls: dict[str, Callable[[], object]] = {"one rank": lambda: None, "two ranks": shared.step}
    if world.is_rank_zero:
        calls["one rank"] = Ours(olmoe(8, 256), World.solo()).step
    return in_turn(world, calls, rounds, root)


PARTS = {
    "training": training, "two-ranks": two_ranks, "own-loop": own_loop.rows,
    "checkpoint": checkpoint.rows,
}  # fmt: skip
