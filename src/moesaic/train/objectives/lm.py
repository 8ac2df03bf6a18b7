"""Language-modelling objective: next-token prediction with attention inside documents, plus the
routers' auxiliary losses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moesaic.dist.collectives import all_gather, all_reduce_, gather
from moesaic.dist.state import TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.inputs import ByProduct, Inputs
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.nn.reports import BlockReport, MoEReport, Reports, moe_reports
from moesaic.policy.balance import LayerBalancer
from moesaic.train.balancing import take_layer_balance
from moesaic.train.data.batch import Batch, Samples
from moesaic.train.expert_migration import ExpertMigration, LayerMigration
from moesaic.train.lm_stats import LMStepStats
from moesaic.train.objectives.objective import StepContext, StepResult
from moesaic.train.parts import Part
from moesaic.train.phases import PhaseTimer
from moesaic.train.routing_replay import RoutingRecorder, RoutingReplay


@dataclass(frozen=True)
class Losses:
    """Losses of one micro-batch on this rank."""

    loss: Tensor
    """This rank's term of the cross-entropy, divided by the targets of the whole batch."""
    aux_losses: tuple[AuxLoss, ...] = ()
    """Auxiliary losses of each pipeline stage with MoE layers; none in evaluation."""
    moe_reports: Mapping[int, MoEReport] = field(default_factory=dict)
    """Reports of this rank's MoE layers, without gradients."""


