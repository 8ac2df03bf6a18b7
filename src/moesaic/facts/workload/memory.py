"""Memory of one rank in training, by kind of content, and its peaks.

One walk over the blocks, in the order of the rank's schedule, follows what a step allocates and
frees: forward adds what its blocks save, backward frees it and makes gradients. It follows our own
layers, torch 2.13 with its FSDP and pipeline schedules, CPU kernels and gloo.

In fine-tuning, parameters count as present, gradients and moments as trainable. Activations and
temporaries count as if the whole model were trained, without the few of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, pipeline_actions, stage_blocks
from moesaic.facts.workload.blocks import BlockBuilder
from moesaic.facts.workload.gradient_reduction import gradient_reductions
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import BIAS_BYTES
from moesaic.facts.workload.spec import BlockSpec
from moesaic.facts.workload.temporary_memory import (
    captured_bytes,
    expert_backward_bytes,
    expert_elements,
    gated_ffn_bytes,
    logits_bytes,
)

_NORM_STREAMS = 5
"""Temporaries in backward of a norm, in units of the residual stream."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank in training, by purpose."""

    parameters_bytes: int
    gradients_bytes: int
    """All gradients, and with gradient accumulation the one that is being added."""
    moments_bytes: int
    staging_bytes: int
    """Copy that checkpoints are written from; 0 where it is in separate host memory."""
    gathered_bytes: int
    """Peak of FSDP's gathered parameters and gradients before reduce-scatter."""
    activations_bytes: int
    """Peak of activations saved for embedding and layers, over all micro-batches in flight."""
    head_bytes: int
    """Activations saved for the head, with the gradient of its weight, and its logits."""
    working_bytes: int
    """Temporaries of backward in a layer's larger half, less activations it has freed."""
    forward_bytes: int
    """Peak of temporary memory in a forward pass: accumulated gradients, activations, FSDP buffers
    and the head."""
    backward_bytes: int
    """Peak of temporary memory in a backward pass or right after it: gradients, remaining
    activations, FSDP buffers and temporaries of kernels."""

    def by_kind(self) -> dict[str, int]:
        """Return the bytes by kind that `total_bytes` sums."""
        return {
            kind: getattr(self, kind)
            for kind in self.__dataclass_fields__
            if kind not in ("forward_bytes", "backward_bytes")
        }

    @property
    def total_bytes(self) -> int:
        """Sum of all kinds, as if they were present at once."""
        return sum(self.by_kind().values())

    @property
    def peak_bytes(self) -> int:
        """Bytes present at once, at the end of a forward pass or in a backward pass."""
        lasting = self.parameters_bytes + self.moments_bytes + self.staging_bytes
        return lasting + max(self.forward_bytes, self.backward_bytes)


def memory(
    job: Job,
    plan: Plan,
    rank: int | None = None,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
) -> Memory:
    """Return the memory of `rank` under `plan`.

    Args:
        job: the job.
        plan: placement of the model on ranks.
        rank: the rank; None for the last, which has the most samples.
        loads: one load per expert layer, as `workload` takes them; None for even routing.
        on_cpu: whether rank and host share one memory, which then also has the staging copy.
    """
    params = RankParams.of_rank(job, plan, plan.ranks - 1 if rank is None else rank)
    step = _StepMemory(params, loads, on_cpu)
    step.run()
    num_elements = sum(local_size(p, plan.dp_shard) for p in params.dense)
    num_elements += sum(p.size for p in params.experts)
    has_staging = job.checkpoint.asynchronous and on_cpu
    return Memory(
        parameters_bytes=num_elements * step.sizes.stored_bytes
        + sum(p.size for p in params.biases) * BIAS_BYTES,
        gradients_bytes=step.gradient_bytes(),
        moments_bytes=params.moments_bytes(),
        staging_bytes=params.checkpoint_bytes() if has_staging else 0,
        gathered_bytes=max((step.gathered_bytes(index) for index in step.layers), default=0),
        activations_bytes=step.receive_bytes + step.activations_peak,
        head_bytes=step.saved.get("head", 0) + step.logits_bytes(),
        working_bytes=max(
            (step.working_bytes(i, gradient_stays=step.gradient_stays) for i in step.layers),
            default=0,
        ),
        forward_bytes=step.receive_bytes + step.forward_peak,
        backward_bytes=step.receive_bytes + step.backward_peak,
    )


