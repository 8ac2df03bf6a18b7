"""What is made of the ways in which ranks end; the ranks themselves run in tests/world."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moesaic.base.errors import MoesaicError, UserError
from moesaic.cli import rank
from moesaic.cli.launch import CutOff, RankFailed, _cause
from moesaic.cli.main import main
from moesaic.cli.start import TURNS, sleep_soon
from moesaic.cli.train import _how_to_go_on

JOB = """
[model]
preset = "tiny-olmoe"
[data]
path = "x"
sequence = 4
[train]
steps = 1
batch = 1
"""


def test_idle_threads_are_told_to_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # So that it is put back, or taken away again.
        monkeypatch.delenv(name)
    sleep_soon()
    assert os.environ["GOMP_SPINCOUNT"] == TURNS
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    sleep_soon()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    sleep_soon()
    assert "GOMP_SPINCOUNT" not in os.environ


def end(logs: Path, *ranks: tuple[int, str | None, str]) -> MoesaicError:
    """The cause, for ranks that ended with (exit status, kind of failure, its text)."""
    failures = {}
    for number, (status, kind, text) in enumerate(ranks):
        (logs / str(number)).mkdir()
        if status:
            failures[number] = SimpleNamespace(exitcode=status)
        if kind is not None:
            record = {"kind": kind, "text": text, "time": number}
            (logs / str(number) / "error.json").write_text(json.dumps(record))
    return _cause(logs, failures)


BUG, MISTAKE = (1, "bug", "Traceback ... lost peer"), (2, "user", "train.steps is wrong")
KILLED, ENDED = (-signal.SIGKILL, None, ""), (-signal.SIGTERM, None, "")
INTERRUPTED = (130, None, "")
LOST = (1, "lost", "RuntimeError: pair.cc:553] Connection closed by peer [127.0.0.1]:23450")


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ([BUG, MISTAKE], UserError, "train.steps is wrong"),
        ([KILLED, MISTAKE], UserError, "train.steps is wrong"),
        ([BUG, KILLED, ENDED], CutOff, "rank 1 was ended by SIGKILL, often for want of memory"),
        ([ENDED, (-signal.SIGSEGV, None, "")], CutOff, "rank 1 was ended by SIGSEGV"),
        ([BUG, INTERRUPTED], CutOff, "interrupted"),
        ([LOST, (-signal.SIGINT, None, ""), ENDED], CutOff, "interrupted"),
        ([ENDED, BUG, (1, "bug", "later")], RankFailed, "Traceback ... lost peer"),
        ([ENDED, (1, None, "")], RankFailed, "rank 1 ended with exit status 1 and said nothing"),
        ([(0, None, ""), ENDED], CutOff, "rank 1 was ended by SIGTERM"),
        ([LOST, ENDED], CutOff, "rank 1 was ended by SIGTERM"),
        ([LOST, BUG, ENDED], RankFailed, "Traceback ... lost peer"),
        (
            [(3, None, ""), (-signal.SIGTERM, *LOST[1:])],
            RankFailed,
            "rank 0 ended with exit status 3 and said nothing",
        ),
        ([(-signal.SIGTERM, *LOST[1:]), ENDED], CutOff, "rank 0 was ended by SIGTERM"),
    ],
)
def test_the_first_failure_that_matters_is_told(
    ranks: list[tuple[int, str | None, str]], kind: type[MoesaicError], words: str, tmp_path: Path
) -> None:
    cause = end(tmp_path, *ranks)
    assert type(cause) is kind
    assert str(cause) == words


def test_a_run_by_a_plan_goes_on_by_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMIT").touch()
    for plan, words in (("my plan.json", "--plan 'my plan.json'"), (None, "--nproc 2")):
        part = rank.Part("job.toml", [], str(tmp_path), None, False, [], plan)
        said = _how_to_go_on(part, 2)
        assert said == f"; to go on: moesaic train job.toml {words} --out {tmp_path} --resume"


def test_a_record_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text('{"kind": "us')
    assert isinstance(end(tmp_path, (1, "bug", "ours")), RankFailed)


def take_part(job: Path, error_file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    part = rank.Part(str(job), [], "run", None, False, ["moesaic", "train"])
    monkeypatch.setattr(sys, "argv", ["rank", rank.encode(part)])
    monkeypatch.setenv(rank.ERROR_FILE, str(error_file))
    return rank.main()


def test_a_rank_writes_what_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, file = tmp_path / "job.toml", tmp_path / "error.json"
    job.write_text(JOB + "[trian]\n")
    assert take_part(job, file, monkeypatch) == 2
    record = json.loads(file.read_text())
    assert (record["kind"], "did you mean 'train'?" in record["text"]) == ("user", True)
    # The shape that torch's agent reads.
    assert record["message"]["message"] == record["text"]
    assert record["message"]["extraInfo"]["timestamp"].isdigit()

    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(rank, "load_job", broken)
    assert take_part(job, file, monkeypatch) == 1
    assert "RuntimeError: ours" in json.loads(file.read_text())["text"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("failure", "status", "last"),
    [
        (UserError("one sentence"), 2, "error: one sentence"),
        (CutOff("ended by SIGTERM"), 75, "error: ended by SIGTERM"),
        (CutOff("interrupted", 130), 130, "error: interrupted"),
        (RankFailed("Traceback ..."), 1, "error: a rank failed, which is a bug of moesaic: "
         "its traceback stands above"),
    ],
)  # fmt: skip
def test_every_end_has_its_status(
    failure: Exception, status: int, last: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moesaic.cli.train.launch", fail)
    Path("job.toml").write_text(JOB)
    Path("x").write_text("text")
    line = "train job.toml --nproc 2 --set train.device=cpu --set data.format=text"
    assert main(line.split()) == status
    assert capfd.readouterr().err.splitlines()[-1] == last


def test_a_rank_whose_parent_is_gone_when_it_begins_ends(tmp_path: Path) -> None:
    """As one that was started while an interrupt ended its parent: nobody else would end it."""
    line = [sys.executable, "-m", "moesaic.cli.start", str(os.getpid() + 1), "moesaic.cli.rank"]
    part = '{"job": "job.toml", "sets": [], "out": "run", "resume": null, "as_json": false, '
    done = subprocess.run(
        [*line, part + '"command": []}'], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
