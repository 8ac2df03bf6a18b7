"""Peaks of temporary memory in one step of a rank.

They follow our own layers, FSDP of torch 2.13, CPU kernels and gloo.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.workload.activation_memory import activation_bytes, gathered_bytes, logits_bytes
from moesaic.facts.workload.expert_memory import expert_backward_bytes
from moesaic.facts.workload.gradient_reduction import GradientReduction, gradient_reductions
from moesaic.facts.workload.loads import routed_by_layer
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import Sizes


@dataclass(frozen=True)
class FlatBucket:
    """A bucket of several gradients."""

    num_bytes: int
    sizes: Sequence[int]
    """Bytes of each gradient."""
    arrivals: Sequence[tuple[float, bool]]
    """Layer in which backward finishes each gradient (infinite: head, -1: embedding), and whether
    it is the first gradient of a dense FFN, which is the layer's larger half."""


def _flat_buckets(reduction: GradientReduction) -> Iterator[FlatBucket]:
    seen: set[str] = set()
    arrivals = []
    for gradient in reduction.gradients:
        layer = {"embed": -1.0, "head": math.inf}.get(gradient.block)
        layer = float(gradient.block.split(".")[1]) if layer is None else layer
        arrivals.append((layer, gradient.block.endswith(".ffn") and gradient.block not in seen))
        seen.add(gradient.block)
    for bucket in reduction.buckets:
        members = slice(bucket.members.start, bucket.members.stop)
        if len(bucket.members) > 1:
            sizes = [gradient.num_bytes for gradient in reduction.gradients[members]]
            yield FlatBucket(bucket.num_bytes, sizes, arrivals[members])


