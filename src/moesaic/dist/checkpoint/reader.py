"""Loading: a checkpoint is a source that fills pieces of any layout, from files it has hashed.

Files are memory-mapped and only the boxes that are wanted are copied out of them, so loading needs
no memory of its own; who reads everything once has one file at a time in memory instead. Nothing
is read from a file before its hash has been found right, by `verify`, by another rank in
`verify_shared`, or, where neither was called, by `fill` itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moesaic.base import direct, tensorfile
from moesaic.base.errors import StoreError
from moesaic.base.tensorfile import Entry
from moesaic.dist.checkpoint.directory import candidates
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    DTYPES,
    MANIFEST,
    Manifest,
    PieceRecord,
    TensorRecord,
    commit_record,
    parse_manifest,
)
from moesaic.dist.state import MAY_BEGIN, Piece, overlap
from moesaic.dist.world import World

_TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class _Copy(NamedTuple):
    """A box to copy from a file into a piece."""

    record: PieceRecord
    dtype: str
    source: tuple[slice, ...]
    target: torch.Tensor


class Checkpoint:
    """A committed checkpoint. It is a `Source`."""

    def __init__(
        self, path: Path, manifest: Manifest, cast: bool = False, once: bool = False
    ) -> None:
        self.path = path
        self._manifest, self._cast = manifest, cast
        alone = all(name.startswith(("rank-0.", "rank-0-")) for name in manifest.files)
        self._once = once and alone and all(len(t.pieces) == 1 for t in manifest.tensors.values())
        self._memory: memoryview | None = None
        self._held: str | None = None
        """The file that was hashed last, which is in that memory."""
        self._verified: set[str] = set()
        self._entries: dict[str, dict[str, tuple[Entry, int]]] = {}

    @classmethod
    def open(cls, path: Path, cast: bool = False, once: bool = False) -> Checkpoint:
        """The checkpoint in directory `path`, its manifest verified.

        `cast` lets floating-point tensors be filled from those of another precision. `once`: no
        tensor will be read again, so that a file goes through memory and not the page cache, if
        one rank has written all.
        """
        try:
            return _open(path, cast, once)
        except StoreError as error:
            raise StoreError(f"{error}; {_advise(path)}") from None

    @property
    def step(self) -> int:
        """Optimizer steps that were finished when it was saved."""
        return self._manifest.step

    @property
    def counters(self) -> dict[str, int]:
        """Position in the run and in the data."""
        return dict(self._manifest.counters)

    @property
    def facts(self) -> dict[str, Any]:
        """What the run said of itself: job, plan."""
        return dict(self._manifest.facts)

    @property
    def tensors(self) -> dict[str, TensorRecord]:
        """Every tensor by kind/name."""
        return dict(self._manifest.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.num_bytes for file in self._manifest.files.values())

    def verify(self) -> None:
        """Read and hash every file; StoreError names those that are not what was written."""
        self._raise_damage(self._find_damage(self._manifest.files))

    def check_sizes(self) -> None:
        """See that every file is there and as long as it was; StoreError names those that are not.

        Quick, and no proof: only `verify` reads what is in them.
        """
        found = (self._find_flaw(name) for name in self._manifest.files)
        self._raise_damage([flaw for flaw in found if flaw])

    def verify_shared(self, world: World) -> None:
        """As `verify`, the files shared out over the ranks; all of them raise the same error."""
        if world.everyone is None:
            self.verify()
            return
        damage = self._find_damage_shared(world)
        if damage:
            self._raise_damage(damage, _advise_shared(self.path, world))
        self._verified.update(self._manifest.files)

    def _find_damage_shared(self, world: World) -> list[str]:
        """As `_find_damage` of all files, each read by one rank."""
        # Largest first and in turns, so that no rank has all the large ones.
        order = sorted(self._manifest.files.items(), key=lambda item: (-item[1].num_bytes, item[0]))
        mine = [name for name, _ in order[world.rank :: world.size]]
        heard: list[Any] = [None] * world.size
        dist.all_gather_object(heard, self._find_damage(mine), group=world.everyone)
        return [flaw for flaws in heard for flaw in flaws]

    @torch.no_grad()
    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write the saved values into every piece; nothing is written if one cannot be filled."""
        copies: dict[str, list[_Copy]] = {}
        for piece in pieces:
            if piece.kind in MAY_BEGIN and piece.key not in self._manifest.tensors:
                continue
            self._check(piece)
            record = self._manifest.tensors[piece.key]
            for stored in record.pieces:
                boxes = overlap(stored.offset, stored.size, piece.offset, tuple(piece.tensor.shape))
                if boxes is not None:
                    copy = _Copy(stored, record.dtype, boxes[0], piece.tensor[boxes[1]])
                    copies.setdefault(stored.file, []).append(copy)
        unverified = [name for name in copies if name not in self._verified]
        self._raise_damage(self._find_damage(unverified))
        for name, wanted in copies.items():
            self._copy_out(name, wanted)

    def lend(self, key: str) -> torch.Tensor | None:
        """A whole tensor, valid until anything else is read: only where all is read once, and of
        a file that has not been let go of for another one."""
        if not self._once:
            return None
        (record,) = self._manifest.tensors[key].pieces
        if self._held != record.file:
            if record.file in self._verified:
                return None
            self._raise_damage(self._find_damage([record.file]))
        (values,) = self._find(record.file, [(record, self._manifest.tensors[key].dtype)])
        return values

    def _check(self, piece: Piece) -> None:
        record = self._manifest.tensors.get(piece.key)
        if record is None:
            flaw = "is not in it"
        elif record.shape != tuple(piece.shape):
            flaw = f"has shape {list(record.shape)} in it and {list(piece.shape)} in the model"
        elif not self._may_fill(record.dtype, piece.tensor.dtype):
            flaw = f"is {record.dtype} in it and {piece.tensor.dtype} in the model"
        else:
            return
        raise StoreError(
            f"checkpoint '{self.path}' does not fit: {piece.key} {flaw}; "
            "load it with the model and precision it was saved with"
        )

    def _may_fill(self, stored: str, wanted: torch.dtype) -> bool:
        dtype = _TORCH_TYPES[stored]
        both_float = dtype.is_floating_point and wanted.is_floating_point
        return dtype == wanted or (self._cast and both_float)

    def _find_damage(self, names: Iterable[str]) -> list[str]:
        """What is wrong with the files `names`; those that are right are noted as such."""
        damage = []
        for name in names:
            flaw = self._find_flaw(name, read=True)
            if flaw:
                damage.append(flaw)
            else:
                self._verified.add(name)
        return damage

    def _find_flaw(self, name: str, read: bool = False) -> str:
        """What is wrong with one file, its contents included if `read`; empty if nothing is."""
        record, file = self._manifest.files[name], self.path / name
        try:
            size = file.stat().st_size
            if size != record.num_bytes:
                return f"'{name}' has {size} bytes where {record.num_bytes} were written"
            if read and self._sha256(name) != record.sha256:
                self._held = None
                return f"'{name}' is not what was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"'{name}' is missing"
        except OSError as error:
            return f"'{name}' cannot be read ({error.strerror})"
        except StoreError as error:
            return f"'{name}' cannot be read ({error.__cause__ or error})"
        return ""

    def _sha256(self, name: str) -> str:
        file, self._held = self.path / name, None
        if not self._once:
            return tensorfile.sha256(file)
        if self._memory is None:
            sizes = (record.num_bytes for record in self._manifest.files.values())
            self._memory = direct.memory(max(sizes))
        digest = hashlib.sha256()
        for part in direct.parts(file, self._memory):
            digest.update(part)
        self._held = name
        return digest.hexdigest()

    def _raise_damage(self, damage: Sequence[str], advice: str | None = None) -> None:
        if damage:
            advice = _advise(self.path) if advice is None else advice
            raise StoreError(f"checkpoint '{self.path}' is damaged: {', '.join(damage)}; {advice}")

    def _copy_out(self, name: str, wanted: Sequence[_Copy]) -> None:
        found = self._find(name, [(copy.record, copy.dtype) for copy in wanted])
        for copy, values in zip(wanted, found, strict=True):
            copy.target.copy_(values[copy.source])

    def _find(self, name: str, wanted: Iterable[tuple[PieceRecord, str]]) -> Iterator[torch.Tensor]:
        """The values of some pieces where they are: in one file, or in the memory that has it."""
        file, num_bytes = self.path / name, self._manifest.files[name].num_bytes
        hashed = self._memory[:num_bytes] if self._memory and self._held == name else None
        if name not in self._entries:
            self._entries[name] = (
                tensorfile.read_entries(file)
                if hashed is None
                else tensorfile.entries_of(file, hashed)
            )
        entries = self._entries[name]
        if hashed is not None:
            content = torch.frombuffer(hashed, dtype=torch.uint8)
        else:
            content = torch.from_file(str(file), shared=False, size=num_bytes, dtype=torch.uint8)
        for record, dtype in wanted:
            expected = Entry(record.entry, dtype, record.size)
            entry, start = entries.get(record.entry, (None, 0))
            if entry != expected or start + expected.num_bytes > num_bytes:
                raise StoreError(f"'{file}' does not hold {expected} as its manifest says")
            raw = content[start : start + expected.num_bytes]
            yield raw.view(_TORCH_TYPES[dtype]).view(record.size)


