"""Column-sharded embedding over ranks that have different samples.

Each rank holds an equal range of columns for the whole vocabulary. It receives the token ids of all
ranks, looks up its columns, and sends them back. Backward sends gradients of columns to their
owner, which sums them in the order of global tokens. No gradient reduction is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.all_to_all import PendingRows, Transport
from moesaic.dist.collectives import GatherColumns, all_gather


@dataclass(frozen=True)
class ShardedEmbedding:
    """Ranks that shard an embedding; with one rank, every method is trivial."""

    num_ranks: int = 1
    transport: Transport | None = None

    def look_up(self, ids: Tensor, weight_VW: Tensor) -> Tensor:
        """Return the full embedding rows of this rank's `ids`, which may be empty."""
        if self.transport is None:
            return F.embedding(ids, weight_VW)
        own_ids = ids.flatten()
        counts = (
            all_gather(own_ids.new_tensor([len(own_ids)]), self.transport.group).flatten().tolist()
        )
        own_counts = [len(own_ids)] * self.num_ranks
        all_ids, work = self.transport.start(own_ids.repeat(self.num_ranks), own_counts, counts)
        work.wait()
        columns = PendingRows(
            F.embedding(all_ids, weight_VW), self.transport, counts, own_counts
        ).wait()
        width = weight_VW.shape[1]
        by_rank = columns.view(self.num_ranks, len(own_ids), width)
        return by_rank.transpose(0, 1).reshape(*ids.shape, self.num_ranks * width)

    def gather_table(self, weight_VW: Tensor) -> Tensor:
        """Return the full table for the output projection; the caller should free it soon."""
        if self.transport is None:
            return weight_VW
        table: Tensor = GatherColumns.apply(weight_VW, self.transport.group)
        return table


UNSHARDED = ShardedEmbedding()
"""An embedding that is not sharded."""
