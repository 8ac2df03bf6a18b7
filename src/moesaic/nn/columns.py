"""Columns: the ranks that hold samples of their own and share out every row of a table.

Each has an equal run of columns, of all words. Words of all ranks go to each of them; it looks up
its columns of those, and every rank gets those of its own words from all. Backward, gradients of
columns go back to where those are, and are added up there in the order of all tokens: what one
process would do with these columns, so that no sum over ranks is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import JoinColumns, gather
from moesaic.dist.exchange import Carrier, Journey


@dataclass(frozen=True)
class Columns:
    """How many ranks there are; of one, every method is trivial."""

    count: int = 1
    carrier: Carrier | None = None

    def look_up(self, ids: Tensor, weight_VW: Tensor) -> Tensor:
        """Whole rows of the table for this rank's `ids`, of which there may be none."""
        if self.carrier is None:
            return F.embedding(ids, weight_VW)
        own = ids.flatten()
        tokens = gather(own.new_tensor([len(own)]), self.carrier.group).flatten().tolist()
        mine = [len(own)] * self.count
        everyone, work = self.carrier.start(own.repeat(self.count), mine, tokens)
        work.wait()
        columns = Journey(F.embedding(everyone, weight_VW), self.carrier, tokens, mine).end()
        width = weight_VW.shape[1]
        by_rank = columns.view(self.count, len(own), width)
        return by_rank.transpose(0, 1).reshape(*ids.shape, self.count * width)

    def join(self, weight_VW: Tensor) -> Tensor:
        """The whole table, for a head that multiplies by it; it is the caller's to let go of."""
        if self.carrier is None:
            return weight_VW
        joined: Tensor = JoinColumns.apply(weight_VW, self.carrier.group)
        return joined


ALONE = Columns()
"""A table that nobody shares out."""
