"""Settings of training: layout, kernels, precision, optimizer, schedule, checkpoints, logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from moesaic.base.config import Section
from moesaic.facts.job.device_name import check_device_name

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""Orders in which pipeline ranks process micro-batches."""

MicroBatchOrder = Literal["by_micro_batch", "by_block"]
"""Orders in which micro-batches pass through the blocks of a model."""

DispatchMethod = Literal["all_to_all", "dedup"]
"""Methods of dispatching tokens to experts on other ranks."""

EmbeddingSharding = Literal["whole", "columns"]
"""Ways to place the embedding table on the ranks of a pipeline stage."""

MatmulBackend = Literal["torch", "triton"]
"""Kernels of the expert matmuls on a GPU."""

MAX_CHUNKS = 64
"""Most chunks that a rank's tokens can be dispatched in."""

MOMENT_BLOCK = 128
"""Elements of a row that share a scale in 8-bit moments."""


class LayoutConfig(Section):
    """Parallel layout of the ranks; data parallelism takes the remaining ranks."""

    ep: int = Field(default=1, ge=1)
    """Expert parallelism: consecutive ranks that split each layer's experts. Raise it for experts
    that do not fit on one rank; keep the group inside one host if it fits."""
    dp_shard: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """Data-parallel replicas that shard the dense parameters (FSDP2); 1: none, "all": every
    replica. Raise it for less memory per rank, at the cost of all-gathers."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: consecutive ranks that split every dense matrix. Raise it for layers that
    do not fit on one rank; keep the group on fast links."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallelism of experts: consecutive ranks, of the `tp` ones, that also split every
    expert's matrices. 1: experts are whole, and only `ep` splits them among ranks."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallelism: number of pipeline ranks that the layers are split over, each a group
    of ranks. Raise it where links between hosts are slow."""
    schedule: PipelineSchedule = "1f1b"
    """Order of the passes on the pipeline ranks. gpipe: all forwards, then all backwards. 1f1b: one
    forward and one backward in turn, with at most `pp` micro-batches in flight. interleaved: 1f1b
    with two stages per pipeline rank, for less idle time. zero-bubble: 1f1b with a split backward
    that fills idle time; not with `train.recompute`."""
    dispatch: Literal["auto"] | DispatchMethod = "auto"
    """How tokens reach experts of other ranks. all_to_all: once per expert. dedup: once per rank
    that has any of a token's experts; one sum of their results comes back. auto: `moesaic plan`
    takes the cheapest; without a plan, dedup if those ranks are on several hosts, else all_to_all.
    """
    dispatch_hosts: int | None = Field(default=None, ge=1)
    """Hosts that the `ep` ranks are on, with equally many on each; needs a `dispatch` other than
    auto. Tokens go to the rank with the same index on another host, and from there to ranks of that
    host; dedup sends them once per host. Unset or 1: directly, whatever the hosts. Must divide
    `ep`."""
    overlap_local: Literal["auto"] | bool = "auto"
    """Compute tokens for the rank's own experts while tokens for other ranks travel. true: overlap,
    with more and smaller matmuls. false: local and received tokens in the same matmuls. auto:
    `moesaic plan` takes the cheapest; without a plan, false."""
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] | Literal["auto"] = "auto"
    """Chunks that a rank's tokens are dispatched in. Experts compute one chunk while the next one,
    and the results of the last one, travel. auto: `moesaic plan` takes the cheapest; without a
    plan, 1."""
    embedding: Literal["auto"] | EmbeddingSharding = "auto"
    """Embedding table on each rank, where `tp` does not shard its vocabulary. whole: all of it (or
    what `dp_shard` leaves), with gradient reduction. columns: an equal column shard; ranks look
    tokens up for each other, and the table's gradients need no reduction. auto: `moesaic plan`
    takes the cheapest; without a plan, whole."""


class KernelsConfig(Section):
    """GPU kernels of the run."""

    grouped_mm: Literal["auto"] | MatmulBackend = "auto"
    """Kernels of the expert matmuls on a GPU; a CPU has its own. torch: `F.grouped_mm` in bf16, one
    `torch.mm` per expert in other dtypes. triton: moesaic's Triton kernels, in fp32, bf16 and fp16.
    auto: triton for fp32, bf16 and fp16 on GPUs of compute capability 9.0, if Triton works there,
    else torch."""


