"""Loading: every change of a checkpoint's bytes is seen, and every misfit is named."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moesaic.base import direct
from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import (
    Checkpoint,
    Saver,
    candidates,
    committed,
    go_back_to,
    newest_intact,
)
from moesaic.dist.checkpoint.manifest import Manifest, commit_record
from moesaic.dist.state import PARAMETER, Piece, State
from moesaic.dist.world import World
from moesaic.testing.states import blank, cut, rows, same_bits, whole, worlds

TENSORS = {
    "a": torch.arange(35.0).reshape(7, 5),
    "b": torch.arange(6.0).to(torch.bfloat16),
    "large": torch.arange(1.0, 3001.0),
}
DIVISION = {"a": [(box, (i,)) for i, box in enumerate(rows((7, 5), 2))],
            "b": [(whole((6,)), (0, 1))],
            "large": [(whole((3000,)), (0, 1))]}  # fmt: skip
ONE = {name: [(whole(tensor.shape), (0,))] for name, tensor in TENSORS.items()}


def save(directory: Path, *steps: int) -> Path:
    """Checkpoints of `steps` by two ranks; the path of the last."""
    everyone = worlds(2)
    savers = [Saver(directory, world, keep=9) for world in everyone]
    for step in steps:
        for saver, world in zip(savers, everyone, strict=True):
            saver.save(State(cut(TENSORS, DIVISION, world.rank), {"step": step}), step, {"a": 1})
    for saver in savers:
        saver.wait()
    return committed(directory)[0]


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and commit it again, as another writer would have."""
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
    chance = random.Random(0)
    for number in range(300):
        file = files[number % len(files)]
        intact = file.read_bytes()
        bit = chance.randrange(8 * len(intact))
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(StoreError, match=file.name):
            Checkpoint.open(path).verify()
        assert newest_intact(tmp_path) is None
        file.write_bytes(intact)
    Checkpoint.open(path).verify()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def swap(file: Path) -> None:
    other = file.with_name("rank-1.safetensors")
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def zero(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-4096:] = bytes(4096)
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, lengthen, swap, zero, Path.unlink])
def test_damage_is_named_and_the_newest_intact_one_offered(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = save(tmp_path, 1, 2, 3, 4)
    damage(path / "rank-0.safetensors")
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b"{}")
    expected = (
        rf"step-00000004' is damaged: .*'rank-0.safetensors'.*; the newest intact one is "
        rf"'{tmp_path}/step-00000002'; resume from it with --resume {tmp_path}/step-00000002"
    )
    with pytest.raises(StoreError, match=expected):
        Checkpoint.open(path).verify()
    with pytest.raises(StoreError, match=r"the newest intact one is '.*step-00000002'"):
        Checkpoint.open(tmp_path / "step-00000003")
    intact = newest_intact(tmp_path)
    assert intact is not None
    assert intact.path.name == "step-00000002"


def test_what_is_read_once_is_lent_from_one_memory(tmp_path: Path) -> None:
    (world,) = worlds(1)
    saver = Saver(tmp_path, world, keep=9)
    saver.save(State(cut(TENSORS, ONE, 0), {"step": 1}), 1, {})
    saver.wait()
    path = committed(tmp_path)[0]
    names = [f"{PARAMETER}/{name}" for name in TENSORS]
    once, often = Checkpoint.open(path, once=True), Checkpoint.open(path)
    assert [often.lend(name) for name in names] == [None] * len(names)
    lent = [once.lend(name) for name in names]
    for tensor, values in zip(TENSORS.values(), lent, strict=True):
        assert values is not None
        assert torch.equal(values, tensor)
    assert len({values.untyped_storage().data_ptr() for values in lent if values is not None}) == 1
    file = path / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    kept = Checkpoint.open(path, once=True)
    kept.lend(names[0])
    file.unlink()  # What is hashed and in memory needs no file any more.
    for name, tensor in zip(names, TENSORS.values(), strict=True):
        values = kept.lend(name)
        assert values is not None
        assert torch.equal(values, tensor)
    data[-1] ^= 1
    file.write_bytes(data)
    damaged = Checkpoint.open(path, once=True)
    for _ in range(2):  # What has been found wrong once stays wrong.
        with pytest.raises(StoreError, match=r"'rank-0\.safetensors' is not what was written"):
            damaged.lend(names[0])


