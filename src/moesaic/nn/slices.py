"""Slices: the ranks that hold the same samples and share out every dense matrix.

Between blocks each of them has an equal run of the samples' tokens, in their order, as one row
[1, tokens, channels]. A block whose matrices are cut joins the runs, does its part of the work for
all tokens, and hands back sums over the slices, as runs again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moesaic.dist.collectives import JoinRuns, SumRuns, SumShares
from moesaic.dist.state import is_shared_out
from moesaic.dist.world import Group
from moesaic.nn.context import Context, compute_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Slices:
    """How many slices there are, and which one is this rank's; of one, every method is trivial."""

    index: int = 0
    count: int = 1
    group: Group | None = None
    mesh: DeviceMesh | None = None
    """The same ranks, for parameters to be whole tensors that they share out; None: a parameter is
    no more than this slice's part of it."""

    def end(self, words: int) -> int:
        """Where the words of this slice end, each having so many; those of the last one never do,
        so that what is no word of any slice fails where it is looked up."""
        return words if self.index < self.count - 1 else sys.maxsize

    def parameter(self, *extents: int, cut: int) -> nn.Parameter:
        """A parameter of so many numbers in each dimension, of which `cut` is shared out."""
        here = list(extents)
        here[cut] //= self.count
        values = torch.empty(here)
        if self.mesh is None:
            return nn.Parameter(values)
        from torch.distributed.tensor import DTensor, Shard  # Slow to import, and rarely used.

        return nn.Parameter(DTensor.from_local(values, self.mesh, [Shard(cut)], run_check=False))

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


def here(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, through which its gradient comes."""
    return parameter.to_local() if is_shared_out(parameter) else parameter


WHOLE = Slices()
"""Matrices that nobody cuts."""
