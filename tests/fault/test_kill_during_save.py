"""SIGKILL at any moment of a save: the checkpoint before it stays, whole, or the new one stands.

Processes are forked from one that has imported torch already, so that each kill costs
milliseconds. A step's state is a function of the step, so what is found afterwards can be compared
bit by bit.
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

from moesaic.dist.checkpoint import PHASES, Checkpoint, Saver, committed
from moesaic.dist.state import State
from moesaic.dist.world import World
from moesaic.testing.states import Division, blank, cut, rows, same_bits, whole

NUM_RANDOM_KILLS = 40
FOLLOWER_PHASES = ("staged", "file_written", "share_written", "announced", "told")
SHAPE = (64, 4096)
FIRST = 10
"""The step before the first of two saves."""
Case = tuple[int, int, str]
"""Ranks, the one that dies, and when."""
Killed = tuple[Path, list[BaseProcess]]
"""Where the checkpoints of a case are, and its ranks."""
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
        "matrix": [(box, (rank,)) for rank, box in enumerate(rows(SHAPE, size))],
        "vector": [(whole((1000,)), tuple(range(size)))],
    }


def state_at(step: int, rank: int, size: int) -> State:
    return State(cut(tensors_at(step), divide(size), rank), {"step": step})


def save_until_killed(directory: Path, first_step: int, pipe: Connection) -> None:
    """Saves without end; tells each step that was committed."""
    torch.set_num_threads(1)

    def tell(name: str, **fields: Any) -> None:
        if name == "checkpoint_done":
            pipe.send(fields["step"])

    saver = Saver(directory, World.solo(), keep=2, on_event=tell)
    pipe.send(0)
    step = first_step
    while True:
        saver.save(state_at(step, 0, 1), step, {}, overlap=step % 2 == 0)
        step += 1


def save_and_die(
    world_of: tuple[int, int, int, str], directory: Path, step: int, victim: int, phase: str
) -> None:
    """Two saves with room for one; the victim dies at `phase` of the second, for which nobody waits
    long."""
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
    """Every committed checkpoint holds its step's state, bit for bit; the newest one's step."""
    found = committed(directory)
    for path in found:
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        wanted = state_at(checkpoint.step, 0, 1).pieces
        pieces = blank(wanted)
        checkpoint.fill(pieces)
        assert same_bits(pieces, wanted)
    return Checkpoint.open(found[0]).step if found else 0


@pytest.fixture(scope="module")
def warm() -> Any:
    """Starts processes by forking one that has all imports behind it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "moesaic.dist.checkpoint", "moesaic.testing.states"])
    return context


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    """A store that outlives the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def await_first(directory: Path) -> None:
    """The first of two saves is done; the second may be, and have removed it."""
    commits = [directory / f"step-{FIRST + number:08d}" / "COMMIT" for number in (1, 2)]
    end = time.monotonic() + 30
    while not any(commit.exists() for commit in commits):
        assert time.monotonic() < end, "no checkpoint came"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def killed(
    warm: Any, store: dist.TCPStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Killed]]:
    """All cases, each begun when the one before has its first checkpoint: whoever survives waits
    in vain for seconds, and they wait at the same time."""
    begun: dict[Case, Killed] = {}
    for size, victim, phase in CASES:
        place = tmp_path_factory.mktemp("killed")
        begun[size, victim, phase] = place, [
            warm.Process(
                target=save_and_die,
                args=((rank, size, store.port, place.name), place, FIRST, victim, phase),
            )
            for rank in range(size)
        ]  # fmt: skip
        for process in begun[size, victim, phase][1]:
            process.start()
        await_first(place)
    yield begun
    for _, processes in begun.values():
        for process in processes:
            process.kill()
            process.join()


def test_a_kill_at_a_random_moment_never_costs_the_previous_one(tmp_path: Path, warm: Any) -> None:
    chance = random.Random(1)
    newest, moments = 0, set()
    for _ in range(NUM_RANDOM_KILLS):
        ours, theirs = warm.Pipe(duplex=False)
        process = warm.Process(target=save_until_killed, args=(tmp_path, newest + 1, theirs))
        process.start()
        theirs.close()
        assert ours.recv() == 0
        time.sleep(chance.uniform(0.0, 0.15))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        told = newest
        try:
            while True:
                told = ours.recv()
        except EOFError:
            pass
        left = {path.name for path in tmp_path.iterdir()}
        moments.add(len(left) - len(committed(tmp_path)))
        newest = find_state(tmp_path)
        # Told is committed; what was committed may not have been told yet.
        assert told <= newest <= told + 1
        assert len(committed(tmp_path)) >= min(2, newest)
    assert newest > 0, "no save ever came through"
    assert 1 in moments, "no kill met a save under way: the test has lost its edge"


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
        # Once it has announced, the save goes on without it.
        survived = phase in ("announced", "told")
    assert find_state(directory) == FIRST + (2 if survived else 1)
    # The next saver goes on from here, and cleans up.
    saver = Saver(directory, World.solo(), keep=1)
    saver.save(state_at(FIRST + 3, 0, 1), FIRST + 3, {})
    saver.wait()
    assert find_state(directory) == FIRST + 3
    assert [path.name for path in directory.iterdir()] == [f"step-{FIRST + 3:08d}"]
