"""The plan: which rank holds which part of the model. One JSON contract, obeyed by the engine."""

from __future__ import annotations

from pydantic import Field

from moesaic.base.config import Section
from moesaic.base.errors import ConfigError
from moesaic.facts.job import LayoutConfig, ModelConfig


class Plan(Section):
    """A layout resolved for a number of ranks.

    Every rank holds its own part of each global micro-batch. Ranks `[i * ep, (i + 1) * ep)` share
    out the experts; ranks with equal `rank % ep` hold copies of the same experts. Ranks
    `[i * shard, (i + 1) * shard)` share out the dense parameters.
    """

    ranks: int = Field(ge=1)
    """World size."""
    ep: int = Field(ge=1)
    """Ranks that share out the experts."""
    shard: int = Field(ge=1)
    """Ranks that share out the dense parameters."""
    experts: int = Field(ge=0)
    """Experts a layer."""

    def homes(self, rank: int) -> range:
        """The experts that live on `rank`, in the order of its slots."""
        share = self.experts // self.ep
        first = rank % self.ep * share
        return range(first, first + share)

    def expert_groups(self) -> list[list[int]]:
        """Groups of ranks that exchange tokens."""
        return [list(range(i, i + self.ep)) for i in range(0, self.ranks, self.ep)]

    def replica_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same experts."""
        return [list(range(i, self.ranks, self.ep)) for i in range(self.ep)]

    def shard_groups(self) -> list[list[int]]:
        """Groups of ranks that share out the dense parameters."""
        return [list(range(i, i + self.shard)) for i in range(0, self.ranks, self.shard)]

    def shard_replica_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same share of the dense parameters."""
        return [list(range(i, self.ranks, self.shard)) for i in range(self.shard)]

    def rows(self, rank: int, batch: int) -> range:
        """Which of the `batch` samples of a global micro-batch `rank` holds: a run of them."""
        return range(rank * batch // self.ranks, (rank + 1) * batch // self.ranks)


def lay_out(layout: LayoutConfig, model: ModelConfig, ranks: int) -> Plan:
    """The plan that `layout` means on `ranks` ranks."""
    shard = ranks if layout.shard == "all" else layout.shard
    for key, value in (("layout.ep", layout.ep), ("layout.shard", shard)):
        if ranks % value:
            raise ConfigError(
                f"{key} = {value} does not divide the number of ranks ({ranks}): "
                f"choose a divisor of {ranks}, or start another number of ranks (--nproc)"
            )
    if layout.ep > 1 and model.experts % layout.ep:
        raise ConfigError(
            f"layout.ep = {layout.ep} does not divide model.experts = {model.experts}: "
            "choose a divisor of the number of experts"
        )
    return Plan(ranks=ranks, ep=layout.ep, shard=shard, experts=model.experts)