def newest_intact(
    directory: Path, tell: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
    """The newest checkpoint in `directory` of which every byte is as it was written.

    `tell` hears of each newer one that is passed over, and why.
    """
    return _newest_intact(directory, None, tell)


def _newest_intact(
    directory: Path, besides: Path | None, tell: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
    for path in candidates(directory):
        if besides is not None and path.name == besides.name:
            continue
        try:
            checkpoint = _open(path, cast=False)
        except StoreError as error:
            tell(f"passed over: {error}")
            continue
        damage = checkpoint._find_damage(checkpoint._manifest.files)
        if not damage:
            return checkpoint
        tell(f"passed over: checkpoint '{path}' is damaged: {', '.join(damage)}")
    return None


def _open(path: Path, cast: bool = False, once: bool = False) -> Checkpoint:
    if not path.is_dir():
        raise StoreError(f"there is no checkpoint '{path}'")
    record = _read(path / COMMIT, f"checkpoint '{path}' was never finished: it has no {COMMIT}")
    data = _read(path / MANIFEST, f"checkpoint '{path}' is damaged: '{MANIFEST}' is missing")
    try:
        promised = json.loads(record)["manifest_sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"checkpoint '{path}' is damaged: '{COMMIT}' cannot be read") from None
    if promised != hashlib.sha256(data).hexdigest():
        raise StoreError(
            f"checkpoint '{path}' is damaged: '{MANIFEST}' or '{COMMIT}' is not what was written"
        )
    try:
        manifest = parse_manifest(data)
    except StoreError as error:
        raise StoreError(f"checkpoint '{path}' cannot be used: {error}") from None
    if record != commit_record(manifest, data):
        raise StoreError(f"checkpoint '{path}' is damaged: '{COMMIT}' is not what was written")
    return Checkpoint(path, manifest, cast, once)


def _read(path: Path, missing: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreError(missing) from None
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error})") from None


def _advise(path: Path) -> str:
    """What to do instead of using the checkpoint at `path`."""
    return _advice(path, _newest_intact(path.absolute().parent, besides=path))


def _advise_shared(path: Path, world: World) -> str:
    """As `_advise`, the files of the others shared out over the ranks."""

    def list_others() -> str:
        others = [one for one in candidates(path.absolute().parent) if one.name != path.name]
        return json.dumps([str(one) for one in others if _opens(one)])

    for other in json.loads(world.led(list_others)):
        checkpoint = _open(Path(other), cast=False)
        if not checkpoint._find_damage_shared(world):
            return _advice(path, checkpoint)
    return _advice(path, None)


def _opens(path: Path) -> bool:
    try:
        _open(path, cast=False)
    except StoreError:
        return False  # The search goes on to an older one.
    return True


def _advice(path: Path, intact: Checkpoint | None) -> str:
    if intact is None:
        return "there is no other intact one beside it: restore it from a copy, or start afresh"
    shown = path.parent / intact.path.name
    return f"the newest intact one is '{shown}'; resume from it with --resume {shown}"
