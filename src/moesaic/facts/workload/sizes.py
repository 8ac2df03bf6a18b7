"""What decides how much work a rank has: sizes of the model, and of its share of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload.learning import Learning

Type = Literal["fp64", "fp32", "bf16", "fp16"]
"""Of the factors of a product."""

STORED_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Bytes of a stored number by `train.precision`; narrow types compute over fp32 weights."""

COMPUTED_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a factor of a matrix product by `train.precision`."""

HEAD_ROWS = 1024
"""Tokens whose logits exist at one time."""

SHARE_BYTES = 1 << 20
"""Between two products of an expert layer on a CPU, which takes that many rows at a time."""

NORM_BYTES = 1 << 19
"""Of the input of a norm on a CPU, which takes that many rows at a time."""

BUCKET_BYTES = 32 << 20
"""Gradients travel in flat buckets of at most so much; a larger one travels alone."""

INDEX_BYTES = 8

MOMENT_CHUNK = 1 << 16
"""Elements updated at a time on a CPU where moments are narrow: what lies between two passes stays
in the cache."""

GPU_MOMENT_CHUNK = 1 << 24
"""The same on a GPU, where many are needed to keep it busy."""

SCALE_BYTES = 4
"""Of the scale of such a block."""

BIAS_BYTES = 4
"""Of a number in a router's bias, whatever else is stored in."""

ROW_BYTES = 8
"""Of the number of rows that came to an expert since homes were last decided on."""


def batches(rows: int, row_bytes: int, most_bytes: int = BUCKET_BYTES) -> Iterator[range]:
    """`rows` rows of a matrix as they share messages of at most so many bytes, one at least."""
    step = max(most_bytes // row_bytes, 1)
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))


@dataclass(frozen=True)
class Sizes:
    """A model, and one rank's rows of a micro-batch of it."""

    model: ModelConfig
    batch: int
    """Samples."""
    sequence: int
    """Tokens of each."""
    precision: Type
    """`train.precision`."""
    mask: int
    """Elements of the mask by which attention ends at documents or looks back on a window."""
    slices: int = 1
    """Ranks that hold the same samples and share out every dense matrix."""
    expert_slices: int = 1
    """Of those, ranks that share out every expert's matrices too."""
    on_cpu: bool = True
    """Whether it computes on a CPU, whose kernels take blocks that stay in the cache."""
    learning: Learning = field(default_factory=Learning)
    """What has gradients."""
    begins: bool = False
    """Whether gradients end in this block: what comes into it has none."""
    columns: int = 1
    """Ranks that share out the columns of the embedding."""
    asked: int = 0
    """Tokens that a rank looks up of its columns: those of all of them."""

    @classmethod
    def of(cls, job: Job, plan: Plan, rank: int, *, on_cpu: bool = True) -> Sizes:
        """Those of `rank`."""
        rows = len(plan.rows(rank, job.train.batch // job.train.micro_batches))
        length, window = job.data.sequence, job.model.window
        mask = 0
        if job.data.packing == "documents":
            mask = rows * length**2
        elif window is not None and window < length:  # The same for all rows.
            mask = length**2
        return cls(
            job.model, rows, length, job.train.precision, mask, plan.tp, plan.etp, on_cpu,
            Learning.of(job.finetune), columns=plan.columns,
            asked=(plan.columns > 1) * length * (job.train.batch // job.train.micro_batches),
        )  # fmt: skip

    @property
    def moment_chunk(self) -> int:
        """Elements updated at a time where moments are narrow."""
        return MOMENT_CHUNK if self.on_cpu else GPU_MOMENT_CHUNK

    @property
    def tokens(self) -> int:
        """Of the micro-batch: what attention, networks and head of every slice go through."""
        return self.batch * self.sequence

    @property
    def run(self) -> int:
        """Tokens that this slice has between blocks, where norms and routers work."""
        return self.tokens // self.slices

    @property
    def stream(self) -> int:
        """Elements of the residual stream: of this slice's run of tokens."""
        return self.run * self.model.hidden

    @property
    def joined(self) -> int:
        """Elements of the residual stream of all slices."""
        return self.tokens * self.model.hidden

    @property
    def sent(self) -> int:
        """Tokens that go to experts from here: those of all slices of the same experts."""
        return self.run * self.expert_slices

    @property
    def ffn(self) -> int:
        """Inner width of this slice of an expert."""
        return self.model.ffn // self.expert_slices

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Tokens whose logits exist at one time, and how many times so many do."""
        full, rest = divmod(self.tokens, HEAD_ROWS)
        return [(HEAD_ROWS, full)] * (full > 0) + [(rest, 1)] * (rest > 0)

    @property
    def heads(self) -> int:
        """Query heads of this slice."""
        return self.model.heads // self.slices

    @property
    def kv_heads(self) -> int:
        """Key heads of this slice."""
        return self.model.kv_heads // self.slices

    @property
    def queries(self) -> int:
        """Width of this slice's query heads."""
        return self.heads * self.model.head_dim

    @property
    def keys(self) -> int:
        """Width of this slice's key heads."""
        return self.kv_heads * self.model.head_dim

    @property
    def looked_up(self) -> int:
        """Elements of columns that this rank looks up."""
        return self.asked * self.model.hidden // self.columns

    @property
    def joins_table(self) -> bool:
        """Whether the head has columns of a tied weight, which come together for it."""
        return self.columns > 1 and self.model.tied

    @property
    def table_batches(self) -> list[int]:
        """Bytes of the messages in which its columns come together."""
        row = self.model.hidden * self.wide
        return [len(rows) * row for rows in batches(self.vocab, row)]

    @property
    def table(self) -> int:
        """Elements of the embedding that this rank has: of its words, or of its columns."""
        return self.vocab * self.model.hidden // self.columns

    @property
    def vocab(self) -> int:
        """Words of this slice."""
        return self.model.vocab // self.slices

    @property
    def shared(self) -> int:
        """Inner width of this slice of the shared experts."""
        return self.model.shared * self.model.ffn // self.slices

    def inner(self, layer: int) -> int:
        """Inner width of this slice of the dense network of `layer`."""
        return self.model.inner(layer) // self.slices

    @property
    def masked(self) -> bool:
        """Whether attention has a mask."""
        return self.mask > 0

    @property
    def wide(self) -> int:
        """Bytes of a number in the residual stream, norms and weights."""
        return STORED_BYTES[self.precision]

    @property
    def narrow(self) -> int:
        """Bytes of a factor of a matrix product."""
        return COMPUTED_BYTES[self.precision]

    @property
    def casts(self) -> int:
        """1 where products take another type than weights are stored in, else 0."""
        return int(self.wide != self.narrow)

    @property
    def wide_type(self) -> Type:
        """Type of what is `wide`."""
        return "fp64" if self.precision == "fp64" else "fp32"

    def cast(self, elements: int) -> int:
        """Bytes read and written to turn `elements` from wide to narrow or back, if they differ."""
        return self.casts * elements * (self.wide + self.narrow)
