"""Expert state on a drive under faults: kills, I/O errors and bad settings cost no bit of state."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_resume import end, middle, run_job
from test_tiers import WIDE, smallest

from moesaic.base.errors import ConfigError, DivergedError, StoreError
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.store.file import BlockFile
from moesaic.testing.jobs import RUN_JOB, RandomSamples, tiny_job
from moesaic.testing.places import content_path
from moesaic.testing.ranks import RankFailed, RankPool
from moesaic.testing.runs import overflow_gradients, start_run
from moesaic.testing.states import read_checkpoint
from moesaic.train import trainer
from moesaic.train.lm import LanguageModelKind
from moesaic.train.tiers import make_tiers

Changes = dict[str, dict[str, Any]]
State = dict[str, Any]
MoveBlock = Callable[[BlockFile, int, Any], None]

CLIPPED: Changes = {
    "model": dict(WIDE),
    "train": {"precision": "fp32", "clip": 0.1, "micro_batch_order": "by_block"},
}
NOT_CLIPPED: Changes = {**CLIPPED, "train": {**CLIPPED["train"], "clip": 0.0}}
FEW_TOUCHED: Changes = {
    "model": {**WIDE, "top_k": 1},
    "train": {**CLIPPED["train"], "batch": 1, "micro_batches": 1},
    "data": {"sequence": 8},
}
"""Some experts get no tokens in a step, and skip its update until they are used."""
LAYOUTS: dict[int, dict[str, Any]] = {1: {"ep": 1}, 2: {"ep": 2}}
"""Layouts by number of ranks."""
NUM_BLOCKS = 9


def tiered(ssd: Path, changes: Changes, size: int = 1) -> Changes:
    """Return the tables of a job whose expert state has few places in memory."""
    tables: Changes = {**changes, "layout": LAYOUTS[size], "memory": {"ssd": str(ssd)}}
    sizes: Changes = {  # As `run_job` has them.
        "model": {"vocab": 260},
        "data": {"sequence": 16},
        "train": {"steps": 4, "batch": 8, "micro_batches": 2},
    }
    job = tiny_job(**{**tables, **{key: {**sizes[key], **tables.get(key, {})} for key in sizes}})
    return {**changes, "memory": {"ssd": str(ssd), "host": smallest(job, NUM_BLOCKS, size)}}


class Reference:
    """Runs without faults, each done once: their directories and last states."""

    def __init__(self, ranks: RankPool, text: Path, directory: Path) -> None:
        self._ranks, self._text, self._directory = ranks, text, directory
        self._done: dict[str, Path] = {}

    def out(self, changes: Changes, size: int, *, on_drive: bool) -> Path:
        """Return the directory of the run, with its expert state in memory or on a drive."""
        key = f"{size} {on_drive} {changes}"
        if key not in self._done:
            out = self._directory / str(len(self._done))
            given = tiered(self._directory, changes, size) if on_drive else changes
            self._ranks.run(size, run_job, str(self._text), str(out), LAYOUTS[size], None, given)
            self._done[key] = out
        return self._done[key]

    def check(self, out: Path, changes: Changes, size: int = 1) -> None:
        """Raise unless the run in `out` has the last state of runs with and without a drive."""
        found = read_checkpoint(end(out))
        for on_drive in (True, False):
            expected = read_checkpoint(end(self.out(changes, size, on_drive=on_drive)))
            assert found.keys() == expected.keys()
            for key, values in expected.items():
                assert np.array_equal(found[key], values), (key, on_drive)


@pytest.fixture(scope="module")
def reference(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(ranks, text, tmp_path_factory.mktemp("reference"))


@contextmanager
def transfers_in(place: str, fault: Callable[[BlockFile, int, bool], None]) -> Iterator[None]:
    """Call `fault` before the third transfer of a block in a phase, such as "forward 2", where two
    steps are done; checkpoints are phases too. Its arguments are file, block, and true if the block
    is written."""
    now, number = [""], [0]
    begin_phase, save = trainer._Session._on_phase, trainer._Session._save

    def on_phase(session: Any, name: str) -> None:
        now[0] = f"{name} {session.run.counters['step']}"
        begin_phase(session, name)

    def on_save(session: Any) -> None:
        now[0] = f"checkpoint {session.run.counters['step']}"
        save(session)

    def count_transfers(move: MoveBlock, writes: bool) -> MoveBlock:
        def transfer(file: BlockFile, block: int, memory: Any) -> None:
            number[0] += now[0] == place
            if number[0] >= 3:
                fault(file, block, writes)
            move(file, block, memory)

        return transfer

    with ExitStack() as stack:
        for owner, name, replacement in (
            (trainer._Session, "_on_phase", on_phase),
            (trainer._Session, "_save", on_save),
            (BlockFile, "read", count_transfers(BlockFile.read, False)),
            (BlockFile, "write", count_transfers(BlockFile.write, True)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def killed_job(world: World, victim: int, place: str, *arguments: Any) -> None:
    def kill(file: BlockFile, block: int, writes: bool) -> None:
        del file, block, writes
        if world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    with transfers_in(place, kill):
        run_job(world, *arguments)


@pytest.mark.parametrize(
    ("place", "changes", "size"),
    [
        ("forward 2", CLIPPED, 1),
        ("backward 2", NOT_CLIPPED, 1),
        ("optimizer 2", FEW_TOUCHED, 1),
        ("checkpoint 4", CLIPPED, 1),
        ("backward 2", CLIPPED, 2),
        pytest.param("optimizer 2", CLIPPED, 1, marks=pytest.mark.soak),
        pytest.param("checkpoint 4", FEW_TOUCHED, 1, marks=pytest.mark.soak),
        pytest.param("forward 2", NOT_CLIPPED, 1, marks=pytest.mark.soak),
        pytest.param("checkpoint 4", NOT_CLIPPED, 2, marks=pytest.mark.soak),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(
    ranks: RankPool,
    text: Path,
    tmp_path: Path,
    reference: Reference,
    place: str,
    changes: Changes,
    size: int,
) -> None:
    ssd, out = tmp_path / "ssd", tmp_path / "out"
    given = tiered(ssd, changes, size)
    start = (str(text), str(out), LAYOUTS[size])
    with pytest.raises(RankFailed, match="the process died"):
        ranks.run(size, killed_job, size - 1, place, *start, None, given)
    assert not list(ssd.glob("*.blocks"))
    assert not end(out).joinpath("COMMIT").exists()
    ranks.run(size, run_job, *start, "auto", given)
    reference.check(out, changes, size)
    assert not list(ssd.iterdir())


@pytest.mark.parametrize(("size", "changes"), [(1, CLIPPED), (1, FEW_TOUCHED), (2, CLIPPED)])
@pytest.mark.parametrize("starts_on_drive", [True, False])
def test_checkpoints_with_and_without_a_drive_are_alike(
    ranks: RankPool,
    text: Path,
    tmp_path: Path,
    reference: Reference,
    size: int,
    changes: Changes,
    starts_on_drive: bool,
) -> None:
    before = reference.out(changes, size, on_drive=starts_on_drive)
    given = changes if starts_on_drive else tiered(tmp_path / "ssd", changes, size)
    out = tmp_path / "out"
    ranks.run(size, run_job, str(text), str(out), LAYOUTS[size], middle(before), given)
    reference.check(out, changes, size)


def flip_bit(file: BlockFile, block: int, writes: bool) -> None:
    """Flip one bit of a block that is about to be read."""
    if not writes:
        with content_path(file).open("r+b") as damaged:
            damaged.seek(block * file.stride_bytes + 77)
            (byte,) = damaged.read(1)
            damaged.seek(-1, os.SEEK_CUR)
            damaged.write(bytes([byte ^ 0x80]))


def cut(file: BlockFile, block: int, writes: bool) -> None:
    if not writes:
        os.truncate(content_path(file), block * file.stride_bytes + 77)


def faulty_job(
    world: World, fault: str | Callable[..., None], code: int, place: str, *arguments: Any
) -> None:
    """Train with a fault of the drive: a function, or a call of the system that fails."""
    if not isinstance(fault, str):
        with transfers_in(place, fault):
            run_job(world, *arguments)
        return
    call, is_broken = getattr(os, fault), list[bool]()

    def fail(*given: Any) -> Any:
        if is_broken:
            raise OSError(code, os.strerror(code))
        return call(*given)

    def break_call(file: BlockFile, block: int, writes: bool) -> None:
        del file, block, writes
        is_broken.append(True)

    with mock.patch(f"os.{fault}", fail), transfers_in(place, break_call):
        run_job(world, *arguments)


@pytest.mark.parametrize(
    ("fault", "code", "place", "message"),
    [
        ("pwritev", errno.EIO, "backward 2", "cannot be written (Input/output error)"),
        ("pwritev", errno.ENOSPC, "optimizer 2", "cannot be written (No space left on device)"),
        ("preadv", errno.EIO, "checkpoint 4", "cannot be read (Input/output error)"),
        (flip_bit, 0, "forward 2", "differs from what was written, so the disk may be failing"),
        (flip_bit, 0, "checkpoint 4", "differs from what was written"),
        (cut, 0, "optimizer 2", "resume from"),  # A later write may fill the hole with zeros.
    ],
)
def test_a_fault_of_the_drive_ends_the_run_and_keeps_the_checkpoint(
    ranks: RankPool,
    text: Path,
    tmp_path: Path,
    reference: Reference,
    fault: str | Callable[..., None],
    code: int,
    place: str,
    message: str,
) -> None:
    ssd, out = tmp_path / "ssd", tmp_path / "out"
    given = tiered(ssd, CLIPPED)
    start = (str(text), str(out), LAYOUTS[1])
    with pytest.raises(RankFailed) as failure:
        ranks.run(1, faulty_job, fault, code, place, *start, None, given)
    sentence = str(failure.value).strip().splitlines()[-1]
    file = ssd / "experts-rank-0.blocks"
    assert sentence.startswith("moesaic.base.errors.StoreError: ")
    assert f"'{file}' at byte " in sentence
    assert message in sentence
    assert "resume from the newest checkpoint" in sentence
    assert not list(ssd.iterdir())
    Checkpoint.open(Path(middle(out))).verify()
    ranks.run(1, run_job, *start, "auto", given)
    reference.check(out, CLIPPED)


FAULT = """
import os

