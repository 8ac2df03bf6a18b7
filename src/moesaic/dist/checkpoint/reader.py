"""Checkpoint loading: fills shards of any layout from verified files.

Files are memory-mapped and only the wanted boxes are copied out, which takes no extra memory. A
`reads_once` reader loads one file at a time instead. No file is used before its hash is verified:
by `verify`, by another rank in `verify_shared`, or else by `fill`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moesaic.base import direct_io, safetensors_file
from moesaic.base.errors import StoreError
from moesaic.base.safetensors_file import TensorEntry
from moesaic.dist.checkpoint.directory import list_committed, resume_candidates
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    DTYPES,
    MANIFEST,
    Manifest,
    ShardRecord,
    TensorRecord,
    commit_record,
    parse_manifest,
)
from moesaic.dist.state import OPTIONAL_KINDS, TensorShard, overlap
from moesaic.dist.world import World


class _Copy(NamedTuple):
    """Box to copy from a file into a shard."""

    record: ShardRecord
    dtype: str
    source: tuple[slice, ...]
    shard: TensorShard
    target: tuple[slice, ...]


class Checkpoint:
    """Committed checkpoint, as a `Source`."""

    def __init__(self, path: Path, manifest: Manifest, reads_once: bool = False) -> None:
        self.path, self._manifest = path, manifest
        one_rank = all(name.startswith(("rank-0.", "rank-0-")) for name in manifest.files)
        self._reads_once = (
            reads_once and one_rank and all(len(t.shards) == 1 for t in manifest.tensors.values())
        )
        self._memory: memoryview | None = None
        self._loaded_file: str | None = None
        """Name of the file in that memory, whose hash has been computed."""
        self._verified: set[str] = set()
        self._entries: dict[str, dict[str, tuple[TensorEntry, int]]] = {}

    @classmethod
    def open(cls, path: Path, reads_once: bool = False) -> Checkpoint:
        """Return the checkpoint in directory `path`, after verifying its manifest.

        Args:
            path: directory of the checkpoint.
            reads_once: read every tensor at most once. A file then goes through memory instead of
                the page cache, if one rank wrote all files.
        """
        try:
            return _open(path, reads_once)
        except StoreError as error:
            raise StoreError(f"{error}; {_advise(path)}") from None

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._manifest.step

    @property
    def counters(self) -> dict[str, int]:
        """Position in the run and in the data."""
        return dict(self._manifest.counters)

    @property
    def facts(self) -> dict[str, Any]:
        """Job and plan of the saved run."""
        return dict(self._manifest.facts)

    @property
    def tensors(self) -> dict[str, TensorRecord]:
        """Tensors by kind/name."""
        return dict(self._manifest.tensors)

    @property
    def snapshots(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Facts of external snapshots, by prefix of their part, then by rank."""
        return dict(self._manifest.snapshots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.num_bytes for file in self._manifest.files.values())

    def verify(self) -> None:
        """Hash every file; raise StoreError with the names of damaged files."""
        self._raise_damage(self._find_damage(self._manifest.files))

    def check_sizes(self) -> None:
        """Check that every file exists with its recorded size; raise StoreError otherwise. This is
        fast, but only `verify` reads the content.
        """
        self._raise_damage(self._find_wrong_sizes())

    def _find_wrong_sizes(self) -> list[str]:
        flaws = (self._find_flaw(name) for name in self._manifest.files)
        return [flaw for flaw in flaws if flaw]

    def verify_shared(self, world: World) -> None:
        """Hash every file, split over the ranks; every rank raises the same StoreError."""
        if world.group is None:
            self.verify()
            return
        # Deal files out by size, so that no rank gets all the large ones.
        order = sorted(self._manifest.files.items(), key=lambda item: (-item[1].num_bytes, item[0]))
        own = [name for name, _ in order[world.rank :: world.size]]
        damage: list[Any] = [None] * world.size
        dist.all_gather_object(damage, self._find_damage(own), group=world.group)
        self._raise_damage([flaw for flaws in damage for flaw in flaws])
        self._verified.update(self._manifest.files)

    @torch.no_grad()
    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write the saved values into every shard; check all of them before writing any."""
        copies: dict[str, list[_Copy]] = {}
        for shard in shards:
            if shard.kind in OPTIONAL_KINDS and shard.key not in self._manifest.tensors:
                continue
            self._check_shard(shard)
            record = self._manifest.tensors[shard.key]
            for stored in record.shards:
                boxes = overlap(stored.offset, stored.size, shard.offset, shard.size)
                if boxes is not None:
                    copy = _Copy(stored, record.dtype, boxes[0], shard, boxes[1])
                    copies.setdefault(stored.file, []).append(copy)
        unverified = [name for name in copies if name not in self._verified]
        self._raise_damage(self._find_damage(unverified))
        for name, file_copies in copies.items():
            self._copy_out(name, file_copies)

    def view_tensor(self, key: str) -> torch.Tensor | None:
        """Return a whole tensor, valid until the next read.

        Return None if the checkpoint is not read once, or if another file has replaced this one in
        memory.
        """
        if not self._reads_once:
            return None
        (record,) = self._manifest.tensors[key].shards
        if self._loaded_file != record.file:
            if record.file in self._verified:
                return None
            self._raise_damage(self._find_damage([record.file]))
        (values,) = self._read_values(record.file, [(record, self._manifest.tensors[key].dtype)])
        return values

    def locate(self, key: str) -> list[tuple[ShardRecord, Path, int]]:
        """Return the shards of a tensor, each with its file and the byte where its values begin;
        the files are verified."""
        record = self._manifest.tensors[key]
        names = {stored.file for stored in record.shards}
        self._raise_damage(self._find_damage(names - self._verified))
        found = []
        for stored in record.shards:
            if stored.file not in self._entries:
                self._entries[stored.file] = safetensors_file.read_entries(self.path / stored.file)
            start = self._start(stored, record.dtype, self._entries[stored.file])
            found.append((stored, self.path / stored.file, start))
        return found

    def _start(
        self, record: ShardRecord, dtype: str, entries: Mapping[str, tuple[TensorEntry, int]]
    ) -> int:
        """Return the byte of a shard's file where its values begin."""
        expected = TensorEntry(record.entry, dtype, record.size)
        entry, start = entries.get(record.entry, (None, 0))
        if (
            entry != expected
            or start + expected.num_bytes > self._manifest.files[record.file].num_bytes
        ):
            raise StoreError(
                f"'{self.path / record.file}' does not contain {expected}, which its manifest lists"
            )
        return start

    def _check_shard(self, shard: TensorShard) -> None:
        record = self._manifest.tensors.get(shard.key)
        if record is None:
            flaw = "is not in the checkpoint"
        elif record.shape != tuple(shard.shape):
            shapes = list(record.shape), list(shard.shape)
            flaw = f"has shape {shapes[0]} in the checkpoint and {shapes[1]} in the model"
        elif DTYPES[record.dtype] != shard.dtype:
            flaw = f"is {record.dtype} in the checkpoint and {shard.dtype} in the model"
        else:
            return
        raise StoreError(
            f"checkpoint '{self.path}' does not fit: {shard.key} {flaw}; "
            "load it with the model and precision it was saved with"
        )

    def _find_damage(self, names: Iterable[str]) -> list[str]:
        """Return the flaws of the files `names`, and mark intact ones as verified."""
        damage = []
        for name in names:
            flaw = self._find_flaw(name, read=True)
            if flaw:
                damage.append(flaw)
            else:
                self._verified.add(name)
        return damage

    def _find_flaw(self, name: str, read: bool = False) -> str:
        """Return the flaw of a file, including its content if `read`, or ""."""
        record, file = self._manifest.files[name], self.path / name
        try:
            size = file.stat().st_size
            if size != record.num_bytes:
                return f"'{name}' has {size} bytes where {record.num_bytes} were written"
            if read and self._sha256(name) != record.sha256:
                self._loaded_file = None
                return f"'{name}' is not what was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"'{name}' is missing"
        except OSError as error:
            return f"'{name}' cannot be read ({error.strerror})"
        except StoreError as error:
            return f"'{name}' cannot be read ({error.__cause__ or error})"
        return ""

    def _sha256(self, name: str) -> str:
        file, self._loaded_file = self.path / name, None
        if not self._reads_once:
            return safetensors_file.sha256(file)
        if self._memory is None:
            sizes = (record.num_bytes for record in self._manifest.files.values())
            self._memory = direct_io.aligned_buffer(max(sizes))
        digest = hashlib.sha256()
        for block in direct_io.read_blocks(file, self._memory):
            digest.update(block)
        self._loaded_file = name
        return digest.hexdigest()

    def _raise_damage(self, damage: Sequence[str]) -> None:
        if damage:
            raise StoreError(
                f"checkpoint '{self.path}' is damaged: {', '.join(damage)}; {_advise(self.path)}"
            )

    def _copy_out(self, name: str, copies: Sequence[_Copy]) -> None:
        tensors = self._read_values(name, [(copy.record, copy.dtype) for copy in copies])
        for copy, values in zip(copies, tensors, strict=True):
            with copy.shard.borrow(writes=True) as tensor:
                tensor[copy.target].copy_(values[copy.source])

    def _read_values(
        self, name: str, wanted: Iterable[tuple[ShardRecord, str]]
    ) -> Iterator[torch.Tensor]:
        """Yield views of some shards of a file, from the loaded file or a memory map."""
        file, num_bytes = self.path / name, self._manifest.files[name].num_bytes
        hashed = self._memory[:num_bytes] if self._memory and self._loaded_file == name else None
        if name not in self._entries:
            self._entries[name] = (
                safetensors_file.read_entries(file)
                if hashed is None
                else safetensors_file.parse_entries(file, hashed)
            )
        entries = self._entries[name]
        if hashed is not None:
            content = torch.frombuffer(hashed, dtype=torch.uint8)
        else:
            content = torch.from_file(str(file), shared=False, size=num_bytes, dtype=torch.uint8)
        for record, dtype in wanted:
            start = self._start(record, dtype, entries)
            stop = start + TensorEntry(record.entry, dtype, record.size).num_bytes
            yield content[start:stop].view(DTYPES[dtype]).view(record.size)


