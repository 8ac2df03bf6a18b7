"""Checkpoint saving: files, their order on disk, events and errors."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import Checkpoint, Saver, list_committed, newest_intact
from moesaic.dist.checkpoint.manifest import DTYPES
from moesaic.dist.checkpoint.staging import Staging
from moesaic.dist.state import FIRST_MOMENT, PARAMETER, State, TensorShard
from moesaic.dist.world import World
from moesaic.testing.states import (
    Box,
    Division,
    blank_shards,
    live_values,
    make_shards,
    row_boxes,
    same_bits,
    whole_box,
    whole_shard,
    worlds,
)


def committed(directory: Path) -> list[str]:
    return [path.name for path in list_committed(directory)]


def solo_state(value: float = 1.0) -> State:
    values = torch.full((4, 3), value)
    shards = [whole_shard("a", values), whole_shard("a", -values, FIRST_MOMENT)]
    return State(shards, {"step": int(value), "samples": 8})


def save_solo(directory: Path, *steps: int, keep: int = 3, **options: Any) -> Saver:
    """Save the states of `steps` on one rank; return the saver."""
    saver = Saver(directory, World.solo(), keep, **options)
    for step in steps:
        saver.save(solo_state(step), step, {})
    saver.wait()
    return saver


def save_all(
    directory: Path, tensors: dict[str, torch.Tensor], division: Division, size: int, **options: Any
) -> Checkpoint:
    """Save on `size` ranks of one process; return the checkpoint."""
    ranks = worlds(size)
    savers = [Saver(directory, world, keep=2, **options) for world in ranks]
    for saver, world in zip(savers, ranks, strict=True):
        saver.save(
            State(make_shards(tensors, division, world.rank), {"step": 1}), 1, {"size": size}
        )
    for saver in savers:
        saver.wait()
    newest = {saver.newest for saver in savers}
    assert len(newest) == 1
    return Checkpoint.open(newest.pop() or directory)


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[tuple[Box, Any]]:
    """Draw a grid of boxes over `shape`, some of them empty, each owned by any ranks."""
    edges = []
    for extent in shape:
        inner = draw(st.lists(st.integers(0, extent), max_size=3))
        edges.append([0, *sorted(inner), extent])
    grid = itertools.product(*(list(itertools.pairwise(line)) for line in edges))
    owners = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda some: tuple(sorted(some)))
    return [
        ((tuple(low for low, _ in box), tuple(high - low for low, high in box)), draw(owners))
        for box in grid
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sharding_loads_into_any_other(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3), "shape"))
    before, after = data.draw(st.integers(1, 3), "before"), data.draw(st.integers(1, 3), "after")
    tensors = {"t": torch.randn(shape)}
    saved = {"t": data.draw(divisions(shape, before), "saved")}
    loaded = {"t": data.draw(divisions(shape, after), "loaded")}
    checkpoint = save_all(tmp_path_factory.mktemp("any"), tensors, saved, before)
    for rank in range(after):
        expected = make_shards(tensors, loaded, rank)
        found = blank_shards(expected)
        checkpoint.fill(found)
        assert same_bits(found, expected)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_dtype_shape_and_stride_is_restored(tmp_path: Path, asynchronous: bool) -> None:
    noise = torch.randint(0, 256, (1920,), dtype=torch.uint8)
    tensors = {}
    for dtype in DTYPES.values():
        bits = noise % 2 if dtype == torch.bool else noise
        tensors[f"dtype.{dtype}"] = bits.view(dtype).reshape(-1, 4)
    tensors["scalar"], tensors["empty"] = torch.tensor(3.5), torch.empty(0, 7)
    division = {name: [(whole_box(tensor.shape), (0,))] for name, tensor in tensors.items()}
    shards = make_shards(tensors, division, 0)
    arena = torch.randn(6, 40)
    shards += [whole_shard("strided", arena[:, 3:11]), whole_shard("transposed", arena.t())]
    saver = Saver(tmp_path, World.solo(), keep=1, asynchronous=asynchronous)
    saver.save(State(shards, {"step": 7, "tokens": 9}), 7, {"job": {"seed": 1}})
    saver.wait()
    checkpoint = Checkpoint.open(list_committed(tmp_path)[0])
    found = blank_shards(shards)
    checkpoint.fill(found)
    assert same_bits(found, shards)
    assert (checkpoint.step, checkpoint.counters) == (7, {"step": 7, "tokens": 9})
    assert checkpoint.facts == {"job": {"seed": 1}}
    assert checkpoint.tensors["parameter/empty"].shape == (0, 7)


def test_replicated_shards_are_written_once_and_balanced(tmp_path: Path) -> None:
    sizes = [50, 40, 30, 20, 10, 10, 10, 10]
    tensors = {f"t{i}": torch.randn(10 * size) for i, size in enumerate(sizes)}
    division = {name: [(whole_box(tensor.shape), (0, 1, 2))] for name, tensor in tensors.items()}
    checkpoint = save_all(tmp_path, tensors, division, 3)
    assert all(len(record.shards) == 1 for record in checkpoint.tensors.values())
    loads = dict.fromkeys(range(3), 0)
    for name, record in checkpoint.tensors.items():
        rank = int(record.shards[0].file.split("-")[1].split(".")[0])
        loads[rank] += tensors[name.removeprefix("parameter/")].nbytes
    assert sorted(loads.values()) == [2400, 2400, 2400]


def test_files_are_split_and_readable_by_safetensors(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100) for i in range(7)}
    division = {name: [(whole_box(tensor.shape), (0,))] for name, tensor in tensors.items()}
    checkpoint = save_all(tmp_path, tensors, division, 1, file_bytes=1000)
    files = sorted(path.name for path in checkpoint.path.glob("*.safetensors"))
    assert files == ["rank-0-1.safetensors", "rank-0-2.safetensors", "rank-0-3.safetensors",
                     "rank-0.safetensors"]  # fmt: skip
    for name, record in checkpoint.tensors.items():
        shard = record.shards[0]
        with safe_open(checkpoint.path / shard.file, "pt") as file:
            read = file.get_tensor(shard.entry)
        assert torch.equal(read, tensors[name.removeprefix("parameter/")])


def test_newest_commits_are_kept_after_rollback(tmp_path: Path) -> None:
    save_solo(tmp_path, 1, 2, 3, 4)
    assert committed(tmp_path) == ["step-00000004", "step-00000003", "step-00000002"]
    # A run resumed from step 2 repeats step 3, and must not overwrite the older step 3.
    saver = save_solo(tmp_path)
    saver.save(solo_state(30), 3, {})
    saver.wait()
    assert committed(tmp_path) == ["step-00000003-2", "step-00000004", "step-00000003"]
    assert saver.newest == tmp_path / "step-00000003-2"
    newest = newest_intact(tmp_path)
    assert newest is not None
    assert newest.counters["step"] == 30


@pytest.mark.parametrize("overlap", [False, True])
def test_save_has_the_state_at_its_call(tmp_path: Path, overlap: bool) -> None:
    go_on = threading.Event()

    def phase(name: str) -> None:
        if name == "placed":
            assert go_on.wait(20)

    saver = Saver(tmp_path, World.solo(), keep=1, phase=phase)
    state = solo_state(5)
    saver.save(state, 5, {}, overlap)
    expected = [live_values(shard).clone() for shard in state.shards]
    saver.wait_for_copy()
    state.counters["step"] = 99
    for shard in state.shards:
        live_values(shard).zero_()
    go_on.set()
    saver.wait()
    checkpoint = Checkpoint.open(tmp_path / "step-00000005")
    checkpoint.fill(state.shards)
    assert all(
        torch.equal(live_values(shard), values)
        for shard, values in zip(state.shards, expected, strict=True)
    )
    assert checkpoint.counters["step"] == 5


def slow_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay copies until the returned event is set."""
    go_on, real = threading.Event(), Staging.copy

    def copy(self: Staging, shards: list[TensorShard]) -> None:
        assert go_on.wait(20)
        real(self, shards)

    monkeypatch.setattr(Staging, "copy", copy)
    return go_on


