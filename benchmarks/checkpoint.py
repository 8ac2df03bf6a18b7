"""How long an asynchronous save keeps training waiting, and which flipped bits are found.

Two gloo ranks each hold 256 MiB of fp32 state, sharded over both along the first dimension. In each
round every contender saves once, in an order that turns; a save ends before the next begins. After
the call each rank multiplies matrices, as a forward and backward pass would, and then waits until
the state may change. Waiting is the time in the call and in that wait. A save's figure is that of
the slower rank.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import measure
from benchmarks.on_ranks import on_ranks
from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import Checkpoint, Saver
from moesaic.dist.state import PARAMETER, State, TensorShard
from moesaic.dist.world import World

NUM_RANKS = 2
MIB, ROUNDS = 256, 11
NUM_TENSORS = 16
NUM_FLIPS = 300
NUM_PRODUCTS = 60
FOREIGN_SHARE = 0.2
"""More than measure's: kernel threads that write pages back count as others."""
DCP = f"torch.distributed.checkpoint {torch.__version__}"
Waits = tuple[Callable[[], Any], Callable[[], Any]]
"""Wait until the state may change; wait until the save is over."""


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure saves and count flipped bits that are found."""
    with tempfile.TemporaryDirectory() as place:
        seconds = on_ranks(NUM_RANKS, timed, Path(place), MIB, min(rounds, ROUNDS))
        spread = _run_flips(Path(place))
    yield from _time_rows(measure.Times(seconds))
    yield from _flip_rows(spread)


def timed(
    world: World, place: Path, mib: int, rounds: int, root: int
) -> dict[str, list[float]] | None:
    """On each rank: let every contender save once a round; return its seconds on rank 0."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    columns = 1024
    height = mib * 2**20 // 4 // columns // NUM_TENSORS
    local = {f"w{i}": torch.randn(height, columns) for i in range(NUM_TENSORS)}
    contenders = _contenders(world, local, place)
    times: dict[str, list[float]] = defaultdict(list)
    names = list(contenders)
    number, left = 0, rounds // 2
    while len(times[names[0]]) < rounds:
        watch = measure.Watch(root)
        one: dict[str, float] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            target = place / f"{name.replace(' ', '-')}-{number}"
            one[name], one[f"step, {name}"] = _time(world, partial(contenders[name], target))
            if world.is_rank_zero:
                shutil.rmtree(target, ignore_errors=True)
                os.sync()
            world.barrier()
        # The first round warms up.
        again = torch.tensor(number == 0 or (left > 0 and watch.foreign_share() > FOREIGN_SHARE))
        dist.broadcast(again, 0, group=world.group)
        if again.item():
            left -= 1
        else:
            for key, seconds in one.items():
                times[key].append(seconds)
        number += 1
    return times if world.is_rank_zero else None


def _time(world: World, save: Callable[[], Waits]) -> tuple[float, float]:
    """Return seconds that `save` keeps the slower rank waiting, and seconds of save and step."""
    matrix = torch.randn(512, 512)
    world.barrier()
    began = time.perf_counter()
    settle, finish = save()
    waited_s = time.perf_counter() - began
    for _ in range(NUM_PRODUCTS):
        torch.mm(matrix, matrix)
    asked = time.perf_counter()
    settle()
    ended = time.perf_counter()
    figures = torch.tensor([waited_s + ended - asked, ended - began], dtype=torch.float64)
    finish()
    dist.all_reduce(figures, dist.ReduceOp.MAX, group=world.group)
    return figures[0].item(), figures[1].item()


def _contenders(
    world: World, local: dict[str, torch.Tensor], place: Path
) -> dict[str, Callable[[Path], Waits]]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    spread = {name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in local.items()}
    pieces = [
        TensorShard.of_tensor(
            PARAMETER, name, (NUM_RANKS * len(t), t.shape[1]), (world.rank * len(t), 0), t,
            (world.rank,),
        )
        for name, t in local.items()
    ]  # fmt: skip
    # One saver for the whole run, as in training; its directory is emptied after each save.
    saver = Saver(place / "moesaic", world, keep=1)
    kept = DefaultStager(StagingOptions(False, False, False, False))

    def ours(target: Path) -> Waits:
        saver.save(State(pieces), int(target.name.rsplit("-", 1)[1]), {}, True)
        return saver.wait_for_copy, saver.wait

    def theirs(target: Path, **options: Any) -> Waits:
        future: Any = dcp.async_save(spread, checkpoint_id=target, **options)
        return _nothing, future.result

    return {
        "moesaic": ours,
        "dcp.async_save": theirs,
        "dcp.async_save kept stager": partial(theirs, async_stager=kept),
        "no save": lambda target: (_nothing, _nothing),
    }


def _nothing() -> None:
    """Wait for nothing."""


