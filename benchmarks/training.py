"""Contenders of the training figures: moesaic and transformers.

All take the same step of the same small model: same weights and batches, clipping at 1.0, fused
AdamW with weight decay on matrices, a balance loss if the job has one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from moesaic.base.config import parse
from moesaic.dist.state import Source
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.hf.config import to_huggingface
from moesaic.models.hf.names import choose_slices
from moesaic.models.init import InitialSource
from moesaic.models.state import tensor_shards
from moesaic.testing.states import live_values
from moesaic.train.assemble import LMRun, assemble
from moesaic.train.data.batch import Batch

WIDTH, LAYERS, EXPERTS, TOP_K, FFN, VOCAB = 512, 4, 64, 8, 256, 4096
TRANSFORMERS = f"transformers {transformers.__version__}"


def olmoe(batch: int, sequence: int, **tables: dict[str, object]) -> Job:
    """Return the job: a small model of OLMoE's shape, 108 million parameters, 18 million active."""
    raw: dict[str, object] = {
        "model": {
            "family": "olmoe", "vocab": VOCAB, "hidden": WIDTH, "layers": LAYERS, "heads": 8,
            "kv_heads": 4, "head_dim": 64, "ffn": FFN, "experts": EXPERTS, "top_k": TOP_K,
        },
        "routing": {"balance_loss": 0.0}, "balance": {"policy": "none"},
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
        """Return the samples of `indices`."""
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
        self.run: LMRun = assemble(
            job, plan_from_layout(job.layout, job.model, world.size), world, source
        )

    def step(self) -> float:
        """Take one step; return its loss."""
        return self.run.step(self.samples).loss


class Theirs:
    """transformers' model, trained as it is."""

    def __init__(self, job: Job, experts: str = "grouped_mm") -> None:
        """`experts` names the implementation of its expert layers."""
        self.job = job
        self.samples, self.next = UniformSamples(job), 0
        self.weight = self._balance_weight()
        keys = {**to_huggingface(job.model, "float32"), "use_cache": False}
        if self.weight:
            keys |= {"output_router_logits": True, "router_aux_loss_coef": self.weight}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.for_model(**keys)
            self.model = transformers.AutoModelForCausalLM.from_config(config).train()
        self.model.set_experts_implementation(experts)
        self.optimizer = self._optimizer()

    @classmethod
    def like(cls, ours: Ours, experts: str = "grouped_mm") -> Theirs:
        """Return one with the weights of `ours`."""
        theirs = cls(ours.run.job, experts)
        theirs.copy(ours)
        return theirs

    def copy(self, ours: Ours) -> None:
        """Copy every weight of ours into the tensor, or the part of a fused one, that holds it."""
        values = self.model.state_dict()
        places = choose_slices(self.job.model, values)
        with torch.no_grad():
            for piece in tensor_shards(ours.run.part.model):
                place = places[piece.name]
                assert place is not None, f"transformers has no {piece.name}"
                box = values[place.tensor]
                for axis, (start, length) in enumerate(zip(place.offset, place.size, strict=True)):
                    box = box.narrow(axis, start, length)
                box.copy_(live_values(piece).view(box.shape))

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

    def _balance_weight(self) -> float:
        """Return the weight of their balance loss, which is `top_k` times ours; 0: none."""
        model, weight = self.job.model, self.job.routing.balance_loss
        if not weight or not model.experts:
            return 0.0
        if model.score_function != "softmax":
            raise ValueError(
                f"routing.balance_loss = {weight}: transformers has none for {model.family}, set "
                "it to 0"
            )
        return weight / model.top_k

    def step(self) -> float:
        """Take one step; return its cross-entropy."""
        result = self._forward()
        self.next += self.job.train.batch
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(result.loss.detach())
        return loss - self.weight * float(result.aux_loss.detach()) if self.weight else loss

    @torch.no_grad()
    def balance(self) -> float:
        """Return the balance loss of the next batch, mean over layers: 1 where loads are even.

        Theirs treats the tokens of all layers as those of one.
        """
        model, logits = self.job.model, self._forward().router_logits
        loss = sys.modules[type(self.model).__module__].load_balancing_loss_func
        layers = [float(loss((one,), model.experts, model.top_k)) for one in logits]
        return sum(layers) / len(layers) / model.top_k

    def _forward(self) -> Any:
        batch = self.samples.batch(range(self.next, self.next + self.job.train.batch))
        return self.model(input_ids=batch.inputs, labels=batch.targets, shift_labels=batch.targets)
