"""Initial parameter values: a state source that depends on the seed and the logical name alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.workload.parameters import A, B
from moesaic.kernels.randomness import normal

_MAX_CHUNK_ELEMENTS = 1 << 22


class InitialSource:
    """Source of initial values: norms are 1, biases and optimizer moments 0, the rest N(0, std²).

    A new LoRA adapter changes nothing: B is zero and A is normal with std `in_features ** -0.5`.
    """

    def __init__(self, seed: int, std: float) -> None:
        self._seed, self._std = seed, std

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write initial values into `shards` in place."""
        for shard in shards:
            if shard.kind != PARAMETER or shard.name.endswith((".bias", B)):
                shard.tensor.zero_()
            elif len(shard.shape) == 1:
                shard.tensor.fill_(1.0)
            elif shard.name.endswith(A):
                self._fill_normal(shard, shard.shape[1] ** -0.5)
            else:
                self._fill_normal(shard, self._std)

    def _fill_normal(self, shard: TensorShard, std: float) -> None:
        """Fill `shard` in chunks of rows, because values are generated in fp64."""
        row = math.prod(shard.shape[1:])
        rows_at_once = max(1, _MAX_CHUNK_ELEMENTS // row)
        box = [slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True)]
        first = box[0].start
        for rows in shard.tensor.split(rows_at_once):
            last = first + len(rows)
            values = normal(self._seed, f"initial {shard.name}", first * row, last * row)
            values = values.view(-1, *shard.shape[1:]).mul_(std)
            rows.copy_(values[(slice(None), *box[1:])])
            first = last
