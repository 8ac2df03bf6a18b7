"""Tensor parallelism with sequence sharding: ranks that have the same samples and shard every
matrix.

Between blocks each rank has an equal shard of the tokens, in order, as [1, tokens, channels]. A
sharded block gathers the tokens, computes with its shard of the matrices, and reduce-scatters the
sums over ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moesaic.dist.collectives import AllReduce, GatherSequence, ReduceScatterSequence
from moesaic.dist.state import is_dtensor
from moesaic.dist.world import Group
from moesaic.nn.inputs import Inputs, compute_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TensorParallel:
    """TP rank, size, and collectives; with size 1 every method is trivial."""

    rank: int = 0
    size: int = 1
    group: Group | None = None
    mesh: DeviceMesh | None = None
    """Device mesh of the TP ranks, for parameters as DTensors; None: parameters are plain local
    shards."""

    def vocab_end(self, vocab_size: int) -> int:
        """Return the end of this rank's vocabulary shard of `vocab_size` words, as a local index.

        The last rank's shard never ends, so that the lookup of an invalid word fails.
        """
        return vocab_size if self.rank < self.size - 1 else sys.maxsize

    def parameter(self, *extents: int, shard_dim: int) -> nn.Parameter:
        """Return an uninitialised parameter of the full shape `extents`, sharded by `shard_dim`."""
        local_shape = list(extents)
        local_shape[shard_dim] //= self.size
        values = torch.empty(local_shape)
        if self.mesh is None:
            return nn.Parameter(values)
        from torch.distributed.tensor import DTensor, Shard  # Slow to import, and rarely needed.

        return nn.Parameter(
            DTensor.from_local(values, self.mesh, [Shard(shard_dim)], run_check=False)
        )

    def shard_slice(self, length: int) -> slice:
        """Return this rank's shard of `length` consecutive items."""
        return slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of all TP ranks, [1, tokens, channels], in the matmul dtype."""
        if self.group is None:
            return x
        gathered: Tensor = GatherSequence.apply(x[0].to(compute_dtype(x)), self.group)
        return gathered[None]

    def gather_rows(self, x: Tensor) -> Tensor:
        """Return the rows of all TP ranks, [tokens, ...], in the dtype of `x`."""
        gathered: Tensor = x if self.group is None else GatherSequence.apply(x, self.group)
        return gathered

    def gather_samples(self, inputs: Inputs, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return each of `parts`, gathered from all TP ranks in one collective, [batch, sequence,
        channels]."""
        if self.group is None:
            return parts
        gathered = self.gather_tokens(torch.cat(parts, dim=-1))
        by_sample: Tensor = gathered.view(-1, inputs.rotary.cosine.shape[2], gathered.shape[-1])
        split: tuple[Tensor, ...] = by_sample.split([part.shape[-1] for part in parts], dim=-1)
        return split

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, [..., channels], reduce-scattered to this rank's
        tokens."""
        if self.group is None:
            return x
        shard: Tensor = ReduceScatterSequence.apply(x.flatten(0, -2), self.group)
        return shard[None]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all TP ranks, on every rank."""
        total: Tensor = x if self.group is None else AllReduce.apply(x, self.group)
        return total


def to_local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, differentiably."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


NO_TP = TensorParallel()
"""No tensor parallelism."""
