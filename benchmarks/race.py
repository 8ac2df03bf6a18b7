"""Race training steps against those of transformers, after both gave the same losses.

transformers computes in processes of its own, without the settings that moesaic makes for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.on_ranks import Unlike
from benchmarks.peer_process import SPINS
from benchmarks.training import TRANSFORMERS, Ours, Theirs
from moesaic.api.start import SPIN_COUNT
from moesaic.facts.job import Job

STEPS = 3
TOLERANCE = 1e-4
_PATIENCE_S = 30.0


def race(
    ours: Ours, theirs: Mapping[str, Theirs | Apart], rounds: int, *, same: int
) -> tuple[measure.Row, measure.Row]:
    """Compare losses, then time steps in turn.

    Return the largest difference of losses, and the speed against the quickest mode.

    Args:
        ours: moesaic's run.
        theirs: modes of transformers, from the same weights.
        rounds: rounds to keep.
        same: steps whose losses must be the same.
    """
    job = ours.run.job
    what = f"{job.model.family}, {job.train.batch} x {job.data.sequence} tokens"
    apart = max(differences(ours, theirs)[:same])
    first = "first step" if same == 1 else f"first {same} steps"
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours.step, **{mode: one.step for mode, one in theirs.items()},
    }  # fmt: skip
    times = measure.interleave(contenders, rounds)
    best = min(theirs, key=times.median)
    loss = measure.row(
        f"difference of the losses, {first}, {what}", apart, "nat", bar="",
        against=f"{TRANSFORMERS}, {' and '.join(theirs)}", repeats=same,
    )  # fmt: skip
    speed = measure.compare(
        f"training tokens/s, {what}", times, best, "ours",
        against=f"{TRANSFORMERS}, experts_implementation {best}, the quickest of {len(theirs)} "
        "modes, same weights and batches, a process of its own, "
        f"{torch.get_num_threads()} threads",
    )  # fmt: skip
    return loss, speed


def differences(ours: Ours, theirs: Mapping[str, Theirs | Apart]) -> list[float]:
    """Return by step how far losses of contenders with the same weights are apart at most.

    Raise where those of the first step differ, the balance loss included.
    """
    balances = {mode: one.balance() for mode, one in theirs.items() if one.weight}
    apart = []
    for step in range(STEPS):
        facts = ours.run.step(ours.samples)
        found = {mode: abs(one.step() - facts.loss) for mode, one in theirs.items()}
        if step == 0:
            for mode, balance in balances.items():
                found[mode] = max(found[mode], abs(balance - facts.balance_loss))
        apart.append(max(found.values()))
        if apart[0] > TOLERANCE:
            raise Unlike(
                f"{ours.run.job.model.family}: losses of the first step differ from ours, "
                f"{facts.loss} and {facts.balance_loss}, by {found}"
            )
    return apart


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Remove moesaic's setting of OpenMP meanwhile."""
    ours = os.environ.get(SPINS) == SPIN_COUNT
    if ours:
        del os.environ[SPINS]
    try:
        yield
    finally:
        if ours:
            os.environ[SPINS] = SPIN_COUNT


class Apart:
    """`Theirs` in another process, which computes on request."""

    def __init__(self, ours: Ours, experts: str) -> None:
        """Start it with the weights of `ours`."""
        here = Theirs.like(ours, experts)
        self.weight, self._experts = here.weight, experts
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.pt"
            torch.save(here.model.state_dict(), weights)
            del here
            given = (other, ours.run.job, experts, weights, torch.get_num_threads())
            self._process = context.Process(target=_serve, args=given, daemon=True)
            with _as_it_was():
                self._process.start()
            other.close()
            self._ask("")

    def step(self) -> float:
        """Take one step; return its cross-entropy."""
        loss: float = self._ask("step")
        return loss

    def balance(self) -> float:
        """Return the balance loss: see `Theirs`."""
        balance: float = self._ask("balance")
        return balance

    def close(self) -> None:
        """End the process."""
        self._end.close()
        self._process.join(_PATIENCE_S)
        self._process.terminate()

    def _ask(self, name: str) -> Any:
        """Return its answer; its errors are on stderr."""
        try:
            self._end.send(name)
            return self._end.recv()
        except (EOFError, OSError) as error:
            self._process.join(_PATIENCE_S)
            code = self._process.exitcode
            raise RuntimeError(f"the process of {self._experts} ended with {code}") from error


def _serve(end: Connection, job: Job, experts: str, weights: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    theirs = Theirs(job, experts)
    theirs.model.load_state_dict(torch.load(weights))
    while True:
        try:
            name = end.recv()
        except EOFError:
            return
        end.send(getattr(theirs, name)() if name else None)