def test_wait_for_copy_does_not_wait_for_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write_on = slow_copy(monkeypatch), threading.Event()

    def phase(name: str) -> None:
        if name == "placed":
            assert write_on.wait(20)

    events: dict[str, Any] = {}
    saver = Saver(
        tmp_path, World.solo(), 1, phase=phase,
        on_event=lambda name, **fields: events.update({name: fields}),
    )  # fmt: skip
    assert saver.wait_for_copy() == 0
    saver.save(solo_state(1), 1, {}, overlap=True)
    waiting = threading.Thread(target=saver.wait_for_copy)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(20)
    assert not waiting.is_alive()
    assert list_committed(tmp_path) == []
    write_on.set()
    saver.wait()
    assert saver.wait_for_copy() == 0
    assert events["checkpoint_done"]["blocking_s"] > events["checkpoint"]["blocking_s"] + 0.1
    Checkpoint.open(tmp_path / "step-00000001").verify()


def test_state_changed_during_the_copy_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = slow_copy(monkeypatch)
    saver = Saver(tmp_path, World.solo(), 1)
    state = solo_state(1)
    saver.save(state, 1, {}, overlap=True)
    live_values(state.shards[1]).add_(1)
    go_on.set()
    with pytest.raises(AssertionError, match=r"first_moment/a was changed .* wait_for_copy\(\)"):
        saver.wait()
    assert list_committed(tmp_path) == []
    saver.wait_for_copy()
    saver.save(state, 2, {}, overlap=True)
    saver.wait()
    assert committed(tmp_path) == ["step-00000002"]


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    go_on, steps = threading.Event(), []

    def phase(name: str) -> None:
        if name == "placed":
            assert go_on.wait(20)
        if name == "staged":
            steps.append(len(list_committed(tmp_path)))

    saver = Saver(tmp_path, World.solo(), keep=5, phase=phase)
    saver.save(solo_state(1), 1, {})
    second = threading.Thread(target=saver.save, args=(solo_state(2), 2, {}))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert steps == [0]
    go_on.set()
    second.join(20)
    saver.wait()
    assert steps == [0, 1]