@dataclass
class _Stage:
    """One pipeline stage of the rank; without a pipeline the whole model."""

    layers: list[int]
    is_first: bool
    is_last: bool
    saved: dict[str, int]
    """Bytes that forward keeps per module, without received inputs."""
    sent_bytes: int
    """Bytes of the result for the next stage."""
    captured_bytes: int
    """Bytes of gradients that the first half of a split backward keeps."""
    has_gradients: bool = False
    """True if the gradients exist yet."""


class _StepMemory:
    """Walk over one step of a rank, which records peaks of temporary memory."""

    def __init__(self, params: RankParams, loads: Sequence[ArrayLike] | None, on_cpu: bool) -> None:
        job, plan = params.job, params.plan
        builder = BlockBuilder(params, loads, on_cpu)
        self.params, self.job, self.plan, self.sizes = params, job, plan, builder.sizes
        self.routed, self.accumulates = builder.routed, job.train.micro_batches > 1
        self.stream_bytes = self.sizes.stream_elements * self.sizes.stored_bytes
        self.angle_bytes = self.sizes.tokens * job.model.rotary_dim * self.sizes.stored_bytes
        self.is_sharded = plan.dp_shard > 1
        self.recompute = plan.recomputes(job)
        self.gradient_stays = not self.accumulates or self.is_sharded or plan.pp > 1
        """True if a weight's gradient outlives its matmul, instead of being added at once."""
        self.saved = dict[str, int]()
        """Bytes that autograd saves per module."""
        self.dense_bytes = dict[str, int]()
        """Bytes of the dense parameters of each module, which FSDP gathers; "" for embedding and
        head."""
        for block in builder.blocks():
            name, layer = block.spec.model_block, block.spec.layer
            self.saved[name] = self.saved.get(name, 0) + block.saved_bytes
            group, dense = "" if layer is None else name, block.spec.dense
            elements = sum(p.size for p in dense if not p.is_column_shard)
            num_bytes = elements * self.sizes.stored_bytes
            self.dense_bytes[group] = self.dense_bytes.get(group, 0) + num_bytes
        self.moe_layers = {spec.layer for spec in params.blocks if spec.kind == "moe"}
        self.layers = [
            spec.layer
            for spec in params.blocks
            if spec.kind != "attention" and spec.layer is not None
        ]
        self.arena_bytes = self._gradient_bytes_of(
            [spec for spec in params.blocks if spec.kind == "moe"][:1], experts=True
        )
        """Bytes of the gradient of one layer's experts."""
        roots = [p for p in params.trainable_dense if p.layer is None]
        self.table_bytes = bool(roots) * self.sizes.table_elements * self.sizes.stored_bytes
        """Bytes of the embedding's gradient."""
        self.root_bytes = sum(p.size for p in roots if not p.is_column_shard)
        self.root_bytes *= self.sizes.stored_bytes
        """Bytes of the gradients of embedding and head that FSDP reduce-scatters."""
        shards = sum(local_size(p, plan.dp_shard) for p in roots if not p.is_column_shard)
        self.root_shard_bytes = shards * self.sizes.stored_bytes
        self.head_gradient_bytes = self.table_bytes
        if not self.sizes.gathers_tied_embedding:
            self.head_gradient_bytes *= self.sizes.embedding_shards
        self.reductions = gradient_reductions(params)
        self.allocations = list(self._gradient_allocations())
        self.current = self.made = 0
        """Bytes of activations and buffers, and of gradients, at present."""
        self.activations_peak = self.forward_peak = self.backward_peak = self.receive_bytes = 0

    def gradient_bytes(self) -> int:
        """Return bytes of all gradients, and with several micro-batches of the one being added."""
        allocated = sum(num_bytes for _, num_bytes in self.allocations)
        return allocated + self.accumulates * self.arena_bytes

    def _gradient_bytes_of(self, blocks: Sequence[BlockSpec], *, experts: bool = False) -> int:
        """Return bytes of the gradients of some blocks, or of their experts only."""
        trained = [p for spec in blocks for p in spec.parameters if self.params.is_trained(p)]
        chosen = [p for p in trained if p.expert is not None or not experts]
        return sum(map(self._gradient_size, chosen)) * self.sizes.stored_bytes

    def _gradient_size(self, parameter: Parameter) -> int:
        """Return elements of a gradient; pipelines keep it unsharded until the last backward."""
        if parameter.expert is not None or self.plan.pp > 1:
            return parameter.size
        return local_size(parameter, self.plan.dp_shard)

    def _gradient_allocations(self) -> list[tuple[float, int]]:
        """Return when backward allocates gradients, and their bytes.

        Times count down from infinity for the head over the indices of layers to -1 for the
        embedding. A half more stands for gradients that exist while the layer computes. A bucket of
        several gradients is allocated with its first one.
        """
        found, bucketed = list[tuple[float, int]](), dict[str, int]()
        blocks = {spec.name: spec for spec in self.params.blocks}
        for reduction in (one for one in self.reductions if one.overlaps_backward):
            for bucket in (one for one in reduction.buckets if len(one.members) > 1):
                members = [reduction.gradients[at] for at in bucket.members]
                spec = blocks[members[0].block]
                found.append((self._time(spec) + (spec.kind == "ffn") / 2, bucket.num_bytes))
                for gradient in members:
                    bucketed[gradient.block] = bucketed.get(gradient.block, 0) + gradient.num_bytes
        for spec in self.params.blocks:
            rest = self._gradient_bytes_of([spec]) - bucketed.get(spec.name, 0)
            found.append((self._time(spec), rest))
        return found

    def _time(self, spec: BlockSpec) -> float:
        if spec.layer is not None:
            return spec.layer
        # FSDP reduces embedding and head together, at the end.
        is_late = spec.kind == "embed" or (self.is_sharded and self.plan.pp == 1)
        return -1.0 if is_late else math.inf

    def gathered_bytes(self, index: float) -> int:
        """Return bytes of FSDP's buffers while backward is in layer `index`.

        These are embedding, head and the layer, the prefetched next layer, and the reduce-scatter
        of the layer before. In a pipeline all parameters stay gathered.
        """
        if not self.is_sharded:
            return 0
        if self.plan.pp > 1:
            return sum(self.dense_bytes.values())
        near = [f"layers.{index + offset}" for offset in (-1, 0, 1)]
        return sum(self.dense_bytes.get(name, 0) for name in ("", *near))

    def logits_bytes(self) -> int:
        """Return peak bytes of the loss beside what it saves; 0 if the head is on another rank."""
        return logits_bytes(self.sizes) if "head" in self.saved else 0

    def working_bytes(self, index: int, *, gradient_stays: bool) -> int:
        """Return bytes of temporaries in backward of the larger half of layer `index`, less freed
        activations."""
        s = self.sizes
        if index not in self.moe_layers:
            width = s.ffn_width(index)
            return self.stream_bytes + gated_ffn_bytes(s, width, gradient_stays=gradient_stays)
        routed = self.routed[index]
        peak = self.arena_bytes + expert_backward_bytes(s, routed)
        if s.shared_width:  # Their backward follows that of the routed experts.
            freed = 2 * s.expert_width * routed.num_tokens
            freed += bool(routed.exchanges) * s.model.hidden * routed.num_sent
            shared = gated_ffn_bytes(s, s.shared_width, gradient_stays=gradient_stays)
            shared += gradient_stays * self.arena_bytes - freed * s.compute_bytes
            peak = max(peak, shared)
        return self.stream_bytes + peak

    def run(self) -> None:
        """Walk over the step."""
        plan, micro_batches = self.plan, self.job.train.micro_batches
        if plan.pp == 1:
            stage = self._stage(0, list(self.saved))
            # From the second micro-batch on, all are alike, except for their angles.
            self.current = max(micro_batches - 2, 0) * self.angle_bytes
            for _ in range(min(micro_batches, 2)):
                self._forward(stage, starts=True)
                self._backward(stage)
                self.current -= sum(stage.saved.values())
        else:
            self._run_pipeline()
        late = [b for one in self.reductions if not one.overlaps_backward for b in one.buckets]
        bucket = max((b.num_bytes for b in late if len(b.members) > 1), default=0)
        shards = sum(local_size(p, plan.dp_shard) for p in self.params.trainable_dense)
        gradients = shards * self.sizes.stored_bytes + self.arena_bytes * len(self.moe_layers)
        self._record_backward(micro_batches * self.angle_bytes + gradients + bucket)

    def _run_pipeline(self) -> None:
        plan, micro_batches = self.plan, self.job.train.micro_batches
        names, pp_rank = stage_blocks(plan, self.job.model), plan.pp_rank(self.params.rank)
        stages = {n: self._stage(n, names[n]) for n in range(pp_rank, plan.num_stages, plan.pp)}
        num_received = sum(2 - stage.is_first - stage.is_last for stage in stages.values())
        self.receive_bytes = num_received * micro_batches * self.stream_bytes
        for kind, number, batch in pipeline_actions(
            plan.schedule, plan.pp, len(stages), micro_batches, pp_rank
        ):
            stage = stages[number]
            if kind == "forward":
                self._forward(stage, starts=number == min(stages))
            elif kind == "input":
                self._input_backward(stage)
            # The first stage does not split its backward.
            elif kind == "backward" or stage.is_first:
                self._backward(stage)
                self._free(stage, batch, sum(stage.saved.values()))
            else:
                self._weight_backward(stage)
                self._free(stage, batch, sum(stage.saved.values()) + stage.captured_bytes)

    def _stage(self, number: int, names: Sequence[str]) -> _Stage:
        layers = [index for index in self.layers if f"layers.{index}" in names]
        saved = {name: self.saved[name] for name in names}
        if self.recompute:
            saved.update({f"layers.{index}": self.stream_bytes for index in layers})
        is_first, is_last = number == 0, number == self.plan.num_stages - 1
        if not is_first:
            saved[names[0]] -= self.stream_bytes  # It is in a receive buffer.
        captured = sum(map(self._captured_bytes, layers))
        # Otherwise the gradient saved by the head serves.
        captured += (is_last and (self.sizes.num_casts or self.sizes.tp > 1)) * self.stream_bytes
        return _Stage(layers, is_first, is_last, saved, (not is_last) * self.stream_bytes, captured)

    def _captured_bytes(self, index: int) -> int:
        routed = self.routed[index] if index in self.moe_layers else None
        trains_experts = self.arena_bytes > 0
        return captured_bytes(self.sizes, index, routed, trains_experts=trains_experts)

    def _record_backward(self, num_bytes: int) -> None:
        self.backward_peak = max(self.backward_peak, num_bytes)

    def _forward(self, stage: _Stage, *, starts: bool) -> None:
        """Add the forward of one micro-batch.

        The rank's first stage (`starts`) adds the angles that all blocks share.
        """
        self.current += starts * self.angle_bytes
        self.current += sum(stage.saved.values()) + stage.sent_bytes
        activations = self.current - stage.saved.get("head", 0)
        self.activations_peak = max(self.activations_peak, activations)
        present = self.current + self.made + stage.is_last * self.logits_bytes()
        gathered = self.gathered_bytes(math.inf)
        if self.plan.pp == 1 and self.is_sharded and stage.layers:
            gathered = self.dense_bytes[""] + self.dense_bytes[f"layers.{stage.layers[-1]}"]
        self.forward_peak = max(self.forward_peak, present + gathered)

    def _gradients_at(self, stage: _Stage, time: float) -> int:
        """Return bytes of gradients while backward is at `time`, those made before included."""
        if stage.has_gradients:
            return self.made
        own = {*stage.layers, *([-1.0] * stage.is_first), *([math.inf] * stage.is_last)}
        return self.made + sum(
            num_bytes
            for at, num_bytes in self.allocations
            if at > time and (self.plan.pp == 1 or at in own)
        )

    def _backward(self, stage: _Stage) -> None:
        """Record the peaks of a full backward, layer by layer."""
        s, tied = self.sizes, self.job.model.tied
        is_new = not stage.has_gradients
        at_head = self._gradients_at(stage, 1e9)
        last = stage.layers[-1] if stage.layers else -1
        if stage.is_last and s.gathers_tied_embedding:
            # The tied weight's gradient: this rank's shard, and a collective's input with a copy.
            scattered = self.table_bytes + 2 * s.table_message_bytes[0]
            self._record_backward(self.current + self.made + scattered + self.gathered_bytes(last))
        base = self.current - stage.saved.get("head", 0)
        held = 0
        if self.plan.pp == 1:
            # The gradient of the head's weight, before it joins the others.
            held = (tied or self.is_sharded) * self.head_gradient_bytes
            if is_new and not held and at_head > self.head_gradient_bytes:  # A copy in a bucket.
                stream = s.stream_elements * s.compute_bytes
                self._record_backward(base + at_head + self.head_gradient_bytes + stream)
        for index in reversed(stage.layers):
            name = f"layers.{index}"
            working = self.working_bytes(
                index, gradient_stays=self.gradient_stays and (self.plan.pp == 1 or is_new)
            )
            if name == list(stage.saved)[-1] and not stage.is_last:
                working -= self.stream_bytes  # Its first gradient is in a receive buffer.
            if self.recompute:
                recomputed = self.saved[name] - self.stream_bytes
                self.activations_peak = max(self.activations_peak, base + recomputed)
                working += recomputed
            gradients = self._gradients_at(stage, index)
            self._record_backward(base + working + gradients + held + self.gathered_bytes(index))
            base -= stage.saved[name]
        if stage.is_first:
            self._embedding_backward(stage, base, held)
        self.made = self._gradients_at(stage, -2.0)
        stage.has_gradients = True

    def _embedding_backward(self, stage: _Stage, base: int, held: int) -> None:
        """Record the peaks of the embedding's backward, and of FSDP's last reduce-scatter.

        With TP, the gradient of all sequence shards comes before the embedding's, with gloo's copy.
        Column shards look up columns, and reorder this rank's tokens.
        """
        s, has_columns = self.sizes, self.sizes.embedding_shards > 1
        tokens = s.gathered_elements * s.stored_bytes
        columns = s.lookup_elements * s.stored_bytes
        gathered = (s.tp > 1) * tokens
        peak = max(self.table_bytes + gathered + columns, bool(gathered) * 2 * tokens)
        if has_columns:
            peak = max(peak, tokens + max(columns, tokens))
        gradients = self._gradients_at(stage, -1.0)
        fsdp = self.gathered_bytes(math.inf) if self.plan.pp > 1 else 0
        self._record_backward(base + gradients + held + peak + fsdp)
        if self.is_sharded and self.plan.pp == 1:
            # Its input, gloo's copy of it, and the last tensor that was copied into it.
            scattered = 2 * self.root_bytes + self.accumulates * self.root_shard_bytes
            scattered += (not (self.job.model.tied or has_columns)) * self.head_gradient_bytes
            self._record_backward(base + self._gradients_at(stage, -2.0) + scattered)

    def _input_backward(self, stage: _Stage) -> None:
        """Record the peaks of the first half of a split backward, which frees nothing."""
        if stage.is_first:
            return
        self.current += stage.captured_bytes
        self.activations_peak = max(self.activations_peak, self.current)
        base = self.current + self.made + self.stream_bytes + self.gathered_bytes(math.inf)
        self._record_backward(base + _NORM_STREAMS * self.stream_bytes)
        for index in set(stage.layers[:1]) & self.moe_layers:
            routed, stays = self.routed[index], self.arena_bytes > 0
            elements = sum(routed.slot_tokens) * self.sizes.model.hidden
            elements += expert_elements(self.sizes, routed, gradients_stay=stays)
            working = elements * self.sizes.compute_bytes
            self._record_backward(base - self._captured_bytes(index) + working)

    def _weight_backward(self, stage: _Stage) -> None:
        """Record the peaks of the second half of a split backward."""
        base = self.current + self.gathered_bytes(math.inf)
        table = 0
        if stage.is_last and self.sizes.gathers_tied_embedding:
            table = self.table_bytes + 2 * self.sizes.table_message_bytes[0]
        self._record_backward(base + self.made + max(self.arena_bytes, table))
        self.made = self._gradients_at(stage, -2.0)
        self._record_backward(base + self.made - stage.captured_bytes)
        stage.has_gradients = True

    def _free(self, stage: _Stage, batch: int, num_bytes: int) -> None:
        """Free the activations of one micro-batch in a pipeline.

        Schedules but 1f1b keep sent tensors until the end of the step. 1f1b keeps the latest
        gradient, and the last result that was sent by itself.
        """
        self.current -= num_bytes
        if self.plan.schedule != "1f1b":
            self.current += (not stage.is_first) * self.stream_bytes
            return
        self.current += (not stage.is_first and batch == 0) * self.stream_bytes
        warmup = self.plan.pp - self.plan.pp_rank(self.params.rank)
        num_warmup = min(warmup, self.job.train.micro_batches)
        self.current -= stage.sent_bytes * (batch != num_warmup - 2)
