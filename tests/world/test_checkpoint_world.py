"""Checkpoints by real ranks: saved by some, loaded by others, while collectives go on."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import Checkpoint, Saver, list_committed
from moesaic.dist.state import FIRST_MOMENT, PARAMETER, State
from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool
from moesaic.testing.states import (
    Division,
    blank_shards,
    make_shards,
    row_boxes,
    same_bits,
    whole_box,
)


def tensors() -> dict[str, torch.Tensor]:
    """The same values in every process."""
    stream = torch.Generator().manual_seed(1)
    shapes = {"uneven": (5, 6), "long": (1000, 8), "norm": (33,), "few": (2, 3)}
    return {name: torch.randn(shape, generator=stream) for name, shape in shapes.items()}


def divide(size: int) -> Division:
    """Rows over all ranks (some have none), a matrix over pairs, and what all hold."""
    everyone = tuple(range(size))
    pairs = size // 2 or 1
    return {
        "uneven": [(box, (rank,)) for rank, box in enumerate(row_boxes((5, 6), size))],
        "few": [(box, (rank,)) for rank, box in enumerate(row_boxes((2, 3), size))],
        "long": [
            (box, everyone[part::pairs]) for part, box in enumerate(row_boxes((1000, 8), pairs))
        ],
        "norm": [(whole_box((33,)), everyone)],
    }


def state_of(world: World) -> State:
    moments = {name: -tensor for name, tensor in tensors().items()}
    pieces = make_shards(tensors(), divide(world.size), world.rank, PARAMETER)
    pieces += make_shards(moments, divide(world.size), world.rank, FIRST_MOMENT)
    return State(pieces, {"step": world.size})


def save(world: World, directory: Path, num_saves: int) -> str:
    """Saves with all_reduces of the training in between; their sums must not be disturbed."""
    state = state_of(world)
    saver = Saver(directory, world, keep=2)
    saver.prepare(state)
    for step in range(1, num_saves + 1):
        saver.save(state, step, {"ranks": world.size})
        for number in range(20):
            total = torch.tensor(float(world.rank + number))
            if world.group is not None:
                dist.all_reduce(total, group=world.group)
            assert total.item() == sum(rank + number for rank in range(world.size))
    saver.wait()
    assert saver.newest is not None
    return saver.newest.name


def load(world: World, path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    checkpoint.verify_shared(world)
    wanted = state_of(world).shards
    found = blank_shards(wanted)
    checkpoint.fill(found)
    assert same_bits(found, wanted)
    assert checkpoint.facts == {"ranks": checkpoint.counters["step"]}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_some_ranks_save_any_others_load(ranks: RankPool, tmp_path: Path, size: int) -> None:
    assert ranks.run(size, save, tmp_path, 3) == ["step-00000003"] * size
    assert [path.name for path in list_committed(tmp_path)] == ["step-00000003", "step-00000002"]
    for other in (1, 2, 4):
        ranks.run(other, load, tmp_path / "step-00000003")


def verify(world: World, path: Path) -> str:
    try:
        Checkpoint.open(path).verify_shared(world)
    except StoreError as error:
        return str(error)
    return ""


def test_all_ranks_raise_the_same_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, save, tmp_path, 2)
    path = tmp_path / "step-00000002"
    assert ranks.run(4, verify, path) == [""] * 4
    data = bytearray((path / "rank-3.safetensors").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "rank-3.safetensors").write_bytes(data)
    (path / "rank-1.safetensors").unlink()
    for size in (1, 2, 4):
        errors = ranks.run(size, verify, path)
        assert len(set(errors)) == 1
        assert "'rank-3.safetensors' is not what was written" in errors[0]
        assert "'rank-1.safetensors' is missing" in errors[0]
        assert f"one is '{tmp_path}/step-00000001'; resume from that" in errors[0]


def fail_then_save(world: World, directory: Path, late: bool) -> tuple[str, str]:
    """Rank 1 fails in the first of two saves; rank 3 writes on until all of it is cleaned away."""
    broken, late = world.rank == 1, late and world.rank == 3

    def phase(name: str) -> None:
        nonlocal broken, late
        if broken and name == "file_written":
            broken = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if late and name == "file_written":
            late = False
            end = time.monotonic() + 20
            while (directory / "step-00000001").exists() and time.monotonic() < end:
                time.sleep(0.01)

    saver = Saver(directory, world, keep=2, phase=phase)
    saver.save(state_of(world), 1, {})
    try:
        saver.save(state_of(world), 2, {})
    except StoreError as error:
        message = str(error)
    else:
        raise AssertionError("the failed save went unnoticed")
    saver.save(state_of(world), 3, {})
    saver.wait()
    assert saver.newest is not None
    return message, saver.newest.name


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_on_one_rank_is_everybodys_and_passes(
    late: bool, ranks: RankPool, tmp_path: Path
) -> None:
    for message, newest in ranks.run(4, fail_then_save, tmp_path, late):
        assert "step 1" in message
        assert "Input/output error" in message
        assert newest == "step-00000003"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def save_without_the_last(world: World, directory: Path) -> str:
    hasty = replace(world, timeout=timedelta(seconds=1))
    saver = Saver(directory, hasty, keep=2)
    if world.rank == world.size - 1:
        return ""
    saver.save(state_of(world), 1, {})
    try:
        saver.wait()
    except StoreError as error:
        return str(error)
    return "committed"


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_deadline(
    ranks: RankPool, tmp_path: Path
) -> None:
    errors = ranks.run(3, save_without_the_last, tmp_path)
    assert "rank 2 did not finish its share within 1 s" in errors[0]
    assert errors[1] == errors[0]
    assert list(tmp_path.glob("*/*")) == []
