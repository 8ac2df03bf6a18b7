"""Saving: training waits for a copy in memory; a thread does the rest.

A save has these phases. On every rank: copy this rank's share into a host buffer (training waits
for this much or, where it asks for that, goes on until it would change the state); in a thread,
write it, hash it, announce files, hashes and pieces. Then rank 0's thread, once all have
announced: write the manifest, rename the commit record into place (from here on the checkpoint
exists), tell all, remove checkpoints beyond `keep`.

Who may delete: until a rank has announced, its files are its own, as nothing can be committed
without them; after that, only rank 0's verdict that the save failed gives them up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from moesaic.base import direct, tensorfile
from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import directory as checkpoints
from moesaic.dist.checkpoint.board import Board
from moesaic.dist.checkpoint.commit import await_files, commit, discard, merge
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    Manifest,
    TensorRecord,
)
from moesaic.dist.checkpoint.staging import Part, Share, Staging, live
from moesaic.dist.state import Piece, State
from moesaic.dist.world import World

PHASES = (
    "staged", "placed", "file_written", "share_written", "announced", "gathered",
    "manifest_written", "commit_written", "committed", "told", "old_withdrawn", "old_removed",
)  # fmt: skip
"""The names that a saver's `phase` is called with, in the order of one save on rank 0."""

_NICENESS = 10
"""How far the writer thread stands back: about a tenth of the time of a thread that does not."""


class _Told(StoreError):
    """Rank 0's verdict that the save failed, in its words for the user."""


@dataclass(frozen=True)
class _Save:
    """One save under way on this rank."""

    number: int
    step: int
    path: Path
    counters: dict[str, int]
    facts: dict[str, Any]
    share: Share
    state: State
    """The live state; to be read only before `settle` has returned, or in a save that blocks."""
    versions: list[int]
    """What the pieces' versions were, if they are still to be copied."""
    began: float