def test_each_of_several_files_is_read_and_hashed_once(tmp_path: Path) -> None:
    """In whatever order tensors are asked for; a file that was let go of is mapped."""
    (world,) = worlds(1)
    saver = Saver(tmp_path, world, keep=9, file_bytes=1)
    saver.save(State(cut(TENSORS, ONE, 0), {"step": 1}), 1, {})
    saver.wait()
    path = committed(tmp_path)[0]
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 1
    checkpoint, read = Checkpoint.open(path, once=True), list[Path]()
    real = direct.parts

    def parts(file: Path, buffer: memoryview) -> Iterator[memoryview]:
        read.append(file)
        return real(file, buffer)

    with mock.patch.object(direct, "parts", parts):
        for name in (*TENSORS, *TENSORS):
            lent = checkpoint.lend(f"{PARAMETER}/{name}")
            if lent is None:
                (piece,) = (p for p in blank(cut(TENSORS, ONE, 0)) if p.name == name)
                checkpoint.fill([piece])
                lent = piece.tensor
            assert torch.equal(lent, TENSORS[name])
    assert sorted(file.name for file in read) == files
    last = path / files[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    damaged = Checkpoint.open(path, once=True)
    found = list[str]()
    for name in TENSORS:
        try:
            damaged.lend(f"{PARAMETER}/{name}")
        except StoreError as error:
            found.append(str(error))
    assert found
    assert all(f"'{files[-1]}' is not what was written" in one for one in found)


def test_nothing_is_lent_of_what_two_ranks_have_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1), once=True)
    assert checkpoint.lend(f"{PARAMETER}/a") is None
    pieces = blank(cut(TENSORS, ONE, 0))
    checkpoint.fill(pieces)
    assert same_bits(pieces, cut(TENSORS, ONE, 0))


def test_a_file_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    (world,) = worlds(1)
    saver = Saver(tmp_path, world, keep=9)
    saver.save(State(cut(TENSORS, ONE, 0), {"step": 1}), 1, {})
    saver.wait()
    path = committed(tmp_path)[0]

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch.object(direct, "_retrying", broken), pytest.raises(StoreError) as caught:
        Checkpoint.open(path, once=True).lend(f"{PARAMETER}/a")
    words = str(caught.value)
    assert "is damaged: 'rank-0.safetensors' cannot be read ([Errno 5] Input/output error)" in words
    assert words.count("restore it") == 1


def test_filling_looks_before_it_reads(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    checkpoint = Checkpoint.open(path)
    pieces = blank(cut(TENSORS, ONE, 0))
    with pytest.raises(StoreError, match="rank-1"):
        checkpoint.fill(pieces)
    assert same_bits(pieces, blank(pieces))
    # What does not touch the damaged file can still be had.
    upper = blank(cut(TENSORS, DIVISION, 0))[:1]
    checkpoint.fill(upper)
    assert same_bits(upper, cut(TENSORS, DIVISION, 0)[:1])


def test_a_half_written_one_is_never_listed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 2)
    (path / "COMMIT").rename(path / "COMMIT.partial")
    assert [found.name for found in committed(tmp_path)] == ["step-00000001"]
    with pytest.raises(StoreError, match=r"never finished: it has no COMMIT; the newest .*00001'"):
        Checkpoint.open(path)
    with pytest.raises(StoreError, match=r"there is no checkpoint '.*step-5'; the newest .*00001'"):
        Checkpoint.open(tmp_path / "step-5")
    (path / "COMMIT.partial").rename(path / "COMMIT")
    (path / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"'manifest\.json' is missing"):
        Checkpoint.open(path)


def test_an_empty_or_absent_directory_has_none(tmp_path: Path) -> None:
    assert committed(tmp_path) == committed(tmp_path / "absent") == []
    assert newest_intact(tmp_path / "absent") is None
    with pytest.raises(StoreError, match="no other intact one"):
        Checkpoint.open(tmp_path / "absent" / "step-00000001")


