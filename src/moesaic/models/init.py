"""Initial parameter values: a state source that depends on the seed and the logical name alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.workload.parameters import A, B
from moesaic.kernels.randomness import normal

_MAX_CHUNK_ELEMENTS = 1 << 22


class InitialSource:
    """Source of initial values: norms are 1, biases and optimizer moments 0, the rest N(0, std²).

    A new LoRA adapter changes nothing: B is zero and A is normal with std `in_features ** -0.5`.
    """

    def __init__(self, seed: int, std: float | None) -> None:
        """Take `std` for all matrices; None: that of Glorot and Bengio, by the matrix's shape."""
        self._seed, self._std = seed, std

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write initial values into `shards` in place."""
        for shard in shards:
            with shard.borrow(writes=True) as tensor:
                if shard.kind != PARAMETER or shard.name.endswith((".bias", B)):
                    tensor.zero_()
                elif len(shard.shape) == 1:
                    tensor.fill_(1.0)
                elif shard.name.endswith(A):
                    self._fill_normal(shard, tensor, shard.shape[1] ** -0.5)
                else:
                    glorot = (2.0 / sum(shard.shape)) ** 0.5
                    self._fill_normal(shard, tensor, glorot if self._std is None else self._std)

    def _fill_normal(self, shard: TensorShard, tensor: Tensor, std: float) -> None:
        """Fill the `tensor` of `shard` in chunks of rows, because values are generated in fp64."""
        row = math.prod(shard.shape[1:])
        rows_at_once = max(1, _MAX_CHUNK_ELEMENTS // row)
        box = [slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True)]
        first = box[0].start
        for rows in tensor.split(rows_at_once):
            last = first + len(rows)
            values = normal(self._seed, f"initial {shard.name}", first * row, last * row)
            values = values.view(-1, *shard.shape[1:]).mul_(std)
            rows.copy_(values[(slice(None), *box[1:])])
            first = last
