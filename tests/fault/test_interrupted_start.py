"""An interrupt at any moment of a start ends all processes without a traceback, and leaves nothing
behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from moesaic.api.run import Run
from moesaic.cli.main import VERBS
from moesaic.testing.jobs import RUN_JOB

JOB = RUN_JOB.replace("steps = 4", "steps = 1000000")


def start(place: Path, *flags: str, env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    """Start a run and return once it has begun to import."""
    place.mkdir()
    (place / "tmp").mkdir()
    (place / "text.txt").write_text("words and more words " * 40)
    (place / "job.toml").write_text(JOB)
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", "train", "job.toml", "--out", "run", *flags],
        cwd=place, env={**os.environ, "TMPDIR": str(place / "tmp"), **env},
        start_new_session=True,
        # Background processes and their children may ignore interrupts by inheritance.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # Until then the interpreter itself starts, which is out of our hands.
    wait_for(lambda: "pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
    return process


def wait_for(true: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def interrupt(process: subprocess.Popen[str]) -> str:
    """Interrupt the whole process group, as Ctrl-C on a terminal does; return its stderr."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def children(parent: int) -> list[str]:
    """Return the children of a process."""
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def living(group: int) -> Iterator[int]:
    """Yield the processes of a group that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own, *_ = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == group and state != "Z":
            yield int(path.parent.name)


LINES = [
    "train job.toml --out new", "generate run --prompt x", "serve run --set port=0",
    "eval run --tasks tasks", "predict run --data x --out y.csv", "convert run --out z",
    "inspect wait.toml", "report run", "replay run", "probe --out new.toml",
    "plan wait.toml --cluster h100-8", "calibrate run --cluster cluster.toml",
    "trace nets:make --out workload.json", "bench layer --set model.preset=tiny-olmoe",
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Directory with the files of `LINES`; its torch waits for the pipe PIPE."""
    for name in ("torch", "run/events", "run/checkpoints/step-00000002"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("import os; open(os.environ['PIPE']).read()")
    (tmp_path / "job.toml").write_text(JOB)
    for name, text in (
        ("text.txt", "words and more words"), ("nets.py", "def make(): pass"), ("x", ""),
        ("run/events/rank-0.jsonl", ""),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    for name in ("run/plan.json", "run/versions.json", "run/checkpoints/step-00000002/COMMIT"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def start_verb(files: Path, line: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a verb that will wait for a pipe: as a file that it reads, or in the import of torch;
    return both."""
    verb = line.split()[0]
    place, pipe = files / f"place-{verb}", files / f"pipe-{verb}"
    os.mkfifo(pipe)
    shutil.copytree(files / "run", place / "run")
    for name in ("job.toml", "text.txt", "nets.py", "x"):
        (place / name).symlink_to(files / name)
    for name in ("run/job.json", "wait.toml", "cluster.toml"):
        (place / name).symlink_to(pipe)
    path = os.pathsep.join([str(files), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", *line.split()],
        cwd=place, env={**os.environ, "PIPE": str(pipe), "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, pipe


@pytest.mark.timeout(120)
def test_an_interrupt_ends_every_verb_with_one_line(files: Path) -> None:
    assert {line.split()[0] for line in LINES} == set(VERBS)
    started = [(line, *start_verb(files, line)) for line in LINES]
    for line, process, pipe in started:
        try:
            with hold_open(pipe, process):
                stderr = interrupt(process)
        finally:
            process.kill()
        assert (process.returncode, stderr) == (130, "interrupted\n"), line
        wait_for(lambda group=process.pid: not list(living(group)), 20)


def test_sigterm_ends_a_server_that_loads_as_one_that_serves(files: Path) -> None:
    process, pipe = start_verb(files, "serve run --set port=0")
    try:
        with hold_open(pipe, process):
            process.send_signal(signal.SIGTERM)
            out, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, stderr) == (0, "", "ended by SIGTERM\n")


AROUND_IMPORTS = """
import signal, sys, time
from moesaic.api.start import exit_on_interrupt

moment, count = int(sys.argv[1]), 0

def interrupt_before(call):
    def called(*arguments, **named):
        global count
        if count == moment:
            signal.raise_signal(signal.SIGINT)
        count += 1
        return call(*arguments, **named)
    return called

signal.signal(signal.SIGINT, signal.default_int_handler)  # A background process ignores it.
signal.signal = interrupt_before(signal.signal)
signal.set_wakeup_fd = interrupt_before(signal.set_wakeup_fd)
try:
    with exit_on_interrupt(), exit_on_interrupt():
        if moment == 4:
            signal.raise_signal(signal.SIGINT)
    assert count == 4
    time.sleep(60)
except KeyboardInterrupt:
    sys.stderr.write("interrupted\\n")
    sys.exit(130)
"""
"""Program that SIGINT hits before one of the four calls that change its effect, or at moment 4
between them."""


@pytest.mark.parametrize("moment", range(5))
def test_an_interrupt_counts_while_its_effect_changes(moment: int) -> None:
    command = [sys.executable, "-c", AROUND_IMPORTS, str(moment)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


SWALLOWING = """
import signal, sys, time
from moesaic.cli import plan
from moesaic.cli.main import main

def swallow(*_, **__):
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
    except BaseException:
        raise ValueError("as a library makes of an interrupt") from None

signal.signal(signal.SIGINT, signal.default_int_handler)
plan.Question.predict = swallow
sys.exit(main(["plan", "job.toml", "--cluster", "h100-8"]))
"""
"""Program whose library swallows an interrupt."""


def test_a_library_cannot_swallow_an_interrupt_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, "-c", SWALLOWING]
    ended = subprocess.run(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


@contextmanager
def hold_open(pipe: Path, process: subprocess.Popen[str]) -> Iterator[None]:
    """Wait until the process reads the pipe, and let it wait for words meanwhile."""
    end = time.monotonic() + 60
    while True:
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # Nobody reads it yet.
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
    yield
    os.close(writer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "tries"),
    [
        ([], 1),
        (["--nproc", "2"], 2),
        pytest.param([], 12, marks=pytest.mark.soak),
        pytest.param(["--nproc", "2"], 8, marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_start_leaves_nothing(flags: list[str], tries: int, tmp_path: Path) -> None:
    process = start(tmp_path / "whole", *flags)
    began = time.monotonic()
    wait_for(lambda: (tmp_path / "whole/run/events/rank-0.jsonl").exists())
    start_s = time.monotonic() - began
    moments = [start_s * (index + 0.5) / tries for index in range(tries)]
    if flags:  # Also interrupt while the interpreters of ranks start.
        moments = [-0.02 * index for index in range(1, tries)] + moments[1:]
    for index, moment in enumerate([start_s, *moments]):
        if index:
            process = start(tmp_path / str(index), *flags)
            if moment < 0:
                wait_for(lambda parent=process.pid: children(parent))
            time.sleep(abs(moment))
        place = tmp_path / (str(index) if index else "whole")
        stderr = interrupt(process)
        where = f"{moment:.3f} of {start_s:.3f} s: {stderr}"
        assert process.returncode in (130, -signal.SIGINT), where
        assert "Traceback" not in stderr, where
        assert stderr.count("\n") <= 1, where
        wait_for(lambda group=process.pid: not list(living(group)), 20)
        assert not list((place / "tmp").iterdir()), where
        assert not (place / "run" / "LOCK").exists(), where
        assert not list(place.rglob("*.partial-*")), where


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "tries"),
    [
        ([], 3),
        (["--nproc", "2"], 2),
        pytest.param([], 12, marks=pytest.mark.soak),
        pytest.param(["--nproc", "2"], 12, marks=pytest.mark.soak),
    ],
)
def test_sigterm_before_the_first_step_says_what_to_do(
    flags: list[str], tries: int, tmp_path: Path
) -> None:
    process = start(tmp_path / "whole", *flags)
    began = time.monotonic()
    wait_for(lambda: (tmp_path / "whole/run/events/rank-0.jsonl").exists())
    start_s = time.monotonic() - began
    interrupt(process)
    for index in range(tries):
        process = start(tmp_path / str(index), *flags)
        time.sleep(start_s * index / tries)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 75, (index, stderr)
        if index and list((tmp_path / str(index)).glob("run/checkpoints/*/COMMIT")):
            continue  # This start was so much faster than the first one that it took a step.
        anew = "before the first step: nothing was saved, the same command starts anew\n"
        line = f"error: ended by SIGTERM {anew}"
        # A rank of several that waits in a library may add words about its own end.
        assert stderr.endswith(line) if flags else stderr == line, (index, stderr)
        wait_for(lambda group=process.pid: not list(living(group)), 20)
        assert not (tmp_path / str(index) / "run" / "LOCK").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "status", "start_of_line"),
    [
        (signal.SIGTERM, 75, "error: ended by SIGTERM; "),
        pytest.param(signal.SIGINT, 130, "interrupted; ", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_ended_while_it_diverges_says_so(
    number: int, status: int, start_of_line: str, tmp_path: Path
) -> None:
    process = start(tmp_path / "run", "--set", "optimizer.lr=10", "--set", "checkpoint.every=500")
    log = tmp_path / "run/run/events/rank-0.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count('"event": "step"') > 20)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert stderr.startswith(f"{start_of_line}the loss diverged from step ")
    assert "optimizer.lr = 10 is far above the usual 1e-4 to 1e-3. " in stderr
    assert "start anew with --out NEW --set optimizer.lr=0.001" in stderr
    assert "to continue" not in stderr
    assert Run.open(tmp_path / "run/run").summary()["status"] == "diverged"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ranks_that_compile(number: int, tmp_path: Path) -> None:
    for tenths in range(0, 60, 5):
        place = tmp_path / str(tenths)
        process = start(
            place, "--nproc", "2", "--set", "layout.ep=2", "--set", "balance.min_replica_tokens=1",
            env={"NUMBA_CACHE_DIR": str(place / "compiled")},
        )  # fmt: skip
        notice = "compiling the balance policy, once for this installation"
        assert process.stdout is not None
        assert any(line.startswith(notice) for line in process.stdout)
        time.sleep(tenths / 10)
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=30)
        anew = "nothing was saved, the same command starts anew\n"
        line = "interrupted: " if number == signal.SIGINT else "error: ended by SIGTERM before"
        assert stderr.startswith(line), (tenths, stderr)
        assert stderr.endswith(anew), (tenths, stderr)
        assert stderr.count("\n") == 1, (tenths, stderr)
        wait_for(lambda group=process.pid: not list(living(group)), 20)
        assert not (place / "run").exists()
