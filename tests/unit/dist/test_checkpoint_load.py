"""Checkpoint loading: all damage is detected, and every mismatch is named."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moesaic.base import direct_io
from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import (
    Checkpoint,
    Saver,
    list_committed,
    newest_intact,
    resume_candidates,
    set_head,
)
from moesaic.dist.checkpoint.manifest import Manifest, commit_record
from moesaic.dist.state import PARAMETER, State, TensorShard
from moesaic.dist.world import World
from moesaic.testing.states import (
    blank_shards,
    live_values,
    make_shards,
    row_boxes,
    same_bits,
    whole_box,
    whole_shard,
    worlds,
)

TENSORS = {
    "a": torch.arange(35.0).reshape(7, 5),
    "b": torch.arange(6.0).to(torch.bfloat16),
    "large": torch.arange(1.0, 3001.0),
}
DIVISION = {"a": [(box, (i,)) for i, box in enumerate(row_boxes((7, 5), 2))],
            "b": [(whole_box((6,)), (0, 1))],
            "large": [(whole_box((3000,)), (0, 1))]}  # fmt: skip
ONE = {name: [(whole_box(tensor.shape), (0,))] for name, tensor in TENSORS.items()}


def save(directory: Path, *steps: int, size: int = 2, **options: Any) -> Path:
    """Save checkpoints of `steps` on one or two ranks; return the path of the last."""
    ranks, division = worlds(size), DIVISION if size == 2 else ONE
    savers = [Saver(directory, world, keep=9, **options) for world in ranks]
    for step in steps:
        for saver, world in zip(savers, ranks, strict=True):
            shards = make_shards(TENSORS, division, world.rank)
            saver.save(State(shards, {"step": step}), step, {"a": 1})
    for saver in savers:
        saver.wait()
    return list_committed(directory)[0]


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and write a matching commit record."""
    raw = json.loads((path / "manifest.json").read_bytes())
    change(raw)
    data = json.dumps(raw).encode()
    (path / "manifest.json").write_bytes(data)
    stamp = Manifest(serial=1, step=raw["step"], counters={}, facts={}, tensors={}, files={})
    (path / "COMMIT").write_bytes(commit_record(stamp, data))


def test_every_single_bit_flip_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    files = sorted(path.iterdir())
    assert [file.name for file in files] == [
        "COMMIT", "manifest.json", "rank-0.safetensors", "rank-1.safetensors",
    ]  # fmt: skip
    generator = random.Random(0)
    for number in range(300):
        file = files[number % len(files)]
        intact = file.read_bytes()
        bit = generator.randrange(8 * len(intact))
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(StoreError, match=file.name):
            Checkpoint.open(path).verify()
        assert newest_intact(tmp_path) is None
        file.write_bytes(intact)
    Checkpoint.open(path).verify()


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def swap(file: Path) -> None:
    other = file.with_name("rank-1.safetensors")
    data, other_data = file.read_bytes(), other.read_bytes()
    file.write_bytes(other_data)
    other.write_bytes(data)


def zero(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-4096:] = bytes(4096)
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, lengthen, swap, zero, Path.unlink])
def test_damage_is_named_and_the_newest_whole_one_suggested(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = save(tmp_path, 1, 2, 3, 4)
    damage(path / "rank-0.safetensors")
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b"{}")
    expected = (
        rf"step-00000004' is damaged: .*'rank-0.safetensors'.*; the newest whole one is "
        rf"'{tmp_path}/step-00000002'; resume from that"
    )
    with pytest.raises(StoreError, match=expected):
        Checkpoint.open(path).verify()
    # Zeros keep the size of the file; a resume verifies its content.
    newest = "step-00000004" if damage is zero else "step-00000002"
    with pytest.raises(StoreError, match=f"the newest whole one is '.*{newest}'"):
        Checkpoint.open(tmp_path / "step-00000003")
    intact = newest_intact(tmp_path)
    assert intact is not None
    assert intact.path.name == "step-00000002"


def read_once(path: Path) -> dict[str, torch.Tensor]:
    """Return copies of all tensors, read in this order and in this order again."""
    checkpoint, found = Checkpoint.open(path, reads_once=True), {}
    for name in (*TENSORS, *TENSORS):
        values = checkpoint.view_tensor(f"{PARAMETER}/{name}")
        if values is None:  # Another file has replaced this one in memory.
            (shard,) = (s for s in blank_shards(make_shards(TENSORS, ONE, 0)) if s.name == name)
            checkpoint.fill([shard])
            values = live_values(shard)
        found[name] = values.clone()
    return found


