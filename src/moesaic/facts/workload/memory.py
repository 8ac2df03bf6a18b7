"""What a rank holds while it trains, by kind of content, and at the moments when it holds most.

What autograd keeps of each block is in `kept`, what is there at the fullest moments in `peaks` and,
of a part of a pipeline, in `flight`.

In fine-tuning, parameters, gradients and moments are those of what is there and of what learns;
activations and what backward makes on its way are counted as if all of the model learnt, and
without what adapters keep, which is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.flight import Flight
from moesaic.facts.workload.parameters import local_size
from moesaic.facts.workload.peaks import Step
from moesaic.facts.workload.share import Share
from moesaic.facts.workload.sizes import BIAS_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds while it trains, by what they are for."""

    parameters_bytes: int
    gradients_bytes: int
    """All of them, and with several micro-batches the one that is being added."""
    moments_bytes: int
    staging_bytes: int
    """The copy that checkpoints are written from; 0 where it lies in a memory of the host's own."""
    gathered_bytes: int
    """Most of what FSDP has put together of other ranks' shards, or is about to share out."""
    activations_bytes: int
    """What autograd keeps of embedding and layers; in a pipeline most of what is under way, but for
    what the head keeps of one micro-batch."""
    head_bytes: int
    """What the head keeps, the gradient of its weight among it, and its logits."""
    working_bytes: int
    """What backward of a layer's larger half makes on its way, less what it has let go."""
    forward_bytes: int
    """Most of what is there in a forward pass and does not last: gradients of micro-batches
    before, activations, what FSDP has gathered, and the head."""
    backward_bytes: int
    """Most of what is there in a backward pass or right after it and does not last: gradients so
    far, activations that are left, what FSDP has gathered, and what kernels need on the way."""

    def by_kind(self) -> dict[str, int]:
        """What is held for its own sake: what `total_bytes` adds up."""
        return {
            kind: getattr(self, kind)
            for kind in self.__dataclass_fields__
            if kind not in ("forward_bytes", "backward_bytes")
        }

    @property
    def total_bytes(self) -> int:
        """All of it, as if it were there at one time."""
        return sum(self.by_kind().values())

    @property
    def peak_bytes(self) -> int:
        """What is there at one time: at the end of a forward pass, or in a backward pass."""
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
    """What `rank` of `plan` holds.

    Args:
        job: the job.
        plan: which rank holds what.
        rank: absent: the last, which has the most rows.
        loads: by expert layer, as `workload` takes them; absent: even routing.
        on_cpu: whether rank and host share one memory, which then holds the staging copy too.
    """
    share = Share.of(job, plan, plan.ranks - 1 if rank is None else rank)
    step = (Step if plan.pp == 1 else Flight)(share, loads, on_cpu)
    held = sum(local_size(p, plan.shard) for p in share.dense) + sum(p.size for p in share.experts)
    biases = sum(p.size for p in share.biases) * BIAS_BYTES
    staged = job.checkpoint.asynchronous and on_cpu
    return Memory(
        parameters_bytes=held * step.s.wide + biases,
        gradients_bytes=step.gradients(),
        moments_bytes=share.moments_bytes(),
        staging_bytes=share.staged_bytes() if staged else 0,
        gathered_bytes=step.most_gathered(),
        activations_bytes=step.most_kept(),
        head_bytes=step.head(),
        working_bytes=step.most_working(),
        forward_bytes=step.forward(),
        backward_bytes=step.backward(),
    )
