"""Transfer of state between ranks, from one layout to another, without a disk.

Ranks share which boxes they have and need, compute the same list of moves, and execute it. A rank
uses its own box if it has it; other requests are spread over the replicas.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.base.errors import StoreError
from moesaic.dist.state import OPTIONAL_KINDS, TensorShard, overlap
from moesaic.dist.world import World
from moesaic.facts.moves import Box, Move

_BATCH_BYTES = 256 << 20


@dataclass
class PeerSource:
    """Source of the state that the ranks of `world` hold, in any layout."""

    world: World
    shards: Sequence[TensorShard]
    """Shards of this rank; empty on a new rank."""

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Fill `shards` from the ranks that hold them. Collective over the world."""
        rank = self.world.rank
        held, wanted = self._all_gather_boxes(self.shards), self._all_gather_boxes(shards)
        known = {info.box.key: info for info in held}
        wanted = [
            info for info in wanted if info.box.key in known or info.kind not in OPTIONAL_KINDS
        ]
        for info in wanted:
            known.get(info.box.key, info).check_fits(info)
        moves = list_moves([info.box for info in held], [info.box for info in wanted])
        have = {_box(shard, rank): shard for shard in self.shards}
        want = {_box(shard, rank): shard for shard in shards}
        execute_moves(moves, have, want, self.world)

    def _all_gather_boxes(self, shards: Sequence[TensorShard]) -> list[_ShardInfo]:
        rank = self.world.rank
        infos = [
            _ShardInfo(_box(shard, rank), shard.kind, tuple(shard.shape), str(shard.dtype))
            for shard in shards
        ]
        if self.world.group is None:
            return infos
        gathered: list[list[_ShardInfo]] = [[] for _ in range(self.world.size)]
        dist.all_gather_object(gathered, infos, group=self.world.group)
        return [info for infos in gathered for info in infos]


class _ShardInfo(NamedTuple):
    box: Box
    kind: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str

    def check_fits(self, wanted: _ShardInfo) -> None:
        """Raise if `wanted` has another shape or dtype, because raw bytes are sent."""
        if (self.shape, self.dtype) != (wanted.shape, wanted.dtype):
            raise StoreError(
                f"'{self.box.key}' is {self.dtype} {list(self.shape)} on the ranks that have it, "
                f"and {wanted.dtype} {list(wanted.shape)} in the model; use the same model and "
                "precision"
            )


def list_moves(have: Sequence[Box], want: Sequence[Box]) -> list[Move]:
    """Return the moves that fill every wanted box; raise StoreError if no rank has one."""
    holders: dict[str, dict[tuple[object, ...], list[Box]]] = defaultdict(dict)
    for box in have:
        holders[box.key].setdefault(box.region, []).append(box)
    moves: list[Move] = []
    for wanted in want:
        covered = 0
        for replicas in holders[wanted.key].values():
            parts = overlap(wanted.offset, wanted.size, replicas[0].offset, replicas[0].size)
            if parts is None:
                continue
            own = [box for box in replicas if box.rank == wanted.rank]
            choice = zlib.crc32(f"{wanted.region}{wanted.rank}".encode()) % len(replicas)
            moves.append(Move((own or [replicas[choice]])[0], wanted))
            covered += _num_elements(parts[0])
        if covered != _num_elements(tuple(slice(0, n) for n in wanted.size)):
            raise StoreError(f"no rank has all of '{wanted.key}'; resume from a checkpoint")
    return moves


def execute_moves(
    moves: Sequence[Move],
    have: Mapping[Box, TensorShard],
    want: Mapping[Box, TensorShard],
    world: World,
) -> None:
    """Execute the moves. Every rank calls this with the same list, in the same order."""
    for batch in _batches(moves):
        operations: list[dist.P2POp] = []
        received: list[tuple[Move, Tensor]] = []
        for move in batch:
            into, out = _overlap(move)
            if move.source.rank == move.target.rank == world.rank:
                values = _read_box(have[move.source], out)
                _write_box(want[move.target], into, values)
            elif move.source.rank == world.rank:
                tensor = _read_box(have[move.source], out)
                operations.append(_p2p_op(dist.isend, tensor, move.target.rank, world))
            elif move.target.rank == world.rank:
                size = [extent.stop - extent.start for extent in into]
                buffer = torch.empty(size, dtype=want[move.target].dtype, device=world.device)
                operations.append(_p2p_op(dist.irecv, buffer, move.source.rank, world))
                received.append((move, buffer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for move, buffer in received:
            _write_box(want[move.target], _overlap(move)[0], buffer)


def _read_box(shard: TensorShard, box: tuple[slice, ...]) -> Tensor:
    """Return some values of a shard, contiguous; a copy if the shard may leave memory."""
    with shard.borrow() as tensor:
        values = tensor[box].contiguous()
        return values if shard.version is not None else values.clone()


def _write_box(shard: TensorShard, box: tuple[slice, ...], values: Tensor) -> None:
    with shard.borrow(writes=True) as tensor:
        tensor[box].copy_(values)


def _p2p_op(kind: Callable[..., Any], tensor: Tensor, peer: int, world: World) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=world.group, group_peer=peer)


def _batches(moves: Sequence[Move]) -> list[list[Move]]:
    batches: list[list[Move]] = [[]]
    batch_bytes = 0
    for move in moves:
        batch_bytes += 8 * _num_elements(_overlap(move)[0])
        if batch_bytes > _BATCH_BYTES and batches[-1]:
            batches.append([])
            batch_bytes = 0
        batches[-1].append(move)
    return batches


def _overlap(move: Move) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    parts = overlap(move.target.offset, move.target.size, move.source.offset, move.source.size)
    assert parts is not None, "a move between disjoint boxes"
    return parts


def _num_elements(box: Sequence[slice]) -> int:
    return math.prod(extent.stop - extent.start for extent in box)


def _box(shard: TensorShard, rank: int) -> Box:
    return Box(shard.key, shard.offset, shard.size, rank)
