"""Work that every rank does on its own disk, rank 0 first: done by all or failed by all.

Rank 0 works while the others wait, so that a shared cache is written once; then they do the same
(and find the cache filled, or fill their own machine's), and all compare what they got. An error
of one rank becomes the same error on every rank. Ranks meet through the world's store; a rank at
work says so now and then, and the world's deadline counts from its last sign of life.
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
"""Work to do; it calls what it is given now and then, to say that it lives."""

_VERDICT = "verdict"


def work_in_turn(world: World, what: str, work: Work[T], digest: Callable[[T], str]) -> T:
    """What `work` returns on this rank, once it has gone well on every rank.

    Args:
        world: the ranks; all of them call this, in the same order of calls.
        what: the work in words, for messages.
        work: see `Work`.
        digest: says of a result what must be the same on all ranks.
    """
    if world.size == 1:
        return work(lambda: None)
    meeting = _Meeting(world, what)
    if not world.leads:
        first = meeting.hear("0", 0)
        result = meeting.attempt(work, digest, expected=first["digest"])
        meeting.hear(_VERDICT, 0)
        return result
    result = meeting.attempt(work, digest)
    try:
        for rank in range(1, world.size):
            meeting.hear(str(rank), rank)
    except MoesaicError as error:
        meeting.say(_VERDICT, error=error)
        raise
    meeting.say(_VERDICT)
    return result


class _Meeting:
    """One call of `work_in_turn`, over the store."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what
        # Each rank counts its own calls in the store: the n-th calls of all ranks belong together.
        turn = world.store.add(f"agreement/turn/{world.rank}", 1)
        self._store = dist.PrefixStore(f"agreement/{turn}", world.store)
        self._last_beat = time.monotonic()

    def attempt(self, work: Work[T], digest: Callable[[T], str], expected: str | None = None) -> T:
        """Work, and tell the others how it went."""
        name = str(self._world.rank)
        try:
            result = work(self._beat)
            found = digest(result)
            if expected is not None and found != expected:
                raise DataError(
                    f"{self._what}: rank {self._world.rank} found other text than rank 0: give "
                    "all machines the same files"
                )
        except Exception as error:
            self.say(name, error=error)
            raise
        self.say(name, digest=found)
        return result

    def say(self, name: str, *, digest: str = "", error: Exception | None = None) -> None:
        """Leave word under `name`."""
        word: dict[str, Any] = {"digest": digest}
        if error is not None:
            kind = type(error).__name__
            user = isinstance(error, MoesaicError)
            text = str(error) if user else f"{self._what} failed with {kind}: {error}"
            word = {"error": kind if user else MoesaicError.__name__, "text": text}
        self._store.set(name, json.dumps(word))

    def hear(self, name: str, rank: int) -> dict[str, Any]:
        """The word left by `rank` under `name`; an error in it is raised here."""
        beats = 0
        while not self._world.await_words(self._store, [name]):
            seen = self._store.add(f"beat/{rank}", 0)
            if seen == beats:
                raise MoesaicError(
                    f"{self._what}: no sign of life from rank {rank} for {self._world.deadline}"
                )
            beats = seen
        word: dict[str, Any] = json.loads(self._store.get(name))
        if "error" in word:
            kind = getattr(errors, word["error"], MoesaicError)
            raise kind(word["text"])
        return word

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat > min(1.0, self._world.deadline.total_seconds() / 4):
            self._last_beat = now
            self._store.add(f"beat/{self._world.rank}", 1)
