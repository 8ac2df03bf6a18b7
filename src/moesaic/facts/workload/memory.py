"""Memory of one rank in training, by kind of content, and its peaks.

`activation_memory` counts saved activations, `peak_memory` the peaks of a step, `pipeline_memory`
those of a pipeline rank.

In fine-tuning, parameters count as present, gradients and moments as trainable. Activations and
temporaries count as if the whole model were trained, without the few of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.parameters import local_size
from moesaic.facts.workload.peak_memory import StepMemory
from moesaic.facts.workload.pipeline_memory import PipelineStepMemory
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import BIAS_BYTES


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
    """Activations saved for embedding and layers; in a pipeline the peak over all micro-batches in
    flight, without those of the head."""
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
    step = (StepMemory if plan.pp == 1 else PipelineStepMemory)(params, loads, on_cpu)
    num_elements = sum(local_size(p, plan.dp_shard) for p in params.dense) + sum(
        p.size for p in params.experts
    )
    biases = sum(p.size for p in params.biases) * BIAS_BYTES
    has_staging = job.checkpoint.asynchronous and on_cpu
    return Memory(
        parameters_bytes=num_elements * step.sizes.stored_bytes + biases,
        gradients_bytes=step.gradient_bytes(),
        moments_bytes=params.moments_bytes(),
        staging_bytes=params.checkpoint_bytes() if has_staging else 0,
        gathered_bytes=step.peak_gathered_bytes(),
        activations_bytes=step.peak_activation_bytes(),
        head_bytes=step.head_bytes(),
        working_bytes=step.peak_working_bytes(),
        forward_bytes=step.peak_forward_bytes(),
        backward_bytes=step.peak_backward_bytes(),
    )