if os.environ.get("RANK") == "1":
    def fail(*_):
        raise OSError(5, os.strerror(5))

    os.pwritev = fail
"""
"""Code that Python runs at startup."""


def test_the_command_line_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
    (tmp_path / "job.toml").write_text(RUN_JOB + '\n[layout]\nep = 2\n[memory]\nssd = "ssd"\n')
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "moesaic", "train", "job.toml", "--nproc", "2", "--out", "run"]
    sets = ("memory.period=1", "memory.host=64MiB", "train.collective_timeout_s=1000")
    done = subprocess.run(
        [*command, *(word for one in sets for word in ("--set", one))],
        capture_output=True, text=True, check=False, timeout=110, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert re.search(
        r"ssd/experts-rank-1.blocks' at byte \d+ cannot be written \(Input/output error\): .*"
        "then resume from the newest checkpoint$",
        line,
    )


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("moesaic.train.assemble.allocate_model", MemoryError),
        ("moesaic.train.trainer.RunRecord", MemoryError),
        ("moesaic.train.optim.AdamW.update", MemoryError),
        ("moesaic.train.optim.AdamW.update", KeyboardInterrupt),
    ],
)
def test_an_error_leaves_nothing_on_the_drive(
    text: Path, tmp_path: Path, place: str, error: type[BaseException]
) -> None:
    given, ssd = tiered(tmp_path / "ssd", CLIPPED), tmp_path / "ssd"
    out = str(tmp_path / "out")
    with mock.patch(place, side_effect=error), pytest.raises(error):
        run_job(World.solo(), str(text), out, LAYOUTS[1], None, given)
    assert ssd.exists()
    assert not list(ssd.iterdir())


@pytest.mark.parametrize(
    ("clip", "state"),
    [(0.1, "and nothing was updated"), (0.0, "which was known only after the update of experts")],
)
def test_a_diverged_step_says_what_was_updated(tmp_path: Path, clip: float, state: str) -> None:
    run = start_run(drive_job(tmp_path, train={"precision": "fp32", "clip": clip}))
    overflow_gradients(list(run.part.model.decoder_layers())[1])
    with pytest.raises(DivergedError, match=f"^step 1: the gradient's norm is nan, {state}$"):
        run.step(RandomSamples(61, 12))
    run.close()


def drive_job(ssd: Path, host: str = "64MiB", **tables: dict[str, Any]) -> Job:
    return tiny_job(memory={"ssd": str(ssd), "host": host}, **tables)


def test_two_jobs_on_one_directory_are_refused(tmp_path: Path) -> None:
    first = start_run(drive_job(tmp_path))
    message = (
        f"memory.ssd = '{tmp_path}' is in use by process {os.getpid()} on {socket.gethostname()}: "
        "give each run a directory of its own"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        start_run(drive_job(tmp_path))
    first.step(RandomSamples(61, 12))
    first.close()
    start_run(drive_job(tmp_path)).close()


def test_a_missing_directory_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for ssd in (tmp_path / "missing" / "too", Path("~/home")):
        start_run(drive_job(ssd, "auto")).close()
        assert not list(ssd.expanduser().iterdir())


@pytest.mark.parametrize(
    ("place", "reason"),
    [("file", "File exists"), ("file/below", "Not a directory"), ("/proc/below", "No such file")],
)
def test_an_unusable_directory_is_refused(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").write_text("in the way")
    ssd = tmp_path / place
    with pytest.raises(ConfigError) as failure:
        start_run(drive_job(ssd))
    assert str(failure.value).startswith(f"memory.ssd = '{ssd}' cannot be written ({reason}")
    assert str(failure.value).endswith(": give a directory on a drive of this machine")


def on_tmpfs(directory: Path, options: str, work: Callable[[], str]) -> str:
    """Mount a tmpfs over `directory` for this thread alone, and return the result of `work`."""
    new_mounts = 0x00020000
    if os.geteuid() or ctypes.CDLL(None).unshare(new_mounts):
        pytest.skip("mounts need root")
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "none", directory]):
        if subprocess.run(["mount", *command], check=False, capture_output=True).returncode:
            pytest.skip("mounts are not permitted")
    return work()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("ro", ConfigError, r"cannot be written \(Read-only file system\): give a directory"),
        (
            "size=256k", StoreError,
            r"needs \S+ MiB, and \S+ KiB are free \(No space left on device\): make room, or name",
        ),
    ],
)  # fmt: skip
def test_a_full_or_read_only_drive_is_refused(
    tmp_path: Path, options: str, error: type[Exception], message: str
) -> None:
    def refuse() -> str:
        with pytest.raises(error) as failure:
            start_run(drive_job(tmp_path))
        assert not list(tmp_path.iterdir())
        return str(failure.value)

    with ThreadPoolExecutor(1) as thread:
        sentence = thread.submit(on_tmpfs, tmp_path, options, refuse).result()
    assert re.search(f"^memory.ssd.*'{tmp_path}.*{message}", sentence)


def test_the_smallest_budget_is_named_and_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        start_run(drive_job(tmp_path, "1kB"))
    sentence = str(failure.value)
    assert sentence.startswith('memory.host = "1kB" is too small for this job, which needs ')
    found = re.search(r'set memory.host = "(\d+MiB)" or more', sentence)
    assert found is not None
    run = start_run(drive_job(tmp_path, found[1]))
    run.step(RandomSamples(61, 12))
    run.close()


def test_a_budget_larger_than_the_machine_is_refused(tmp_path: Path) -> None:
    message = r'^memory.host = "900TB" is more than the .*: set it to "\d+MiB"'
    with pytest.raises(ConfigError, match=message):
        start_run(drive_job(tmp_path, "900TB"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"finetune": {"method": "lora"}}, "[finetune] does not work with [memory]: remove one"),
        (
            {"optimizer": {"moments": "8bit"}},
            'optimizer.moments = "8bit" does not work with [memory]: remove one',
        ),
        (
            {"model": {"family": "llama", "experts": 0, "top_k": 0}},
            "the model is dense (model.experts = 0): remove the table",
        ),
        ({"train": {"device": "cuda"}}, 'train.device = "cuda" does not work with [memory]'),
        (
            {"layout": {"pp": 2}},
            "layout.pp = 2 with [memory]: pipeline ranks work on one micro-batch at a time, set "
            "layout.pp = 1",
        ),
        (
            {"layout": {"ep": 2, "chunks": 2}},
            "layout.chunks = 2 does not work with [memory]: remove one",
        ),
        (
            {"layout": {"ep": 2}, "balance": {"policy": "none", "migrate_every": 3}},
            "balance.migrate_every = 3 does not work with [memory]: remove one",
        ),
        (
            {"layout": {"ep": 2}, "balance": {"policy": "eplb"}},
            'balance.policy = "eplb" with [memory]: replicas of experts are sent for one '
            'micro-batch at a time, set balance.policy = "none"',
        ),
    ],
)
def test_settings_that_need_all_experts_in_memory_are_refused(
    tmp_path: Path, tables: Changes, message: str
) -> None:
    with pytest.raises(ConfigError) as failure:
        drive_job(tmp_path, **tables)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("size", "device", "message"),
    [
        (
            2, "cpu",
            "layout.ep = 1 on 2 ranks with [memory]: each expert must have one owner, set "
            "layout.ep = 2",
        ),
        (
            1, "cuda",
            '[memory] with train.device = "cuda": expert state on a drive is for CPU ranks, use '
            "these or remove the table",
        ),
    ],
)  # fmt: skip
def test_ranks_that_cannot_keep_state_on_a_drive_are_refused(
    tmp_path: Path, size: int, device: str, message: str
) -> None:
    job, world = drive_job(tmp_path), World.solo()
    world.device = torch.device(device)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_tiers(job, plan_from_layout(job.layout, job.model, size), world, torch.float64)
    assert not list(tmp_path.iterdir())


def test_a_drive_without_direct_io_is_warned_of_and_works(tmp_path: Path) -> None:
    with mock.patch("moesaic.base.direct_io.set_direct_io", return_value=False):
        run = start_run(drive_job(tmp_path, "3MiB"))
        run.step(RandomSamples(61, 12))
    lines = list(LanguageModelKind().describe(run))
    run.close()
    start = f"warning: memory.ssd = '{tmp_path}' has no direct I/O"
    assert any(line.startswith(start) for line in lines)
