"""Checkpoint saving: training waits for a copy to host memory; a thread does the rest.

Every rank copies its shards into a host buffer. Training waits for this copy, or with `overlap`
runs until it changes the state. In a thread, the rank then writes and hashes its files, waits for
external snapshots, and announces files, hashes and shards. After all announcements, rank 0's thread
writes the manifest, renames the commit record into place, posts the verdict, and removes
checkpoints beyond `keep`. The checkpoint exists from the rename on.

A rank may delete its files until it has announced, because nothing can be committed without them.
Afterwards only rank 0's verdict that the save failed allows it.
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
from typing import Any

from moesaic.base import direct_io, safetensors_file
from moesaic.base.errors import StoreError
from moesaic.dist.checkpoint import directory as checkpoints
from moesaic.dist.checkpoint.commit import await_files, commit, discard, merge
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    Manifest,
    TensorRecord,
)
from moesaic.dist.checkpoint.staging import DataFile, RankFiles, Staging, live_values
from moesaic.dist.checkpoint.store_channel import StoreChannel
from moesaic.dist.state import State
from moesaic.dist.world import World

PHASES = (
    "staged", "placed", "file_written", "files_written", "announced", "gathered",
    "manifest_written", "commit_written", "committed", "finished", "old_uncommitted", "old_removed",
)  # fmt: skip
"""Arguments of a saver's `phase` callback, in the order of one save on rank 0."""

_WRITER_NICENESS = 10
"""Nice value of the writer thread: it gets about a tenth of the time of a normal thread."""


class _SaveFailed(StoreError):
    """Rank 0's verdict that the save failed, with its error message."""


@dataclass(frozen=True)
class _Save:
    """One save in progress on this rank."""

    number: int
    step: int
    path: Path
    counters: dict[str, int]
    facts: dict[str, Any]
    rank_files: RankFiles
    is_staged: bool
    """True if a copy of the state is written; else the live state."""
    state: State
    """Live state, valid until `wait_for_copy` returns, or throughout a blocking save."""
    versions: list[int | None]
    """Version counters of the shards before an overlapped copy, else empty."""
    start_s: float
    snapshots: dict[str, Callable[[], dict[str, Any]]]
    """Functions that wait for external snapshots, by prefix of their part."""


