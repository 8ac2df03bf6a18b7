"""Memory peaks of one step on a pipeline rank.

A forward adds what its stage saves for one micro-batch, and a backward frees it. So this module
replays the rank's schedule, action by action. It includes the buffers of torch 2.13's schedules:

- Receive buffers for input and gradient of each micro-batch, allocated once.
- Results of a stage, until their backward.
- Sent tensors, which all schedules but 1f1b keep until the end of the step.

In a split backward, the first half keeps everything that forward saved, and adds gradients of
results. The second half computes the gradients of weights from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.plan import stage_blocks
from moesaic.facts.plan.pipeline_order import pipeline_actions
from moesaic.facts.workload.activation_memory import captured_attention, captured_ffn, logits_bytes
from moesaic.facts.workload.expert_memory import peak_expert_elements
from moesaic.facts.workload.parameters import Parameter
from moesaic.facts.workload.peak_memory import StepMemory
from moesaic.facts.workload.rank_params import RankParams

_NORM_STREAMS = 5
"""Temporaries in backward of a norm, in units of the residual stream."""


@dataclass
class _Stage:
    """One pipeline stage of the rank, in bytes per micro-batch."""

    layers: list[int]
    is_first: bool
    """True if it is the first stage of the model."""
    is_last: bool
    activation_bytes: dict[str, int]
    """Bytes that forward saves per block, without received inputs."""
    sent_bytes: int
    """Bytes of the result for the next stage."""
    captured_bytes: int
    """Bytes of gradients that the first half of backward keeps."""
    gradient_bytes: int
    """Bytes of all gradients of the stage."""
    has_gradients: bool = False
    """True if the gradients exist yet."""

    @property
    def total_activation_bytes(self) -> int:
        """Bytes that forward saves in all blocks."""
        return sum(self.activation_bytes.values())


class PipelineStepMemory(StepMemory):
    """Memory peaks of a step on a rank with some of the model's stages."""

    def __init__(self, params: RankParams, loads: Sequence[ArrayLike] | None, on_cpu: bool) -> None:
        super().__init__(params, loads, on_cpu)
        plan, micro_batches = params.plan, params.job.train.micro_batches
        pp_rank = plan.pp_rank(params.rank)
        self.stream_bytes = self.sizes.stream_elements * self.sizes.stored_bytes
        names = stage_blocks(plan, params.job.model)
        own_stages = range(pp_rank, plan.num_stages, plan.pp)
        self.stages = {number: self._stage(number, names[number]) for number in own_stages}
        num_received = sum(2 - stage.is_first - stage.is_last for stage in self.stages.values())
        self.receive_buffer_bytes = num_received * micro_batches * self.stream_bytes
        self.current_bytes = self.gradient_bytes_made = self.max_current_bytes = (
            self.max_forward_bytes
        ) = self.max_backward_bytes = 0
        for kind, number, batch in pipeline_actions(
            plan.schedule, plan.pp, len(self.stages), micro_batches, pp_rank
        ):
            stage = self.stages[number]
            if kind == "forward":
                self._run_forward(number, stage)
            elif kind == "input":
                self._run_input_backward(stage)
            # The first stage does not split its backward.
            elif kind == "backward" or stage.is_first:
                self._run_backward(stage, batch)
            else:
                self._run_weight_backward(stage, batch)

    def peak_gathered_bytes(self) -> int:
        """Return bytes of all FSDP parameters, which stay gathered until the last backward."""
        num_elements = self.root_elements + sum(self.dense_elements.values())
        return (self.plan.dp_shard > 1) * num_elements * self.sizes.stored_bytes

    def peak_activation_bytes(self) -> int:
        """Return the peak of activations of micro-batches in flight, without those of the head."""
        return (
            self.receive_buffer_bytes
            + self.max_current_bytes
            - self.activation_bytes.get("head", 0)
        )

    def head_bytes(self) -> int:
        """Return bytes of the head's activations for one micro-batch, its logits and a gathered
        tied weight.

        Returns 0 if the head is on another rank.
        """
        if "head" not in self.activation_bytes:
            return 0
        return (
            self.activation_bytes["head"] + logits_bytes(self.sizes) + self.gathered_table_bytes()
        )

    def gradient_stays(self) -> bool:
        """Return True: the first backward of a stage keeps its gradients."""
        return True

    def peak_forward_bytes(self) -> int:
        """Return the peak of temporary memory in any forward."""
        return self.receive_buffer_bytes + self.peak_gathered_bytes() + self.max_forward_bytes

    def peak_backward_bytes(self) -> int:
        """Return the peak of temporary memory in any backward, or when replicas are reduced."""
        contexts = self.activation_bytes["context"] * self.job.train.micro_batches
        reduced = sum(self.shards) + self.arena_elements * len(self.routed)
        final_bytes = contexts + reduced * self.sizes.stored_bytes + self.largest_bucket_bytes()
        return self.receive_buffer_bytes + max(
            self.peak_gathered_bytes() + self.max_backward_bytes, final_bytes
        )

    def _gradient_size(self, parameter: Parameter) -> int:
        """Return the full size: gradients stay unsharded until the last backward."""
        return parameter.size

    def _stage(self, number: int, names: Sequence[str]) -> _Stage:
        layers = [index for index in self.layers if f"layers.{index}" in names]
        saved = {name: self.activation_bytes[name] for name in names}
        if self.recompute:
            saved.update({f"layers.{index}": self.stream_bytes for index in layers})
        is_first, is_last = number == 0, number == self.plan.num_stages - 1
        if not is_first:
            saved[names[0]] -= self.stream_bytes  # It is in a receive buffer.
        captured = sum(map(self._captured_bytes, layers))
        if is_last and (
            self.sizes.num_casts or self.sizes.tp > 1
        ):  # Otherwise the gradient saved by the head serves.
            captured += self.stream_bytes
        gradients = (
            sum(self.trainable_elements[index] for index in layers)
            + (is_first or is_last) * self.root_gradient_elements
        )
        return _Stage(
            layers,
            is_first,
            is_last,
            saved,
            (not is_last) * self.stream_bytes,
            captured,
            gradients * self.sizes.stored_bytes,
        )

    def _captured_bytes(self, index: int) -> int:
        """Return bytes of a layer's output gradients that wait for the second half of backward."""
        trains_experts, routed = self.arena_elements > 0, self.routed.get(index)
        return captured_attention(self.sizes) + captured_ffn(
            self.sizes, index, routed, trains_experts=trains_experts
        )

    def _run_forward(self, number: int, stage: _Stage) -> None:
        """Add the forward of one micro-batch.

        The first stage adds the context that all blocks share.
        """
        if number == min(self.stages):
            self.current_bytes += self.activation_bytes["context"]
        self.current_bytes += stage.total_activation_bytes + stage.sent_bytes
        self.max_current_bytes = max(self.max_current_bytes, self.current_bytes)
        logits = logits_bytes(self.sizes) + self.gathered_table_bytes() if stage.is_last else 0
        self.max_forward_bytes = max(
            self.max_forward_bytes, self.current_bytes + self.gradient_bytes_made + logits
        )

    def _run_backward(self, stage: _Stage, batch: int) -> None:
        """Record the peaks of a full backward, layer by layer."""
        element_bytes, new_gradients = (
            self.sizes.stored_bytes,
            stage.is_last * self.root_gradient_elements * self.sizes.stored_bytes,
        )
        if stage.is_last:
            self._record_backward(
                self.current_bytes + self.gradient_bytes_made + self.scattered_table_bytes()
            )
        base = self.current_bytes + self.gradient_bytes_made - stage.activation_bytes.get("head", 0)
        for index in reversed(stage.layers):
            name = f"layers.{index}"
            working = self.working_bytes(index, not stage.has_gradients)
            if name == list(stage.activation_bytes)[-1] and not stage.is_last:
                working -= self.stream_bytes  # Its first gradient is in a receive buffer.
            if self.recompute:
                recomputed = self.activation_bytes[name] - self.stream_bytes
                self.max_current_bytes = max(
                    self.max_current_bytes, self.current_bytes + recomputed
                )
                working += recomputed
            self._record_backward(base + working + (not stage.has_gradients) * new_gradients)
            base -= stage.activation_bytes[name]
            new_gradients += self.trainable_elements[index] * element_bytes
        if (
            stage.is_first
        ):  # With TP, the gradient of all sequence shards comes before the embedding's.
            gathered = (
                self.sizes.tp > 1
            ) * self.sizes.gathered_elements + self.sizes.lookup_elements
            peak = max(self.table_gradient_elements + gathered, self.lookup_elements())
            self._record_backward(
                base + (not stage.has_gradients) * new_gradients + peak * element_bytes
            )
        self._finish_backward(stage, batch, stage.total_activation_bytes)

    def _run_input_backward(self, stage: _Stage) -> None:
        """Record the peaks of the first half of a split backward, which frees nothing."""
        if stage.is_first:
            return
        self.current_bytes += stage.captured_bytes
        self.max_current_bytes = max(self.max_current_bytes, self.current_bytes)
        base = self.current_bytes + self.gradient_bytes_made + self.stream_bytes
        self._record_backward(base + _NORM_STREAMS * self.stream_bytes)
        for index in stage.layers[:1]:
            if index in self.routed:
                routed = self.routed[index]
                elements = sum(routed.slot_tokens) * self.sizes.model.hidden
                elements += peak_expert_elements(
                    self.sizes,
                    routed,
                    on_cpu=self.on_cpu,
                    gradients_stay=self.arena_elements > 0,
                )
                working = elements * self.sizes.compute_bytes
                self._record_backward(base - self._captured_bytes(index) + working)

    def _run_weight_backward(self, stage: _Stage, batch: int) -> None:
        """Record the peaks of the second half of a split backward."""
        base = self.current_bytes + self.gradient_bytes_made
        self._record_backward(
            base
            + max(
                self.arena_elements * self.sizes.stored_bytes,
                stage.is_last * self.scattered_table_bytes(),
            )
        )
        if not stage.has_gradients:
            self._record_backward(base + stage.gradient_bytes - stage.captured_bytes)
        self._finish_backward(stage, batch, stage.total_activation_bytes + stage.captured_bytes)

    def _record_backward(self, num_bytes: int) -> None:
        self.max_backward_bytes = max(self.max_backward_bytes, num_bytes)

    def _finish_backward(self, stage: _Stage, batch: int, freed_bytes: int) -> None:
        """Free the activations of one micro-batch; sent tensors may stay."""
        self.current_bytes -= freed_bytes
        if self.plan.schedule != "1f1b":
            self.current_bytes += (not stage.is_first) * self.stream_bytes
        else:  # The latest gradient stays, and the last result that was sent by itself.
            self.current_bytes += (
                not stage.is_first and not stage.has_gradients
            ) * self.stream_bytes
            num_warmup = min(
                self.plan.pp - self.plan.pp_rank(self.rank), self.job.train.micro_batches
            )
            self.current_bytes -= stage.sent_bytes * (batch != num_warmup - 2)
        self.gradient_bytes_made += 0 if stage.has_gradients else stage.gradient_bytes
        stage.has_gradients = True
