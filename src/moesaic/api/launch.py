"""Start of ranks on this machine through torch's elastic agent, with one message about failures.

Such a rank prints no errors. It writes a failure to the file that torch's agent names; the parent
reads all files and raises the first cause.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from moesaic.api.start import block_interrupts
from moesaic.base import errors
from moesaic.base.errors import ConfigError, MoesaicError, UserError, as_user_error
from moesaic.base.files import atomic_replace
from moesaic.base.host_memory import count_killed_for_memory

EXIT_USER_ERROR, EXIT_DOES_NOT_FIT, EXIT_RELAUNCH, EXIT_INTERRUPTED = 2, 3, 75, 130
SILENCE_S = 5.0
"""Seconds that a rank waits for another one to report their mistake."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's agent: path for the report of a failure."""
RANK_MODULE = "moesaic.api.start"
"""Module that a rank's process runs."""
_SAVED = "saved"
"""Kind of a rank's report of an end from outside, after a checkpoint."""
_SIGTERM_ENDS = (-signal.SIGTERM, EXIT_RELAUNCH)
"""Exit statuses of ranks after SIGTERM, without and with a handler."""
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torch's agent handles."""


class RankFailed(MoesaicError):
    """A bug in a rank; the message is its traceback."""


class RunInterrupted(MoesaicError):
    """A run that was ended from outside; `resume` continues it."""

    def __init__(self, text: str, status: int = EXIT_RELAUNCH, *, is_saved: bool = False) -> None:
        super().__init__(text)
        self.status = status
        """Exit status of the command line."""
        self.is_saved = is_saved
        """True if the run saved its last step and recorded its end."""


def is_torchrun() -> bool:
    """Return whether torchrun or a similar launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_leader() -> bool:
    """Return whether this process prints for all ranks."""
    return not is_torchrun() or os.environ["RANK"] == "0"


def message_prefix() -> str:
    """Return the prefix of messages: `rank 1: ` under torchrun, empty for rank 0."""
    return "" if is_leader() else f"rank {os.environ['RANK']}: "


@contextmanager
def said_once() -> Iterator[None]:
    """Let one rank of each machine report a mistake that all of its ranks find.

    The others wait meanwhile and exit, since torchrun ends all ranks when the first one ends.
    """
    try:
        yield
    except UserError:
        if not is_torchrun() or os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        time.sleep(SILENCE_S)
        raise SystemExit(EXIT_USER_ERROR) from None


def num_ranks(nproc: int | None) -> int | None:
    """Return the number of ranks to start, or of ranks under torchrun; None if unset."""
    if nproc is not None and nproc < 1:
        raise ConfigError(f"nproc = {nproc}: give a number from 1")
    if not is_torchrun():
        return nproc
    if nproc is not None:
        raise ConfigError(f"nproc = {nproc} under torchrun, which starts the ranks: remove it")
    return int(os.environ["WORLD_SIZE"])


def launch(module: str, task: str, ranks: int, memory_hint: str) -> None:
    """Run `ranks` processes of `module` with `task` until all end.

    Raise the first failure: UserError, RankFailed, or RunInterrupted if a signal ended a rank.
    SIGINT of this process raises KeyboardInterrupt. `memory_hint` is the remedy against a lack of
    memory.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if "elastic" in name]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    killed_before = count_killed_for_memory()
    with tempfile.TemporaryDirectory(prefix="moesaic-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        )  # fmt: skip
        try:
            arguments = ("-m", RANK_MODULE, str(os.getpid()), module, task)
            with _restored_signal_handlers(), _forwarded_sigterm() as sent, block_interrupts():
                elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            is_short = count_killed_for_memory() > killed_before
            failure = _first_failure(Path(logs), error.failures, memory_hint if is_short else None)
            if sent and not isinstance(failure, UserError):
                failure = RunInterrupted("ended by SIGTERM")
            raise failure from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RunInterrupted(f"ended by {error.sigval.name}") from None
        for record in _read_error_files(Path(logs)):
            if record["kind"] == _SAVED:  # Every rank has ended with status 0.
                raise RunInterrupted(record["text"], is_saved=True)


@contextmanager
def _forwarded_sigterm() -> Iterator[list[int]]:
    """Send SIGTERM on to the ranks, which end by themselves; yield a list of the ranks told."""
    told = list[int]()

    def forward(_signal: int, _frame: FrameType | None) -> None:
        ranks = [] if told else list(_ranks_of(os.getpid()))
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        told.extend(ranks)
        if not told:
            raise RunInterrupted("ended by SIGTERM")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, forward)
    yield told