@pytest.mark.parametrize("file_bytes", [1, 1 << 30], ids=["several files", "one file"])
def test_each_file_is_read_and_hashed_once(tmp_path: Path, file_bytes: int) -> None:
    path = save(tmp_path, 1, size=1, file_bytes=file_bytes)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert (len(files) > 1) == (file_bytes == 1)
    real, files_read = direct_io.read_blocks, list[str]()

    def record_blocks(file: Path, buffer: memoryview) -> Iterator[memoryview]:
        files_read.append(file.name)
        return real(file, buffer)

    with mock.patch.object(direct_io, "read_blocks", record_blocks):
        found = read_once(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert sorted(files_read) == files
    flip_last_bit(path / files[-1])
    damaged = Checkpoint.open(path, reads_once=True)
    errors = list[str]()
    for name in (*TENSORS, *TENSORS):  # Damage is reported every time.
        try:
            damaged.view_tensor(f"{PARAMETER}/{name}")
        except StoreError as error:
            errors.append(str(error))
    assert len(errors) > 1
    assert all(f"'{files[-1]}' is not what was written" in error for error in errors)


def test_only_files_of_one_rank_are_read_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1), reads_once=True)
    assert checkpoint.view_tensor(f"{PARAMETER}/a") is None


def test_unreadable_file_is_reported_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1, size=1)
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    words = (
        r"is damaged: 'rank-0.safetensors' cannot be read \(\[Errno 5\] Input/output error\); no"
    )
    with (
        mock.patch.object(direct_io, "_with_cache_fallback", side_effect=broken),
        pytest.raises(StoreError, match=words),
    ):
        Checkpoint.open(path, reads_once=True).view_tensor(f"{PARAMETER}/a")


def test_fill_verifies_before_it_writes(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip_last_bit(path / "rank-1.safetensors")
    checkpoint = Checkpoint.open(path)
    shards = blank_shards(make_shards(TENSORS, ONE, 0))
    with pytest.raises(StoreError, match="rank-1"):
        checkpoint.fill(shards)
    assert same_bits(shards, blank_shards(shards))
    # Shards outside the damaged file can still be filled.
    upper = blank_shards(make_shards(TENSORS, DIVISION, 0))[:1]
    checkpoint.fill(upper)
    assert same_bits(upper, make_shards(TENSORS, DIVISION, 0)[:1])


def test_uncommitted_checkpoint_is_never_listed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 2)
    (path / "COMMIT").rename(path / "COMMIT.partial")
    assert [found.name for found in list_committed(tmp_path)] == ["step-00000001"]
    with pytest.raises(StoreError, match=r"never finished: it has no COMMIT; the newest .*00001'"):
        Checkpoint.open(path)
    with pytest.raises(StoreError, match=r"there is no checkpoint '.*step-5'; the newest .*00001'"):
        Checkpoint.open(tmp_path / "step-5")
    (path / "COMMIT.partial").rename(path / "COMMIT")
    (path / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"'manifest\.json' is missing"):
        Checkpoint.open(path)


def test_empty_or_absent_directory_has_none(tmp_path: Path) -> None:
    assert list_committed(tmp_path) == list_committed(tmp_path / "absent") == []
    assert newest_intact(tmp_path / "absent") is None
    with pytest.raises(StoreError, match="no other whole checkpoint"):
        Checkpoint.open(tmp_path / "absent" / "step-00000001")


DAMAGED_RECORDS = [b"", b"\xff", b'{"serial": Infinity}', b"[" * 100_000, b'{"serial": -3}']


@pytest.mark.parametrize("record", DAMAGED_RECORDS, ids=["empty", "ff", "inf", "deep", "negative"])
def test_damaged_commit_record_is_reported(tmp_path: Path, record: bytes) -> None:
    save(tmp_path, 1, 2, 3)
    for step in (1, 3):
        (tmp_path / f"step-{step:08d}" / "COMMIT").write_bytes(record)
    names = ["step-00000002", "step-00000003", "step-00000001"]
    assert [path.name for path in list_committed(tmp_path)] == names, (
        "damaged ones are removed first"
    )
    assert [path.name for path in resume_candidates(tmp_path)] == [*names[1:], names[0]]
    with pytest.raises(StoreError, match=r"00003' is damaged: 'COMMIT' .* the newest .*00002'"):
        Checkpoint.open(resume_candidates(tmp_path)[0])
    log: list[str] = []
    found = newest_intact(tmp_path, log.append)
    assert found is not None
    assert found.step == 2
    assert len(log) == 2
    assert "step-00000003' is damaged: 'COMMIT'" in log[0]


@pytest.mark.parametrize("steps", [(4, 10, 6), (2, 4, 4)], ids=["rollback", "same step"])
def test_damaged_record_after_rollback_is_reported(tmp_path: Path, steps: tuple[int, ...]) -> None:
    newest = save(tmp_path, *steps)
    (newest / "COMMIT").write_bytes(b"")
    assert resume_candidates(tmp_path)[0] == newest
    # A changed serial number is damage too.
    other = save(tmp_path, 20)
    record = (other / "COMMIT").read_bytes()
    (other / "COMMIT").write_bytes(record.replace(b'"serial": ', b'"serial": 0.'))
    assert other in resume_candidates(tmp_path)[:2]


