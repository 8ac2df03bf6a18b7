"""Contenders of the training figures: moesaic, transformers and plain matrix products.

All of them take the same step of the same small OLMoE-shaped model: same weights, same batches,
clipping at 1.0, fused AdamW with decay on matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import transformers
from torch import Tensor

from moesaic.base.config import parse
from moesaic.dist.state import Source
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import parameters
from moesaic.models.hf.config import to_huggingface
from moesaic.models.hf.names import choose
from moesaic.models.initial import InitialSource
from moesaic.models.pieces import pieces
from moesaic.train.assemble import assemble
from moesaic.train.data import Batch
from moesaic.train.run import Run

WIDTH, LAYERS, EXPERTS, TOP_K, FFN, VOCAB = 512, 4, 64, 8, 256, 4096
TRANSFORMERS = f"transformers {transformers.__version__}"
PEER = f"{TRANSFORMERS}, experts_implementation grouped_mm"


def olmoe(batch: int, sequence: int, **tables: dict[str, object]) -> Job:
    """The job: a small model of OLMoE's shape, 108 million parameters, 18 million active."""
    raw: dict[str, object] = {
        "model": {
            "family": "olmoe", "vocab": VOCAB, "hidden": WIDTH, "layers": LAYERS, "heads": 8,
            "kv_heads": 4, "head_dim": 64, "ffn": FFN, "experts": EXPERTS, "top_k": TOP_K,
        },
        "routing": {"balance_loss": 0.0},
        "data": {"path": "unused", "sequence": sequence},
        "train": {"steps": 1_000_000, "batch": batch, "clip": 1.0, "device": "cpu"},
        "schedule": {"kind": "constant"},
        **tables,
    }  # fmt: skip
    return parse(Job, raw, "benchmark")


class UniformSamples:
    """Endless samples of uniform random tokens, one document each, a function of their index."""

    def __init__(self, job: Job) -> None:
        self._vocab, self._sequence = job.model.vocab, job.data.sequence

    def __len__(self) -> int:
        return 1 << 30

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """The samples of `indices`."""
        del shuffled
        size = (self._sequence + 1,)
        rows = [
            torch.randint(self._vocab, size, generator=torch.Generator().manual_seed(index))
            for index in indices
        ]
        tokens = torch.stack(rows)
        places = torch.arange(self._sequence).expand(len(rows), -1)
        return Batch(
            samples=torch.tensor(list(indices)), inputs=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].contiguous(), documents=torch.zeros_like(places).int(),
            positions=places,
        )  # fmt: skip


class Ours:
    """moesaic's run of the job on the ranks of `world`."""

    def __init__(self, job: Job, world: World) -> None:
        self.samples = UniformSamples(job)
        source: Source = InitialSource(job.seed, job.model.init_std)
        self.run: Run = assemble(job, lay_out(job.layout, job.model, world.size), world, source)

    def step(self) -> float:
        """One step; its loss."""
        return self.run.step(self.samples).loss


class Theirs:
    """transformers' model with the weights that `ours` has now, trained as it is."""

    def __init__(self, ours: Ours, experts: str = "grouped_mm") -> None:
        """Its products of experts are of the implementation that is called `experts`."""
        job = self.job = ours.run.job
        self.samples, self.next = UniformSamples(job), 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            keys = {**to_huggingface(job.model, "float32"), "use_cache": False}
            config = transformers.AutoConfig.for_model(**keys)
            self.model = transformers.AutoModelForCausalLM.from_config(config).train()
        self.model.set_experts_implementation(experts)
        self._copy(ours)
        self.optimizer = self._optimizer()

    def _copy(self, ours: Ours) -> None:
        """Every weight of ours into the tensor, or the part of a fused one, that holds it here."""
        values = self.model.state_dict()
        places = choose(self.job.model, values)
        with torch.no_grad():
            for piece in pieces(ours.run.model):
                place = places[piece.name]
                assert place is not None, f"transformers has no {piece.name}"
                box = values[place.tensor]
                for axis, (start, length) in enumerate(zip(place.offset, place.size, strict=True)):
                    box = box.narrow(axis, start, length)
                box.copy_(piece.tensor.view(box.shape))

    def _optimizer(self) -> torch.optim.Optimizer:
        config = self.job.optimizer
        weights = list(self.model.parameters())
        groups = [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ]
        first, second = config.betas
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=(first, second), eps=config.epsilon, fused=True
        )

    def step(self) -> float:
        """One step; its loss."""
        size = self.job.train.batch
        batch = self.samples.batch(range(self.next, self.next + size))
        self.next += size
        result = self.model(
            input_ids=batch.inputs, labels=batch.targets, shift_labels=batch.targets
        )
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(result.loss.detach())


def dense_limit(job: Job) -> Callable[[], Tensor]:
    """The matrix flops of one step, forward and backward, spent in products of 1024 x 1024.

    It leaves out attention's own products, norms, routing, the optimizer: a limit, not a peer.
    """
    rows = job.train.batch * job.data.sequence
    active = sum(_active(job, p.name, p.shape) for p in parameters(job.model))
    times = round(3 * active / 1024**2)
    left, right = torch.randn(rows, 1024), torch.randn(1024, 1024)
    out = torch.empty(rows, 1024)

    def multiply() -> Tensor:
        for _ in range(times):
            torch.mm(left, right, out=out)
        return out

    return multiply


def _active(job: Job, name: str, shape: tuple[int, ...]) -> float:
    """Elements of a parameter that a token is multiplied with, on average."""
    if len(shape) < 2 or name == "embed.weight":
        return 0.0
    share = job.model.top_k / job.model.experts if ".experts." in name else 1.0
    return share * shape[0] * shape[1]
