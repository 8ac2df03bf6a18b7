"""Language models as a kind of job: text, layout, pretrained weights, routing records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.state import PARAMETER, Source, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, plan_from_job
from moesaic.facts.workload import count_parameters
from moesaic.facts.workload.parameters import A, B, describe_trainable
from moesaic.kernels.grouped_mm import check_backend
from moesaic.models.hf.reader import HFSource
from moesaic.models.init import InitialSource
from moesaic.train.assemble import assemble
from moesaic.train.data import TextData
from moesaic.train.job_file import LoadedJob
from moesaic.train.routing_replay import RoutingReplay, open_recorder
from moesaic.train.run import Run
from moesaic.train.topology import check_topology, resolve_dispatch


class PretrainedSource:
    """Source of parameters from a Hugging Face directory; moments and adapters get initial
    values."""

    def __init__(self, weights: Source, initial: Source) -> None:
        self._pretrained, self._initial = weights, initial

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Fill shards of all kinds."""
        pretrained: list[TensorShard] = []
        new: list[TensorShard] = []
        for shard in shards:
            is_initial = shard.kind != PARAMETER or shard.name.endswith((A, B))
            (new if is_initial else pretrained).append(shard)
        self._initial.fill(new)
        self._pretrained.fill(pretrained)


class LanguageModelKind:
    """Jobs that train one language model on next-token prediction."""

    unit = "tokens"

    def units_per_step(self, job: Job) -> int:
        """Return the tokens in one step."""
        return job.train.batch * job.data.sequence

    def plan(self, loaded: LoadedJob[Job], world: World) -> Plan:
        """Return the given plan, or the job's own layout with the default dispatch method."""
        job = loaded.job
        plan = loaded.plan or resolve_dispatch(plan_from_job(job, world.size), job, world)
        check_topology(plan, world, loaded.plan_origin)
        if loaded.plan is not None and job.model.experts:
            check_backend(plan.grouped_mm, world.device, key=f"{loaded.plan_origin}: grouped_mm")
        return plan

    def open_data(self, job: Job, world: World, log: Callable[[str], None]) -> TextData:
        """Open the text, and tokenise it first if the cache lacks it."""
        data = TextData.open(job.data, job.seed, world, log)
        data.check_vocab(job.model.vocab)
        return data

    def assemble(
        self,
        loaded: LoadedJob[Job],
        plan: Plan,
        world: World,
        checkpoint: Checkpoint | None,
        data: TextData,
        log: Callable[[str], None],
    ) -> Run:
        """Return the run, with replay and record of routing if the job asks for them."""
        job = loaded.job
        counters = None if checkpoint is None else dict(checkpoint.counters)
        first_step = 0 if counters is None else counters["step"]
        replay = None
        if job.routing.replay:
            replay = RoutingReplay(Path(job.routing.replay), job, data.digest)
            replay.check_steps(first_step)
        source: Source = checkpoint or _initial_source(job)
        if checkpoint is not None:
            has_fixed_placement = loaded.plan is not None and job.balance.migrate_every == 0
            plan = _restore_decisions(plan, checkpoint, has_fixed_placement)
        run = assemble(job, plan, world, source, counters, log)
        run.routing_replay = replay
        if job.routing.record:
            recorder = open_recorder(Path(job.routing.record), world, data.digest, first_step)
            try:
                run.routing_recorder = run.files.enter_context(recorder)
            except BaseException:
                run.close()
                raise
        return run

    def describe(self, run: Run) -> Iterator[str]:
        """Yield kernels, transports, balance policy, trained weights, and settings without
        effect."""
        for line in (run.describe_backends(), run.describe_balance()):
            if line is not None:
                yield line
        if run.job.finetune is not None:
            yield from describe_trainable(run.job)
        is_pinned = run.job.kernels.grouped_mm != "auto" and run.job.model.experts > 0
        if is_pinned and run.world.device.type == "cpu":
            yield "kernels.grouped_mm has no effect on a CPU"

    def start_fields(self, run: Run) -> dict[str, Any]:
        """Return numbers of parameters, and the kernels of this rank."""
        counts = count_parameters(run.job.model)
        return {
            "parameters_total": counts.total, "parameters_active": counts.active,
            "backends": run.describe_backends(),
        }  # fmt: skip


def _initial_source(job: Job) -> Source:
    initial = InitialSource(job.seed, job.model.init_std)
    if job.source is None:
        return initial
    return PretrainedSource(HFSource(Path(job.source), job.model), initial)


def _restore_decisions(plan: Plan, checkpoint: Checkpoint, has_fixed_placement: bool) -> Plan:
    """Return `plan` with the prices and expert placement of a checkpoint with the same layout. The
    resumed run then continues as if it had never stopped. Prices of the plan or the job take
    precedence, and so does a given plan's placement unless experts migrate."""
    saved = {"expert_placement_by_layer": {}, **checkpoint.facts["plan"]}
    now, prices = plan.decisions(), saved.pop("prices", None)
    saved.pop("grouped_mm", None)
    del now["prices"], now["grouped_mm"]
    if not has_fixed_placement:
        now |= {key: saved[key] for key in ("expert_placement", "expert_placement_by_layer")}
    if saved != now:
        return plan
    changes: dict[str, Any] = {
        key: saved[key] for key in ("expert_placement", "expert_placement_by_layer")
    }
    if plan.prices is None and prices:
        changes["prices"] = Prices(**prices)
    return plan.model_copy(update=changes)