def newest_intact(
    directory: Path, log: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
    """Return the newest checkpoint in `directory` whose files are all intact.

    `log` gets a line for each newer one that is skipped.
    """
    for path in resume_candidates(directory):
        try:
            checkpoint = _open(path)
        except StoreError as error:
            log(f"passed over: {error}")
            continue
        damage = checkpoint._find_damage(checkpoint._manifest.files)
        if not damage:
            return checkpoint
        log(f"passed over: checkpoint '{path}' is damaged: {', '.join(damage)}")
    return None


def list_snapshots(directory: Path, prefix: str) -> list[dict[str, dict[str, Any]]]:
    """Return the facts of a part's external snapshot in each committed checkpoint, by rank.

    Raise StoreError if a checkpoint is damaged, or is removed meanwhile."""
    return [_open(path).snapshots.get(prefix, {}) for path in list_committed(directory)]


def _open(path: Path, reads_once: bool = False) -> Checkpoint:
    if not path.is_dir():
        raise StoreError(f"there is no checkpoint '{path}'")
    record = _read(path / COMMIT, f"checkpoint '{path}' was never finished: it has no {COMMIT}")
    data = _read(path / MANIFEST, f"checkpoint '{path}' is damaged: '{MANIFEST}' is missing")
    try:
        expected_sha256 = json.loads(record)["manifest_sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"checkpoint '{path}' is damaged: '{COMMIT}' cannot be read") from None
    if expected_sha256 != hashlib.sha256(data).hexdigest():
        raise StoreError(
            f"checkpoint '{path}' is damaged: '{MANIFEST}' or '{COMMIT}' is not what was written"
        )
    try:
        manifest = parse_manifest(data)
    except StoreError as error:
        raise StoreError(f"checkpoint '{path}' cannot be used: {error}") from None
    if record != commit_record(manifest, data):
        raise StoreError(f"checkpoint '{path}' is damaged: '{COMMIT}' is not what was written")
    return Checkpoint(path, manifest, reads_once)


def _read(path: Path, missing: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreError(missing) from None
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error})") from None


def _advise(path: Path) -> str:
    """Return advice for a damaged checkpoint at `path`: the newest other one with a valid manifest
    and whole files, whose content a resume verifies."""
    for other in resume_candidates(path.absolute().parent):
        if other.name == path.name:
            continue
        try:
            is_whole = not _open(other)._find_wrong_sizes()
        except StoreError:
            continue  # Try an older one.
        if is_whole:
            whole = path.parent / other.name
            return f"the newest whole one is '{whole}'; resume from that"
    return "no other whole checkpoint is beside it; restore it from a copy or start a new run"
