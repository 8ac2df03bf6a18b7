"""What a rank holds while it trains, by kind of content.

What autograd keeps of each layer is exact for torch's kernels on a CPU, and for whatever a GPU
computes with the same ones; it depends on routing only through the rows that arrive. Estimates
are: what FSDP holds together for a time, and what lives no longer than a layer's own passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.loads import expert_counts, slots_of
from moesaic.facts.workload.messages import group_of
from moesaic.facts.workload.parameters import Parameter, local_size, parameters, rank_size
from moesaic.facts.workload.sizes import HEAD_ROWS, INDEX_BYTES, Sizes


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
    """What FSDP has put together of other ranks' shards: an estimate."""
    activations_bytes: int
    """What autograd keeps of embedding and layers."""
    head_bytes: int
    """What the head keeps, the gradient of its weight among it, and its logits."""
    idle_gradients_bytes: int
    """Those of `gradients_bytes` that are there while a forward pass runs."""
    backward_bytes: int
    """Most of what is there in a backward pass and does not last: gradients so far, activations
    that are left, and what kernels need on the way."""

    def by_kind(self) -> dict[str, int]:
        """What is held for its own sake: what `total_bytes` adds up."""
        return {
            kind: getattr(self, kind)
            for kind in self.__dataclass_fields__
            if not kind.startswith(("idle", "backward"))
        }

    @property
    def total_bytes(self) -> int:
        """All of it, as if it were there at one time."""
        return self._lasting_bytes + (
            self.gradients_bytes + self.activations_bytes + self.head_bytes
        )

    @property
    def peak_bytes(self) -> int:
        """What is there at one time: at the end of a forward pass, or in a backward pass."""
        forward = self.idle_gradients_bytes + self.activations_bytes + self.head_bytes
        return self._lasting_bytes + max(forward, self.backward_bytes, self.gradients_bytes)

    @property
    def _lasting_bytes(self) -> int:
        return self.parameters_bytes + self.moments_bytes + self.staging_bytes + self.gathered_bytes


def memory(job: Job, plan: Plan, rank: int | None = None, *, on_cpu: bool = True) -> Memory:
    """What `rank` of `plan` holds, for even routing.

    Args:
        job: the job.
        plan: which rank holds what.
        rank: absent: the last, which has the most rows.
        on_cpu: whether rank and host share one memory, which then holds the staging copy too.
    """
    rank = plan.ranks - 1 if rank is None else rank
    s = Sizes.of(job, plan, rank)
    everything = list(parameters(job.model))
    dense = [p for p in everything if p.kind != "expert"]
    experts = [p for p in everything if p.expert is not None and p.expert in plan.homes(rank)]
    num_experts = sum(p.size for p in experts)
    held = sum(local_size(p, plan.shard) for p in dense) + num_experts
    moments = 2 * (sum(rank_size(p, plan.shard, rank) for p in dense) + num_experts)
    several = job.train.micro_batches > 1
    gradients = held + several * num_experts // job.model.layers
    kept = activations(job, plan, rank)
    head = kept.pop("head") + _logits(s)
    layers = [num_bytes for name, num_bytes in kept.items() if name.startswith("layers.")]
    recomputed = sum(layers) - len(layers) * s.stream * s.wide - max(layers)
    staged = _staged(dense, experts, plan, rank) if job.checkpoint.asynchronous else 0
    return Memory(
        parameters_bytes=held * s.wide,
        gradients_bytes=gradients * s.wide,
        moments_bytes=moments * s.wide,
        staging_bytes=staged * s.wide if on_cpu else 0,
        gathered_bytes=_gathered(dense, plan) * s.wide,
        activations_bytes=sum(kept.values()) - (recomputed if job.train.recompute else 0),
        head_bytes=head,
        idle_gradients_bytes=(held if several else 0) * s.wide,
        backward_bytes=_backward(job, plan, rank, dense, num_experts),
    )