class Saver:
    """Writer of the checkpoints of one run, one at a time. Every rank has one.

    Args:
        directory: directory of the checkpoints, shared by all ranks.
        world: ranks that save together; its timeout limits the wait for announcements.
        keep: number of committed checkpoints to keep.
        asynchronous: write in a thread. Else `save` returns after the commit, and needs no host
            buffer.
        on_event: callback on rank 0 for checkpoint (from the saving thread, if it goes on), and
            checkpoint_done, checkpoint_failed and checkpoint_leftover (from the writer thread).
        phase: callback at each of PHASES, for tests that inject faults.
        file_bytes: approximate maximum size of a file.
        spared: function that returns the checkpoint to keep beyond `keep`, if any, of the committed
            ones, newest first. Rank 0 calls it after each commit, from the writer thread.
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
        spared: Callable[[Sequence[Path]], Path | None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: keep at least 1 checkpoint")
        self._directory, self._world, self._keep = directory, world, keep
        self._asynchronous = asynchronous
        self._emit = on_event if on_event is not None and world.is_rank_zero else _ignore
        self._phase = phase or _ignore
        self._spared = spared or _ignore
        self._staging = Staging(world.rank, world.device, file_bytes)
        self._channel = StoreChannel(world.store, world.rank)
        # Both threads start early, since starting one can cost the caller a turn of the GIL.
        # Training may wait for the copy, so only the writer has a low priority.
        self._copier = ThreadPoolExecutor(1, "checkpoint-copy")
        self._writer = ThreadPoolExecutor(1, "checkpoint-write", _lower_priority)
        self._pending_copy: Future[None] | None = None
        self._pending_save: Future[None] | None = None
        self._waited_s = 0.0
        self._num_saves = 0
        self._newest: Path | None = None
        if world.is_rank_zero:
            self._remove_uncommitted()

    @property
    def newest(self) -> Path | None:
        """Checkpoint that this saver committed last, on every rank."""
        return self._newest

    def prepare(self, state: State) -> None:
        """Allocate the host buffer for `state`, to speed up the first save."""
        self.wait()
        if self._is_staged(state):
            self._staging.prepare(self._staging.plan_files(state.shards))

    def save(
        self, state: State, step: int, facts: Mapping[str, Any], overlap: bool = False
    ) -> float:
        """Start a checkpoint of `state`; return the seconds that the caller was blocked.

        Wait for the previous save first, and raise its error.

        Args:
            state: state to save, as it is now.
            step: finished optimizer steps.
            facts: job and plan; must be JSON.
            overlap: copy in a thread, if all shards are in memory; the caller must call
                `wait_for_copy` before it changes `state`.
        """
        start_s = time.perf_counter()
        self.wait()
        self._num_saves += 1
        save = self._begin(state, step, facts, overlap and self._is_staged(state), start_s)
        if not save.is_staged:
            self._run_save(save)
            return time.perf_counter() - start_s
        self._waited_s = time.perf_counter() - start_s
        self._emit("checkpoint", step=step, path=str(save.path), blocking_s=self._waited_s)
        if overlap:
            self._pending_copy = self._copier.submit(self._copy_overlapped, save)
        self._pending_save = self._writer.submit(self._run_save, save, self._pending_copy)
        return time.perf_counter() - start_s

    def _is_staged(self, state: State) -> bool:
        """Return whether a save copies `state` first. State that is not always in memory does not
        fit there twice, so it is written while training waits."""
        return self._asynchronous and all(shard.version is not None for shard in state.shards)

    def wait_for_copy(self) -> float:
        """Wait until the state may change; return the seconds blocked."""
        pending, self._pending_copy = self._pending_copy, None
        if pending is None:
            return 0.0
        start_s = time.perf_counter()
        futures.wait([pending])
        waited_s = time.perf_counter() - start_s
        self._waited_s += waited_s
        return waited_s

    def wait(self) -> None:
        """Wait for the save in progress; raise any error since the last call."""
        pending, self._pending_save = self._pending_save, None
        self._pending_copy = None
        if pending is not None:
            pending.result()

    def abandon(self) -> None:
        """Give up a save that waits for other ranks of a lost world. Later saves fail."""
        self._channel.abandon()
        if self._pending_save is not None:
            futures.wait([self._pending_save])

    def _begin(
        self, state: State, step: int, facts: Mapping[str, Any], overlap: bool, start_s: float
    ) -> _Save:
        with self._post_failure(self._num_saves):
            rank_files = self._staging.plan_files(state.shards)
            is_staged = self._is_staged(state)
            if is_staged:
                self._staging.reserve(rank_files)
            versions = [shard.version for shard in state.shards] if overlap else []
            save = _Save(
                self._num_saves, step, checkpoints.new_checkpoint_path(self._directory, step),
                dict(state.counters), json.loads(json.dumps(dict(facts), allow_nan=False)),
                rank_files, is_staged, state, versions, start_s,
                {prefix: one.begin(step) for prefix, one in state.snapshots.items()},
            )  # fmt: skip
            if not overlap:
                if is_staged:
                    self._staging.copy(state.shards)
                self._phase("staged")
        return save

    @contextlib.contextmanager
    def _post_failure(self, number: int) -> Iterator[None]:
        """Report an error in the block to the other ranks, so that they fail now and not at the
        timeout."""
        try:
            yield
        except BaseException as error:
            key = "verdict" if self._world.is_rank_zero else str(self._world.rank)
            message = {"error": f"rank {self._world.rank}: {error}", "discarded": True}
            self._channel.post(f"{number}/{key}", message)
            raise

    def _copy_overlapped(self, save: _Save) -> None:
        """Copy the state while training runs, and check that it did not change."""
        with self._post_failure(save.number):
            self._staging.copy(save.state.shards)
            for shard, version in zip(save.state.shards, save.versions, strict=True):
                if shard.version != version:
                    raise AssertionError(
                        f"{shard.key} was changed while it was copied; call wait_for_copy() first"
                    )
            self._phase("staged")

    def _run_save(self, save: _Save, pending_copy: Future[None] | None = None) -> None:
        try:
            if pending_copy is not None:
                pending_copy.result()
            if self._world.is_rank_zero:
                self._save_as_leader(save)
            else:
                self._save_as_follower(save)
        except BaseException as error:  # noqa: BLE001 - any error is raised again
            explained = self._explain(error, save)
            self._emit("checkpoint_failed", step=save.step, error=str(explained))
            raise explained from None

    # Rank 0.

    def _remove_uncommitted(self) -> None:
        """Remove the files of failed or interrupted saves; no rank writes at this time."""
        for path in checkpoints.list_uncommitted(self._directory):
            checkpoints.remove_files(path)

    def _save_as_leader(self, save: _Save) -> None:
        path = save.path
        try:
            self._remove_uncommitted()
            path.mkdir(parents=True, exist_ok=True)
            self._channel.post(f"{save.number}/place", path.name)
            self._phase("placed")
            own_files = self._write_rank_files(path, save)
            self._phase("announced")
            manifest = self._gather(path, save, own_files)
            self._phase("gathered")
            commit(path, manifest, self._phase)
        except BaseException as error:
            discard(path, self._world.rank, COMMIT, checkpoints.PARTIAL_COMMIT, MANIFEST)
            discarded = not (path / COMMIT).exists()
            text = str(self._explain(error, save))
            self._channel.post(f"{save.number}/verdict", {"error": text, "discarded": discarded})
            raise
        self._newest = path
        self._channel.post(f"{save.number}/verdict", {"path": path.name})
        self._phase("finished")
        num_bytes = sum(file.num_bytes for file in manifest.files.values())
        seconds = time.perf_counter() - save.start_s
        self._emit(
            "checkpoint_done", step=save.step, path=str(path), bytes=num_bytes, seconds=seconds,
            blocking_s=self._waited_s if save.is_staged else seconds,
        )  # fmt: skip
        self._remove_old()

    def _gather(self, path: Path, save: _Save, own_files: dict[str, Any]) -> Manifest:
        tensors: dict[str, TensorRecord] = {}
        files: dict[str, FileRecord] = {}
        snapshots: dict[str, dict[str, dict[str, Any]]] = {}
        deadline = time.monotonic() + self._world.timeout.total_seconds()
        for rank in range(self._world.size):
            message = own_files
            if rank != self._world.rank:
                remaining_s = max(0.0, deadline - time.monotonic())
                message = self._receive(f"{save.number}/{rank}", rank, remaining_s)
            files |= {name: FileRecord.model_validate(f) for name, f in message["files"].items()}
            for key, record in message["tensors"].items():
                merge(tensors, key, TensorRecord.model_validate_json(record), rank)
            for prefix, facts in message["snapshots"].items():
                snapshots.setdefault(prefix, {})[str(rank)] = facts
        # Every rank has announced, so every rank has finished the previous save.
        self._channel.erase(f"{save.number - 1}/verdict")
        self._channel.erase(f"{save.number}/place")
        if self._world.size > 1:
            await_files(path, files)
        manifest = Manifest(
            serial=checkpoints.next_serial(self._directory), step=save.step,
            counters=save.counters, facts=save.facts, tensors=tensors, files=files,
            snapshots=snapshots,
        )  # fmt: skip
        if flaw := manifest.find_flaw():
            raise AssertionError(f"the ranks' shards do not form a whole state: {flaw}")
        return manifest

    def _receive(self, key: str, rank: int, timeout_s: float) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._channel.read([key], timeout_s)[1]
        except TimeoutError:
            raise StoreError(
                f"rank {rank} did not finish its share within "
                f"{self._world.timeout.total_seconds():.0f} s of rank 0"
            ) from None
        self._channel.erase(key)
        if "error" in message:
            raise StoreError(f"rank {rank}: {message['error']}")
        return message

    def _remove_old(self) -> None:
        """Remove the checkpoints beyond `keep`, but for the spared one; report failures and leave
        them to the next save."""
        paths = checkpoints.list_committed(self._directory)
        spared = self._spared(paths)
        for path in paths[self._keep :]:
            if path == spared:
                continue
            try:
                checkpoints.remove_commit(path)
                self._phase("old_uncommitted")
                checkpoints.remove_files(path)
                self._phase("old_removed")
            except OSError as error:
                self._emit("checkpoint_leftover", path=str(path), error=str(error))

    # Other ranks.

    def _save_as_follower(self, save: _Save) -> None:
        verdict = f"{save.number}/verdict"
        timeout_s = 2 * self._world.timeout.total_seconds()
        key, message = self._channel.read([verdict, f"{save.number}/place"], timeout_s)
        if key == verdict:
            raise _SaveFailed(message["error"])
        path = self._directory / message
        try:
            own_files = self._write_rank_files(path, save)
        except BaseException as error:
            discard(path, self._world.rank)
            # Another rank failed, and rank 0 removed the directory's files.
            if failure := self._channel.peek(verdict):
                raise _SaveFailed(failure["error"]) from None
            self._channel.post(f"{save.number}/{self._world.rank}", {"error": str(error)})
            raise
        self._channel.post(f"{save.number}/{self._world.rank}", own_files)
        self._phase("announced")
        message = self._channel.read([verdict], timeout_s)[1]
        if "error" in message:
            if message["discarded"]:
                discard(path, self._world.rank)
            raise _SaveFailed(message["error"])
        self._newest = path
        self._phase("finished")

    # All ranks.

    def _write_rank_files(self, path: Path, save: _Save) -> dict[str, Any]:
        """Write this rank's files and wait for its external snapshots; return its announcement."""
        files: dict[str, Any] = {}
        for data_file in save.rank_files.files:
            files[data_file.file] = self._write_data_file(path, data_file, save)
            self._phase("file_written")
        safetensors_file.sync_directory(path)
        self._phase("files_written")
        tensors = {key: record.model_dump_json() for key, record in save.rank_files.tensors.items()}
        snapshots = {prefix: wait() for prefix, wait in save.snapshots.items()}
        return {"files": files, "tensors": tensors, "snapshots": snapshots}

    def _write_data_file(self, path: Path, data_file: DataFile, save: _Save) -> dict[str, Any]:
        buffers = (
            self._staging.staged_values(data_file)
            if save.is_staged
            else live_values(data_file, save.state)
        )
        file, digest = path / data_file.file, hashlib.sha256()
        direct_io.write(
            file, safetensors_file.file_chunks(data_file.entries, buffers, digest=digest)
        )
        return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}

    def _explain(self, error: BaseException, save: _Save) -> BaseException:
        if isinstance(error, _SaveFailed) or not isinstance(error, (OSError, StoreError)):
            return error
        newest = next(iter(checkpoints.list_committed(self._directory)), None)
        last = f"the last checkpoint is '{newest}'" if newest else "there is no earlier checkpoint"
        return StoreError(
            f"the checkpoint of step {save.step} in '{self._directory}' was not made ({error}); "
            f"free disk space and check that every rank can write there; {last}"
        )


def _ignore(*_: object, **__: object) -> None:
    """Ignore an event."""


def _lower_priority() -> None:
    """Give training priority over this thread; on Linux niceness applies per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