class Saver:
    """Writes the checkpoints of one run, at most one at a time. Every rank has one.

    Args:
        directory: where the checkpoints go; all ranks must share it.
        world: who saves together; its deadline is the patience with ranks that do not announce.
        keep: committed checkpoints that stay.
        asynchronous: write in a thread; else `save` returns when the checkpoint is committed, and
            needs no copy in memory.
        on_event: on rank 0, hears checkpoint (from the thread that saves), checkpoint_done,
            checkpoint_failed and checkpoint_leftover (from the writer thread).
        phase: called at each of PHASES, for tests that break a save there.
        file_bytes: a rank's share is cut into files of about this size.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        keep: int,
        asynchronous: bool = True,
        on_event: Callable[..., None] | None = None,
        phase: Callable[[str], None] | None = None,
        file_bytes: int = 2 << 30,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: a saver keeps at least the checkpoint it just made")
        self._directory, self._world, self._keep = directory, world, keep
        self._asynchronous = asynchronous
        self._emit = on_event if on_event is not None and world.leads else _ignore
        self._phase = phase or _ignore
        self._staging = Staging(world.rank, world.device, file_bytes)
        self._board = Board(world.store, world.rank)
        # Threads that stand by: starting one can cost the caller a turn of the interpreter lock.
        # Training may come to wait for the copy, so only the writer stands back behind training.
        self._copier = ThreadPoolExecutor(1, "checkpoint-copy")
        self._writer = ThreadPoolExecutor(1, "checkpoint-write", _stand_back)
        self._copying: Future[None] | None = None
        self._under_way: Future[None] | None = None
        self._waited_s = 0.0
        self._failure: BaseException | None = None
        self._num_saves = 0
        self._newest: Path | None = None
        if world.leads:
            self._clean()

    @property
    def newest(self) -> Path | None:
        """The checkpoint that this saver committed last, on every rank."""
        return self._newest

    def prepare(self, state: State) -> None:
        """Reserve the memory that saves of `state` copy into, so that the first one need not."""
        self.wait()
        if self._asynchronous:
            self._staging.prepare(self._staging.lay_out(state.pieces))

    def save(
        self, state: State, step: int, facts: Mapping[str, Any], overlap: bool = False
    ) -> float:
        """Begin a checkpoint of `state`; returns the seconds that the caller was kept waiting.

        Waits for the save before this one and raises what failed in it.

        Args:
            state: what to save, as it is now.
            step: finished optimizer steps.
            facts: what the run says of itself; must be JSON.
            overlap: leave the copy to the thread; the caller calls `settle` before it changes
                anything in `state`.
        """
        began = time.perf_counter()
        self.wait()
        self._num_saves += 1
        overlap = overlap and self._asynchronous
        save = self._begin(state, step, facts, overlap, began)
        if not self._asynchronous:
            self._run(save)
            self.wait()
            return time.perf_counter() - began
        self._waited_s = time.perf_counter() - began
        self._tell_begun(save)
        if overlap:
            self._copying = self._copier.submit(self._copy_late, save)
        self._under_way = self._writer.submit(self._run, save, self._copying)
        return time.perf_counter() - began

    def settle(self) -> float:
        """Wait until the state may change; returns the seconds that took, 0 if it may already."""
        copying, self._copying = self._copying, None
        if copying is None:
            return 0.0
        began = time.perf_counter()
        futures.wait([copying])
        waited_s = time.perf_counter() - began
        self._waited_s += waited_s
        return waited_s

    def wait(self) -> None:
        """Wait until no save is under way; raise what failed since the last call."""
        under_way, self._under_way = self._under_way, None
        self._copying = None
        if under_way is not None:
            under_way.result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Give up a save that waits for other ranks, and take no further one: the world is lost."""
        self._board.abandon()
        if self._under_way is not None:
            futures.wait([self._under_way])

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the save under way; where the block failed, do not wait for other ranks."""
        if error is None:
            self.wait()
        else:
            self.abandon()

    def _begin(
        self, state: State, step: int, facts: Mapping[str, Any], overlap: bool, began: float
    ) -> _Save:
        with self._told_on_failure(self._num_saves):
            share = self._staging.lay_out(state.pieces)
            if self._asynchronous:
                self._staging.reserve(share)
            versions = [piece.tensor._version for piece in state.pieces] if overlap else []
            save = _Save(
                self._num_saves, step, checkpoints.vacant(self._directory, step),
                dict(state.counters), json.loads(json.dumps(dict(facts), allow_nan=False)),
                share, state, versions, began,
            )  # fmt: skip
            if not overlap:
                if self._asynchronous:
                    self._staging.copy(state.pieces)
                self._phase("staged")
        return save

    @contextlib.contextmanager
    def _told_on_failure(self, number: int) -> Iterator[None]:
        """The others are on their way into this save: let them fail now, not at the deadline."""
        try:
            yield
        except BaseException as error:
            key = "verdict" if self._world.leads else str(self._world.rank)
            message = {"error": f"rank {self._world.rank}: {error}", "given_up": True}
            self._board.post(f"{number}/{key}", message)
            raise

    def _copy_late(self, save: _Save) -> None:
        """Copy the state while training goes on, as far as it leaves the state alone."""
        with self._told_on_failure(save.number):
            self._staging.copy(save.state.pieces)
            for piece, version in zip(save.state.pieces, save.versions, strict=True):
                if piece.tensor._version != version:
                    raise AssertionError(
                        f"{piece.key} was changed while it was copied: call settle() first"
                    )
            self._phase("staged")

    def _tell_begun(self, save: _Save) -> None:
        self._emit("checkpoint", step=save.step, path=str(save.path), blocking_s=self._waited_s)

    def _run(self, save: _Save, copying: Future[None] | None = None) -> None:
        try:
            if copying is not None:
                copying.result()
            if self._world.leads:
                self._lead(save)
            else:
                self._follow(save)
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the caller raises it
            self._failure = error
            self._failure = self._explain(error, save)
            self._emit("checkpoint_failed", step=save.step, error=str(self._failure))

    # Rank 0.

    def _clean(self) -> None:
        """Remove what saves that failed or were killed have left; nobody writes there now."""
        for path in checkpoints.leftovers(self._directory):
            checkpoints.remove(path)

    def _lead(self, save: _Save) -> None:
        path = save.path
        try:
            self._clean()
            path.mkdir(parents=True, exist_ok=True)
            self._board.post(f"{save.number}/place", path.name)
            self._phase("placed")
            mine = self._write_share(path, save)
            self._phase("announced")
            manifest = self._gather(path, save, mine)
            self._phase("gathered")
            commit(path, manifest, self._phase)
        except BaseException as error:
            discard(path, self._world.rank, COMMIT, checkpoints.PARTIAL_COMMIT, MANIFEST)
            given_up = not (path / COMMIT).exists()
            text = str(self._explain(error, save))
            self._board.post(f"{save.number}/verdict", {"error": text, "given_up": given_up})
            raise
        self._newest = path
        self._board.post(f"{save.number}/verdict", {"path": path.name})
        self._phase("told")
        if not self._asynchronous:
            self._waited_s = time.perf_counter() - save.began
            self._tell_begun(save)
        num_bytes = sum(file.num_bytes for file in manifest.files.values())
        seconds = time.perf_counter() - save.began
        self._emit(
            "checkpoint_done", step=save.step, path=str(path), bytes=num_bytes, seconds=seconds,
            blocking_s=self._waited_s,
        )  # fmt: skip
        self._retire()

    def _gather(self, path: Path, save: _Save, mine: dict[str, Any]) -> Manifest:
        tensors: dict[str, TensorRecord] = {}
        files: dict[str, FileRecord] = {}
        until = time.monotonic() + self._world.deadline.total_seconds()
        for rank in range(self._world.size):
            message = mine
            if rank != self._world.rank:
                left_s = max(0.0, until - time.monotonic())
                message = self._hear(f"{save.number}/{rank}", rank, left_s)
            files |= {name: FileRecord.model_validate(f) for name, f in message["files"].items()}
            for key, record in message["tensors"].items():
                merge(tensors, key, TensorRecord.model_validate_json(record), rank)
        # Everybody has announced, so everybody is through with the save before this one.
        self._board.erase(f"{save.number - 1}/verdict")
        self._board.erase(f"{save.number}/place")
        if self._world.size > 1:
            await_files(path, files)
        manifest = Manifest(
            serial=checkpoints.next_serial(self._directory), step=save.step,
            counters=save.counters, facts=save.facts, tensors=tensors, files=files,
        )  # fmt: skip
        if flaw := manifest.find_flaw():
            raise AssertionError(f"the ranks' pieces make no whole state: {flaw}")
        return manifest

    def _hear(self, key: str, rank: int, patience_s: float) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._board.read([key], patience_s)[1]
        except TimeoutError:
            raise StoreError(
                f"rank {rank} did not finish its share within "
                f"{self._world.deadline.total_seconds():.0f} s of rank 0"
            ) from None
        self._board.erase(key)
        if "error" in message:
            raise StoreError(f"rank {rank}: {message['error']}")
        return message

    def _retire(self) -> None:
        """Remove the checkpoints beyond `keep`; what resists is told and left to the next save."""
        for path in checkpoints.committed(self._directory)[self._keep :]:
            try:
                checkpoints.withdraw(path)
                self._phase("old_withdrawn")
                checkpoints.remove(path)
                self._phase("old_removed")
            except OSError as error:
                self._emit("checkpoint_leftover", path=str(path), error=str(error))

    # The other ranks.

    def _follow(self, save: _Save) -> None:
        verdict = f"{save.number}/verdict"
        patience_s = 2 * self._world.deadline.total_seconds()
        key, message = self._board.read([verdict, f"{save.number}/place"], patience_s)
        if key == verdict:
            raise _Told(message["error"])
        path = self._directory / message
        try:
            mine = self._write_share(path, save)
        except BaseException as error:
            discard(path, self._world.rank)
            if told := self._board.peek(verdict):  # It failed elsewhere, and was cleaned away.
                raise _Told(told["error"]) from None
            self._board.post(f"{save.number}/{self._world.rank}", {"error": str(error)})
            raise
        self._board.post(f"{save.number}/{self._world.rank}", mine)
        self._phase("announced")
        message = self._board.read([verdict], patience_s)[1]
        if "error" in message:
            if message["given_up"]:
                discard(path, self._world.rank)
            raise _Told(message["error"])
        self._newest = path
        self._phase("told")

    # Every rank.

    def _write_share(self, path: Path, save: _Save) -> dict[str, Any]:
        """Write this rank's files; returns its announcement."""
        files: dict[str, Any] = {}
        for part in save.share.parts:
            files[part.file] = self._write_part(path, part, save.state.pieces)
            self._phase("file_written")
        tensorfile.sync_directory(path)
        self._phase("share_written")
        tensors = {key: record.model_dump_json() for key, record in save.share.tensors.items()}
        return {"files": files, "tensors": tensors}

    def _write_part(self, path: Path, part: Part, pieces: Sequence[Piece]) -> dict[str, Any]:
        buffers = self._staging.staged(part) if self._asynchronous else live(part, pieces)
        file, digest = path / part.file, hashlib.sha256()
        direct.write(file, tensorfile.content(part.entries, buffers, digest=digest))
        return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}

    def _explain(self, error: BaseException, save: _Save) -> BaseException:
        if isinstance(error, _Told) or not isinstance(error, (OSError, StoreError)):
            return error
        kept = next(iter(checkpoints.committed(self._directory)), None)
        last = f"the last checkpoint is '{kept}'" if kept else "there is no earlier checkpoint"
        return StoreError(
            f"the checkpoint of step {save.step} in '{self._directory}' was not made ({error}): "
            f"make room and see that every rank can write there; {last}"
        )


def _ignore(*_: object, **__: object) -> None:
    """What is called where nobody listens."""


def _stand_back() -> None:
    """Leave the processor to training while it wants it; on Linux that is a thread's own matter."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
