"""Slices: the ranks that hold the same samples and share out every dense matrix.

Between blocks each of them has an equal run of the samples' tokens, in their order, as one row
[1, tokens, channels]. A block whose matrices are cut joins the runs, does its part of the work for
all tokens, and hands back sums over the slices, as runs again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dist.collectives import JoinRuns, SumRuns, SumShares
from moesaic.dist.world import Group
from moesaic.nn.context import Context, compute_dtype


@dataclass(frozen=True)
class Slices:
    """How many slices there are, and which one is this rank's; of one, every method is trivial."""

    index: int = 0
    count: int = 1
    group: Group | None = None

    def run(self, whole: int) -> slice:
        """This slice's run of `whole` things in a row."""
        return slice(self.index * whole // self.count, (self.index + 1) * whole // self.count)

    def join(self, x: Tensor) -> Tensor:
        """All slices' tokens, [1, tokens, channels], in the type that products take."""
        if self.group is None:
            return x
        joined: Tensor = JoinRuns.apply(x[0].to(compute_dtype(x)), self.group)
        return joined[None]

    def rows(self, x: Tensor) -> Tensor:
        """All slices' rows of `x`, [tokens, ...], as they are."""
        joined: Tensor = x if self.group is None else JoinRuns.apply(x, self.group)
        return joined

    def samples(self, context: Context, *parts: Tensor) -> tuple[Tensor, ...]:
        """What all slices have of each of `parts`, [batch, sequence, channels], in one message."""
        if self.group is None:
            return parts
        joined = self.join(torch.cat(parts, dim=-1))
        by_sample: Tensor = joined.view(-1, context.rotary.cosine.shape[2], joined.shape[-1])
        split: tuple[Tensor, ...] = by_sample.split([part.shape[-1] for part in parts], dim=-1)
        return split

    def sum_runs(self, x: Tensor) -> Tensor:
        """The sum of all slices' `x`, [..., channels] over all tokens, of this slice's tokens."""
        if self.group is None:
            return x
        run: Tensor = SumRuns.apply(x.flatten(0, -2), self.group)
        return run[None]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all slices' `x`, which every one of them goes on with."""
        total: Tensor = x if self.group is None else SumShares.apply(x, self.group)
        return total


WHOLE = Slices()
"""Matrices that nobody cuts."""