def names(paths: list[Path]) -> list[str]:
    return [path.name.removeprefix("step-000000") for path in paths]


def test_rollback_lasts_until_the_next_commit(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    set_head(tmp_path / "step-00000010")
    assert (
        names(resume_candidates(tmp_path)) == names(list_committed(tmp_path)) == ["10", "30", "20"]
    )
    found = newest_intact(tmp_path)
    assert found is not None
    assert found.step == 10
    set_head(tmp_path / "step-00000020")
    assert names(resume_candidates(tmp_path)) == ["20", "30", "10"]
    save(tmp_path, 25)
    assert names(resume_candidates(tmp_path)) == ["25", "30", "20", "10"]
    (tmp_path / "HEAD").write_bytes(b"torn")
    with pytest.raises(
        StoreError, match=r"HEAD' is damaged, .*; remove the file and name a checkpoint"
    ):
        resume_candidates(tmp_path)


def test_rolled_back_checkpoint_is_removed_last(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    set_head(tmp_path / "step-00000010")
    saver = Saver(tmp_path, World.solo(), keep=1)
    saver.save(State([whole_shard("a", torch.arange(3.0))], {"step": 11}), 11, {})
    saver.wait()
    assert names(list_committed(tmp_path)) == ["11"]


def test_commit_record_that_is_a_directory(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 2)
    (path / "COMMIT").unlink()
    (path / "COMMIT").mkdir()
    assert resume_candidates(tmp_path)[0] == path
    with pytest.raises(StoreError, match=r"COMMIT' cannot be read .*; the newest .*00001'"):
        Checkpoint.open(path)


def test_check_sizes_detects_missing_files(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    Checkpoint.open(path).check_sizes()
    file = path / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    Checkpoint.open(path).check_sizes()
    file.unlink()
    with pytest.raises(StoreError, match=r"damaged: 'rank-1\.safetensors' is missing"):
        Checkpoint.open(path).check_sizes()


def point_outside(raw: dict[str, Any]) -> None:
    raw["files"]["../outside"] = raw["files"].pop("rank-1.safetensors")


def lose_shard(raw: dict[str, Any]) -> None:
    raw["tensors"]["parameter/a"]["shards"].pop()


def overlap_shards(raw: dict[str, Any]) -> None:
    raw["tensors"]["parameter/a"]["shards"][1]["offset"] = [3, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version=2), "format version 2 and this moesaic reads version"),
        (lambda raw: raw.update(format="x"), "does not describe a moesaic checkpoint"),
        (lambda raw: raw.pop("counters"), "malformed at counters"),
        (lambda raw: raw["tensors"]["parameter/b"].update(dtype="F1"), "parameter/b .* type F1"),
        (lambda raw: raw["files"].pop("rank-1.safetensors"), "not among the files"),
        (point_outside, r"'\.\./outside' points outside"),
        (lose_shard, "parameter/a .* not wholly covered: 20 of 35"),
        (overlap_shards, "parameter/a .* overlap"),
    ],
)
def test_invalid_manifest_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = save(tmp_path, 1)
    forge(path, lambda raw: None)
    Checkpoint.open(path).verify()
    forge(path, change)
    with pytest.raises(StoreError, match=message):
        Checkpoint.open(path)


def test_manifest_that_contradicts_its_files_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, 1)

    def change(raw: dict[str, Any]) -> None:
        raw["tensors"]["parameter/b"]["dtype"] = "F16"

    forge(path, change)
    with pytest.raises(StoreError, match=r"does not contain .*parameter/b"):
        Checkpoint.open(path).fill([whole_shard("b", torch.empty(6).half())])


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (whole_shard("c", torch.empty(6)), "parameter/c is not in the checkpoint"),
        (whole_shard("a", torch.empty(7, 5), "first_moment"), "first_moment/a is"),
        (
            whole_shard("a", torch.empty(5, 7)),
            r"parameter/a has shape \[7, 5\] in the checkpoint and \[5, 7\] in the model",
        ),
        (
            whole_shard("a", torch.empty(7, 5).double()),
            r"parameter/a is F32 in the checkpoint and torch\.float64 in the model",
        ),
    ],
)
def test_mismatch_is_named_before_anything_is_written(
    tmp_path: Path, shard: TensorShard, message: str
) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1))
    good = blank_shards(make_shards(TENSORS, ONE, 0))
    with pytest.raises(StoreError, match=message):
        checkpoint.fill([*good, shard])
    assert same_bits(good, blank_shards(good))


def test_parameters_and_strided_views_are_filled_in_place(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1))
    parameter = torch.nn.Parameter(torch.zeros(7, 5))
    arena = torch.zeros(7, 9)
    checkpoint.fill([whole_shard("a", parameter), whole_shard("a", arena[:, 2:7])])
    assert torch.equal(parameter, TENSORS["a"])
    assert torch.equal(arena[:, 2:7], TENSORS["a"])
    assert arena[:, :2].eq(0).all()
    assert arena[:, 7:].eq(0).all()
