"""How a job trains: steps, precision, optimizer, schedule, layout, checkpoints, logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""Orders in which the parts of a pipeline go through micro-batches."""

Dispatch = Literal["rows", "visits"]
"""Ways in which tokens reach experts of other ranks."""

Local = Literal["along", "first"]
"""When experts take what tokens of their own rank have for them."""

Embedding = Literal["whole", "columns"]
"""What of the embedding's table a rank of a part of the pipeline has."""

GroupedMM = Literal["torch", "triton", "fp8"]
"""Kernels that multiply tokens by expert matrices on a GPU."""

MOST_CHUNKS = 64
"""Chunks that a rank's tokens can be cut into."""

MOMENT_BLOCK = 128
"""Numbers of a row that share a scale where moments have eight bits."""


class LayoutConfig(Section):
    """How the ranks share the model; data parallelism takes whatever is left."""

    ep: int = Field(default=1, ge=1)
    """Expert parallelism: consecutive ranks that share out a layer's experts."""
    shard: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """Replicas that share out the dense parameters (FSDP2): 1: none do; "all": every one."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: consecutive ranks that share out every dense matrix."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallelism of experts: of those ranks, consecutive ones that share out every expert's
    matrices too. 1: an expert is whole, and only `ep` shares experts out."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallelism: parts that the layers are cut into, each on ranks of its own."""
    schedule: Schedule = "1f1b"
    """The order in which parts of a pipeline compute forward and backward of micro-batches."""
    dispatch: Literal["auto"] | Dispatch = "auto"
    """How tokens reach experts of other ranks. rows: once for each expert. visits: once for each
    rank that has some of a token's experts, and back as one sum of their results. auto: `moesaic
    plan` takes what costs least; without a plan, visits where those ranks are on several hosts."""
    hosts: int | None = Field(default=None, ge=1)
    """Beside a `dispatch` that is not auto: hosts that the `ep` ranks are on, as many on each.
    Tokens go to the rank of the same place on another host, and from that one to the host's ranks;
    visits once to each host. 1, as if unset: straight, whatever hosts there are. They divide
    `ep`."""
    local: Literal["auto"] | Local = "auto"
    """What becomes of tokens that have experts on their own rank, beside what comes from other
    ranks. along: experts take both together. first: they take what is local by itself, while tokens
    and results travel. auto: `moesaic plan` takes what costs least; without a plan, along."""
    chunks: Annotated[int, Field(ge=1, le=MOST_CHUNKS)] | Literal["auto"] = "auto"
    """Parts of a rank's tokens that go to experts of other ranks one after another: experts compute
    with one while the next one and the results of the last one travel. auto: `moesaic plan` takes
    what costs least; without a plan, 1."""
    embedding: Literal["auto"] | Embedding = "auto"
    """What of the embedding's table each rank has, where `tp` does not share out its words. whole:
    all of it, and gradients are summed, or what `shard` leaves. columns: an equal share of every
    word's numbers; ranks look words up for each other, and no gradient of the table is summed.
    auto: `moesaic plan` takes what costs least; without a plan, whole."""


class KernelsConfig(Section):
    """GPU kernels of the run."""

    grouped_mm: Literal["auto"] | GroupedMM = "auto"
    """Kernels of the expert matmuls on a GPU; a CPU has its own. torch: `F.grouped_mm` in bf16, one
    `torch.mm` per expert in other dtypes. triton: moesaic's Triton kernels, in fp32, bf16 and fp16.
    fp8: the Triton kernels with both factors in fp8, scaled by row and by column; gradients of
    matrices keep the dtype of the tokens. auto: triton for bf16 and fp16 on GPUs of compute
    capability 9.0, if Triton works there, else torch; never fp8."""


class TrainConfig(Section):
    """One run's length, batch and precision."""

    steps: int = Field(ge=1, lt=1 << 31)
    """Optimizer steps of the whole run."""
    batch: int = Field(ge=1, le=1 << 24)
    """Samples of one global batch, over all ranks and micro-batches."""
    micro_batches: int = Field(default=1, ge=1)
    """Equal parts of a global batch whose gradients are added up; each is spread over all ranks."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp32; bf16 and fp16 compute in 16 bits with fp32 weights, fp16 scales its loss; fp64 for
    proofs."""
    recompute: bool = False
    """Activation checkpointing: layers are computed again in backward instead of kept."""
    clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; larger gradients are scaled down. 0: never."""
    device: str = "auto"
    """auto: a GPU where there is one, else cpu."""
    validate_every: int = Field(default=0, ge=0)
    """Steps between validation passes; 0: only at the end, if there is validation text."""
    validation_samples: int = Field(default=64, ge=1)
    """Samples of one validation pass."""
    deadline_s: float = Field(default=600.0, ge=1, le=1e7)
    """Seconds that a rank waits for its peers before it gives up."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.batch % self.micro_batches:
            raise ValueError(
                f"train.batch = {self.batch} is not divisible by "
                f"train.micro_batches = {self.micro_batches}: a batch has equal parts, change one"
            )
        return self


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay on matrices."""

    kind: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of weights with two or more dimensions; norms have none."""
    moments: Literal["full", "bf16", "8bit"] = "full"
    """What both moments of matrices are kept in: full: as weights are; bf16: half of fp32; 8bit: a
    quarter, in blocks with a scale each."""

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"optimizer.betas = {self.betas} is out of range: each is from 0 and below 1"
            )
        return self


class ScheduleConfig(Section):
    """The learning rate over steps."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up from zero."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak."""


class CheckpointConfig(Section):
    """When the run saves, and what it keeps."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints that stay on disk."""
    asynchronous: bool = True
    """Write in the background while training goes on."""


class LogConfig(Section):
    """Where figures go besides the run's own events."""

    tensorboard: bool = True
    """Write TensorBoard scalars."""
    wandb: str | None = None
    """Weights & Biases project (needs the wandb extra)."""
    mlflow: str | None = None
    """MLflow experiment (needs the mlflow extra)."""
    loads_every: int = Field(default=1, ge=1)
    """Steps between records of expert load, and of what a policy of balance made of it."""


def grouped_mm_fault(grouped_mm: Literal["auto"] | GroupedMM, train: TrainConfig) -> str | None:
    """Return why these kernels cannot serve a job of this precision and device, or None."""
    if grouped_mm in ("auto", "torch"):
        return None
    if train.device == "cpu":
        return (
            f'grouped_mm = "{grouped_mm}" is for GPUs, and train.device = "cpu": leave one of them '
            "out"
        )
    if train.precision != "fp64":
        return None
    return (
        f'grouped_mm = "{grouped_mm}" with train.precision = "fp64", which the Triton kernels do '
        'not support: set it to "torch", or choose another precision'
    )
