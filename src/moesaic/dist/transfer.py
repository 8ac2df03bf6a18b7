"""Transfer: state from the ranks that hold it to the ranks that want it.

Every rank says which boxes it holds and which it wants; all of them work out the same list of moves
(a rank serves itself where it can, the rest is spread over the holders) and obey it. This is how a
run goes on under another layout without touching a disk.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.base.errors import StoreError
from moesaic.dist.state import MAY_BEGIN, Piece, overlap
from moesaic.dist.world import World
from moesaic.facts.moves import Box, Move

_BATCH_BYTES = 256 << 20


@dataclass
class PeerSource:
    """What the ranks of `world` still hold, from whatever layout they held it under."""

    world: World
    pieces: Sequence[Piece]
    """This rank's; empty on a rank that is new."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Every rank of the world calls this at once, each with what it wants."""
        rank = self.world.rank
        held, wanted = self._everywhere(self.pieces), self._everywhere(pieces)
        there = _sorts(held)
        wanted = [one for one in wanted if one.box.key in there or one.kind not in MAY_BEGIN]
        _refuse_others(there, _sorts(wanted))
        moves = list_moves([one.box for one in held], [one.box for one in wanted])
        have = {_box(piece, rank): piece.tensor for piece in self.pieces}
        want = {_box(piece, rank): piece.tensor for piece in pieces}
        obey(moves, have, want, self.world)

    def _everywhere(self, pieces: Sequence[Piece]) -> list[_Said]:
        """What all ranks say of theirs."""
        rank = self.world.rank
        said = [
            _Said(_box(one, rank), one.kind, tuple(one.shape), str(one.tensor.dtype))
            for one in pieces
        ]
        if self.world.everyone is None:
            return said
        gathered: list[list[_Said]] = [[] for _ in range(self.world.size)]
        dist.all_gather_object(gathered, said, group=self.world.everyone)
        return [one for part in gathered for one in part]


class _Said(NamedTuple):
    """A piece without its values."""

    box: Box
    kind: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str


def _sorts(said: Sequence[_Said]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor."""
    return {one.box.key: (one.shape, one.dtype) for one in said}


def _refuse_others(
    there: Mapping[str, tuple[tuple[int, ...], str]],
    wanted: Mapping[str, tuple[tuple[int, ...], str]],
) -> None:
    """Raise if a tensor is of another shape or dtype there: raw bytes travel, part by part."""
    for key, (shape, dtype) in wanted.items():
        was = there.get(key, (shape, dtype))
        if was != (shape, dtype):
            raise StoreError(
                f"'{key}' is {was[1]} {list(was[0])} on the ranks that hold it, and {dtype} "
                f"{list(shape)} in the model: go on with the model and precision that they have"
            )


def list_moves(have: Sequence[Box], want: Sequence[Box]) -> list[Move]:
    """The moves that fill every wanted box; an error names a tensor that nobody holds whole."""
    holders: dict[str, dict[tuple[object, ...], list[Box]]] = defaultdict(dict)
    for box in have:
        holders[box.key].setdefault(box.place, []).append(box)
    moves: list[Move] = []
    for wanted in want:
        covered = 0
        for copies in holders[wanted.key].values():
            parts = overlap(wanted.offset, wanted.size, copies[0].offset, copies[0].size)
            if parts is None:
                continue
            own = [box for box in copies if box.rank == wanted.rank]
            spread = zlib.crc32(f"{wanted.place}{wanted.rank}".encode()) % len(copies)
            moves.append(Move((own or [copies[spread]])[0], wanted))
            covered += _volume(parts[0])
        if covered != _volume(tuple(slice(0, n) for n in wanted.size)):
            raise StoreError(f"no rank holds all of '{wanted.key}': start from a checkpoint")
    return moves


def obey(
    moves: Sequence[Move], have: dict[Box, Tensor], want: dict[Box, Tensor], world: World
) -> None:
    """Carry out moves; every rank calls this with the same list, in the same order."""
    for batch in _batches(moves):
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        for move in batch:
            into, out = _parts(move)
            if move.have.rank == move.want.rank == world.rank:
                want[move.want][into].copy_(have[move.have][out])
            elif move.have.rank == world.rank:
                tensor = have[move.have][out].contiguous()
                operations.append(_operation(dist.isend, tensor, move.want.rank, world))
            elif move.want.rank == world.rank:
                target = want[move.want][into]
                buffer = torch.empty_like(target, memory_format=torch.contiguous_format)
                operations.append(_operation(dist.irecv, buffer, move.have.rank, world))
                arriving.append((target, buffer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for target, buffer in arriving:
            target.copy_(buffer)


def _operation(kind: Callable[..., Any], tensor: Tensor, peer: int, world: World) -> dist.P2POp:
    return dist.P2POp(kind, tensor, peer, group=world.everyone)


def _batches(moves: Sequence[Move]) -> list[list[Move]]:
    batches: list[list[Move]] = [[]]
    held = 0
    for move in moves:
        held += 8 * _volume(_parts(move)[0])
        if held > _BATCH_BYTES and batches[-1]:
            batches.append([])
            held = 0
        batches[-1].append(move)
    return batches


def _parts(move: Move) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    parts = overlap(move.want.offset, move.want.size, move.have.offset, move.have.size)
    assert parts is not None, "a move between boxes that are apart"
    return parts


def _volume(box: Sequence[slice]) -> int:
    volume = 1
    for part in box:
        volume *= part.stop - part.start
    return volume


def _box(piece: Piece, rank: int) -> Box:
    return Box(piece.key, piece.offset, tuple(piece.tensor.shape), rank)