def _backward(job: Job, plan: Plan, rank: int, dense: Sequence[Parameter], num_experts: int) -> int:
    """The most that one layer's backward pass finds or makes, of what does not last.

    Layers that are through leave gradients and free activations, so that it is the last layer or
    the first, whichever is larger.
    """
    s, layers = Sizes.of(job, plan, rank), job.model.layers
    kept = activations(job, plan, rank)
    layer = sum(local_size(p, plan.shard) for p in dense if p.layer == 0) + num_experts // layers
    head = sum(local_size(p, plan.shard) for p in dense if p.name.startswith("head"))
    held = sum(local_size(p, plan.shard) for p in dense) + num_experts
    on_the_way = _on_the_way(s, job, plan, rank)
    most = 0
    for index in range(layers):
        gradients = (head + (layers - index) * layer) * s.wide
        if job.train.micro_batches > 1:  # All are there, and this layer's come once more.
            gradients = (held + num_experts // layers) * s.wide
        left = kept["context"] + kept["embed"] + (index + 1) * kept["layers.0"]
        if job.train.recompute:
            left = kept["context"] + kept["embed"] + kept["layers.0"] + index * s.stream * s.wide
        most = max(most, gradients + left + on_the_way)
    return most


def _on_the_way(s: Sizes, job: Job, plan: Plan, rank: int) -> int:
    """What backward of a layer's larger half makes and lets go again, less what it has let go."""
    stream = 2 * s.stream * s.wide
    if not job.model.experts:
        return stream + 2 * s.tokens * job.model.ffn * s.narrow
    counts = expert_counts(job, plan, None)
    slots = slots_of(counts, plan, rank, group_of(plan.expert_groups(), rank))
    # Gradients of results and of rows, these in parts and joined; the results are gone by then.
    rows = 3 * sum(slots) - int(counts[rank].sum())
    return stream + rows * job.model.hidden * s.narrow


def activations(job: Job, plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that autograd keeps of one micro-batch: context, embed, layers.0, ..., head.

    Parameters are not in it, nor what checkpointing saves (`train.recompute`): that leaves each
    layer its input, and in backward one layer at a time all of it.
    """
    s = Sizes.of(job, plan, rank)
    inner = _moe_bytes(s, job, plan, rank) if job.model.experts else _dense_bytes(s)
    layer = _attention_bytes(s) + inner
    angles = s.tokens * job.model.head_dim * s.wide
    head = _norm_bytes(s) + s.stream * s.narrow + job.model.vocab * job.model.hidden * s.wide
    return {
        "context": angles + s.mask,
        "embed": s.tokens * INDEX_BYTES,
        **{f"layers.{index}": layer for index in range(job.model.layers)},
        "head": head,
    }


def _norm_bytes(s: Sizes) -> int:
    """Its input, the input normed, and a factor a row."""
    return (2 * s.stream + s.tokens) * s.wide


def _inputs_bytes(s: Sizes, num: int, weights: int) -> int:
    """What `num` products read of one wide tensor, and casts of `weights` elements of weights."""
    if s.casts:
        return (num * s.stream + weights) * s.narrow
    return s.stream * s.wide


def _attention_bytes(s: Sizes) -> int:
    q, k, model = s.tokens * s.queries, s.tokens * s.keys, s.model
    kept = _norm_bytes(s) + _inputs_bytes(s, 3, 2 * (s.queries + s.keys) * model.hidden)
    if model.normalised_attention:
        kept += 2 * (q + k + s.tokens) * s.wide
    if model.clip_qkv is not None:
        kept += (q + k) * s.wide + k * s.narrow
    # Turned queries, keys and values as often as they are repeated; the result, twice.
    kept += 5 * q * s.narrow + s.tokens * model.heads * s.wide
    return kept + s.mask * s.narrow


def _dense_bytes(s: Sizes) -> int:
    weights = 3 * s.model.ffn * s.model.hidden
    gated = 4 * s.tokens * s.model.ffn * s.narrow
    return _norm_bytes(s) + _inputs_bytes(s, 2, weights) + gated


def _moe_bytes(s: Sizes, job: Job, plan: Plan, rank: int) -> int:
    model, t = s.model, s.tokens
    counts = expert_counts(job, plan, None)
    slots = slots_of(counts, plan, rank, group_of(plan.expert_groups(), rank))
    leaving, arriving = int(counts[rank].sum()), sum(slots)
    scores, chosen = t * model.experts, t * model.top_k
    routing = (2 * scores + t + model.experts) * s.wide
    if model.renormalise:
        routing += (chosen + t) * s.wide
    indices = (2 * chosen + leaving + len(slots)) * INDEX_BYTES + 2 * chosen
    if plan.ep > 1:
        indices += 2 * arriving * INDEX_BYTES
    rows = arriving * (model.hidden + 2 * model.ffn) + leaving * model.hidden
    return _norm_bytes(s) + s.stream * s.wide + routing + indices + (rows + chosen) * s.narrow


def _logits(s: Sizes) -> int:
    """Logits and their logarithms of some rows, and in narrow types the weight and its addend."""
    weight = s.casts * 2 * s.model.vocab * s.model.hidden * s.narrow
    return 2 * min(s.tokens, HEAD_ROWS) * s.model.vocab * s.wide + weight


def _gathered(dense: Sequence[Parameter], plan: Plan) -> int:
    """Embedding and head, two layers, and the gradients of one group as they are shared out."""
    if plan.shard == 1:
        return 0
    root = sum(p.size for p in dense if p.layer is None)
    layer = sum(p.size for p in dense if p.layer == 0)
    return root + 2 * layer + 2 * max(root, layer)


def _staged(dense: Sequence[Parameter], experts: Sequence[Parameter], plan: Plan, rank: int) -> int:
    """Elements that `rank` writes of a checkpoint: the owners of a piece share pieces out."""
    shared: dict[tuple[int, ...], list[int]] = {}
    for parts, by in ((dense, plan.shard), (experts, plan.ep)):
        owners = tuple(range(rank % by, plan.ranks, by))
        sizes = [p.size if p.kind == "expert" else rank_size(p, by, rank) for p in parts]
        shared.setdefault(owners, []).extend(sizes)
    staged = 0
    for owners, sizes in shared.items():
        loads = [0] * len(owners)
        for size in sorted(sizes * 3, reverse=True):
            loads[loads.index(min(loads))] += size
        staged += loads[owners.index(rank)]
    return staged
