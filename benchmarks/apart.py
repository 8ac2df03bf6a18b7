"""A contender in a process of its own, without the settings that moesaic makes for itself."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.training import Ours, Theirs
from moesaic.api.start import SPIN_COUNT
from moesaic.facts.job import Job

_PATIENCE_S = 30.0
SPINS = "GOMP_SPINCOUNT"


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