DAMAGED_RECORDS = [b"", b"\xff", b'{"serial": Infinity}', b"[" * 100_000, b'{"serial": -3}']


@pytest.mark.parametrize("record", DAMAGED_RECORDS, ids=["empty", "ff", "inf", "deep", "negative"])
def test_a_damaged_commit_record_is_never_passed_over_in_silence(
    tmp_path: Path, record: bytes
) -> None:
    save(tmp_path, 1, 2, 3)
    for step in (1, 3):
        (tmp_path / f"step-{step:08d}" / "COMMIT").write_bytes(record)
    names = ["step-00000002", "step-00000003", "step-00000001"]
    assert [path.name for path in committed(tmp_path)] == names, "the damaged ones go away first"
    assert [path.name for path in candidates(tmp_path)] == [*names[1:], names[0]]
    with pytest.raises(StoreError, match=r"00003' is damaged: 'COMMIT' .* the newest .*00002'"):
        Checkpoint.open(candidates(tmp_path)[0])
    told: list[str] = []
    found = newest_intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 2
    assert len(told) == 2
    assert "step-00000003' is damaged: 'COMMIT'" in told[0]


@pytest.mark.parametrize("steps", [(4, 10, 6), (2, 4, 4)], ids=["went back", "same step"])
def test_a_damaged_record_after_going_back_is_told(tmp_path: Path, steps: tuple[int, ...]) -> None:
    newest = save(tmp_path, *steps)
    (newest / "COMMIT").write_bytes(b"")
    assert candidates(tmp_path)[0] == newest
    # A flipped digit of the serial number is no less damage.
    other = save(tmp_path, 20)
    record = (other / "COMMIT").read_bytes()
    (other / "COMMIT").write_bytes(record.replace(b'"serial": ', b'"serial": 0.'))
    assert other in candidates(tmp_path)[:2]


def names(paths: list[Path]) -> list[str]:
    return [path.name.removeprefix("step-000000") for path in paths]


