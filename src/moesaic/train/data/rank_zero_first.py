"""Work on each rank's disk, on rank 0 first, that succeeds or fails on all ranks together.

Rank 0 works while the others wait, so a shared cache is written once. Then the others do the same
work, with a filled cache or their own machine's, and all compare results. An error on one rank
becomes the same error on every rank. Ranks communicate through the world's store. A working rank
sends heartbeats, and the world's timeout counts from its last one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from moesaic.base import errors
from moesaic.base.errors import DataError, MoesaicError
from moesaic.dist.world import World

T = TypeVar("T")
Work = Callable[[Callable[[], None]], T]
"""Function to run, which calls its argument now and then as a heartbeat."""

_VERDICT = "verdict"
_MESSAGE_S = 2.0
"""Seconds between messages about progress."""


def make_progress_log(
    heartbeat: Callable[[], None], log: Callable[[str], None]
) -> Callable[[str], None]:
    """Return a function that sends a heartbeat, and logs its text unless it did so just before."""
    last = time.monotonic()

    def report(text: str) -> None:
        nonlocal last
        heartbeat()
        now = time.monotonic()
        if now - last > _MESSAGE_S:
            last = now
            log(text)

    return report


def run_rank_zero_first(
    world: World, description: str, work: Work[T], digest: Callable[[T], str]
) -> T:
    """Return the result of `work` on this rank, after it succeeded on every rank.

    Args:
        world: the ranks; all of them make the same calls in the same order.
        description: description of the work, for messages.
        work: the work; see `Work`.
        digest: function from a result to a string that must be equal on all ranks.
    """
    if world.size == 1:
        return work(lambda: None)
    session = _StoreSession(world, description)
    if not world.is_rank_zero:
        first = session.await_result("0", 0)
        result = session.run_work(work, digest, expected=first["digest"])
        session.await_result(_VERDICT, 0)
        return result
    result = session.run_work(work, digest)
    try:
        for rank in range(1, world.size):
            session.await_result(str(rank), rank)
    except MoesaicError as error:
        session.post_result(_VERDICT, error=error)
        raise
    session.post_result(_VERDICT)
    return result


class _StoreSession:
    """One call of `run_rank_zero_first`, through the store."""

    def __init__(self, world: World, description: str) -> None:
        self._world, self._description = world, description
        # Each rank counts its calls in the store, so the n-th calls of all ranks belong together.
        turn = world.store.add(f"agreement/turn/{world.rank}", 1)
        self._store = dist.PrefixStore(f"agreement/{turn}", world.store)
        self._last_heartbeat = time.monotonic()

    def run_work(self, work: Work[T], digest: Callable[[T], str], expected: str | None = None) -> T:
        """Run `work` and post the outcome for the other ranks."""
        name = str(self._world.rank)
        try:
            result = work(self._send_heartbeat)
            result_digest = digest(result)
            if expected is not None and result_digest != expected:
                raise DataError(
                    f"{self._description}: rank {self._world.rank} found other data than rank 0: "
                    "give all machines the same files"
                )
        except Exception as error:
            self.post_result(name, error=error)
            raise
        self.post_result(name, digest=result_digest)
        return result

    def post_result(self, name: str, *, digest: str = "", error: Exception | None = None) -> None:
        """Post an outcome under `name`."""
        outcome: dict[str, Any] = {"digest": digest}
        if error is not None:
            kind = type(error).__name__
            is_ours = isinstance(error, MoesaicError)
            text = str(error) if is_ours else f"{self._description} failed with {kind}: {error}"
            outcome = {"error": kind if is_ours else MoesaicError.__name__, "text": text}
        self._store.set(name, json.dumps(outcome))

    def await_result(self, name: str, rank: int) -> dict[str, Any]:
        """Return the outcome of `rank` under `name`; raise if it is an error."""
        beats = 0
        while not self._world.wait_for_keys(self._store, [name]):
            count = self._store.add(f"beat/{rank}", 0)
            if count == beats:
                raise MoesaicError(
                    f"{self._description}: no sign of life from rank {rank} "
                    f"for {self._world.timeout}"
                )
            beats = count
        outcome: dict[str, Any] = json.loads(self._store.get(name))
        if "error" in outcome:
            kind = getattr(errors, outcome["error"], MoesaicError)
            raise kind(outcome["text"])
        return outcome

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat > min(1.0, self._world.timeout.total_seconds() / 4):
            self._last_heartbeat = now
            self._store.add(f"beat/{self._world.rank}", 1)
