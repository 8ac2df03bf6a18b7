"""Sizes that determine a rank's work: model dimensions, and its share of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.finetune import AdapterTarget
from moesaic.facts.plan import Plan

FloatType = Literal["fp64", "fp32", "bf16", "fp16"]
"""Data types of matmul operands."""

STORED_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Bytes of a stored number, by `train.precision`; bf16 and fp16 keep fp32 weights."""

COMPUTED_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a matmul operand, by `train.precision`."""

LOSS_CHUNK_TOKENS = 1024
"""Tokens per chunk of the loss, which bounds the logits in memory."""

FOLLOWER_CHUNK_TOKENS = 256
"""Tokens per chunk of the losses of students, which bounds their logits in memory."""

DIVERGENCE_QUERY_BLOCK = 64
"""Queries per matmul of the divergence of attention, which bounds the scores in memory."""

DIVERGENCE_BLOCK_BYTES = 1 << 20
"""Bytes of logits or scores between two passes over them on a CPU, so that they stay in cache."""

DIVERGENCE_MAX_BYTES = 32 << 20
"""Most bytes of one model's logits or scores in a block of a divergence, on any device: few enough
for any memory, and enough to keep a GPU busy."""

EXPERT_CHUNK_BYTES = 1 << 20
"""Bytes between two expert matmuls on a CPU, which bounds the tokens per chunk."""

NORM_CHUNK_BYTES = 1 << 19
"""Input bytes per chunk of a norm on a CPU."""

BUCKET_BYTES = 32 << 20
"""Maximum bytes of a flat gradient bucket; a larger gradient gets a bucket to itself."""

ATTENTION_QUERY_BLOCK = 256
"""Queries per kernel call of attention where it needs a mask; bounds the mask's rows."""

INDEX_BYTES = 8
"""Bytes of an index, a count or another number that ranks exchange."""

MOMENT_CHUNK = 1 << 16
"""Elements per chunk of a low-bit optimizer update on a CPU, so that intermediates stay in cache.
"""

GPU_MOMENT_CHUNK = 1 << 24
"""Elements per chunk of a low-bit optimizer update on a GPU, enough to keep it busy."""

SCALE_BYTES = 4
"""Bytes of the scale of one block of 8-bit moments."""

BIAS_BYTES = 4
"""Bytes of a number in a router's bias, for every `train.precision`."""


