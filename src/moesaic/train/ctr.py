"""Recommenders as a kind of job: clicks, a network on every rank, and a table shared by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from moesaic.base.decisions import Decision
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes
from moesaic.dist.checkpoint import Checkpoint, list_snapshots
from moesaic.dist.state import Source
from moesaic.dist.world import World
from moesaic.facts.job import CtrJob
from moesaic.facts.plan import Plan
from moesaic.models.init import InitialSource
from moesaic.models.recommender import Recommender, network_params
from moesaic.models.recommender_files import TABLE
from moesaic.ps.sharded import ShardedTable
from moesaic.ps.snapshots import TableSnapshots
from moesaic.ps.stored_rows import StoredRows
from moesaic.ps.table import Table
from moesaic.ps.table_shard import TableShard
from moesaic.train.assemble import DTYPES
from moesaic.train.ctr_stats import CtrStepStats
from moesaic.train.data.clicks import ClickData
from moesaic.train.job_file import LoadedJob
from moesaic.train.objectives.ctr import ClickObjective
from moesaic.train.parts import Part, PartPlacement, make_part, parts_source
from moesaic.train.run import Run
from moesaic.train.table_passes import open_tiers, start_passes
from moesaic.train.trainer import RunStart
from moesaic.train.walk import MicroBatchWalk

CtrRun: TypeAlias = Run[ClickObjective, CtrStepStats]
"""Run of a recommender."""


class CtrKind:
    """Jobs that train a recommender to predict clicks."""

    unit = "samples"
    restarts_data = False
    data_change = "the files of its samples have changed"
    new_run = "start a new run"

    def units_per_step(self, job: CtrJob) -> int:
        """Return the samples in one step."""
        return job.train.batch

    def plan(
        self, loaded: LoadedJob[CtrJob], world: World, decisions: list[Decision[Any, Any]]
    ) -> Plan:
        """Return data parallelism over all ranks."""
        del loaded, decisions
        return Plan.data_parallel(world.size)

    def open_data(self, job: CtrJob, world: World, log: Callable[[str], None]) -> ClickData:
        """Open the samples, and read their files into the cache first if it lacks them."""
        return ClickData.open(job.data, job.seed, world, log)

    def assemble(self, start: RunStart[CtrJob]) -> CtrRun:
        """Return the run, its network and rows from a checkpoint or from first values."""
        job, world, checkpoint = start.loaded.job, start.world, start.checkpoint
        if checkpoint is not None:
            _check_added_days(checkpoint, start.data)
        placement = PartPlacement("", start.plan, range(world.size))
        part = _make_part(job, placement, world)
        table = Table(job.table, job.model.dim, seed=job.seed, dtype=job.row_dtype)
        rows = ShardedTable(table, world)
        run: CtrRun = Run(
            job, world, [placement], [part],
            ClickObjective(job, world, part, rows, start.data.train),
            MicroBatchWalk(job.train.precision, world.device), world.group,
            {} if checkpoint is None else dict(checkpoint.counters),
        )  # fmt: skip
        try:
            source: Source = InitialSource(job.seed, None)
            if checkpoint is not None:
                source = parts_source(checkpoint, source, [placement], run.counters, start.log)
            source.fill(run.state().shards)
            tiers = open_tiers(job.table, rows, world)
            if tiers is not None:
                run.files.callback(tiers.close)
            part.external_snapshot = run.files.enter_context(_open_snapshots(start, rows))
            if tiers is not None:
                first, batch = run.counters["samples"], job.train.batch
                objective = run.objective
                objective.passes = start_passes(
                    tiers, start.data.train, rows, first, batch, objective.pass_decisions
                )
                run.files.callback(objective.passes.close)
        except BaseException:
            run.close()
            raise
        return run

    def details(self, run: CtrRun) -> Iterator[str]:
        """Yield nothing."""
        return iter(())

    def describe(self, run: CtrRun) -> Iterator[str]:
        """Yield the network, the table, and where its rows are."""
        job, passes = run.objective.job, run.objective.passes
        layout = run.objective.rows.table.layout
        yield (
            f"{job.model.family}: {job.num_network_parameters:,} parameters; rows of "
            f"{job.model.dim} numbers and {job.table.optimizer}, {layout.record_bytes} bytes each"
        )
        if passes is not None:
            yield (
                f"rows: {format_bytes(passes.tiers.host_bytes)} in memory on each rank, the others "
                f"in '{job.table.ssd}'"
            )

    def start_fields(self, run: CtrRun) -> dict[str, Any]:
        """Return the parameters of the network, all of which each sample uses."""
        count = run.objective.job.num_network_parameters
        return {"parameters_total": count, "parameters_active": count}


def _check_added_days(checkpoint: Checkpoint, data: ClickData) -> None:
    """Raise if days were added after the first epoch, whose end would move."""
    old, new = (str(words).count(" ") for words in (checkpoint.facts["data"], data.digest))
    done = checkpoint.counters["samples"]
    if old < new and done and data.train.day_of(done - 1) >= old:
        raise ConfigError(
            f"resume: data.path has {new} days, and '{checkpoint.path}' has done the {old} days "
            "that it had: add days before an epoch ends, or start a new run"
        )


def _make_part(job: CtrJob, placement: PartPlacement, world: World) -> Part[Recommender]:
    """Return the network's part, whose parameters have no values yet."""
    network = Recommender(
        job.model, job.data.num_slots, job.data.num_dense,
        dtype=DTYPES[job.train.precision], device=world.device,
    )  # fmt: skip
    return make_part(network, placement, world, network_params(network, placement.ranks), job)


def _open_snapshots(start: RunStart[CtrJob], rows: ShardedTable) -> TableSnapshots:
    """Return the snapshots of this rank's rows, after the rows of a checkpoint are restored."""
    checkpoint, shard, rank = start.checkpoint, TableShard(rows.table), start.world.rank
    facts = {} if checkpoint is None else checkpoint.snapshots.get("", {})
    if checkpoint is not None:
        directory = checkpoint.path.absolute().parent.parent / TABLE
        stored = StoredRows.open_snapshot(directory, facts, shard.segment_layout)
        shard.restore(stored, rows.owns, rank if len(facts) == start.world.size else None)
    snapshots = TableSnapshots(
        start.out / TABLE, shard, rank, start.world.size,
        lambda: list_snapshots(start.out / "checkpoints", ""),
    )  # fmt: skip
    try:
        snapshots.resume(facts)
    except BaseException:
        snapshots.close()
        raise
    return snapshots
