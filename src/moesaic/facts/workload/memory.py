"""Memory of one rank in training, by kind of content, and its peaks.

One walk over the blocks, in the order of the rank's schedule, follows what a step allocates and
frees. It knows our layers, FSDP and pipeline schedules of torch 2.13, CPU kernels and gloo.

In fine-tuning, parameters count as present, gradients and moments as trainable. Activations and
temporaries count as if the whole model were trained, without the few of adapters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, pipeline_actions, stage_blocks
from moesaic.facts.workload.blocks import BlockBuilder
from moesaic.facts.workload.gradient_reduction import gradient_reductions
from moesaic.facts.workload.loads import RoutedTokens
from moesaic.facts.workload.parameters import local_size
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import (
    BIAS_BYTES,
    EXPERT_CHUNK_BYTES,
    LOSS_CHUNK_TOKENS,
    STORED_BYTES,
    Sizes,
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a training step, by purpose."""

    parameters_bytes: int
    moments_bytes: int
    staging_bytes: int
    """Copy that checkpoints are written from; 0 where it is in separate host memory."""
    gradients_bytes: int = 0
    activations_bytes: int = 0
    """Activations saved for backward, over all micro-batches in flight."""
    gathered_bytes: int = 0
    """FSDP's gathered parameters, and gradients before reduce-scatter."""
    working_bytes: int = 0
    """Temporaries of kernels, less activations that they have freed."""
    experts_bytes: int = 0
    """Blocks of expert state in memory, if a budget leaves the others on a drive."""

    @property
    def peak_bytes(self) -> int:
        """Sum of all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind."""
        return dict(vars(self))


def memory(
    job: Job,
    plan: Plan,
    rank: int | None = None,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
    group_size: int | None = None,
) -> Memory:
    """Return the memory of `rank` under `plan`; with a budget (`[memory]`), without expert state.

    Args:
        job: the job.
        plan: placement of the model on ranks.
        rank: the rank; None for the last, which has the most samples.
        loads: one load per expert layer, as `workload` takes them; None for even routing.
        on_cpu: whether rank and host share one memory, which then also has the staging copy.
        group_size: micro-batches that pass through a block together, if the job goes block by
            block; None: all.
    """
    rank = plan.ranks - 1 if rank is None else rank
    params = RankParams(job, plan, rank, with_experts=job.memory is None)
    num_elements = sum(local_size(p, plan.dp_shard) for p in params.dense)
    num_elements += sum(p.size for p in params.experts)
    has_staging = job.checkpoint.asynchronous and on_cpu and job.memory is None
    lasting = Memory(
        parameters_bytes=num_elements * STORED_BYTES[job.train.precision]
        + sum(p.size for p in params.biases) * BIAS_BYTES,
        moments_bytes=params.moments_bytes(),
        staging_bytes=params.checkpoint_bytes() if has_staging else 0,
    )
    builder = BlockBuilder(params, Sizes(job, plan, rank, on_cpu), loads)
    group_size = (group_size or job.train.micro_batches) if job.is_by_block else 1
    return _StepMemory(builder, lasting, group_size).run()


class _Peak(NamedTuple):
    """Bytes at one time of a step."""

    gradients: int
    activations: int
    gathered: int
    working: int


@dataclass
class _Stage:
    """One pipeline stage of the rank; without a pipeline the whole model."""

    layers: list[int]
    is_first: bool
    is_last: bool
    saved: dict[str, int]
    """Bytes that forward keeps per module, without received inputs."""
    captured_bytes: int
    """Bytes of gradients that the first half of a split backward keeps."""
    gradients: list[tuple[float, int]]
    """Layer at which backward allocates gradients, and their bytes; empty once they exist."""
    highest: _Peak | None = None
    """Highest peak of a backward that finds its gradients made."""


