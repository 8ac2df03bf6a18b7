"""Language models as a kind of job: text, layout, pretrained weights, routing records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.base.decisions import Decision
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.state import PARAMETER, Source, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import BalanceCosts, Job
from moesaic.facts.job.distill import (
    AUXILIARY,
    StudentConfig,
    student_prefix,
    students_in_order,
)
from moesaic.facts.plan import Plan, plan_from_job
from moesaic.facts.workload import count_parameters
from moesaic.facts.workload.parameters import SCORE, A, B, describe_trainable
from moesaic.kernels.grouped_mm import check_backend, describe_backend
from moesaic.models.hf.reader import PretrainedSource
from moesaic.models.init import InitialSource
from moesaic.models.tokenizer import check_vocabulary
from moesaic.nn.inputs import LOW_PRECISION
from moesaic.policy.balance import reason_not_to_balance
from moesaic.train.assemble import LMRun, assemble, place_parts
from moesaic.train.data.text_data import TextData
from moesaic.train.job_file import LoadedJob
from moesaic.train.parts import find_prefix, parts_source
from moesaic.train.routing_replay import RoutingReplay, open_recorder
from moesaic.train.topology import check_topology, resolve_dispatch
from moesaic.train.trainer import RunStart


class LanguageModelKind:
    """Jobs that train one language model on next-token prediction."""

    unit = "tokens"
    restarts_data = True
    data_change = "the files of its text have changed"
    new_run = "start a new run from its weights (moesaic convert, then [model] from)"

    def units_per_step(self, job: Job) -> int:
        """Return the tokens in one step."""
        return job.train.batch * job.data.sequence

    def plan(
        self, loaded: LoadedJob[Job], world: World, decisions: list[Decision[Any, Any]]
    ) -> Plan:
        """Return the given plan, or the job's own layout with the default dispatch method."""
        job = loaded.job
        plan = loaded.plan or resolve_dispatch(
            plan_from_job(job, world.size, loaded.origin), job, world, decisions
        )
        check_topology(plan, world, loaded.plan_origin)
        if loaded.plan is not None and job.model.experts:
            check_backend(plan.grouped_mm, world.device, key=f"{loaded.plan_origin}: grouped_mm")
        return plan

    def open_data(self, job: Job, world: World, log: Callable[[str], None]) -> TextData:
        """Open the text, and tokenise it first if the cache lacks it."""
        data = TextData.open(job.data, job.seed, world, log, job.control)
        check_vocabulary(job.model.vocab, data.tokenizer, has_control=job.control is not None)
        return data

    def assemble(self, start: RunStart[Job]) -> LMRun:
        """Return the run, with replay and record of routing if the job asks for them."""
        loaded, plan, checkpoint = start.loaded, start.plan, start.checkpoint
        job, data = loaded.job, start.data
        counters = None if checkpoint is None else dict(checkpoint.counters)
        first_step = 0 if counters is None else counters["step"]
        replay = None
        if job.routing.replay:
            replay = RoutingReplay(Path(job.routing.replay), job, data.digest)
            replay.check_steps(first_step)
        source: Source = InitialWeights(job)
        if checkpoint is not None and counters is not None:
            source = parts_source(checkpoint, source, place_parts(job, plan), counters, start.log)
            has_fixed_placement = loaded.plan is not None and job.balance.migrate_every == 0
            plan = _restore_decisions(plan, checkpoint, has_fixed_placement)
        run = assemble(job, plan, start.world, source, counters, start.log, start.decisions)
        run.objective.routing_replay = replay
        if job.routing.record:
            recorder = open_recorder(Path(job.routing.record), start.world, data.digest, first_step)
            try:
                run.objective.routing_recorder = run.files.enter_context(recorder)
            except BaseException:
                run.close()
                raise
        return run

    def describe(self, run: LMRun) -> Iterator[str]:
        """Yield the model, trained weights, a slow drive, and settings without effect."""
        job = run.objective.job
        counts = count_parameters(job.model)
        active = f", {counts.active:,} active" if job.model.experts else ""
        yield f"{job.model.family}: {counts.total:,} parameters{active}"
        tiers = run.objective.part.tiers
        if tiers is not None and not tiers.is_direct:
            assert job.memory is not None
            yield (
                f"warning: memory.ssd = '{job.memory.ssd}' has no direct I/O, so the page cache "
                "takes memory beyond memory.host: name a directory on ext4 or xfs"
            )
        if job.finetune is not None:
            yield describe_trainable(job)[0]
        is_pinned = job.kernels.grouped_mm != "auto" and job.model.experts > 0
        if is_pinned and run.world.device.type == "cpu":
            yield "kernels.grouped_mm has no effect on a CPU"
        yield from map(_describe_student, students_in_order(job.student))

    def details(self, run: LMRun) -> Iterator[str]:
        """Yield sizes of trained weights by name, kernels, transports and the balance policy."""
        job = run.objective.job
        if job.finetune is not None:
            yield from describe_trainable(job)[1:]
        for line in (_describe_backends(run), _describe_balance(run)):
            if line is not None:
                yield line

    def start_fields(self, run: LMRun) -> dict[str, Any]:
        """Return numbers of parameters, the kernels of this rank, and the students, if any."""
        job = run.objective.job
        counts = count_parameters(job.model)
        students = [
            {
                "name": one.name, "teacher": one.teacher,
                "parameters_total": count_parameters(one.model).total,
            }
            for one in job.student
        ]  # fmt: skip
        return {
            "parameters_total": counts.total, "parameters_active": counts.active,
            "backends": _describe_backends(run),
            **({"students": students} if students else {}),
        }  # fmt: skip


