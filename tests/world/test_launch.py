"""Ranks started by --nproc and by torchrun: how they end, and what the user hears of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import Commands
from moesaic.base.events import read_events
from moesaic.testing.jobs import RUN_JOB

JOB = RUN_JOB.replace("steps = 4", "steps = 3") + "\n[layout]\nep = 2\n"

ENDLESS = ["--set", "train.steps=1000000", "--set", "checkpoint.every=2", "--out", "my run"]
GO_ON = "; to continue: moesaic train --out 'my run' --resume\n"


_started: list[subprocess.Popen[str]] = []
"""Processes of the running test."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "text.txt").write_text("words and more words " * 40)
    (tmp_path / "job.toml").write_text(JOB)
    yield tmp_path
    for process in _started:  # A failed test leaves its run, which may be endless.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    _started.clear()


def start(
    place: Path, *flags: str, module: str = "moesaic", file_limit: int | None = None
) -> subprocess.Popen[str]:
    limit = ["prlimit", f"--fsize={file_limit}"] if file_limit else []
    process = subprocess.Popen(
        [*limit, sys.executable, "-m", *module.split(), "train", "job.toml", *flags],
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    _started.append(process)
    return process


def ranks_of(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed}
    return [pid for pid, command in commands.items() if b"moesaic.api.train_worker" in command]


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_ranks_train_and_the_parent_tells(place: Path) -> None:
    process = start(place, "--nproc", "2", "--out", "run", "--json", "--verbose")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    facts = json.loads(out)
    assert (facts["ranks"], facts["step"], facts["status"]) == (2, 3, "finished")
    first, model, engines, balance, *others = err.splitlines()
    shared = "experts over 2, tokens once per expert, dense parameters on every rank"
    assert re.fullmatch(rf"plan: 2 ranks, {shared}; cpu \(.* 1 thread per rank\)", first)
    assert re.fullmatch(r"olmoe: [0-9,]+ parameters, [0-9,]+ active", model)
    by = r"(oneDNN \(torch\.mm for [a-z ]+\)|torch\.mm) per expert(, small experts .*)?"
    assert re.fullmatch(rf"experts: {by}; tokens sent by memory", engines)
    few = r"a rank has \d+ routed tokens per layer; replicas pay off from 256"
    assert re.fullmatch(f"balance: no replicas, {few}", balance)
    assert all(line.startswith("step ") for line in others)
    assert (place / "run" / "report.html").is_file()
    for rank in (0, 1):
        events = read_events(place / "run" / "events" / f"rank-{rank}.jsonl")
        assert sum(event["event"] == "rank_step" for event in events) == 3
    command = json.loads((place / "run" / "versions.json").read_text())["command"]
    assert command[-6:] == ["--nproc", "2", "--out", "run", "--json", "--verbose"]


def test_a_mistake_that_ranks_find_is_told_once(place: Path) -> None:
    # The first line is JSON, so only a rank finds the second one.
    (place / "text.txt").write_text('{"text": "words and more words"}\nno JSON\n')
    process = start(place, "--nproc", "2", "--out", "run", "--set", "data.format=jsonl")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "text.txt" in err
    assert not (place / "run").exists()


def test_ranks_end_with_their_parent(place: Path) -> None:
    process = start(place, "--nproc", "2", *ENDLESS)
    wait_for(lambda: any(place.glob("my run/checkpoints/*/COMMIT")), process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    if err:  # One of the ranks, in the moment before it ends too, of the other one's socket.
        assert "recvValue failed" in err
    all_go(ranks)


def all_go(ranks: list[int]) -> None:
    end = time.monotonic() + 20
    while not all(gone(pid) for pid in ranks):
        assert time.monotonic() < end, "a rank outlived its parent"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "rank 1 was ended by SIGKILL, often for lack of memory"),
        pytest.param(signal.SIGTERM, "ended by SIGTERM", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_is_killed_ends_the_run(
    number: signal.Signals, words: str, place: Path
) -> None:
    process = start(place, "--nproc", "2", *ENDLESS)
    wait_for(lambda: any(place.glob("my run/checkpoints/*/COMMIT")), process)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err == f"error: {words}{GO_ON}"
    assert all(gone(pid) for pid in ranks)
    last = list(read_events(place / "my run" / "events" / "rank-0.jsonl"))[-1]
    assert (last["event"], last["reason"]) == ("run_end", words)


def test_a_rank_that_the_kernel_kills_for_memory_names_the_remedy(
    place: Path, memory_group: Path | None
) -> None:
    if memory_group is None:
        pytest.skip("this process may not make a memory control group of version 1")
    group, limit = memory_group / "cgroup.procs", memory_group / "memory.limit_in_bytes"
    process = start(place, "--nproc", "2", *ENDLESS)
    group.write_text(str(process.pid))
    wait_for(lambda: any(place.glob("my run/checkpoints/*/COMMIT")), process)
    for rank in ranks_of(process.pid):  # Either may be killed, but not their parent.
        Path(f"/proc/{rank}/oom_score_adj").write_text("1000")
    used = int((memory_group / "memory.usage_in_bytes").read_text())
    limit.write_text(str(used + (32 << 20)))
    take = f"""
import os, sys
open('/proc/self/oom_score_adj', 'w').write('-1000')
open('{group}', 'w').write(str(os.getpid()))
taken = []
while 'oom_kill 0' in open('{memory_group}/memory.oom_control').read():  # Until the first kill.
    taken.append(b'1' * {1 << 18})
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", take], stdin=subprocess.PIPE) as other:
        _, err = process.communicate(timeout=60)
        other.communicate()
    assert process.returncode == 3, err  # Not 75: a new start would end alike.
    killed = r"error: there is not enough memory \(the kernel killed rank [01]\): "
    assert re.match(killed + r"raise train\.micro_batches ", err)
    again = "moesaic train --out 'my run' --resume --set KEY=VALUE"
    assert err.endswith(f"; to continue with the change: {again}\n")


def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint(place: Path) -> None:
    """Only the request to end saves: the job itself saves at the end alone."""
    process = start(place, "--nproc", "2", *ENDLESS, "--set", "checkpoint.every=0")
    log = place / "my run" / "events" / "rank-0.jsonl"
    wait_for(lambda: log.exists() and '"event": "step"' in log.read_text(), process)
    ranks = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, f"error: ended by SIGTERM{GO_ON}")
    assert all(gone(pid) for pid in ranks)
    events = list(read_events(log))
    last = max(event["step"] for event in events if event["event"] == "step")
    (saved,) = (place / "my run" / "checkpoints").glob("*/COMMIT")
    assert saved.parent.name == f"step-{last:08d}"
    assert (events[-1]["event"], events[-1]["reason"]) == ("run_end", "ended by SIGTERM")
    assert sum(event["event"] == "run_end" for event in events) == 1
    assert not (place / "my run" / "LOCK").exists()


def test_a_full_disk_in_the_middle_of_a_run_is_one_sentence(place: Path) -> None:
    endless = ["--set", "train.steps=1000000", "--set", "layout.ep=1", "--out", "run"]
    process = start(place, "--nproc", "2", *endless, file_limit=1 << 16)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 2, err
    assert err.startswith("error: 'run/events/rank-")
    assert "cannot be written (File too large): make room, or" in err
    assert err.count("\n") == 1


def test_a_reader_that_leaves_costs_no_training(place: Path) -> None:
    flags = ["--nproc", "2", "--set", "layout.ep=1", "--out", "run", "--set"]
    process = start(
        place, *flags, "train.validate_every=1", "--set", "data.validation_path=text.txt"
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    assert (place / "run" / "report.html").is_file()


def test_a_second_process_is_kept_out_of_a_run_and_an_interrupt_ends_the_first(
    place: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    first = start(place, "--nproc", "2", *ENDLESS)
    try:
        wait_for(lambda: any(place.glob("my run/checkpoints/*/COMMIT")), first)
        second = ["train", "job.toml", *ENDLESS, "--set", "layout.ep=1", "--resume"]
        err = commands.refusal(second)
        ranks = ranks_of(first.pid)
        (pid,) = [pid for pid in ranks if f"process {pid} on " in err]
        assert pid
        assert err.startswith("error: 'my run' is in use by process ")
        assert err.endswith(": wait for its end, or name another directory\n")
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=60)
    assert (first.returncode, err) == (130, f"interrupted{GO_ON}")
    all_go(ranks)
    assert not (place / "my run" / "LOCK").exists()


def test_under_torchrun_the_program_is_one_rank(place: Path) -> None:
    """It tells of copies at the start and at the end."""
    costs = "{expert_tokens_per_s = 1.0, bytes_per_s = 1e30, latency_s = 0, overlaps = true}"
    told = ['policy="eplb"', "as_published=true", f"costs={costs}"]
    sets = [word for one in told for word in ("--set", f"balance.{one}")]
    module = "torch.distributed.run --standalone --nproc-per-node 2 -m moesaic"
    process = start(place, "--verbose", *sets, module=module)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert out.count("trained 3 steps") == 1
    assert out.count("balance: eplb, as published; experts 1 tokens/s") == 1
    assert len(re.findall(r"^  balance costs do not match this machine: ", out, re.M)) == 1
    (run,) = (place / "runs").iterdir()
    assert run.name.startswith("job-")
    assert (run / "events" / "rank-1.jsonl").is_file()


WATCHED = """
import os
from moesaic.__main__ import main
from moesaic.api import start

def end(status):
    open(f"status-{os.environ['RANK']}", "w").write(str(status))
    os._exit(status)

start.exit_process = end
main()
"""
"""Module that runs moesaic and keeps its exit status, which torchrun does not tell."""


def test_sigterm_to_torchrun_ends_every_rank_after_its_step_with_a_checkpoint(place: Path) -> None:
    """torchrun forwards it to each rank, and ends with a traceback and a status of its own."""
    (place / "watched.py").write_text(WATCHED)
    module = "torch.distributed.run --standalone --nproc-per-node 2 -m watched"
    process = start(place, *ENDLESS, "--set", "checkpoint.every=0", module=module)
    log = place / "my run" / "events" / "rank-0.jsonl"
    wait_for(lambda: log.exists() and '"event": "step"' in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    ended = "error: ended by SIGTERM; to continue: the same command with --out 'my run' --resume\n"
    assert err.count(ended) == 1
    assert [(place / f"status-{rank}").read_text() for rank in (0, 1)] == ["75", "75"]
    events = list(read_events(log))
    last = max(event["step"] for event in events if event["event"] == "step")
    (saved,) = (place / "my run" / "checkpoints").glob("*/COMMIT")
    assert saved.parent.name == f"step-{last:08d}"
    assert (events[-1]["event"], events[-1]["reason"]) == ("run_end", "ended by SIGTERM")
