"""Run: a model on its ranks that takes training steps.

A step consists of named phases: data, forward, backward, reduce, clip, optimizer, log, and migrate
where experts may move. Each micro-batch has its own forward and backward; with a pipeline they
interleave in a phase called pipeline.

A global batch is a list of global sample indices; this rank takes its samples of each micro-batch.
Losses are divided by counts over all ranks, so gradients are plain sums. All ranks of a TP group
load the same samples and share their loss; only the first of them counts these samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moesaic.dist.buckets import GradientBuckets
from moesaic.dist.collectives import all_gather, all_reduce_, all_reduce_buckets_
from moesaic.dist.state import State, TensorShard
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.kernels.grouped_mm import describe_backend
from moesaic.kernels.norms import sum_of_squares
from moesaic.models.lm import LanguageModel
from moesaic.models.state import EMBED_WEIGHT, LocalParam, router_biases
from moesaic.nn.inputs import LOW_PRECISION, ByProduct, Inputs, autocast_to
from moesaic.nn.reports import MoEReport
from moesaic.policy.balance import LayerBalancer, reason_not_to_balance
from moesaic.train import loss_scale
from moesaic.train.balancing import take_layer_balance
from moesaic.train.data import Batch, Samples
from moesaic.train.expert_migration import ExpertMigration, LayerMigration
from moesaic.train.lm_stats import LMStepStats
from moesaic.train.objectives import lm
from moesaic.train.optim import AdamW, FlatParams, learning_rate
from moesaic.train.phases import PhaseTimer
from moesaic.train.routing_replay import RoutingRecorder, RoutingReplay

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from moesaic.train.pipeline import MicroBatchFlow, Pipeline


@dataclass
class Run:
    """State of a run, as built by `assemble`."""

    job: Job
    plan: Plan
    world: World
    model: LanguageModel
    trainable: list[LocalParam]
    """Trainable parameters."""
    flat_params: list[FlatParams]
    """Trainable parameters, grouped into tensors that are updated at once."""
    optimizer: AdamW
    pipeline_rank_group: Group | None
    """Ranks that hold the same blocks: all ranks of a pipeline rank, or all without a pipeline."""
    tied_weight_group: Group | None
    """First and last pipeline rank that both hold the tied weight."""
    buckets: GradientBuckets
    """Buckets of the gradients that ranks reduce."""
    expert_dp_group: Group | None
    """Ranks that own the same experts. Gradients of experts without places of their own are reduced
    over it after backward."""
    pipeline: Pipeline | None
    frozen: list[LocalParam] = field(default_factory=list)
    """Frozen parameters: no gradients, no moments, no part in the gradient norm."""
    counters: dict[str, int] = field(default_factory=lambda: {"step": 0, "samples": 0, "tokens": 0})
    phase_hook: Callable[[str], None] | None = None
    """Function to call with the name of each phase as it begins."""
    routing_recorder: RoutingRecorder | None = None
    routing_replay: RoutingReplay | None = None
    files: ExitStack = field(default_factory=ExitStack)
    """Files that are open as long as the run."""
    migration: ExpertMigration | None = None
    """Expert migration between steps; None if experts stay."""

    def state(self) -> State:
        """Return everything that training resumes from, as live shards."""
        shards: list[TensorShard] = []
        for item in self.trainable:
            shards += item.parameter_shards(self.world.rank)
            shards += self.optimizer.moment_shards(item, self.world.rank)
        for item in self.frozen:
            shards += item.parameter_shards(self.world.rank)
        shards += router_biases(self.model, self.plan, self.world.rank)
        shards += () if self.migration is None else self.migration.state_shards()
        return State(shards, dict(self.counters))

    def step(self, samples: Samples) -> LMStepStats:
        """Take one optimizer step on the next global batch of `samples`."""
        phases = PhaseTimer(self.world.device, self.phase_hook)
        with phases("data"):
            micro_batches = self._load_micro_batches(samples)
            targets = self._count_targets(micro_batches)
        losses = self._forward_backward(micro_batches, targets, phases)
        with phases("reduce"):
            self._reduce_gradients()
        with phases("clip"):
            scale = loss_scale.current_scale(self.counters)
            grad_norm = self.gradient_norm() / scale
            is_finite = math.isfinite(
                grad_norm
            )  # All ranks get the same result, whichever overflowed.
        with phases("optimizer"):
            lr = (
                self._update(grad_norm, scale)
                if is_finite
                else self._skip_update(grad_norm, losses)
            )
            if is_finite:
                self._update_router_biases(losses)
        self.counters["step"] += 1
        self.counters["samples"] += self.job.train.batch
        self.counters["tokens"] += targets
        with phases("log"):
            balance = {
                layer: take_layer_balance(moe)
                for layer, moe in self.model.expert_layers()
                if isinstance(moe.balancer, LayerBalancer)
            }
            facts = self._step_stats(losses, grad_norm, lr, targets, phases)
        is_scaled = loss_scale.EXPONENT in self.counters
        facts = replace(
            facts,
            balance=balance,
            migrations=self._migrate_experts(facts.counts, phases),
        )
        return replace(facts, loss_scale=scale, is_skipped=not is_finite) if is_scaled else facts

    def compute_gradients(self, samples: Samples) -> list[lm.Losses]:
        """Compute the gradients of the next global batch, reduce them and leave them in place
        without an update.

        In fp16 they are multiplied by the loss scale.
        """
        micro_batches = self._load_micro_batches(samples)
        targets = self._count_targets(micro_batches)
        losses = self._forward_backward(micro_batches, targets, PhaseTimer(self.world.device))
        self._reduce_gradients()
        return losses

    def _load_micro_batches(self, samples: Samples) -> list[Batch]:
        """Return this rank's samples of every micro-batch of the next global batch."""
        train = self.job.train
        size = train.batch // train.micro_batches
        local = self.plan.sample_range(self.world.rank, size)
        start = self.counters["samples"]
        starts = range(start, start + train.batch, size)
        return [samples.batch(range(first + local.start, first + local.stop)) for first in starts]

    def _count_targets(self, micro_batches: Sequence[Batch]) -> int:
        local = sum(self._num_local_targets(batch) for batch in micro_batches)
        total = torch.tensor([local], device=self.world.device)
        return int(all_reduce_(total, self.pipeline_rank_group))

    def _training_inputs(self, batch: Batch) -> Inputs:
        """Return the training inputs of a micro-batch."""
        inputs = lm.make_inputs(self.model, batch, self.job, self.counters["step"])
        kept: frozenset[ByProduct] = frozenset()
        if self.routing_recorder is not None:
            kept = frozenset({"router_choices"})
        routing_replay = None
        if self.routing_replay is not None:
            choices = self.routing_replay.read_expert_ids(self.counters["step"], batch.samples)
            routing_replay = {
                layer: chosen[inputs.token_slice].to(self.world.device)
                for layer, chosen in choices.items()
            }
        return replace(inputs, training=True, keep=kept, routing_replay=routing_replay)

    def _num_local_targets(self, batch: Batch) -> int:
        return lm.num_targets(batch) if self.plan.counts_samples(self.world.rank) else 0

    def _forward_backward(
        self, micro_batches: Sequence[Batch], targets: int, phases: PhaseTimer
    ) -> list[lm.Losses]:
        self.model.train()
        if self.pipeline is None:
            losses = self._run_micro_batches(micro_batches, targets, phases)
        else:
            with phases("pipeline"):
                scale = loss_scale.current_scale(self.counters)
                losses = self.pipeline.step(
                    self._micro_batch_flow(micro_batches, self._training_inputs, targets, scale)
                )
        if self.routing_recorder is not None:
            for batch, result in zip(micro_batches, losses, strict=True):
                self._record_routing(self.routing_recorder, batch, result.moe_reports)
        return losses

    def _micro_batch_flow(
        self,
        micro_batches: Sequence[Batch],
        make_inputs: Callable[[Batch], Inputs],
        targets: int,
        scale: float = 1.0,
    ) -> MicroBatchFlow:
        """Return micro-batches for the pipeline."""
        from moesaic.train.pipeline import MicroBatchFlow

        def inputs_with_targets(batch: Batch) -> Inputs:
            return lm.add_targets(make_inputs(batch), batch, targets, scale)

        return MicroBatchFlow(micro_batches, inputs_with_targets, self.autocast, scale)

    def _run_micro_batches(
        self, micro_batches: Sequence[Batch], targets: int, phases: PhaseTimer
    ) -> list[lm.Losses]:
        """Run forward and backward of one micro-batch after the other."""
        losses = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            if self.plan.dp_shard > 1:
                # Each micro-batch reduce-scatters gradients; only the last one all-reduces over
                # replicas.
                cast("FSDPModule", self.model).set_requires_all_reduce(is_last)
            with phases("forward"), self.autocast():
                scale = loss_scale.current_scale(self.counters)
                inputs = self._training_inputs(batch)
                total, result = lm.compute_loss(self.model, batch, inputs, self.job, targets, scale)
            with phases("backward"):
                if is_last:
                    self.buckets.expect_last_backward()
                total.backward()
            losses.append(result)
        return losses

    def _record_routing(
        self, recorder: RoutingRecorder, batch: Batch, reports: Mapping[int, MoEReport]
    ) -> None:
        """Record the choices of all TP ranks together, because one rank's need not cover whole
        samples."""
        choices = dict[int, Tensor]()
        for layer, report in reports.items():
            assert report.router_choices is not None
            choices[layer] = all_gather(report.router_choices, self.model.tp.group).flatten(0, 1)
        if self.plan.counts_samples(self.world.rank):
            recorder.record(self.counters["step"], batch.samples, choices)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which matmuls run in the job's precision."""
        return autocast_to(self.job.train.precision, self.world.device)

    def describe_backends(self) -> str | None:
        """Describe this rank's grouped matmul and its token transports for the user; None without
        experts."""
        moe = next((moe for _, moe in self.model.expert_layers()), None)
        if moe is None:
            return None
        dtype = LOW_PRECISION.get(self.job.train.precision, moe.bank.arena.dtype)
        experts = f"experts: {describe_backend(self.world.device, dtype, moe.bank.backend)}"
        transports = [transport.name for transport in moe.dispatcher.groups.transports]
        return f"{experts}; tokens sent by {', then '.join(transports)}" if transports else experts

    def describe_balance(self) -> str | None:
        """Describe the balance policy and its prices for the user; None if the job wants no
        balancing."""
        prices, config = self.plan.prices, self.job.balance
        balances = any(moe.balancer for _, moe in self.model.expert_layers())
        reason = reason_not_to_balance(self.job, self.plan)
        if prices is None or not (balances or self.migration):
            return None if reason is None else f"balance: no replicas, {reason}"
        migration = (
            f"; experts may migrate every {config.migrate_every} steps" if self.migration else ""
        )
        policy = (
            config.display_name
            if balances
            else "no replicas"
            if reason is None
            else f"no replicas, {reason}"
        )
        hint = (
            "; remove balance.prefetch: nothing overlaps replica transfers on these ranks"
            if balances and config.prefetch and not prices.overlaps
            else ""
        )
        return f"balance: {policy}{migration}; {prices.describe()}{hint}"

    def _reduce_gradients(self) -> None:
        """Finish the reduction of all gradients, and add up a tied weight's over both ends of a
        pipeline.

        Column-sharded embeddings need no reduction. FSDP has reduced its own over DP ranks;
        gradients of unsharded parameters still need a sum over TP ranks.
        """
        if self.plan.dp_shard > 1:
            params = (item for item in reversed(self.trainable) if not item.is_column_sharded)
            unsharded = [
                item.grad for item in params if item.bank is None and not item.is_tp_sharded
            ]
            all_reduce_buckets_(unsharded, self.model.tp.group)
        self.buckets.finish()
        if self.expert_dp_group is not None:
            with_places = (item for item in reversed(self.trainable) if item.places is not None)
            grads = [grad for item in with_places for grad in item.grads()]
            all_reduce_buckets_(grads, self.expert_dp_group)
        if self.tied_weight_group is not None:
            all_reduce_buckets_(
                [item.grad for item in self.trainable if item.name == EMBED_WEIGHT],
                self.tied_weight_group,
            )

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient; the first owner of each element counts it.

        Experts count one by one, so the bits do not depend on those in memory.
        """
        own = (item for item in self.trainable if item.owners[0] == self.world.rank)
        local = [grad for item in own for grad in item.grads()]
        total = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        if local:
            total += sum_of_squares(local)
        return math.sqrt(float(all_reduce_(total, self.world.group)))

    def _update(self, norm: float, scale: float) -> float:
        """Update all parameters by gradients that are `scale` times too large; return the learning
        rate."""
        train, lr = self.job.train, self._learning_rate()
        clip = min(1.0, train.clip / (norm + 1e-6)) if train.clip else 1.0
        update = loss_scale.num_updates(self.counters) + 1
        for _, block in groupby(self.flat_params, key=lambda flat: flat.block):
            group = list(block)
            self.optimizer.update_block(group, self.world.rank, update, lr=lr, clip=clip / scale)
            for item in (item for flat in group for item in flat.params):
                item.clear_grad()
        loss_scale.record_update(self.counters)
        return lr

    def _skip_update(self, norm: float, losses: list[lm.Losses]) -> float:
        """Skip the update after an overflow and back off the loss scale; return the learning
        rate."""
        loss_scale.back_off(self.counters, norm, self._reduce_losses(losses)[0])
        for item in self.trainable:
            item.clear_grad()
        return self._learning_rate()

    def _learning_rate(self) -> float:
        """Return this step's learning rate. Skipped steps count, so that the schedule ends with the
        run."""
        step, steps = self.counters["step"] + 1, self.job.train.steps
        return learning_rate(step, steps, self.job.optimizer.lr, self.job.schedule)

    def _update_router_biases(self, losses: list[lm.Losses]) -> None:
        """Adjust router biases by the experts requested in the whole batch, which every rank
        knows."""
        if self.job.finetune is not None and self.job.finetune.router == "frozen":
            return
        for layer, router in self.model.sigmoid_routers():
            requested = torch.stack([one.moe_reports[layer].requested for one in losses]).sum(0)
            router.update_bias(requested, self.job.routing.bias_update_rate)

    def _migrate_experts(
        self, counts: Mapping[int, Tensor], phases: PhaseTimer
    ) -> list[LayerMigration]:
        """Move experts to their new owner ranks, if migration is due."""
        if self.migration is None:
            return []
        self.migration.add_counts(counts)
        if not self.migration.is_due(self.counters["step"]):
            return []
        with phases("migrate"):
            self.plan, migrations = self.migration.migrate(self.plan)
        return migrations

    def _reduce_losses(self, losses: list[lm.Losses]) -> tuple[float, float, float, float, float]:
        """Return the total loss, its terms, and the replay mismatches, each summed over all
        ranks."""
        mismatches = sum(
            report.num_replay_mismatches for one in losses for report in one.moe_reports.values()
        )
        terms = [
            torch.stack([term.double() for term in (one.loss, one.balance_loss, one.z_loss)])
            for one in losses
        ]
        local = torch.cat((torch.stack(terms).sum(0), terms[0].new_tensor([mismatches])))
        loss, balance, z, all_mismatches = all_reduce_(local, self.world.group).tolist()
        routing = self.job.routing
        total = loss + routing.balance_loss * balance + routing.z_loss * z
        return total, loss, balance, z, all_mismatches

    def _step_stats(
        self, losses: list[lm.Losses], norm: float, lr: float, targets: int, phases: PhaseTimer
    ) -> LMStepStats:
        total, loss, balance, z, mismatches = self._reduce_losses(losses)
        by_rank: dict[int, Tensor] = {}
        dropped: dict[int, int] = {}
        for one in losses:
            for layer, report in one.moe_reports.items():
                by_rank[layer] = report.counts + by_rank.get(layer, 0)
                dropped[layer] = report.num_dropped + dropped.get(layer, 0)
        by_rank = _copy_to_host(by_rank)
        counts = {layer: rows.sum(0) for layer, rows in by_rank.items()}
        if self.pipeline is not None:
            counts, dropped = self.pipeline.gather_expert_counts(counts, dropped)
        return LMStepStats(
            step=self.counters["step"], loss=loss, total_loss=total, balance_loss=balance,
            z_loss=z, grad_norm=norm, lr=lr, tokens=targets,
            num_replay_mismatches=int(mismatches), dropped=dropped,
            counts=counts, counts_by_rank=by_rank, phases=phases.seconds,
        )  # fmt: skip

    @torch.no_grad()
    def validate(self, samples: Samples, max_samples: int) -> tuple[float, int]:
        """Return the mean loss over the first `max_samples` samples, and the number of targets."""
        self.model.eval()
        count = min(max_samples, len(samples))
        size = max(self.job.train.batch // self.job.train.micro_batches, 1)
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for start in range(0, count, size):
            sample_range = self.plan.sample_range(self.world.rank, min(size, count - start))
            batch = samples.batch(
                range(start + sample_range.start, start + sample_range.stop), shuffled=False
            )
            losses = self._validation_losses(batch)
            # In a pipeline only the last rank has the loss, so only it counts targets.
            counted = self._num_local_targets(batch) if "head" in self.model.block_names else 0
            total += torch.stack((losses.loss.double(), total.new_tensor(counted)))
        loss, targets = all_reduce_(total, self.world.group).tolist()
        return loss / max(targets, 1.0), int(targets)

    def _validation_losses(self, batch: Batch) -> lm.Losses:
        """Return the losses of a batch; in a pipeline, this rank's share of them."""

        def make_inputs(batch: Batch) -> Inputs:
            return lm.make_inputs(self.model, batch, self.job, 0)

        if self.pipeline is not None:
            return self.pipeline.evaluate(self._micro_batch_flow([batch], make_inputs, 1))
        with self.autocast():
            return lm.compute_loss(self.model, batch, make_inputs(batch), self.job, 1)[1]

    def flush(self) -> None:
        """Write the routing recorded so far."""
        if self.routing_recorder is not None:
            self.routing_recorder.flush()

    def close(self) -> None:
        """Release the model and files; the world stays."""
        self.files.close()
        self.trainable.clear()
        self.flat_params.clear()
        self.frozen.clear()
        self.optimizer.close()
        self.buckets.close()
        self.pipeline = self.migration = None
        del self.model


def _copy_to_host(tables: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copy equally shaped tables, by layer, to the host in one transfer if they are on a device."""
    if all(one.device.type == "cpu" for one in tables.values()):
        return tables
    return dict(zip(tables, torch.stack(list(tables.values())).cpu(), strict=True))