def test_going_back_holds_until_the_next_commit(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    go_back_to(tmp_path / "step-00000010")
    assert names(candidates(tmp_path)) == names(committed(tmp_path)) == ["10", "30", "20"]
    found = newest_intact(tmp_path)
    assert found is not None
    assert found.step == 10
    go_back_to(tmp_path / "step-00000020")
    assert names(candidates(tmp_path)) == ["20", "30", "10"]
    save(tmp_path, 25)
    assert names(candidates(tmp_path)) == ["25", "30", "20", "10"]
    (tmp_path / "HEAD").write_bytes(b"torn")
    with pytest.raises(StoreError, match=r"HEAD' is damaged, .*: remove that file, and name one"):
        candidates(tmp_path)


def test_the_one_gone_back_to_is_the_last_to_be_retired(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    go_back_to(tmp_path / "step-00000010")
    saver = Saver(tmp_path, World.solo(), keep=1)
    tensor = torch.arange(3.0)
    state = State([Piece(PARAMETER, "a", (3,), (0,), tensor, (0,))], {"step": 11})
    saver.save(state, 11, {})
    saver.wait()
    assert names(committed(tmp_path)) == ["11"]


def test_a_directory_in_place_of_a_commit_record(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 2)
    (path / "COMMIT").unlink()
    (path / "COMMIT").mkdir()
    assert candidates(tmp_path)[0] == path
    with pytest.raises(StoreError, match=r"COMMIT' cannot be read .*; the newest .*00001'"):
        Checkpoint.open(path)


def test_sizes_tell_what_is_gone_without_reading(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    Checkpoint.open(path).check_sizes()
    file = path / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    Checkpoint.open(path).check_sizes()
    file.unlink()
    with pytest.raises(StoreError, match=r"damaged: 'rank-1\.safetensors' is missing"):
        Checkpoint.open(path).check_sizes()


def point_out(raw: dict[str, Any]) -> None:
    raw["files"]["../outside"] = raw["files"].pop("rank-1.safetensors")


def lose_piece(raw: dict[str, Any]) -> None:
    raw["tensors"]["parameter/a"]["pieces"].pop()


def double_piece(raw: dict[str, Any]) -> None:
    raw["tensors"]["parameter/a"]["pieces"][1]["offset"] = [3, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version=2), "version 2 of the format and this moesaic reads versi"),
        (lambda raw: raw.update(format="x"), "does not describe a moesaic checkpoint"),
        (lambda raw: raw.pop("counters"), "malformed at counters"),
        (lambda raw: raw["tensors"]["parameter/b"].update(dtype="F1"), "parameter/b .* type F1"),
        (lambda raw: raw["files"].pop("rank-1.safetensors"), "not among the files"),
        (point_out, r"'\.\./outside' leads out of"),
        (lose_piece, "parameter/a .* not wholly covered: 20 of 35"),
        (double_piece, "parameter/a .* overlap"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = save(tmp_path, 1)
    forge(path, lambda raw: None)
    Checkpoint.open(path).verify()
    forge(path, change)
    with pytest.raises(StoreError, match=message):
        Checkpoint.open(path)


def test_a_manifest_that_contradicts_its_files_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)

    def change(raw: dict[str, Any]) -> None:
        raw["tensors"]["parameter/b"]["dtype"] = "F16"

    forge(path, change)
    pieces = [Piece(PARAMETER, "b", (6,), (0,), torch.empty(6, dtype=torch.float16), (0,))]
    with pytest.raises(StoreError, match=r"does not hold .*parameter/b"):
        Checkpoint.open(path).fill(pieces)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(PARAMETER, "c", (6,), (0,), torch.empty(6), (0,)), "parameter/c is not in it"),
        (Piece("first_moment", "a", (7, 5), (0, 0), torch.empty(7, 5), (0,)), "first_moment/a is"),
        (Piece(PARAMETER, "a", (5, 7), (0, 0), torch.empty(5, 7), (0,)),
         r"parameter/a has shape \[7, 5\] in it and \[5, 7\] in the model"),
        (Piece(PARAMETER, "a", (7, 5), (0, 0), torch.empty(7, 5).double(), (0,)),
         r"parameter/a is F32 in it and torch\.float64 in the model"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_is_written(
    tmp_path: Path, piece: Piece, message: str
) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1))
    good = blank(cut(TENSORS, ONE, 0))
    with pytest.raises(StoreError, match=message):
        checkpoint.fill([*good, piece])
    assert same_bits(good, blank(good))


def test_precision_changes_only_where_it_is_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    wide = Piece(PARAMETER, "b", (6,), (0,), torch.empty(6), (0,))
    narrow = Piece(PARAMETER, "a", (7, 5), (2, 0), torch.empty(3, 5, dtype=torch.bfloat16), (0,))
    whole_numbers = replace(wide, tensor=torch.empty(6, dtype=torch.int32))
    with pytest.raises(StoreError, match="precision"):
        Checkpoint.open(path).fill([wide])
    checkpoint = Checkpoint.open(path, cast=True)
    checkpoint.fill([wide, narrow])
    assert torch.equal(wide.tensor, TENSORS["b"].float())
    assert torch.equal(narrow.tensor, TENSORS["a"][2:5].bfloat16())
    with pytest.raises(StoreError, match=r"torch\.int32"):
        checkpoint.fill([whole_numbers])


def test_a_parameter_that_learns_and_a_strided_one_are_filled_in_place(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1))
    parameter = torch.nn.Parameter(torch.zeros(7, 5))
    arena = torch.zeros(7, 9)
    strided = Piece(PARAMETER, "a", (7, 5), (0, 0), arena[:, 2:7], (0,))
    checkpoint.fill([Piece(PARAMETER, "a", (7, 5), (0, 0), parameter, (0,)), strided])
    assert torch.equal(parameter, TENSORS["a"])
    assert torch.equal(arena[:, 2:7], TENSORS["a"])
    assert arena[:, :2].eq(0).all()
    assert arena[:, 7:].eq(0).all()


def test_a_copied_checkpoint_is_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "here", 1)
    shutil.copytree(path, tmp_path / "elsewhere")
    pieces = blank(cut(TENSORS, ONE, 0))
    Checkpoint.open(tmp_path / "elsewhere").fill(pieces)
    assert same_bits(pieces, cut(TENSORS, ONE, 0))
