"""A rank's share of a save: which pieces it writes, into which files, and the copy it writes from.

A piece that several ranks hold is written by one of them. Ranks that hold the same box know the
same list of such boxes, so each works out alone which are its own: largest first, to the owner
with the fewest bytes yet. The copy lives in one buffer that later saves use again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moesaic.base.errors import StoreError
from moesaic.base.tensorfile import ITEM_BYTES, Entry
from moesaic.dist import device as devices
from moesaic.dist.checkpoint.manifest import DTYPES, PieceRecord, TensorRecord
from moesaic.dist.state import Piece

_ALIGNMENT = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Part:
    """One file of a rank's share."""

    file: str
    """Its name."""
    entries: tuple[Entry, ...]
    """What it holds, in order."""
    pieces: tuple[int, ...]
    """Which piece of the state each entry is."""
    start: int
    """Where its values lie in the buffer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True)
class Share:
    """What one rank writes in one save."""

    parts: tuple[Part, ...]
    """Its files."""
    tensors: dict[str, TensorRecord]
    """The pieces it writes, by tensor; tensors without elements too, without pieces."""


class Staging:
    """Takes a rank's share out of the live state, again and again."""

    def __init__(self, rank: int, device: torch.device, file_bytes: int) -> None:
        self._rank, self._device, self._file_bytes = rank, device, file_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._signature: list[object] | None = None
        self._share = Share((), {})
        self._slots: list[tuple[torch.Tensor, int]] = []

    def lay_out(self, pieces: Sequence[Piece]) -> Share:
        """This rank's share of `pieces`; worked out once for as long as they look the same."""
        signature: list[object] = [
            (piece.kind, piece.name, piece.shape, piece.offset, piece.owners, piece.tensor.shape,
             piece.tensor.dtype) for piece in pieces
        ]  # fmt: skip
        if signature != self._signature:
            self._share = _lay_out(pieces, self._rank, self._file_bytes)
            self._slots, self._signature = [], signature
        return self._share

    def prepare(self, share: Share) -> None:
        """Have the buffer for `share` there and touched: copying into it then costs no faults."""
        self.reserve(share)
        self._buffer[::_PAGE_BYTES] = 0

    def reserve(self, share: Share) -> None:
        """Have the buffer for `share` there."""
        if self._slots:
            return
        total = max((part.start + part.num_bytes for part in share.parts), default=0)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # Give the old one back first.
            pinned = self._device.type != "cpu"
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
        names = {name: dtype for dtype, name in DTYPES.items()}
        for part in share.parts:
            start = part.start
            for entry, index in zip(part.entries, part.pieces, strict=True):
                raw = self._buffer[start : start + entry.num_bytes]
                self._slots.append((raw.view(names[entry.dtype]).view(entry.shape), index))
                start += entry.num_bytes

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copy this rank's share into the buffer; returns when the copy is whole."""
        for slot, index in self._slots:
            slot.copy_(pieces[index].tensor, non_blocking=True)
        devices.now(self._device)

    def staged(self, part: Part) -> Iterator[memoryview]:
        """The copied values of a file's entries, in order."""
        whole = self._buffer.numpy().data
        start = part.start
        for entry in part.entries:
            yield whole[start : start + entry.num_bytes]
            start += entry.num_bytes


@torch.no_grad()
def live(part: Part, pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """The values of a file's entries as they are now, one at a time, in order."""
    for index in part.pieces:
        host = pieces[index].tensor.detach().to("cpu").contiguous()
        yield host.reshape(-1).view(torch.uint8).numpy().data


def elect(pieces: Sequence[Piece], rank: int) -> list[int]:
    """Which of `pieces` (all that `rank` holds) `rank` writes."""
    chosen: list[int] = []
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.tensor.numel() == 0:
            continue
        if piece.owners == (rank,):
            chosen.append(index)
        else:
            shared.setdefault(piece.owners, []).append(index)
    for owners, indices in shared.items():
        indices.sort(key=lambda i: (-pieces[i].tensor.nbytes, pieces[i].key, pieces[i].offset))
        loads = dict.fromkeys(owners, 0)
        for index in indices:
            writer = min(owners, key=loads.__getitem__)
            loads[writer] += pieces[index].tensor.nbytes
            if writer == rank:
                chosen.append(index)
    return chosen


def _lay_out(pieces: Sequence[Piece], rank: int, file_bytes: int) -> Share:
    chosen = elect(pieces, rank)
    # Wide types first: every entry then starts at a multiple of its item's size.
    chosen.sort(key=lambda i: (-pieces[i].tensor.itemsize, pieces[i].key, pieces[i].offset))
    parts: list[Part] = []
    records: dict[str, list[PieceRecord]] = {}
    start = 0
    for indices in _cut([(i, pieces[i].tensor.nbytes) for i in chosen], file_bytes):
        suffix = f"-{len(parts)}" if parts else ""
        entries = tuple(_entry(pieces[i]) for i in indices)
        part = Part(f"rank-{rank}{suffix}.safetensors", entries, tuple(indices), start)
        start += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
        parts.append(part)
        for entry, piece in zip(entries, (pieces[i] for i in indices), strict=True):
            records.setdefault(piece.key, []).append(
                PieceRecord(offset=piece.offset, size=entry.shape, file=part.file, entry=entry.name)
            )
    for piece in pieces:
        if math.prod(piece.shape) == 0:
            records.setdefault(piece.key, [])
    tensors = {
        piece.key: TensorRecord(
            dtype=_dtype_name(piece), shape=piece.shape, pieces=tuple(records[piece.key])
        )
        for piece in pieces
        if piece.key in records
    }
    return Share(tuple(parts), tensors)


def _cut(sizes: Sequence[tuple[int, int]], limit: int) -> Iterator[list[int]]:
    """Runs of items, of (item, bytes), of at most `limit` bytes; a larger item stands alone."""
    run: list[int] = []
    total = 0
    for item, num_bytes in sizes:
        if run and total + num_bytes > limit:
            yield run
            run, total = [], 0
        run.append(item)
        total += num_bytes
    if run:
        yield run


def _entry(piece: Piece) -> Entry:
    shape = tuple(piece.tensor.shape)
    whole = shape == tuple(piece.shape)
    name = piece.key if whole else f"{piece.key}@{','.join(map(str, piece.offset))}"
    return Entry(name, _dtype_name(piece), shape)


def _dtype_name(piece: Piece) -> str:
    name = DTYPES.get(piece.tensor.dtype)
    if name is None or name not in ITEM_BYTES:
        raise StoreError(f"{piece.key} is of {piece.tensor.dtype}, which checkpoints cannot hold")
    return name