class StepMemory:
    """Memory peaks of a step on a rank with all blocks of the model."""

    def __init__(self, params: RankParams, loads: Sequence[ArrayLike] | None, on_cpu: bool) -> None:
        job, plan, rank = params.job, params.plan, params.rank
        self.sizes, self.job, self.plan, self.rank = Sizes.of_rank(job, plan, rank), job, plan, rank
        self.share, self.on_cpu, self.accumulates = params, on_cpu, job.train.micro_batches > 1
        self.activation_bytes = activation_bytes(job, plan, rank, loads)
        self.layers = [i for i in range(job.model.layers) if f"layers.{i}" in self.activation_bytes]
        self.recompute = job.train.recompute if plan.recompute is None else plan.recompute
        expert_layers = job.model.expert_layers
        rows = routed_by_layer(job, plan, rank, loads) if expert_layers else []
        self.routed = {
            i: one for i, one in zip(expert_layers, rows, strict=True) if i in self.layers
        }
        """Routed tokens of each of the rank's expert layers."""
        expert_elements = sum(p.size for p in params.experts if p.name in params.trainable)
        self.arena_elements = expert_elements // max(len(self.routed), 1)
        """Trainable expert elements of one expert layer."""
        self.shards = [local_size(p, plan.dp_shard) for p in params.trainable_dense]
        dense = sum(self._gradient_size(p) for p in params.trainable_dense)
        self.gradient_elements = dense + self.arena_elements * len(self.routed)
        """Elements of all gradients."""
        self.dense_elements = dict.fromkeys(self.layers, 0)
        self.trainable_elements = {
            index: self.arena_elements * (index in self.routed) for index in self.layers
        }
        """Dense elements per layer; all trainable elements per layer on this rank."""
        self.root_elements = self.root_gradient_elements = self.root_shard_elements = (
            self.scattered_elements
        ) = 0
        for p in params.dense:
            if p.layer is None:
                self.root_elements += p.size * (not p.is_column_shard)
            else:
                self.dense_elements[p.layer] += p.size
        for p in params.trainable_dense:
            if p.layer is None:
                self.root_gradient_elements += p.size
                self.scattered_elements += p.size * (not p.is_column_shard)
                self.root_shard_elements += local_size(p, plan.dp_shard) * (not p.is_column_shard)
            else:
                self.trainable_elements[p.layer] += self._gradient_size(p)
        self.reductions = gradient_reductions(params)
        self.flat_buckets = [
            flat for one in self.reductions if one.overlaps_backward for flat in _flat_buckets(one)
        ]
        """Buckets of several gradients, allocated with the first one."""
        self.padding_bytes = sum(flat.num_bytes - sum(flat.sizes) for flat in self.flat_buckets)
        self.head_gradient_elements = (
            self.sizes.vocab * job.model.hidden * (self.root_gradient_elements > 0)
        )
        """Elements of the gradient of the head's weight, before it joins the other gradients."""
        if self.sizes.gathers_tied_embedding:
            self.head_gradient_elements = self.table_gradient_elements

    @property
    def table_gradient_elements(self) -> int:
        """Elements of the gradient of the embedding."""
        return self.sizes.table_elements * (self.root_gradient_elements > 0)

    def gradient_bytes(self) -> int:
        """Return bytes of all gradients, and with several micro-batches of the one being added."""
        return (
            self.gradient_elements + self.accumulates * self.arena_elements
        ) * self.sizes.stored_bytes + self.padding_bytes

    def peak_gathered_bytes(self) -> int:
        """Return the peak of FSDP's buffers."""
        return max((self.gathered_bytes(index) for index in self.layers), default=0)

    def peak_activation_bytes(self) -> int:
        """Return the peak of activations saved for embedding and layers."""
        return (
            self.activation_bytes["context"]
            + self.activation_bytes["embed"]
            + max(map(self.activations_left, self.layers))
        )

    def head_bytes(self) -> int:
        """Return bytes of the head's saved activations, its logits and its gathered tied weight."""
        return (
            self.activation_bytes["head"] + logits_bytes(self.sizes) + self.gathered_table_bytes()
        )

    def gathered_table_bytes(self) -> int:
        """Return bytes of a tied weight gathered from column shards."""
        s = self.sizes
        return s.gathers_tied_embedding * s.vocab * s.model.hidden * s.stored_bytes

    def scattered_table_bytes(self) -> int:
        """Return bytes beside that weight's gradient while it is reduce-scattered.

        These are this rank's shard, and one collective's input with gloo's copy of it.
        """
        if not self.sizes.gathers_tied_embedding:
            return 0
        return (
            self.table_gradient_elements * self.sizes.stored_bytes
            + 2 * self.sizes.table_message_bytes[0]
        )

    def lookup_elements(self) -> int:
        """Return peak elements of column-sharded lookups, without those of the table.

        These are looked-up columns, and this rank's tokens before and after reordering.
        """
        s = self.sizes
        return (s.embedding_shards > 1) * s.gathered_elements + max(
            s.lookup_elements, (s.embedding_shards > 1) * s.gathered_elements
        )

    def peak_working_bytes(self) -> int:
        """Return the peak of temporaries in backward of a layer's larger half."""
        return max(
            (self.working_bytes(index, self.gradient_stays()) for index in self.layers), default=0
        )

    def peak_forward_bytes(self) -> int:
        """Return the peak of temporary memory in a forward pass.

        It is at the head's logits, or at the embedding's partial sums of TP ranks. FSDP holds the
        buffer that gathered the last layer.
        """
        s = self.sizes
        saved = self.activations_left(self.layers[-1])
        if self.recompute:
            saved = len(self.layers) * s.stream_elements * s.stored_bytes
        is_sharded, accumulated = self.plan.dp_shard > 1, self.accumulates * self.gradient_elements
        head_peak = (
            saved
            + self.head_bytes()
            + is_sharded * self.dense_elements[self.layers[-1]] * s.stored_bytes
        )
        embedding_peak = (
            (s.tp > 1) * (3 * s.gathered_elements + s.stream_elements) + self.lookup_elements()
        ) * s.stored_bytes
        padding = self.accumulates * self.padding_bytes
        return (
            self._context_bytes()
            + (accumulated + is_sharded * self.root_elements) * s.stored_bytes
            + padding
            + max(head_peak, embedding_peak)
        )

    def peak_backward_bytes(self) -> int:
        """Return the peak of temporary memory in a backward pass, or right after it."""
        peaks = [
            self._head_gradient_bytes(),
            self._final_bytes(),
            *(self._layer_backward_bytes(index) for index in self.layers),
        ]
        if self.sizes.gathers_tied_embedding:
            peaks.append(self._table_scatter_bytes())
        return max(peaks)

    def _table_scatter_bytes(self) -> int:
        """Return bytes while the tied weight's gradient is reduce-scattered, before any other
        exists."""
        saved = self.activations_left(self.layers[-1])
        if self.recompute:
            saved = len(self.layers) * self.sizes.stream_elements * self.sizes.stored_bytes
        fsdp_elements = (self.plan.dp_shard > 1) * (
            self.root_elements + self.dense_elements[self.layers[-1]]
        )
        persistent = (
            self.accumulates * self.gradient_elements + fsdp_elements
        ) * self.sizes.stored_bytes + self.accumulates * self.padding_bytes
        return (
            self._context_bytes()
            + persistent
            + saved
            + self.activation_bytes["head"]
            + self.scattered_table_bytes()
        )

    def activations_left(self, index: int) -> int:
        """Return bytes of activations saved for layers up to `index` when backward reaches that
        one."""
        before = [i for i in self.layers if i < index]
        if self.recompute:
            return (
                len(before) * self.sizes.stream_elements * self.sizes.stored_bytes
                + self.activation_bytes[f"layers.{index}"]
            )
        return sum(self.activation_bytes[f"layers.{i}"] for i in (*before, index))

    def gathered_bytes(self, index: int) -> int:
        """Return bytes of FSDP buffers while backward is in layer `index`.

        These are embedding, head and the layer, the prefetched next layer, and the reduce-scatter
        of the layer before.
        """
        groups = sum(self.dense_elements.get(near, 0) for near in (index - 1, index, index + 1))
        return (self.plan.dp_shard > 1) * (self.root_elements + groups) * self.sizes.stored_bytes

    def gradient_stays(self) -> bool:
        """Return whether a weight's gradient outlives its matmul, instead of being accumulated at
        once."""
        return not self.accumulates or self.plan.dp_shard > 1

    def working_bytes(self, index: int, gradient_stays: bool) -> int:
        """Return bytes of temporaries in backward of the larger half of layer `index`, less freed
        activations."""
        s, model = self.sizes, self.sizes.model
        stream = s.stream_elements * s.stored_bytes
        if index not in self.routed:
            return stream + self._gated_ffn_bytes(s.ffn_width(index), gradient_stays)
        routed = self.routed[index]
        peak = self.arena_elements * s.stored_bytes
        peak += expert_backward_bytes(s, routed, on_cpu=self.on_cpu)
        if model.shared_experts:  # Their backward follows that of the routed experts.
            freed = 2 * s.expert_width * routed.num_tokens
            freed += bool(routed.exchanges) * model.hidden * routed.num_sent
            expert_gradients = gradient_stays * self.arena_elements * s.stored_bytes
            peak = max(
                peak,
                expert_gradients
                + self._gated_ffn_bytes(s.shared_width, gradient_stays)
                - freed * s.compute_bytes,
            )
        return stream + peak

    def _gradient_size(self, parameter: Parameter) -> int:
        """Return elements of a dense parameter's gradient on this rank."""
        return local_size(parameter, self.plan.dp_shard)

    def _layer_backward_bytes(self, index: int) -> int:
        """Return bytes in the larger half of layer `index`, when its gradients begin."""
        later = (size for other, size in self.trainable_elements.items() if other > index)
        gradients = self.gradient_elements if self.accumulates else sum(later)
        if not self.accumulates or self.plan.dp_shard > 1 or self.job.model.tied:
            gradients += self.head_gradient_elements  # It has not joined the others yet.
        base = self._context_bytes() + self.activations_left(index) + self.gathered_bytes(index)
        # Before the layer computes, gloo copies the all-gather of the next layer. Recomputed
        # activations do not exist yet.
        prefetches = self.plan.dp_shard > 1 and index > 0 and not self.recompute
        copied_elements = self.dense_elements[index - 1] if prefetches else 0
        peak = max(
            self.working_bytes(index, self.gradient_stays()),
            (self.sizes.stream_elements + copied_elements) * self.sizes.stored_bytes,
        )
        return base + gradients * self.sizes.stored_bytes + self._bucket_padding_bytes(index) + peak

    def _bucket_padding_bytes(self, index: float) -> int:
        """Return bytes of allocated buckets that wait for gradients in the larger half of layer
        `index`.

        With gradient accumulation, only the gaps between gradients count.
        """
        if self.accumulates:
            return self.padding_bytes
        waiting = 0
        for flat in self.flat_buckets:
            has_arrived = [
                layer > index or (layer == index and first) for layer, first in flat.arrivals
            ]
            arrived = sum(
                size for size, present in zip(flat.sizes, has_arrived, strict=True) if present
            )
            waiting += any(has_arrived) * (flat.num_bytes - arrived)
        return waiting

    def _head_gradient_bytes(self) -> int:
        """Return bytes while the gradient of the head's weight is copied into its bucket."""
        gradient_bytes = self.head_gradient_elements * self.sizes.stored_bytes
        is_bucketed = any((math.inf, False) in flat.arrivals for flat in self.flat_buckets)
        if self.accumulates or self.job.model.tied or not is_bucketed:
            return 0
        base = (
            self._context_bytes()
            + self.activations_left(self.layers[-1])
            + self.sizes.stream_elements * self.sizes.compute_bytes
        )
        return base + 2 * gradient_bytes + self._bucket_padding_bytes(self.layers[-1] + 0.5)

    def _final_bytes(self) -> int:
        """Return bytes when the last gradients are computed, or when replicas are reduced."""
        s, extra = self.sizes, 0
        tied, is_sharded = self.job.model.tied, self.plan.dp_shard > 1
        gathered = (s.tp > 1) * s.gathered_elements
        if s.embedding_shards > 1:
            base = (
                self._context_bytes() + self.gradient_elements * s.stored_bytes + self.padding_bytes
            )
            return base + max(self._final_column_shard_bytes(), self.largest_bucket_bytes())
        # The bucket of the embedding's gradient is allocated before that gradient.
        bucketed_layers = (layer for flat in self.flat_buckets for layer, _ in flat.arrivals)
        is_allocated = not self.accumulates and -1 in bucketed_layers
        if is_sharded:
            # The reduce-scatter of embedding and head, gloo's copy of it, the last tensor copied
            # into it, and the resulting shard before it is accumulated.
            last_elements = 0 if tied else self.head_gradient_elements
            extra = (
                2 * self.root_gradient_elements
                + last_elements
                + self.accumulates * self.root_shard_elements
            )
            extra = max(extra, self.root_gradient_elements + gathered)
        else:
            if self.accumulates or tied:  # The embedding's gradient, before it is added.
                extra = self.head_gradient_elements * (1 + (self.accumulates and tied))
            extra += gathered + is_allocated * self.head_gradient_elements
        if gathered:  # Before it, the gradient of all sequence shards, and gloo's copy.
            num_waiting = (
                (tied or is_sharded) - (not self.accumulates and not is_sharded) + is_allocated
            )
            extra = max(
                extra, 2 * gathered + s.stream_elements + num_waiting * self.head_gradient_elements
            )
        gradient_bytes = self.gradient_elements * s.stored_bytes + self.padding_bytes
        return (
            self._context_bytes()
            + gradient_bytes
            + max(extra * s.stored_bytes, self.largest_bucket_bytes())
        )

    def _final_column_shard_bytes(self) -> int:
        """Return bytes beside all gradients at the end of backward, with a column-sharded
        embedding.

        The embedding's gradient is summed from looked-up columns, which are allocated first. FSDP
        still has the gradient of the head's weight, and then its reduce-scatter with gloo's copy.
        """
        tied, accumulates = self.job.model.tied, self.accumulates
        summing = self.table_gradient_elements * (tied + accumulates) + self.sizes.lookup_elements
        looking_up = (
            self.table_gradient_elements * (tied - (not accumulates)) + self.lookup_elements()
        )
        if self.plan.dp_shard == 1:
            return max(summing, looking_up) * self.sizes.stored_bytes
        before_scatter = self.scattered_elements - self.root_shard_elements * (not accumulates)
        scattering = 2 * self.scattered_elements + accumulates * self.root_shard_elements
        return max(before_scatter + max(summing, looking_up), scattering) * self.sizes.stored_bytes

    def largest_bucket_bytes(self) -> int:
        """Return bytes of the largest bucket that is filled after backward."""
        late = (
            bucket for one in self.reductions if not one.overlaps_backward for bucket in one.buckets
        )
        return max((b.num_bytes for b in late if len(b.members) > 1), default=0)

    def _context_bytes(self) -> int:
        """Return bytes of the embedding and of the contexts of all micro-batches, which live until
        the end of the step."""
        contexts = self.job.train.micro_batches * self.activation_bytes["context"]
        return contexts + self.activation_bytes["embed"]

    def _gated_ffn_bytes(self, inner: int, gradient_stays: bool) -> int:
        """Return bytes of temporaries in backward of a gated FFN of width `inner`.

        The gradient of the stream does not count. Three gradients around a matmul exist, but not
        its result. The next weight's gradient stays, or has been accumulated. With TP, the gradient
        of all sequence shards comes first, with gloo's copy.
        """
        s = self.sizes
        inner_bytes, weight = s.tokens * inner * s.compute_bytes, inner * s.model.hidden
        peak = gradient_stays * weight * s.stored_bytes + 2 * inner_bytes
        if s.tp == 1:
            return peak
        gathered = gathered_bytes(s)
        cast = s.num_casts * s.stream_elements * s.compute_bytes
        return max(peak, gathered + cast + max(gathered, inner_bytes + weight * s.compute_bytes))
