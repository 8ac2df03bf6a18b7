"""SIGKILL at any moment of a save leaves the previous checkpoint or the complete new one.

Processes are forked from one that has already imported torch, so a kill costs milliseconds. The
state is a function of the step, so checkpoints can be verified bit by bit.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moesaic.dist.checkpoint import PHASES, Checkpoint, Saver, list_committed
from moesaic.dist.state import State
from moesaic.dist.world import World
from moesaic.testing.states import (
    Division,
    blank_shards,
    make_shards,
    row_boxes,
    same_bits,
    whole_box,
)

NUM_RANDOM_KILLS = 16
FOLLOWER_PHASES = ("staged", "file_written", "files_written", "announced", "finished")
SHAPE = (64, 4096)
FIRST = 10
"""Step before the first of two saves."""
Case = tuple[int, int, str]
"""Number of ranks, the rank that dies, and its phase."""
Killed = tuple[Path, list[BaseProcess]]
"""Checkpoint directory of a case, and its rank processes."""
CASES: list[Case] = [
    *((1, 0, phase) for phase in PHASES),
    *((2, 0, phase) for phase in PHASES),
    *((2, 1, phase) for phase in FOLLOWER_PHASES),
]


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    grid = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    return {"matrix": grid * step + step, "vector": torch.full((1000,), float(step))}


def divide(size: int) -> Division:
    return {
        "matrix": [(box, (rank,)) for rank, box in enumerate(row_boxes(SHAPE, size))],
        "vector": [(whole_box((1000,)), tuple(range(size)))],
    }


def state_at(step: int, rank: int, size: int) -> State:
    return State(make_shards(tensors_at(step), divide(size), rank), {"step": step})


def save_until_killed(directory: Path, first_step: int, pipe: Connection) -> None:
    """Save without end, and send each committed step through `pipe`."""
    torch.set_num_threads(1)

    def report(name: str, **fields: Any) -> None:
        if name == "checkpoint_done":
            pipe.send(fields["step"])

    saver = Saver(directory, World.solo(), keep=2, on_event=report)
    pipe.send(0)
    step = first_step
    while True:
        saver.save(state_at(step, 0, 1), step, {}, overlap=step % 2 == 0)
        step += 1


def save_and_die(
    world_of: tuple[int, int, int, str], directory: Path, step: int, victim: int, phase: str
) -> None:
    """Save twice with room for one; the victim dies at `phase` of the second save, which has a
    short timeout."""
    rank, size, port, prefix = world_of
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    num_saves = 0

    def die(name: str) -> None:
        if rank == victim and num_saves == 2 and name == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    for num_saves, patience_s in ((1, 30.0), (2, 1.5)):
        own = dist.PrefixStore(f"{prefix}/{num_saves}", store)
        deadline = timedelta(seconds=patience_s)
        world = World(rank, size, torch.device("cpu"), 0, deadline, own)
        saver = Saver(directory, world, keep=1, phase=die)
        saver.save(state_at(step + num_saves, rank, size), step + num_saves, {})
        saver.wait()


def find_state(directory: Path) -> int:
    """Verify every committed checkpoint bit for bit, and return the newest one's step."""
    found = list_committed(directory)
    for path in found:
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        wanted = state_at(checkpoint.step, 0, 1).shards
        shards = blank_shards(wanted)
        checkpoint.fill(shards)
        assert same_bits(shards, wanted)
    return Checkpoint.open(found[0]).step if found else 0


@pytest.fixture(scope="module")
def fork_context() -> Any:
    """Return a context that forks processes from one with all imports done."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "moesaic.dist.checkpoint", "moesaic.testing.states"])
    return context


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    """Return a store that outlives the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait_for_first_save(directory: Path) -> None:
    """Wait for the first of two saves; the second may be done too and have removed it."""
    commits = [directory / f"step-{FIRST + number:08d}" / "COMMIT" for number in (1, 2)]
    end = time.monotonic() + 30
    while not any(commit.exists() for commit in commits):
        assert time.monotonic() < end, "no checkpoint came"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def killed(
    fork_context: Any, store: dist.TCPStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Killed]]:
    """Start each case once the previous one has its first checkpoint. Survivors wait for their
    timeouts at the same time."""
    begun: dict[Case, Killed] = {}
    for size, victim, phase in CASES:
        place = tmp_path_factory.mktemp("killed")
        begun[size, victim, phase] = place, [
            fork_context.Process(
                target=save_and_die,
                args=((rank, size, store.port, place.name), place, FIRST, victim, phase),
            )
            for rank in range(size)
        ]  # fmt: skip
        for process in begun[size, victim, phase][1]:
            process.start()
        wait_for_first_save(place)
    yield begun
    for _, processes in begun.values():
        for process in processes:
            process.kill()
            process.join()


def test_a_kill_at_a_random_moment_never_costs_the_previous_one(
    tmp_path: Path, fork_context: Any
) -> None:
    chance = random.Random(1)
    newest, moments, longest_s = 0, set(), 0.15
    for _ in range(NUM_RANDOM_KILLS):
        ours, theirs = fork_context.Pipe(duplex=False)
        process = fork_context.Process(
            target=save_until_killed, args=(tmp_path, newest + 1, theirs)
        )
        process.start()
        theirs.close()
        assert ours.recv() == 0
        time.sleep(chance.uniform(0.0, longest_s))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        reported = newest
        try:
            while True:
                reported = ours.recv()
        except EOFError:
            pass
        left = {path.name for path in tmp_path.iterdir()}
        moments.add(len(left) - len(list_committed(tmp_path)))
        before, newest = newest, find_state(tmp_path)
        if newest == before:
            longest_s *= 1.1  # A busy machine saves slowly.
        # A reported step is committed; a committed one may not be reported yet.
        assert reported <= newest <= reported + 1
        assert len(list_committed(tmp_path)) >= min(2, newest)
    assert newest > 0, "no save ever came through"
    assert 1 in moments, "no kill hit a save in progress: the test checks nothing"


@pytest.mark.parametrize(("size", "victim", "phase"), CASES)
def test_a_kill_at_each_phase_leaves_the_old_or_the_new_one(
    killed: dict[Case, Killed], size: int, victim: int, phase: str
) -> None:
    directory, processes = killed[size, victim, phase]
    for process in processes:
        process.join()
    assert processes[victim].exitcode == -signal.SIGKILL
    survived = PHASES.index(phase) >= PHASES.index("committed")
    if victim == 1:
        # After its announcement, the save continues without this rank.
        survived = phase in ("announced", "finished")
    assert find_state(directory) == FIRST + (2 if survived else 1)
    # The next saver continues from here and cleans up.
    saver = Saver(directory, World.solo(), keep=1)
    saver.save(state_at(FIRST + 3, 0, 1), FIRST + 3, {})
    saver.wait()
    assert find_state(directory) == FIRST + 3
    assert [path.name for path in directory.iterdir()] == [f"step-{FIRST + 3:08d}"]