class LanguageModelObjective:
    """Next-token prediction by one part, with balancing, routing records and expert migration."""

    unit = "tokens"

    def __init__(self, job: Job, world: World, part: Part[LanguageModel]) -> None:
        self.job, self.world, self.part = job, world, part
        self.routing_recorder: RoutingRecorder | None = None
        self.routing_replay: RoutingReplay | None = None
        self.migration: ExpertMigration | None = None
        """Expert migration between steps; None if experts stay."""
        plan = part.plan
        self._pipeline_group = world.partition(plan.pp_groups())
        self._counts_group = world.partition(plan.same_etp_rank_groups())

    def load(self, samples: Samples, indices: range, *, shuffled: bool) -> Batch:
        """Return this rank's batch of a global micro-batch."""
        return samples.batch(self.part.local_samples(indices), shuffled=shuffled)

    def num_units(self, batch: Batch) -> int:
        """Return the targets of a batch that this rank counts."""
        return num_targets(batch) if self.part.plan.counts_samples(self.world.rank) else 0

    def training_inputs(self, batch: Batch, context: StepContext) -> Inputs:
        """Return the training inputs of a micro-batch, with targets."""
        inputs = make_inputs(self.part.model, batch, self.job, context.step)
        kept: frozenset[ByProduct] = frozenset()
        if self.routing_recorder is not None:
            kept = frozenset({"router_choices"})
        routing_replay = None
        if self.routing_replay is not None:
            choices = self.routing_replay.read_expert_ids(context.step, batch.samples)
            routing_replay = {
                layer: chosen[inputs.token_slice].to(self.world.device)
                for layer, chosen in choices.items()
            }
        inputs = replace(inputs, training=True, keep=kept, routing_replay=routing_replay)
        return add_targets(inputs, batch, context.units, context.scale)

    def validation_inputs(self, batch: Batch) -> Inputs:
        """Return the inputs of a validation batch, whose loss is a sum over its targets."""
        return add_targets(make_inputs(self.part.model, batch, self.job, 0), batch, 1, 1.0)

    def compute_loss(self, batch: Batch, context: StepContext) -> tuple[Tensor, Losses]:
        """Return a tensor whose backward gives the gradients of one micro-batch, times the scale,
        and the losses.

        The head computes its gradient in forward, in fp16 too, so the inputs carry the scale.
        """
        root, losses, _ = self.run_model(batch, self.training_inputs(batch, context), context.scale)
        return root, losses

    def run_model(
        self, batch: Batch, inputs: Inputs, scale: float
    ) -> tuple[Tensor, Losses, Reports]:
        """Run the model with its head; return what `compute_loss` does, and the reports of all
        blocks."""
        loss, reports = self.part.model(batch.inputs.to(self.world.device), inputs)
        root, aux_losses = self.attach_aux_losses(loss, reports.values(), scale)
        moe = detach_all(moe_reports(reports.values()))
        return root, Losses(loss.detach() / scale, aux_losses, moe), reports

    def attach_aux_losses(
        self, x: Tensor, reports: Iterable[BlockReport], scale: float
    ) -> tuple[Tensor, tuple[AuxLoss, ...]]:
        """Start to sum the counts of the MoE layers; return `x`, whose backward adds the gradients
        of their losses times `scale`, and these losses."""
        aux_losses = self.sum_aux_losses(moe_reports(reports).values())
        for aux_loss in aux_losses:
            x = aux_loss.attach(x, *self.aux_weights(scale))
        return x, aux_losses

    def sum_aux_losses(self, reports: Collection[MoEReport]) -> tuple[AuxLoss, ...]:
        """Start to sum the counts of MoE layers; return their auxiliary losses, if there are any
        layers."""
        return (AuxLoss(list(reports), self._counts_group),) if reports else ()

    def aux_weights(self, scale: float) -> tuple[float, float]:
        """Return the weights of a micro-batch's balance losses and z-losses in backward."""
        factor, routing = scale / self._num_aux_losses, self.job.routing
        return factor * routing.balance_loss, factor * routing.z_loss

    @property
    def _num_aux_losses(self) -> int:
        """Expert layers times micro-batches: auxiliary losses are means over both."""
        return self.job.train.micro_batches * max(len(self.job.model.expert_layers), 1)

    def evaluate(self, batch: Batch) -> Losses:
        """Return the losses of a validation batch."""
        inputs = self.validation_inputs(batch)
        loss, _ = self.part.model(batch.inputs.to(self.world.device), inputs)
        return Losses(loss)

    def validation_loss(self, batch: Batch, losses: Losses) -> tuple[Tensor, int]:
        """Return the loss of a validation batch and its targets.

        In a pipeline only the last rank has the loss, so only it counts targets.
        """
        has_head = "head" in self.part.model.block_names
        return losses.loss, self.num_units(batch) if has_head else 0

    def validation_figures(self, losses: Sequence[Losses]) -> dict[str, float]:
        """Return nothing more."""
        del losses
        return {}

    def total_loss(self, losses: Sequence[Losses]) -> float:
        """Return the weighted sum of all losses of a step over all ranks."""
        return self._reduce_losses(losses)[0]

    def after_update(self, losses: Sequence[Losses]) -> None:
        """Adjust router biases by the experts requested in the whole batch."""
        if self.job.finetune is not None and self.job.finetune.router == "frozen":
            return
        routers = dict(self.part.model.sigmoid_routers())
        requested = _sum_by_layer(losses, "requested_LE") if routers else {}
        for layer, router in routers.items():
            router.update_bias(requested[layer], self.job.routing.bias_update_rate)

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> LMStepStats:
        """Return the statistics of a step; record its routing and move experts if that is due."""
        if self.routing_recorder is not None:
            for batch, one in zip(result.batches, result.losses, strict=True):
                self._record_routing(self.routing_recorder, result.step - 1, batch, one.moe_reports)
        with phases("log"):
            balance = {
                layer: take_layer_balance(moe)
                for layer, moe in self.part.model.expert_layers()
                if isinstance(moe.balancer, LayerBalancer)
            }
            tiers = self.part.tiers
            memory = None if tiers is None else tiers.end_step()
            stats = replace(self._step_stats(result, phases), balance=balance, memory=memory)
        return replace(stats, migrations=self._migrate_experts(stats, phases))

    def state_shards(self) -> list[TensorShard]:
        """Return the token counts that decide the next migration."""
        return [] if self.migration is None else list(self.migration.state_shards())

    def flush(self) -> None:
        """Write the routing recorded so far."""
        if self.routing_recorder is not None:
            self.routing_recorder.flush()

    def _record_routing(
        self,
        recorder: RoutingRecorder,
        step: int,
        batch: Batch,
        reports: Mapping[int, MoEReport],
    ) -> None:
        """Record the choices of all TP ranks together, because one rank's need not cover whole
        samples."""
        choices = dict[int, Tensor]()
        for layer, report in reports.items():
            assert report.router_choices is not None
            choices[layer] = all_gather(report.router_choices, self.part.tp_group).flatten(0, 1)
        if self.part.plan.counts_samples(self.world.rank):
            recorder.record(step, batch.samples, choices)

    def _migrate_experts(self, stats: LMStepStats, phases: PhaseTimer) -> list[LayerMigration]:
        """Move experts to their new owner ranks, if migration is due."""
        if self.migration is None:
            return []
        self.migration.add_counts(stats.counts)
        if not self.migration.is_due(stats.step):
            return []
        with phases("migrate"):
            self.part.plan, migrations = self.migration.migrate(self.part.plan)
        return migrations

    def _reduce_losses(self, losses: Sequence[Losses]) -> tuple[float, float, float, float, float]:
        """Return the total loss, its terms, and the replay mismatches, each summed over all
        ranks."""
        mismatches = sum(
            report.num_replay_mismatches for one in losses for report in one.moe_reports.values()
        )
        local = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        local[0] = torch.stack([one.loss.double() for one in losses]).sum()
        for aux_loss in (aux for one in losses for aux in one.aux_losses):
            local[1:3] += torch.stack(aux_loss.losses()) / self._num_aux_losses
        local[3] = mismatches
        loss, balance, z, all_mismatches = all_reduce_(local, self.world.group).tolist()
        routing = self.job.routing
        total = loss + routing.balance_loss * balance + routing.z_loss * z
        return total, loss, balance, z, all_mismatches

    def _step_stats(self, result: StepResult, phases: PhaseTimer) -> LMStepStats:
        total, loss, balance, z, mismatches = self._reduce_losses(result.losses)
        counts = _copy_to_host(_sum_by_layer(result.losses, "kept_LE"))
        requested = counts
        if self.job.routing.capacity_factor is not None:
            requested = _copy_to_host(_sum_by_layer(result.losses, "requested_LE"))
        dropped = {layer: int((requested[layer] - kept).sum()) for layer, kept in counts.items()}
        by_rank: dict[int, Tensor] = {}
        if self.job.log.is_sampled(result.step):
            by_rank = self._gather_counts_by_rank(result.losses)
        if self._pipeline_group is not None:
            counts, dropped = self._gather_expert_counts(counts, dropped)
        return LMStepStats(
            step=result.step, loss=loss, total_loss=total, balance_loss=balance, z_loss=z,
            grad_norm=result.grad_norm, lr=result.lr, tokens=result.units,
            num_replay_mismatches=int(mismatches), dropped=dropped,
            counts=counts, counts_by_rank=by_rank, phases=phases.seconds,
            loss_scale=result.loss_scale, is_skipped=result.is_skipped,
        )  # fmt: skip

    def _gather_counts_by_rank(self, losses: Sequence[Losses]) -> dict[int, Tensor]:
        """Return the assignments of each rank to each expert, [ranks, experts], by layer of this
        pipeline rank; empty on all ranks but the first."""
        layers = list(losses[0].moe_reports)
        if not layers:
            return {}
        kept = [torch.stack([one.moe_reports[layer].kept for layer in layers]) for one in losses]
        gathered = gather(torch.stack(kept).sum(0), self._counts_group)
        return {} if gathered is None else dict(zip(layers, gathered.cpu().unbind(1), strict=True))

    def _gather_expert_counts(
        self, counts: dict[int, Tensor], dropped: dict[int, int]
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Return tokens per expert and drops of each expert layer, over all pipeline ranks."""
        model = self.job.model
        table = torch.zeros(model.layers, model.experts + 1, dtype=torch.int64)
        for layer, tokens in counts.items():
            table[layer, :-1], table[layer, -1] = tokens, dropped[layer]
        table = all_reduce_(table.to(self.world.device), self._pipeline_group).cpu()
        return (
            {layer: table[layer, :-1] for layer in model.expert_layers},
            {layer: int(table[layer, -1]) for layer in model.expert_layers},
        )


def _sum_by_layer(losses: Sequence[Losses], name: str) -> dict[int, Tensor]:
    """Return a table of `GlobalCounts` by layer, summed over micro-batches."""
    total: dict[int, Tensor] = {}
    for stage in zip(*(one.aux_losses for one in losses), strict=True):
        table_LE = torch.stack([getattr(one.wait(), name) for one in stage]).sum(0)
        total |= zip(stage[0].layers, table_LE, strict=True)
    return total


def _copy_to_host(tables: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copy equally shaped tables, by layer, to the host in one transfer if they are on a device."""
    if all(one.device.type == "cpu" for one in tables.values()):
        return tables
    return dict(zip(tables, torch.stack(list(tables.values())).cpu(), strict=True))


def make_inputs(model: LanguageModel, batch: Batch, job: Job, step: int) -> Inputs:
    """Return the inputs of evaluation for one micro-batch, without targets."""
    device = next(model.parameters()).device
    return Inputs(
        model.rotary(batch.positions.to(device)),
        attention=AttentionMetadata.packed(batch.documents, model.config.window, device),
        seed=job.seed,
        step=step,
        samples=batch.samples.to(device),
        positions=torch.arange(batch.inputs.shape[1], device=device),
        token_slice=model.tp.shard_slice(batch.inputs.numel()),
    )


def num_targets(batch: Batch) -> int:
    """Return the number of tokens that count towards the loss."""
    return int((batch.targets != IGNORE_INDEX).sum())


def add_targets(inputs: Inputs, batch: Batch, targets_total: int, scale: float) -> Inputs:
    """Return inputs for which the head returns `scale` times the loss of `batch`, divided by the
    global batch's `targets_total`."""
    targets = batch.targets.to(inputs.rotary.cosine.device)
    return replace(inputs, targets=targets, loss_scale=scale / max(targets_total, 1))


def detach_all(reports: Mapping[int, MoEReport]) -> dict[int, MoEReport]:
    """Return the reports without gradients, which would keep the graph alive."""
    return {layer: report.detach() for layer, report in reports.items()}