def test_later_saves_reuse_the_buffer(tmp_path: Path) -> None:
    saver = Saver(tmp_path, World.solo(), keep=1)
    saver.prepare(solo_state())
    addresses = set()
    for step in (1, 2, 3):
        saver.save(solo_state(step), step, {})
        addresses.add(saver._staging._buffer.data_ptr())
    # Another layout that fits in the same buffer.
    smaller = State(solo_state().shards[:1], {"step": 4})
    saver.save(smaller, 4, {})
    addresses.add(saver._staging._buffer.data_ptr())
    saver.wait()
    assert len(addresses) == 1
    assert list(Checkpoint.open(tmp_path / "step-00000004").tensors) == ["parameter/a"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_events_come_in_order(tmp_path: Path, asynchronous: bool) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    saver = save_solo(
        tmp_path,
        asynchronous=asynchronous,
        on_event=lambda name, **fields: events.append((name, fields)),
    )
    blocking_s = saver.save(solo_state(3), 3, {})
    saver.wait()
    begun = ["checkpoint"] if asynchronous else []
    assert [name for name, _ in events] == [*begun, "checkpoint_done"]
    for _, fields in events:
        assert (fields["step"], fields["path"]) == (3, str(tmp_path / "step-00000003"))
        assert 0 < fields["blocking_s"] <= blocking_s
    done = events[-1][1]
    assert done["bytes"] == Checkpoint.open(tmp_path / "step-00000003").num_bytes
    assert done["seconds"] >= done["blocking_s"]


def test_commit_record_is_renamed_after_all_fsyncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        synced.append(f"rename {Path(target).name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save_solo(tmp_path, 1)
    rename = synced.index("rename COMMIT")
    before, after = synced[:rename], synced[rename + 1 :]
    files = {"rank-0.safetensors", "manifest.json", "COMMIT.partial"}
    assert files <= set(before)
    last_file = max(before.index(name) for name in files)
    assert "step-00000001" in before[last_file:]
    assert tmp_path.name in before[last_file:]
    assert "step-00000001" in after


def test_leftovers_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    for name in ("step-00000002", "step-00000003"):
        (tmp_path / name).mkdir()
        for file in ("rank-0.safetensors", "rank-11-1.safetensors", "manifest.json",
                     "COMMIT.partial"):  # fmt: skip
            (tmp_path / name / file).write_bytes(b"half")
    (tmp_path / "step-00000003" / "notes.txt").write_text("user file")
    (tmp_path / "step-9").mkdir()
    Saver(tmp_path, World.solo(), keep=3)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert [name for name in left if not name.startswith("step-00000001")] == [
        "step-00000003", "step-00000003/notes.txt", "step-9",
    ]  # fmt: skip
    assert committed(tmp_path) == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 256 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def big_state(num_bytes: int) -> State:
    return State([whole_shard("big", torch.zeros(num_bytes, dtype=torch.uint8))], {"step": 2})


def test_full_disk_is_an_error_and_the_run_continues(small_disk: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    saver = save_solo(
        small_disk, 1, keep=2, on_event=lambda name, **fields: events.append((name, fields))
    )
    saver.save(big_state(1 << 20), 2, {})
    with pytest.raises(StoreError, match=r"step 2 .*No space left.*'.*step-00000001'"):
        saver.save(solo_state(3), 3, {})
    saver.wait()  # Raised once.
    failed = [fields for name, fields in events if name == "checkpoint_failed"]
    assert len(failed) == 1
    assert failed[0]["step"] == 2
    assert "No space left" in failed[0]["error"]
    # The partial files are gone, so there is space again.
    assert {path.parent.name for path in small_disk.glob("*/*")} == {"step-00000001"}
    Checkpoint.open(small_disk / "step-00000001").verify()
    saver.save(solo_state(3), 3, {})
    saver.wait()
    assert {path.name for path in small_disk.iterdir()} == {"step-00000003", "step-00000001"}


def test_unwritable_directory_is_an_error(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="Read-only file system"):
        save_solo(small_disk, 1)


def test_file_instead_of_directory_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints"
    file.write_text("not a directory")
    with pytest.raises(StoreError, match=r"step 1 in '.*checkpoints' was not made"):
        save_solo(file, 1)


def test_undeletable_checkpoint_is_reported_and_the_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    saver = save_solo(tmp_path, 1, keep=1, on_event=lambda name, **_: events.append(name))

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    saver.save(solo_state(2), 2, {})
    saver.wait()
    assert events[-2:] == ["checkpoint_done", "checkpoint_leftover"]
    assert len(list_committed(tmp_path)) == 2
    monkeypatch.undo()
    saver.save(solo_state(3), 3, {})
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def failing_savers(
    directory: Path, size: int, failing_rank: int, phase: str, error: Exception
) -> list[tuple[Saver, State]]:
    """Return the savers and states of all ranks, one of which fails at `phase`."""

    def fail(name: str) -> None:
        if name == phase:
            raise error

    division = {"t": [(box, (i,)) for i, box in enumerate(row_boxes((9, 2), size))]}
    tensors = {"t": torch.randn(9, 2)}
    return [
        (
            Saver(directory, world, keep=2, phase=fail if world.rank == failing_rank else None),
            State(make_shards(tensors, division, world.rank)),
        )
        for world in worlds(size)
    ]


@pytest.mark.parametrize("failing_rank", range(3))
def test_failed_rank_fails_the_save_of_all(tmp_path: Path, failing_rank: int) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    pairs = failing_savers(tmp_path, 3, failing_rank, "file_written", error)
    for saver, state in pairs:
        saver.save(state, 1, {})
    for saver, _ in pairs:
        with pytest.raises(StoreError, match=r"step 1 .*Input/output error") as caught:
            saver.wait()
        assert str(caught.value).count("was not made") == 1
        assert saver.newest is None
    assert list(tmp_path.glob("*/*")) == []


def save_and_wait(saver: Saver, state: State, overlap: bool) -> None:
    saver.save(state, 1, {}, overlap)
    saver.wait()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_copy_fails_the_save_of_all(
    tmp_path: Path, failing_rank: int, overlap: bool
) -> None:
    error = MemoryError("no room for a copy")
    pairs = failing_savers(tmp_path, 2, failing_rank, "staged", error)
    other, state = pairs[1 - failing_rank]
    other.save(state, 1, {}, overlap)
    with pytest.raises(MemoryError):
        save_and_wait(*pairs[failing_rank], overlap)
    with pytest.raises(StoreError, match="no room for a copy"):
        other.wait()
    assert list(tmp_path.glob("*/*")) == []


def test_incomplete_or_overlapping_shards_are_never_committed(tmp_path: Path) -> None:
    half = TensorShard.of_tensor(PARAMETER, "t", (4, 2), (0, 0), torch.zeros(2, 2), (0,))
    saver = Saver(tmp_path, World.solo(), keep=2)
    saver.save(State([half]), 1, {})
    with pytest.raises(AssertionError, match=r"parameter/t .* not wholly covered: 4 of 8"):
        saver.wait()
    saver.save(State([half, half]), 2, {})
    with pytest.raises(AssertionError, match=r"parameter/t .* overlap"):
        saver.wait()
    assert list_committed(tmp_path) == []


def test_save_with_lost_peers_can_be_abandoned(tmp_path: Path) -> None:
    first, _ = worlds(2)
    saver = Saver(tmp_path, first, keep=2)
    saver.save(solo_state(1), 1, {})
    saver.abandon()
    with pytest.raises(StoreError, match="given up"):
        saver.wait()
    assert list_committed(tmp_path) == []


def test_facts_must_be_json(tmp_path: Path) -> None:
    saver = Saver(tmp_path, World.solo(), keep=2)
    with pytest.raises(TypeError):
        saver.save(solo_state(1), 1, {"path": tmp_path})
    with pytest.raises(ValueError, match="JSON"):
        saver.save(solo_state(1), 1, {"loss": float("nan")})
    saver.save(solo_state(1), 1, {"loss": 1.0})
    saver.wait()
    record = json.loads((tmp_path / "step-00000001" / "COMMIT").read_text())
    assert record["step"] == 1