def _ranks_of(parent: int) -> Iterator[int]:
    """Yield the processes that `launch` has started in process `parent`."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
    for pid in listed:
        with suppress(OSError):
            if RANK_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that torch's agent replaces in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS if is_main}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_reporting_errors(work: Callable[[], object], memory_hint: str) -> int:
    """Do a rank's work; write errors to the error file and return the exit status.

    `memory_hint` is the remedy against a lack of memory.
    """
    try:
        work()
    except UserError as error:
        _write_error(str(error), type(error).__name__)
        return 2
    except RunInterrupted as error:
        if not error.is_saved:
            return error.status
        _write_error(str(error), _SAVED)  # Status 0, or the agent would end the other ranks.
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the parent prints it
        user_error = as_user_error(error, memory_hint)
        if user_error is not None:
            _write_error(str(user_error), type(user_error).__name__)
            return 2
        from moesaic.dist.world import is_peer_lost

        _write_error(traceback.format_exc(), "lost" if is_peer_lost(error) else "bug")
        return 1
    return 0


def _write_error(text: str, kind: str) -> None:
    """Write a failure in the form that torch's agent and the parent read.

    `kind` is a class of `base.errors`, "saved" for an end from outside, "lost" for a lost peer,
    or "bug".
    """
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    record = {
        "message": {"message": text, "extraInfo": extra},
        "kind": kind, "text": text, "time": time.time(),
    }  # fmt: skip
    try:
        # Atomically: the agent may read at any moment.
        with atomic_replace(Path(os.environ[ERROR_FILE])) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        print(text, file=sys.stderr)


def _first_failure(
    logs: Path, failures: dict[int, Any], memory_hint: str | None = None
) -> MoesaicError:
    """Return the cause of the failure: the first user error, else a signal, else a bug.

    Peers of a failed rank fail too; their errors are consequences. `memory_hint` is given if the
    kernel has killed a process for lack of memory meanwhile.
    """
    records = sorted(_read_error_files(logs), key=lambda record: float(record["time"]))
    for record in records:
        if hasattr(errors, record["kind"]):
            kind: type[UserError] = getattr(errors, record["kind"])
            return kind(record["text"])
    interruption = _find_signal(failures, memory_hint)
    if interruption is not None:
        return interruption
    for record in records:
        if record["kind"] == "bug":
            return RankFailed(record["text"])
    reported = {record["rank"] for record in records}
    for rank, failure in failures.items():
        if failure.exitcode not in _SIGTERM_ENDS and str(rank) not in reported:
            status = failure.exitcode
            return RankFailed(f"rank {rank} ended with exit status {status} and no message")
    # In the order of their ends: the agent ends the other ranks after the first one.
    for rank, failure in failures.items():
        if failure.exitcode in _SIGTERM_ENDS:
            return RunInterrupted(f"rank {rank} was ended by SIGTERM")
    return RankFailed(records[0]["text"])


def _find_signal(failures: dict[int, Any], memory_hint: str | None) -> RunInterrupted | None:
    """Return the signal that ended a rank, except the agent's own SIGTERM to other ranks."""
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            name = signal.Signals(-failure.exitcode).name
            if name == "SIGKILL" and memory_hint is not None:  # A new start would end alike.
                text = f"there is not enough memory (the kernel killed rank {rank}): {memory_hint}"
                return RunInterrupted(text, EXIT_DOES_NOT_FIT)
            hint = ", often for lack of memory" if name == "SIGKILL" else ""
            return RunInterrupted(f"rank {rank} was ended by {name}{hint}")
    interrupted = (EXIT_INTERRUPTED, -signal.SIGINT)  # With and without our handler.
    if any(failure.exitcode in interrupted for failure in failures.values()):
        return RunInterrupted("interrupted", EXIT_INTERRUPTED)
    return None


def _read_error_files(logs: Path) -> Iterator[dict[str, Any]]:
    for path in logs.rglob("error.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # The rank was killed while it wrote.
        if "kind" in record:
            yield {**record, "rank": path.parent.name}