class _StepMemory:
    """Walk over one step of a rank, which records the peak."""

    def __init__(self, builder: BlockBuilder, lasting: Memory, group_size: int) -> None:
        params, s = builder.params, builder.sizes
        self.params, self.plan, self.sizes = params, params.plan, s
        self.group_size, self.is_by_block = group_size, params.job.is_by_block
        self.recomputes = self.plan.recomputes(params.job)
        self.routed, self.is_sharded = builder.routed, self.plan.dp_shard > 1
        self.stream_bytes = s.stream_elements * s.stored_bytes
        self.angle_bytes = s.tokens * s.model.rotary_dim * s.stored_bytes
        self.saved: Counter[str] = Counter()
        """Bytes that autograd saves per module."""
        self.captured: Counter[str] = Counter()
        """Bytes of gradients per module that a split backward keeps."""
        self.dense_bytes: Counter[str] = Counter()
        """Bytes of the dense parameters of each module, which FSDP gathers, in model order."""
        self.reduced_bytes: Counter[str] = Counter()
        """Bytes of the whole gradients of each module, which FSDP reduces."""
        for block in builder.blocks():
            name = block.spec.model_block
            self.saved[name] += block.saved_bytes
            self.captured[name] += block.captured_bytes
            sharded = [p for p in block.spec.dense if not p.is_column_shard]
            self.dense_bytes[name] += sum(p.size for p in sharded) * s.stored_bytes
            elements = sum(p.size for p in sharded if params.is_trained(p))
            self.reduced_bytes[name] += elements * s.stored_bytes
        trained = [p for p in params.experts if params.is_trained(p)]
        arena_elements = sum(p.size for p in trained if p.layer == trained[0].layer)
        self.arena_bytes = arena_elements * s.stored_bytes
        """Bytes of the gradient of one layer's experts."""
        has_table = any(p.layer is None and params.is_trained(p) for p in params.dense)
        self.table_bytes = has_table * s.table_elements * s.stored_bytes
        """Bytes of the embedding's gradient."""
        # A pipeline reduces gradients after its last backward, without buckets.
        self.reductions = gradient_reductions(params) if self.plan.pp == 1 else []
        # FSDP reduces embedding and head together, at the end, unless they are walked apart.
        self.reduces_by_layer = self.is_sharded and self.plan.pp == 1 and not self.is_by_block
        self.is_head_late = self.reduces_by_layer
        self.current = self.made = 0
        """Bytes of activations and buffers, and of gradients, at present."""
        self.peak = lasting

    def _gradient_allocations(self, names: Sequence[str]) -> list[tuple[float, int]]:
        """Return when backward of some modules allocates gradients, and their bytes.

        Times count down from infinity for the head over the indices of layers to -1 for the
        embedding. A bucket of several gradients is allocated with its first one. FSDP allocates
        shards after the block; pipelines keep gradients unsharded until the last backward.
        """
        num_shards = 1 if self.plan.pp > 1 else self.plan.dp_shard
        allocated: Counter[float] = Counter()
        for spec in (spec for spec in self.params.blocks if spec.model_block in names):
            time = self._time(spec.name)
            for p in filter(self.params.is_trained, spec.parameters):
                is_dense = p.expert is None
                size = local_size(p, num_shards) if is_dense else p.size
                allocated[time - is_dense * self.is_sharded / 2] += size * self.sizes.stored_bytes
        for reduction in self.reductions:
            for bucket in reduction.buckets if reduction.overlaps_backward else ():
                members = [reduction.gradients[at] for at in bucket.members]
                if len(members) > 1:
                    allocated[self._time(members[0].block)] += bucket.num_bytes
                    for gradient in members:
                        allocated[self._time(gradient.block)] -= gradient.num_bytes
        return list(allocated.items())

    def _time(self, block: str) -> float:
        if block.startswith("layers."):
            return int(block.split(".")[1])
        return -1.0 if block == "embed" or self.is_head_late else math.inf

    def _gathered_bytes(self, index: int = 0) -> int:
        """Return bytes of FSDP's buffers while backward is in layer `index`.

        These are embedding, head and the layer, the prefetched next layer, and the reduce-scatter
        of the layer before. In a pipeline all parameters stay gathered. Block by block, these are
        the layer and the prefetched next block.
        """
        if not self.is_sharded:
            return 0
        names = [*self.dense_bytes]
        if self.is_by_block:
            names = names[index : index + 2]
        elif self.plan.pp == 1:
            names = [*{*names[index : index + 3], "embed", "head"}]
        return sum(self.dense_bytes[name] for name in names)

    def _working_bytes(self, index: int, *, adds: bool) -> int:
        """Return bytes of temporaries in backward of the larger half of layer `index`, less freed
        activations. `adds`: whether gradients are added to those of other micro-batches."""
        s = self.sizes
        if index not in self.routed:
            # Three gradients around a matmul, but not its result, and the next weight's gradient.
            inner = s.model.ffn_width(index) // s.tp
            weight_bytes = (not adds) * inner * s.model.hidden * s.stored_bytes
            return self.stream_bytes + weight_bytes + 2 * s.tokens * inner * s.compute_bytes
        num_bytes = self.stream_bytes + _expert_backward_bytes(s, self.routed[index])
        if self.params.with_experts:
            return num_bytes + self.arena_bytes
        # One expert's gradient at a time joins the others.
        return num_bytes + adds * 3 * s.expert_width * s.model.hidden * s.stored_bytes

    def run(self) -> Memory:
        """Walk over the step, and return the memory at its peak."""
        plan, micro_batches = self.plan, self.params.job.train.micro_batches
        names, pp_rank = stage_blocks(plan, self.sizes.model), plan.pp_rank(self.params.rank)
        stages = {n: self._stage(n, names[n]) for n in range(pp_rank, plan.num_stages, plan.pp)}
        if plan.pp > 1:
            self._run_pipeline(stages, micro_batches)
            return self.peak
        for _ in range(min(micro_batches // self.group_size, 2)):  # Later ones are like the second.
            self.current = self.group_size * self.angle_bytes
            self._forward(stages[0])
            self._backward(stages[0])
        return self.peak

    def _run_pipeline(self, stages: Mapping[int, _Stage], micro_batches: int) -> None:
        """Walk over all micro-batches. Receive buffers are kept until the end of the step."""
        plan = self.plan
        num_received = sum(2 - stage.is_first - stage.is_last for stage in stages.values())
        self.current = num_received * micro_batches * self.stream_bytes
        for kind, number, batch in pipeline_actions(
            plan.schedule, plan.pp, len(stages), micro_batches, plan.pp_rank(self.params.rank)
        ):
            stage = stages[number]
            if kind == "forward":
                self.current += (number == min(stages)) * self.angle_bytes
                self._forward(stage)
            elif kind == "input":
                self.current += (not stage.is_first) * stage.captured_bytes
                norm_bytes = 6 * self.stream_bytes  # Temporaries of a norm and its gradients.
                self._record(self.made, self.current, self._gathered_bytes(), norm_bytes)
            else:
                num_bytes = sum(stage.saved.values())
                if kind == "backward" or stage.is_first:  # The first stage has no input half.
                    self._backward(stage)
                else:
                    self._record(self.made, self.current, self._gathered_bytes(), self.arena_bytes)
                    self._make_gradients(stage)
                    num_bytes += stage.captured_bytes
                self.current -= num_bytes
                # 1f1b frees its result too, and keeps the latest gradient for the previous stage.
                # The other schedules keep all results and gradients until the end of the step.
                if plan.schedule == "1f1b":
                    self.current -= (not stage.is_last) * self.stream_bytes
                if not stage.is_first and (plan.schedule != "1f1b" or batch == 0):
                    self.current += self.stream_bytes

    def _stage(self, number: int, names: Sequence[str]) -> _Stage:
        layers = [int(name.removeprefix("layers.")) for name in names if "." in name]
        saved = {name: self.group_size * self.saved[name] for name in names}
        if self.recomputes:
            inputs = self.group_size * self.stream_bytes
            saved.update({f"layers.{index}": inputs for index in layers})
        is_first, is_last = number == 0, number == self.plan.num_stages - 1
        if not is_first:
            saved[names[0]] -= self.stream_bytes  # It is in a receive buffer.
        captured = sum(self.captured[name] for name in names if name != "head")
        gradients = self._gradient_allocations(names)
        return _Stage(layers, is_first, is_last, saved, captured, gradients)

    def _record(
        self, gradients: int, activations: int, gathered: int = 0, working: int = 0
    ) -> None:
        now, peak = gradients + activations + gathered + working, self.peak
        highest = peak.gradients_bytes + peak.activations_bytes
        if now > highest + peak.gathered_bytes + peak.working_bytes:
            self.peak = replace(
                peak, gradients_bytes=gradients, activations_bytes=activations,
                gathered_bytes=gathered, working_bytes=working,
            )  # fmt: skip

    def _forward(self, stage: _Stage) -> None:
        """Add the forward of one micro-batch."""
        sent_bytes = (not stage.is_last) * self.stream_bytes
        self.current += sum(stage.saved.values()) + sent_bytes
        # Forward has prefetched no layer after the last one.
        gathered = self._gathered_bytes(len(stage.layers) + self.is_by_block)
        logits = logits_bytes(self.sizes) if stage.is_last else 0
        self._record(self.made, self.current, gathered, logits)
        if self.is_by_block and self.is_sharded:  # Gloo has a layer that arrives twice.
            arriving = self.dense_bytes[f"layers.{stage.layers[-1]}"]
            self._record(self.made, self.current, gathered + 2 * arriving)

    def _gradients_at(self, stage: _Stage, time: float) -> int:
        """Return bytes of gradients while backward is at `time`, those made before included."""
        return self.made + sum(num_bytes for at, num_bytes in stage.gradients if at > time)

    def _make_gradients(self, stage: _Stage) -> None:
        """Add all gradients of a stage, if they do not exist yet."""
        self.made = self._gradients_at(stage, -math.inf)
        stage.gradients = []

    def _backward(self, stage: _Stage) -> None:
        """Record the peaks of a full backward."""
        peaks = [stage.highest] if stage.highest is not None else []
        if not peaks or peaks[0].gradients != self.made:
            peaks = list(self._backward_peaks(stage))
        if peaks and not stage.gradients:  # Later ones differ in what came before.
            stage.highest = max(peaks, key=sum)
            peaks = [stage.highest]
        for gradients, activations, gathered, working in peaks:
            self._record(gradients, self.current + activations, gathered, working)
        self._make_gradients(stage)

    def _backward_peaks(self, stage: _Stage) -> Iterator[_Peak]:
        """Yield the peaks of a full backward, layer by layer; activations count from those
        before it."""
        s, base, held = self.sizes, -stage.saved.get("head", 0), 0
        if self.plan.pp == 1:
            # The gradient of the head's weight, before it joins the others.
            table = self.table_bytes
            if not s.gathers_tied_embedding:
                table *= s.plan.embedding_shards
            held = (s.model.tied or self.is_head_late) * table
            at_head = self._gradients_at(stage, 1e9)
            if stage.gradients and not held and at_head > table:  # A copy in a bucket.
                yield _Peak(at_head + table, base, 0, s.stream_elements * s.compute_bytes)
        # Block by block, results and their gradients stay until the block is done.
        base += self.is_by_block * 2 * self.group_size * self.stream_bytes
        for index in reversed(stage.layers):
            name, gathered = f"layers.{index}", self._gathered_bytes(index)
            recomputed = self.recomputes * (self.saved[name] - self.stream_bytes)
            working = recomputed + self._working_bytes(index, adds=not stage.gradients)
            yield _Peak(self._gradients_at(stage, index) + held, base, gathered, working)
            if self.reduces_by_layer:
                yield from self._whole_gradient_peaks(stage, index, base, held)
            if self.group_size > 1:  # The second micro-batch adds to gradients that FSDP gathers.
                freed = stage.saved[name] // self.group_size - self.stream_bytes
                gathered += self.is_sharded * self.dense_bytes[name]
                working = recomputed + self._working_bytes(index, adds=True)
                gradients = self._gradients_at(stage, index - 0.5) + held
                yield _Peak(gradients, base - freed, gathered, working)
            base -= stage.saved[name]
        if stage.is_first:
            gradients = self._gradients_at(stage, -1.0) + held
            gathered = self._gathered_bytes() if self.plan.pp > 1 else 0
            yield _Peak(gradients, base, gathered, self.table_bytes)
            if self.reduces_by_layer:
                # Embedding and head are reduced together; FSDP keeps the last gradient meanwhile.
                whole = self.reduced_bytes["embed"] + self.reduced_bytes["head"]
                yield _Peak(gradients, base, whole, self.table_bytes)
                kept = self.reduced_bytes["head"] + whole // self.plan.dp_shard
                yield _Peak(gradients - held, base, (1 + s.on_cpu) * whole, kept)

    def _whole_gradient_peaks(
        self, stage: _Stage, index: int, base: int, held: int
    ) -> Iterator[_Peak]:
        """Yield the peaks before and after backward of a sharded layer: Gloo has a copy of the next
        layer that arrives, and the layer's whole gradient waits for its reduction."""
        name, gathered = f"layers.{index}", self._gathered_bytes(index)
        arriving = (index > 0 and self.sizes.on_cpu) * self.dense_bytes[f"layers.{index - 1}"]
        yield _Peak(self._gradients_at(stage, index) + held, base, gathered + arriving, 0)
        gradients = self._gradients_at(stage, index - 0.25) + held
        after = base - stage.saved[name]
        whole = gathered + self.reduced_bytes[name]
        yield _Peak(gradients, after, whole, self.stream_bytes)


def _expert_backward_bytes(s: Sizes, routed: RoutedTokens) -> int:
    """Return peak bytes beside the gradient of the experts, less freed activations.

    A CPU computes slots in chunks that fit the cache, or one by one if they are on a drive.
    """
    hidden, ffn, chunk = s.model.hidden, s.expert_width, routed.split_chunks()[0]
    rows = at_once = sum(chunk.slot_tokens)
    if s.on_cpu:
        largest = max(*chunk.slot_tokens, 1)
        limit = (s.job.memory is None) * EXPERT_CHUNK_BYTES // (2 * ffn * s.compute_bytes)
        at_once = min(rows, max(limit // largest, 1) * largest)
    if routed.is_all_to_all:
        elements = (rows - chunk.num_sent) * hidden
    else:  # Gradients for the tokens of all expert TP ranks; token and weight of each row.
        num_received = chunk.exchanges[-1].num_received if chunk.is_dedup else s.dispatched_tokens
        elements = (s.plan.etp > 1 or chunk.is_dedup) * num_received * hidden + 2 * rows
    if routed.num_chunks > 1:  # Gradients of the next chunk arrive.
        exchange = chunk.exchanges[0]
        elements += (exchange.num_received + chunk.is_dedup * exchange.num_sent) * hidden
    results = (chunk.is_all_to_all or at_once < rows) * rows * hidden
    # A slot's matrix or its gradient may be cast beside them; on a GPU the matrices of all slots.
    weights = s.num_casts * 2 * ffn * hidden * (1 if s.on_cpu else len(chunk.slot_tokens))
    inner = at_once * ffn
    elements += results + at_once * hidden + 4 * inner + max(inner, weights)
    return elements * s.compute_bytes


def logits_bytes(s: Sizes) -> int:
    """Return peak bytes of the loss beside what it saves.

    These are its input, and logits and log-probabilities of a chunk. Low precision adds a cast
    weight, and later the gradients of logits and weight. A CPU casts the latter to add it. A tied
    weight may be gathered from column shards.
    """
    logits, weight = min(s.tokens, LOSS_CHUNK_TOKENS) * s.vocab, s.vocab * s.model.hidden
    narrow, wide = s.num_casts * s.compute_bytes, s.stored_bytes
    inputs = s.gathered_elements * (narrow + wide)
    gradients = logits * (wide + narrow) + weight * s.num_casts * (narrow + s.on_cpu * wide)
    weights = narrow + s.gathers_tied_embedding * wide
    return inputs + max(2 * logits * wide, gradients) + weights * weight
