"""Errors and exit statuses of ranks, without starting any; tests/world starts ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moesaic.api import train_worker
from moesaic.api.launch import ERROR_FILE, RankFailed, RunInterrupted, _first_failure
from moesaic.api.start import SPIN_COUNT, set_spin_count
from moesaic.base.errors import ConfigError, MoesaicError, UserError
from moesaic.cli.main import main
from moesaic.testing.jobs import RUN_JOB


def test_idle_threads_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # Restored after the test.
        monkeypatch.delenv(name)
    set_spin_count()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    set_spin_count()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    set_spin_count()
    assert "GOMP_SPINCOUNT" not in os.environ


def first_failure(logs: Path, *ranks: tuple[int, str | None, str]) -> MoesaicError:
    """Return the cause for ranks that ended with (exit status, kind of failure, its text)."""
    failures = {}
    for number, (status, kind, text) in enumerate(ranks):
        (logs / str(number)).mkdir()
        if status:
            failures[number] = SimpleNamespace(exitcode=status)
        if kind is not None:
            record = {"kind": kind, "text": text, "time": number}
            (logs / str(number) / "error.json").write_text(json.dumps(record))
    return _first_failure(logs, failures)


BUG, MISTAKE = (1, "bug", "Traceback ... lost peer"), (2, "ConfigError", "train.steps is wrong")
KILLED, ENDED = (-signal.SIGKILL, None, ""), (-signal.SIGTERM, None, "")
INTERRUPTED = (130, None, "")
LOST = (1, "lost", "RuntimeError: pair.cc:553] Connection closed by peer [127.0.0.1]:23450")


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ([BUG, MISTAKE], ConfigError, "train.steps is wrong"),
        ([KILLED, MISTAKE], ConfigError, "train.steps is wrong"),
        (
            [BUG, KILLED, ENDED],
            RunInterrupted,
            "rank 1 was ended by SIGKILL, often for lack of memory",
        ),
        ([ENDED, (-signal.SIGSEGV, None, "")], RunInterrupted, "rank 1 was ended by SIGSEGV"),
        ([BUG, INTERRUPTED], RunInterrupted, "interrupted"),
        ([LOST, (-signal.SIGINT, None, ""), ENDED], RunInterrupted, "interrupted"),
        ([ENDED, BUG, (1, "bug", "later")], RankFailed, "Traceback ... lost peer"),
        ([ENDED, (1, None, "")], RankFailed, "rank 1 ended with exit status 1 and no message"),
        ([(0, None, ""), ENDED], RunInterrupted, "rank 1 was ended by SIGTERM"),
        ([LOST, ENDED], RunInterrupted, "rank 1 was ended by SIGTERM"),
        ([LOST, BUG, ENDED], RankFailed, "Traceback ... lost peer"),
        (
            [(3, None, ""), (-signal.SIGTERM, *LOST[1:])],
            RankFailed,
            "rank 0 ended with exit status 3 and no message",
        ),
        ([(-signal.SIGTERM, *LOST[1:]), ENDED], RunInterrupted, "rank 0 was ended by SIGTERM"),
    ],
)
def test_the_cause_of_a_failure(
    ranks: list[tuple[int, str | None, str]], kind: type[MoesaicError], words: str, tmp_path: Path
) -> None:
    cause = first_failure(tmp_path, *ranks)
    assert type(cause) is kind
    assert str(cause) == words


def test_a_rank_killed_for_memory_names_the_remedy(tmp_path: Path) -> None:
    failures = {1: SimpleNamespace(exitcode=-signal.SIGKILL)}
    cause = _first_failure(tmp_path, failures, "use less")
    assert isinstance(cause, RunInterrupted)
    assert cause.status == 3
    assert str(cause) == "there is not enough memory (the kernel killed rank 1): use less"


def test_a_truncated_error_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text('{"kind": "us')
    assert isinstance(first_failure(tmp_path, (1, "bug", "ours")), RankFailed)


def run_rank(job: Path, error_file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    task = train_worker.TrainTask(str(job), [], "run", None, None, ["moesaic", "train"])
    monkeypatch.setattr(sys, "argv", ["rank", train_worker.encode(task)])
    monkeypatch.setenv(ERROR_FILE, str(error_file))
    return train_worker.main()


def test_a_rank_writes_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, file = tmp_path / "job.toml", tmp_path / "error.json"
    job.write_text(RUN_JOB + "[trian]\n")
    assert run_rank(job, file, monkeypatch) == 2
    record = json.loads(file.read_text())
    assert record["kind"] == "ConfigError"
    assert "did you mean 'train'?" in record["text"]
    # The form that torch's agent reads.
    assert record["message"]["message"] == record["text"]
    assert record["message"]["extraInfo"]["timestamp"].isdigit()

    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(train_worker, "load_job", broken)
    assert run_rank(job, file, monkeypatch) == 1
    assert "RuntimeError: ours" in json.loads(file.read_text())["text"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("failure", "status", "last"),
    [
        (UserError("one sentence"), 2, "error: one sentence"),
        (RunInterrupted("ended by SIGTERM"), 75, "error: ended by SIGTERM before the first step: "
         "nothing was saved, the same command starts anew"),
        (RunInterrupted("interrupted", 130), 130, "interrupted: nothing was saved, the "
         "same command starts anew"),
        (RankFailed("Traceback ..."), 1, "error: a rank failed because of a bug in moesaic; "
         "see the traceback above"),
    ],
)  # fmt: skip
def test_every_failure_has_an_exit_status(
    failure: Exception, status: int, last: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moesaic.api.prepared_run.launch", fail)
    Path("job.toml").write_text(RUN_JOB)
    Path("text.txt").write_text("text and more of it")
    assert main(["train", "job.toml", "--nproc", "2"]) == status
    assert capfd.readouterr().err.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("rank", "failure", "told"),
    [
        ("0", RunInterrupted("interrupted; go on", 130), "interrupted; go on\n"),
        ("1", RunInterrupted("interrupted; go on", 130), ""),
        ("1", RunInterrupted("ended", is_saved=True), ""),
        ("1", RunInterrupted("ended"), "error: rank 1: ended\n"),
    ],
)
def test_an_end_that_all_ranks_share_is_told_once(
    rank: str, failure: RunInterrupted, told: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def train() -> None:
        raise failure

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("moesaic.cli.train.train", train)
    assert main(["train"]) == failure.status
    assert capfd.readouterr() == ("", told)


def test_a_rank_without_its_parent_ends_at_once(tmp_path: Path) -> None:
    """An interrupt may kill the parent while it starts a rank; no process would end that rank."""
    line = [
        sys.executable,
        "-m",
        "moesaic.api.start",
        str(os.getpid() + 1),
        "moesaic.api.train_worker",
    ]
    task = '{"job": "job.toml", "sets": [], "out": "run", "resume": null, "output": null, '
    done = subprocess.run(
        [*line, task + '"command": []}'], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