def _describe_backends(run: LMRun) -> str | None:
    """Describe this rank's grouped matmul and its token transports for the user; None without
    experts."""
    moe = next((moe for _, moe in run.objective.part.model.expert_layers()), None)
    if moe is None:
        return None
    dtype = LOW_PRECISION.get(run.job.train.precision, moe.bank.arena.dtype)
    experts = f"experts: {describe_backend(run.world.device, dtype, moe.bank.backend)}"
    transports = [transport.name for transport in moe.dispatcher.groups.transports]
    return f"{experts}; tokens sent by {', then '.join(transports)}" if transports else experts


def _describe_balance(run: LMRun) -> str | None:
    """Describe the balance policy and its costs for the user; None if the job wants no
    balancing."""
    job, migration = run.objective.job, run.objective.migration
    costs, config = run.plan.balance_costs, job.balance
    balances = any(moe.balancer for _, moe in run.objective.part.model.expert_layers())
    reason = reason_not_to_balance(job, run.plan)
    if costs is None or not (balances or migration):
        return None if reason is None else f"balance: no replicas, {reason}"
    migrates = f"; experts may migrate every {config.migrate_every} steps" if migration else ""
    policy = (
        config.display_name
        if balances
        else "no replicas"
        if reason is None
        else f"no replicas, {reason}"
    )
    hint = (
        "; remove balance.prefetch: nothing overlaps replica transfers on these ranks"
        if balances and config.prefetch and not costs.overlaps
        else ""
    )
    return f"balance: {policy}{migrates}; {costs.describe()}{hint}"


def _describe_student(student: StudentConfig) -> str:
    """Describe a student and what it learns from for the user."""
    losses = ", ".join(
        f"{name} {weight:g}" for name, weight in student.losses.model_dump().items() if weight
    )
    every = f", every {student.interval} steps" if student.interval > 1 else ""
    layer = "; with an auxiliary layer" if student.auxiliary_layer else ""
    return (
        f'student "{student.name}": {count_parameters(student.model).total:,} parameters; learns '
        f'from "{student.teacher}"{every}: {losses}{layer}'
    )


@dataclass(frozen=True)
class InitialWeights:
    """Source of the values at the start of a run: of the model, and of each student."""

    job: Job

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Fill shards from the directories that the job names, and the others at random."""
        models = {"": (self.job.source, self.job.model)}
        models |= {student_prefix(one.name): (one.source, one.model) for one in self.job.student}
        groups: dict[str, list[TensorShard]] = {prefix: [] for prefix in models}
        for shard in shards:
            groups[find_prefix(shard.name, models) or ""].append(shard)
        for prefix, group in groups.items():
            source, model = models[prefix]
            initial = InitialSource(self.job.seed, model.init_std)
            if source is None or not group:
                initial.fill(group)
                continue
            pretrained = PretrainedSource(Path(source), model)
            stored = [one for one in group if _is_pretrained(one, prefix, pretrained)]
            kept = {id(one) for one in stored}
            initial.fill([one for one in group if id(one) not in kept])
            named = [replace(one, name=one.name.removeprefix(prefix)) for one in stored]
            # A row's first values depend on the name in the run.
            partial = [i for i, one in enumerate(named) if pretrained.is_partial(one)]
            initial.fill([stored[i] for i in partial])
            pretrained.fill(named)


def _is_pretrained(shard: TensorShard, prefix: str, pretrained: PretrainedSource) -> bool:
    """Return whether a Hugging Face directory has values of `shard`: it has none of moments,
    adapters, auxiliary weights of students, and a new classifier."""
    name = shard.name.removeprefix(prefix)
    return (
        shard.kind == PARAMETER
        and not name.endswith((A, B))
        and not name.startswith(f"{AUXILIARY}.")
        and (pretrained.has_classifier or name != SCORE)
    )


def _restore_decisions(plan: Plan, checkpoint: Checkpoint, has_fixed_placement: bool) -> Plan:
    """Return `plan` with the costs and expert placement of a checkpoint with the same layout. The
    resumed run then continues as if it had never stopped. Costs of the plan or the job take
    precedence, and so does a given plan's placement unless experts migrate."""
    saved = {"expert_placement_by_layer": {}, **checkpoint.facts["plan"]}
    now, costs = plan.decisions(), saved.pop("balance_costs", None)
    saved.pop("grouped_mm", None)
    del now["balance_costs"], now["grouped_mm"]
    if not has_fixed_placement:
        now |= {key: saved[key] for key in ("expert_placement", "expert_placement_by_layer")}
    if saved != now:
        return plan
    changes: dict[str, Any] = {
        key: saved[key] for key in ("expert_placement", "expert_placement_by_layer")
    }
    if plan.balance_costs is None and costs:
        changes["balance_costs"] = BalanceCosts(**costs)
    return plan.model_copy(update=changes)
