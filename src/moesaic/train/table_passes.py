"""Drive below a recommender's table: the budget of a rank, and passes that read rows ahead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError
from moesaic.base.host_memory import free_memory_bytes
from moesaic.base.units import format_bytes
from moesaic.dist.collectives import all_gather
from moesaic.dist.world import World
from moesaic.facts.job import TableConfig
from moesaic.facts.table_rows import PassLength, PassNeeds
from moesaic.policy.table_rows import choose_leaving, choose_pass_length
from moesaic.ps.index import Int64s
from moesaic.ps.passes import TablePasses
from moesaic.ps.sharded import ShardedTable
from moesaic.ps.tiers import TableTiers
from moesaic.train.data.clicks import ClickSamples
from moesaic.train.topology import gather_places

PassDecision = Decision[PassNeeds, PassLength]
"""Decision on the steps of a pass."""


def open_tiers(config: TableConfig, rows: ShardedTable, world: World) -> TableTiers | None:
    """Return the tiers of this rank's rows; None without `table.ssd`. Every rank of the world must
    call this."""
    if config.ssd is None:
        return None
    directory = Path(config.ssd).expanduser()
    return TableTiers(rows.table, directory, _host_bytes(config, world), choose_leaving)


def _host_bytes(config: TableConfig, world: World) -> int:
    """Return the bytes of memory for rows and their index; raise if a rank has less."""
    hosts = [place.host for place in gather_places(world)]
    free = free_memory_bytes() // hosts.count(hosts[world.rank])
    # All ranks must raise, or none.
    free = int(all_gather(torch.tensor([free], device=world.device), world.group).min())
    if config.host_bytes is not None and config.host_bytes > free:
        raise ConfigError(
            f'table.host = "{config.host}" is more than the {format_bytes(free)} of memory that '
            "are free for a rank: lower it, or start fewer ranks on a host"
        )
    return free // 2 if config.host_bytes is None else config.host_bytes


def start_passes(
    tiers: TableTiers,
    samples: ClickSamples,
    rows: ShardedTable,
    first: int,
    batch: int,
    decisions: list[PassDecision],
) -> TablePasses:
    """Return the passes over the steps from global sample `first` on.

    Args:
        tiers: tiers of this rank's rows.
        samples: samples to train on.
        rows: rows over all ranks.
        first: first sample of the next step.
        batch: samples of a step.
        decisions: list that receives decisions on the steps of passes.
    """
    pass_steps = rows.table.config.pass_steps
    return TablePasses(
        tiers, _coming_keys(samples, rows, first, batch),
        partial(_decide_length, decisions), 0 if pass_steps == "auto" else pass_steps,
    )  # fmt: skip


def _decide_length(decisions: list[PassDecision], needs: PassNeeds) -> PassLength:
    return decide(choose_pass_length, needs, decisions)


def _coming_keys(
    samples: ClickSamples, rows: ShardedTable, first: int, batch: int
) -> Iterator[Int64s]:
    """Yield the keys of each coming step that this rank owns.

    Each rank reads the samples of all ranks, so that nothing is sent from the thread that scans.
    """
    for start in count(first, batch):
        keys = samples.read(range(start, start + batch), shuffled=True).keys
        yield keys[rows.owns(keys)]
