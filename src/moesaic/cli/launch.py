"""Start of ranks on this machine through torch's elastic agent, with one message about failures."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.base.errors import MoesaicError, UserError
from moesaic.cli import screen
from moesaic.cli.start import block_interrupts, exit_on_interrupt

EXIT_RELAUNCH, EXIT_INTERRUPTED = 75, 130

Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", help="Ranks to start on this machine.", show_default="1"),
]


class RankFailed(MoesaicError):
    """A bug in a rank; the message is its traceback."""


class RunInterrupted(MoesaicError):
    """A run that was ended from outside; --resume continues it."""

    def __init__(self, text: str, status: int = EXIT_RELAUNCH) -> None:
        super().__init__(text)
        self.status = status
        """Exit status of the command line."""


def is_torchrun() -> bool:
    """Return whether torchrun or a similar launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_leader() -> bool:
    """Return whether this process prints for all ranks."""
    return not is_torchrun() or os.environ["RANK"] == "0"


def message_prefix() -> str:
    """Return the prefix of messages: `rank 1: ` under torchrun, empty for rank 0."""
    return "" if is_leader() else f"rank {os.environ['RANK']}: "


def num_ranks(nproc: int | None) -> int | None:
    """Return the number of ranks to start, or of ranks under torchrun; None if unset."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: give a number from 1")
    if not is_torchrun():
        return nproc
    if nproc is not None:
        raise UserError(f"--nproc {nproc} under torchrun, which starts the ranks: remove it")
    return int(os.environ["WORLD_SIZE"])


def launch(module: str, task: str, ranks: int) -> None:
    """Run `ranks` processes of `module` with `task` until all end.

    Raise the first failure: UserError, RankFailed, or RunInterrupted if a signal ended a rank.
    """
    with exit_on_interrupt():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if "elastic" in name]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _set_rank_environment(ranks)
    with tempfile.TemporaryDirectory(prefix="moesaic-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        try:
            arguments = ("-m", "moesaic.cli.start", str(os.getpid()), module, task)
            with block_interrupts():
                elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            raise _first_failure(Path(logs), error.failures) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise RunInterrupted("interrupted", EXIT_INTERRUPTED) from None
            raise RunInterrupted(f"ended by {error.sigval.name}") from None


def print_rank_failure(error: RankFailed) -> int:
    """Print why a rank failed; return the exit status."""
    screen.err().print(str(error).rstrip())
    screen.print_error("a rank failed because of a bug in moesaic; see the traceback above")
    return 1


def _set_rank_environment(ranks: int) -> None:
    """Set what torchrun leaves to its user: threads per rank, and the loopback interface."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _first_failure(logs: Path, failures: dict[int, Any]) -> MoesaicError:
    """Return the cause of the failure: the first user error, else a signal, else a bug.

    Peers of a failed rank fail too; their errors are consequences.
    """
    records = sorted(_read_error_files(logs), key=lambda record: float(record["time"]))
    for record in records:
        if record["kind"] == "user":
            return UserError(record["text"])
    interruption = _find_signal(failures)
    if interruption is not None:
        return interruption
    for record in records:
        if record["kind"] == "bug":
            return RankFailed(record["text"])
    reported = {record["rank"] for record in records}
    for rank, failure in failures.items():
        if failure.exitcode != -signal.SIGTERM and str(rank) not in reported:
            status = failure.exitcode
            return RankFailed(f"rank {rank} ended with exit status {status} and no message")
    # In the order of their ends: the agent ends the other ranks after the first one.
    for rank, failure in failures.items():
        if failure.exitcode == -signal.SIGTERM:
            return RunInterrupted(f"rank {rank} was ended by SIGTERM")
    return RankFailed(records[0]["text"])


def _find_signal(failures: dict[int, Any]) -> RunInterrupted | None:
    """Return the signal that ended a rank, except the agent's own SIGTERM to other ranks."""
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            name = signal.Signals(-failure.exitcode).name
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