def _time_rows(times: measure.Times) -> Iterator[measure.Row]:
    peers = {
        "dcp.async_save": f"{DCP}, async_save, thread",
        "dcp.async_save kept stager": f"{DCP}, async_save, one DefaultStager kept between saves",
    }
    each = [
        measure.compare(
            f"time an asynchronous save keeps training waiting, moesaic / {peer}", times,
            "moesaic", peer, against=against,
        )
        for peer, against in peers.items()
    ]  # fmt: skip
    yield measure.worst(
        "time an asynchronous save keeps training waiting, against dcp.async_save, worst of its "
        "two stagers", each, "<= 0.25",
    )  # fmt: skip
    bare = np.asarray(times.seconds["step, no save"])
    added = [np.asarray(times.seconds[f"step, {name}"]) - bare for name in
             ("moesaic", "dcp.async_save")]  # fmt: skip
    ratios = added[0] / added[1]
    yield measure.row(
        "time an asynchronous save adds to the step beside it, waiting included, "
        "moesaic / dcp.async_save", float(np.median(ratios)), "ratio", bar="<= 1.0",
        against=peers["dcp.async_save"], interval=measure.bootstrap(ratios), repeats=times.rounds,
    )  # fmt: skip
    yield from each


# Flipped bits.


def _run_flips(place: Path) -> dict[str, dict[str, int]]:
    """Count flips found and values silently wrong, by way to draw a bit and by contender."""
    context = mp.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    # In a process with a memory limit: DCP's metadata is a pickle, and a flipped pickle may
    # allocate anything.
    process = context.Process(target=_flip, args=(place, send))
    process.start()
    send.close()
    result: dict[str, dict[str, int]] = receive.recv()
    process.join()
    return result


def _flip(place: Path, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Flipped pickles make the interpreter complain.
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    values = {f"w{i}": torch.randn(32, 1024) for i in range(4)}
    state = {
        name: TensorShard.of_tensor(PARAMETER, name, (32, 1024), (0, 0), t, (0,))
        for name, t in values.items()
    }
    saver = Saver(place / "flips", World.solo(), keep=1)
    saver.save(State(list(state.values())), 1, {})
    saver.wait()
    assert saver.newest is not None
    dcp.save(dict(values), checkpoint_id=place / "flips-dcp", no_dist=True)
    contenders = {
        "moesaic": (saver.newest, _load_ours, (StoreError,)),
        "dcp": (place / "flips-dcp", _load_theirs, (Exception, CheckpointException)),
    }
    result: dict[str, dict[str, int]] = {}
    for draw in ("byte", "file"):
        for name, (path, load, errors) in contenders.items():
            result[f"{draw} {name}"] = _count(path, draw, values, load, errors)
    pipe.send(result)


def _count(
    path: Path,
    draw: str,
    values: dict[str, torch.Tensor],
    load: Callable[[Path, dict[str, torch.Tensor]], None],
    errors: tuple[type[BaseException], ...],
) -> dict[str, int]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = [file.stat().st_size for file in files]
    chance = random.Random(7)
    counts = {"found": 0, "wrong": 0, "harmless": 0}
    for _ in range(NUM_FLIPS):
        file = chance.choices(files, sizes if draw == "byte" else None)[0]
        intact = file.read_bytes()
        bit = chance.randrange(8 * len(intact))
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        try:
            load(path, loaded)
        except errors:
            counts["found"] += 1
        else:
            same = all(torch.equal(loaded[name], tensor) for name, tensor in values.items())
            counts["harmless" if same else "wrong"] += 1
        file.write_bytes(intact)
    return counts


def _load_ours(path: Path, into: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    checkpoint.fill(
        [
            TensorShard.of_tensor(PARAMETER, n, tuple(t.shape), (0, 0), t, (0,))
            for n, t in into.items()
        ]
    )


def _load_theirs(path: Path, into: dict[str, torch.Tensor]) -> None:
    dcp.load(dict(into), checkpoint_id=path, no_dist=True)


def _flip_rows(spread: dict[str, dict[str, int]]) -> Iterator[measure.Row]:
    each = []
    for draw, words in (("byte", "drawn over all bytes"), ("file", "file drawn first")):
        ours, theirs = spread[f"{draw} moesaic"], spread[f"{draw} dcp"]
        against = (
            f"{DCP}: {theirs['found']} found, {theirs['wrong']} loaded as wrong values, "
            f"{theirs['harmless']} without effect"
        )
        each.append(
            measure.row(
                f"single-bit flips found of {NUM_FLIPS}, {words}", ours["found"], "flips", bar="",
                against=against, repeats=NUM_FLIPS,
            )
        )  # fmt: skip
    title = f"single-bit flips found of {NUM_FLIPS}, worst of two ways to draw"
    yield measure.worst(title, each, f"== {NUM_FLIPS}")
    yield from each