class TrainConfig(Section):
    """Length, batch and precision of one run."""

    steps: int = Field(ge=1, lt=1 << 31)
    """Optimizer steps of the whole run."""
    batch: int = Field(ge=1, le=1 << 24)
    """Samples of one global batch, over all ranks and micro-batches."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches of a global batch (gradient accumulation); each is split over all ranks. Raise
    it for less activation memory. "auto": a search of layouts chooses it (`plan = "auto"`, `moesaic
    plan --search`); auxiliary losses and capacity are taken over one of them, so it changes
    numbers."""
    micro_batch_order: Literal["auto"] | MicroBatchOrder = "auto"
    """Order of the passes of a step. by_micro_batch: each micro-batch passes through the whole
    model before the next one. by_block: all micro-batches pass through one block before the next
    block, which keeps the inputs of every block for all of them. auto: by_block with a `[memory]`
    budget, which then reads a layer's experts once per step and direction; else by_micro_batch."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of compute. bf16 and fp16 keep fp32 weights; fp16 also scales its loss. fp64 is for
    exact comparisons."""
    recompute: bool = False
    """Activation checkpointing: backward computes each layer again instead of keeping its
    activations. Set it where activations do not fit in memory."""
    clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; larger gradients are scaled down. 0: no clipping."""
    device: str = "auto"
    """Device of the ranks; auto: a GPU if there is one, else cpu."""
    validate_every: int = Field(default=0, ge=0)
    """Steps between validation passes; 0: only at the end, if there is validation text."""
    validation_samples: int = Field(default=64, ge=1)
    """Samples of one validation pass."""
    collective_timeout_s: float = Field(default=600.0, ge=1, le=1e7)
    """Seconds that a collective waits for other ranks before the run fails."""

    @field_validator("device")
    @classmethod
    def _names_device(cls, device: str) -> str:
        return check_device_name("train.device", device)

    def conflicts(self) -> Iterator[str]:
        """Yield a sentence if the batch has no equal parts."""
        if self.batch % self.micro_batches:
            yield (
                f"train.batch = {self.batch} is not divisible by "
                f"train.micro_batches = {self.micro_batches}: a batch has equal parts, change one"
            )


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay on matrices."""

    kind: Literal["adamw"] = "adamw"
    """Kind of optimizer."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of parameters with two or more dimensions; norms have none."""
    moments: Literal["full", "bf16", "8bit"] = "full"
    """Storage of both moments of matrices. full: the dtype of the weights. bf16: half the memory of
    fp32. 8bit: a quarter, in blocks with one scale each. Choose bf16 or 8bit where the optimizer
    state does not fit in memory."""

    def conflicts(self) -> Iterator[str]:
        """Yield decays that are out of range."""
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"optimizer.betas = {self.betas} is out of range: each is from 0 and below 1"


class ScheduleConfig(Section):
    """Learning rate over steps."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up from zero."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a fraction of the peak."""


def warmup_conflicts(schedule: ScheduleConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a sentence if the warm-up is longer than the run."""
    if schedule.warmup > train.steps:
        yield (
            f"schedule.warmup = {schedule.warmup} is longer than "
            f"train.steps = {train.steps}: shorten the warm-up, or train longer"
        )


class CheckpointConfig(Section):
    """Checkpoints that a run writes and keeps."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(default=3, ge=1)
    """Number of newest checkpoints that stay on disk. Once the loss has clearly risen, the
    newest one from before stays too."""
    asynchronous: bool = True
    """Write checkpoints in the background while training continues."""


class LogConfig(Section):
    """Loggers besides the run's own events."""

    tensorboard: bool = True
    """Write TensorBoard scalars."""
    wandb: str | None = None
    """Weights & Biases project (needs the wandb extra)."""
    mlflow: str | None = None
    """MLflow experiment (needs the mlflow extra)."""
    loads_every: int = Field(default=1, ge=1)
    """Steps between records of expert loads and of the balance policy's decisions."""

    def is_sampled(self, step: int) -> bool:
        """Return whether loads and decisions of `step` are recorded."""
        return step % self.loads_every == 0


def grouped_mm_fault(grouped_mm: Literal["auto"] | MatmulBackend, train: TrainConfig) -> str | None:
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
