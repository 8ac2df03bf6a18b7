"""Starting ranks on this machine through torch's elastic agent, and saying once how they ended."""

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
from moesaic.cli.start import at_once, holding_back

RELAUNCH, INTERRUPTED = 75, 130

Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", help="Ranks to start on this machine.", show_default="1"),
]


class RankFailed(MoesaicError):
    """A rank met a bug; the message is its traceback."""


class CutOff(MoesaicError):
    """A run was ended from outside; starting again with --resume goes on."""

    def __init__(self, text: str, status: int = RELAUNCH) -> None:
        super().__init__(text)
        self.status = status
        """What the command line exits with."""


def launched() -> bool:
    """Whether torchrun, or the like, started this process as one rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    """Whether this process speaks for all."""
    return not launched() or os.environ["RANK"] == "0"


def speaker() -> str:
    """What a message of this process opens with: `rank 1: ` under torchrun, if it is not rank 0."""
    return "" if leads() else f"rank {os.environ['RANK']}: "


def num_ranks(nproc: int | None) -> int | None:
    """How many ranks there will be, or are; None where nobody said."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: give a number from 1")
    if not launched():
        return nproc
    if nproc is not None:
        raise UserError(f"--nproc {nproc} under torchrun, which starts the ranks: leave it out")
    return int(os.environ["WORLD_SIZE"])


def launch(module: str, part: str, ranks: int) -> None:
    """Run `ranks` ranks to their end, each as what `cli.start` makes of `module` and `part`.

    Raises what the first one to fail met: UserError, RankFailed, or CutOff where a signal ended it.
    """
    with at_once():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if "elastic" in name]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _share_machine(ranks)
    with tempfile.TemporaryDirectory(prefix="moesaic-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        try:
            begin = ("-m", "moesaic.cli.start", str(os.getpid()), module, part)
            with holding_back():
                elastic_launch(config, sys.executable)(*begin)
        except ChildFailedError as error:
            raise _cause(Path(logs), error.failures) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise CutOff("interrupted", INTERRUPTED) from None
            raise CutOff(f"ended by {error.sigval.name}") from None


def tell_bug(error: RankFailed) -> int:
    """Tell what ended a rank; returns the exit status."""
    screen.err().print(str(error).rstrip())
    screen.fail("a rank failed, which is a bug of moesaic: its traceback stands above")
    return 1


def _share_machine(ranks: int) -> None:
    """What torchrun leaves to its user: threads for every rank, and a link that is always there."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _cause(logs: Path, failures: dict[int, Any]) -> MoesaicError:
    """What ended the ranks: the first mistake of the user's, or signal, or bug, in this order.

    A rank that fails takes its peers along, whose own complaints say nothing.
    """
    records = sorted(_read_records(logs), key=lambda record: float(record["time"]))
    for record in records:
        if record["kind"] == "user":
            return UserError(record["text"])
    cut = _cut_off(failures)
    if cut is not None:
        return cut
    for record in records:
        if record["kind"] == "bug":
            return RankFailed(record["text"])
    heard = {record["rank"] for record in records}
    for rank, failure in failures.items():
        if failure.exitcode != -signal.SIGTERM and str(rank) not in heard:
            status = failure.exitcode
            return RankFailed(f"rank {rank} ended with exit status {status} and said nothing")
    # In the order of their ends: the agent ends the others only after the first.
    for rank, failure in failures.items():
        if failure.exitcode == -signal.SIGTERM:
            return CutOff(f"rank {rank} was ended by SIGTERM")
    return RankFailed(records[0]["text"])


def _cut_off(failures: dict[int, Any]) -> CutOff | None:
    """The signal that ended a rank, unless it is the one by which the agent ends the others."""
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            name = signal.Signals(-failure.exitcode).name
            hint = ", often for want of memory" if name == "SIGKILL" else ""
            return CutOff(f"rank {rank} was ended by {name}{hint}")
    interrupted = (INTERRUPTED, -signal.SIGINT)  # Where it was ready to hear it, and before.
    if any(failure.exitcode in interrupted for failure in failures.values()):
        return CutOff("interrupted", INTERRUPTED)
    return None


def _read_records(logs: Path) -> Iterator[dict[str, Any]]:
    for path in logs.rglob("error.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # Its writer was killed over it.
        if "kind" in record:
            yield {**record, "rank": path.parent.name}