def divergence_queries(heads: int, length: int, window: int | None, score_bytes: int) -> int:
    """Return the queries of a block of the divergence of attention, `DIVERGENCE_QUERY_BLOCK` or as
    many as `DIVERGENCE_MAX_BYTES` allow.

    Args:
        heads: heads with scores of their own.
        length: tokens of the sequence.
        window: keys that a query attends to at most; None for all.
        score_bytes: bytes of one score.
    """
    keys = min(length, (window or length) + DIVERGENCE_QUERY_BLOCK)
    return max(1, min(DIVERGENCE_QUERY_BLOCK, DIVERGENCE_MAX_BYTES // (heads * keys * score_bytes)))


def divergence_rows(row_bytes: int, length: int, *, on_cpu: bool) -> int:
    """Return the rows of a block of a divergence, of `length`: as many as fit a CPU's cache, and on
    other devices `DIVERGENCE_MAX_BYTES`."""
    limit = DIVERGENCE_BLOCK_BYTES if on_cpu else DIVERGENCE_MAX_BYTES
    return max(1, min(length, limit // row_bytes))


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def row_batches(rows: int, row_bytes: int, max_bytes: int = BUCKET_BYTES) -> Iterator[range]:
    """Yield ranges of `rows` matrix rows, of at most `max_bytes` or of a single row each."""
    step = max(max_bytes // row_bytes, 1)
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model, and of one rank's share of a micro-batch."""

    job: Job
    plan: Plan
    rank: int
    on_cpu: bool = True
    """True if the rank computes on a CPU, whose kernels work in chunks that fit the cache."""

    @property
    def model(self) -> ModelConfig:
        """Dimensions of the model."""
        return self.job.model

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks, which hold the same samples and split every dense matrix."""
        return self.plan.tp

    @cached_property
    def tp_ranks(self) -> tuple[int, ...]:
        """Ranks of the TP group."""
        return self.plan.tp_groups().of(self.rank)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Ranks with the same pipeline rank; without a pipeline, all."""
        return self.plan.stage_groups().of(self.rank)

    @property
    def precision(self) -> FloatType:
        """Precision of training."""
        return self.job.train.precision

    @property
    def trains_weights(self) -> bool:
        """True if the weights themselves have gradients, not just adapters; routers aside."""
        return self.job.finetune is None or self.job.finetune.method == "full"

    def adapter_rank(self, target: AdapterTarget) -> int:
        """Return the rank of the adapters of `target`; 0 if it has none."""
        finetune = self.job.finetune
        if finetune is None or finetune.method == "full":
            return 0
        return finetune.rank * (target in finetune.targets)

    @cached_property
    def tokens(self) -> int:
        """Tokens of this rank's samples, which attention, FFN and head process on every TP rank."""
        return self._tokens_of(self.rank)

    def _tokens_of(self, rank: int) -> int:
        job = self.job
        samples = self.plan.sample_range(rank, job.train.batch // job.train.micro_batches)
        return len(samples) * job.data.sequence

    @property
    def shard_tokens(self) -> int:
        """Tokens in this rank's sequence shard, which norms and routers process."""
        return self.tokens // self.tp

    @property
    def stream_elements(self) -> int:
        """Elements of the residual stream in this sequence shard, [shard_tokens, hidden]."""
        return self.shard_tokens * self.model.hidden

    @property
    def gathered_elements(self) -> int:
        """Elements of the residual stream over all sequence shards, [tokens, hidden]."""
        return self.tokens * self.model.hidden

    @property
    def dispatched_tokens(self) -> int:
        """Tokens dispatched to experts from here, those of all ranks in the expert TP group."""
        return self.shard_tokens * self.plan.etp

    @property
    def expert_width(self) -> int:
        """Inner width of this rank's shard of an expert."""
        return self.model.ffn // self.plan.etp

    @property
    def heads(self) -> int:
        """Query heads on this TP rank."""
        return self.model.heads // self.tp

    @property
    def q_width(self) -> int:
        """Width of the query heads on this TP rank."""
        return self.heads * self.model.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the key-value heads on this TP rank."""
        return self.model.kv_heads // self.tp * self.model.head_dim

    @property
    def lookup_tokens(self) -> list[int]:
        """Tokens of each rank that this one looks up in its column shard; none without one."""
        if self.plan.embedding_shards == 1:
            return []
        return [self._tokens_of(rank) for rank in self.stage_ranks]

    @property
    def lookup_elements(self) -> int:
        """Elements that this rank looks up in its column shard, for the tokens of all ranks."""
        return sum(self.lookup_tokens) * self.model.hidden // self.plan.embedding_shards

    @property
    def gathers_tied_embedding(self) -> bool:
        """True if the head gathers column shards of a tied weight."""
        return self.plan.embedding_shards > 1 and self.model.tied

    @property
    def table_elements(self) -> int:
        """Elements of the embedding on this rank: its vocabulary shard, or its column shard."""
        return self.vocab * self.model.hidden // self.plan.embedding_shards

    @property
    def vocab(self) -> int:
        """Vocabulary rows on this TP rank."""
        return self.model.vocab // self.tp

    @property
    def stored_bytes(self) -> int:
        """Bytes of a number in the residual stream, norms and stored weights."""
        return STORED_BYTES[self.precision]

    @property
    def compute_bytes(self) -> int:
        """Bytes of a matmul operand."""
        return COMPUTED_BYTES[self.precision]

    @property
    def num_casts(self) -> int:
        """Casts per matmul operand: 1 if matmuls use another type than stored weights, else 0."""
        return int(self.stored_bytes != self.compute_bytes)

    def cast_bytes(self, elements: int) -> int:
        """Return bytes read and written to cast `elements` between stored and compute type, if they
        differ."""
        return self.num_casts * elements * (self.stored_bytes + self.compute_bytes)
