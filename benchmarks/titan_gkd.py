"""Part of the theme `titan`: students of a frozen teacher, against TRL's GKD trainer.

Both sides have the same weights and batches, and the same loss: the divergence KL(teacher ||
student) of the logits, a mean over the targets. TRL trains one student a run. A run is a process
of its own, which takes turns with this one; the steps of its students add up.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks import measure
from benchmarks.on_ranks import Unlike
from benchmarks.peer_process import Arm, interpreter, peer
from benchmarks.titan_students import BATCH, NAMES, PATIENCE_S, SEQUENCE, distillation, ratio_row
from benchmarks.training import UniformSamples
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import write_model
from moesaic.models.init import InitialSource
from moesaic.models.state import tensor_shards
from moesaic.models.tokenizer import ByteTokenizer
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.assemble import LMRun, assemble
from moesaic.train.data.batch import Batch

PYTHON = interpreter("titan")
MISSING = f"no TRL in {PYTHON.parents[1]}; benchmarks/titan.md says how to install it"
TRL = "TRL 1.16.0, GKDTrainer, lmbda 0, beta 0, fp32"
LOSSES = {"logits": 1.0}
CHECKED_STEPS = 3
TOLERANCE = 1e-3
"""Relative difference of a loss in the first steps."""
BATCHES = 64
"""Batches in the file of tokens."""
BARS = {1: ">= 1.1", 3: ">= 1.8"}


class SharedSamples(UniformSamples):
    """Samples whose last token has no target, as in a trainer that reads no further token."""

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of `indices`."""
        batch = super().batch([i % (BATCHES * BATCH) for i in indices], shuffled=shuffled)
        batch.targets[:, -1] = IGNORE_INDEX
        return batch


class Students:
    """moesaic's run of a frozen teacher and its students."""

    def __init__(self, names: Sequence[str]) -> None:
        self.job: Job = distillation(names, LOSSES, frozen=True)
        plan = plan_from_layout(self.job.layout, self.job.model, 1)
        source = InitialSource(self.job.seed, self.job.model.init_std)
        self.run: LMRun = assemble(self.job, plan, World.solo(), source)
        self.samples = SharedSamples(self.job)

    def step(self) -> list[float]:
        """Take one step; return the loss of each student."""
        stats = self.run.step(self.samples)
        return [one.losses["logits"] for one in stats.students.values()]

    def export(self, directory: Path) -> None:
        """Write all models, a tokenizer, the tokens and the trainer's settings."""
        names = ["model", *(one.name for one in self.job.student)]
        for name, part in zip(names, self.run.parts, strict=True):
            config = self.job.model_of(name)
            write_model(directory / name, config, InMemoryTensors(tensor_shards(part.model)))
        files = directory / "tokenizer"
        files.mkdir()
        for name, content in ByteTokenizer().files().items():
            (files / name).write_bytes(content)
        batch = self.samples.batch(range(BATCHES * BATCH))
        torch.save(batch.inputs, directory / "tokens.pt")
        (directory / "settings.json").write_text(json.dumps({"trainer": self.trainer_settings()}))

    def trainer_settings(self) -> dict[str, object]:
        """Return the optimizer of the job, in the words of transformers."""
        train, optimizer = self.job.train, self.job.optimizer
        return {
            "max_steps": 1_000_000,
            "per_device_train_batch_size": train.batch,
            "max_grad_norm": train.clip,
            "learning_rate": optimizer.lr,
            "optim": "adamw_torch_fused",
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_epsilon": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
        }


@contextmanager
def their_runs(ours: Students) -> Iterator[list[Arm]]:
    """Start a run of TRL for each student, with the weights of `ours`."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        ours.export(Path(place))
        threads = torch.get_num_threads()
        yield [
            stack.enter_context(peer(PYTHON, "benchmarks.titan_trl", place, one.name, threads))
            for one in ours.job.student
        ]


def check_losses(three: Students, one: Students, theirs: Sequence[Arm]) -> float:
    """Raise unless the first losses of all sides agree; return the largest relative difference."""
    apart = 0.0
    for _ in range(CHECKED_STEPS):
        found = [run({})["loss"] for run in theirs]
        for ours, peers in ((three.step(), found), (one.step(), found[:1])):
            ratios = np.divide(ours, peers)
            apart = max(apart, float(np.abs(ratios - 1).max()))
            if apart > TOLERANCE:
                raise Unlike(f"losses of the students are {ours}, and {peers} in TRL")
    return apart


def gkd(rounds: int) -> Iterator[measure.Row]:
    """Measure students of a frozen teacher against TRL."""
    names = {n: f"students: speed of {n} with a frozen teacher, over TRL's GKD" for n in BARS}
    if not PYTHON.exists():
        yield from (measure.untried(names[n], bar, MISSING) for n, bar in BARS.items())
        return
    sides = {3: Students(NAMES), 1: Students(NAMES[:1])}
    with their_runs(sides[3]) as theirs:
        apart = check_losses(sides[3], sides[1], theirs)
        contenders: dict[str, Callable[[], object]] = {
            "3": sides[3].step, "TRL": lambda: [run({}) for run in theirs], "1": sides[1].step,
            "TRL, 1": lambda: theirs[0]({}),
        }  # fmt: skip
        times = measure.interleave(contenders, rounds, warmup=1, patience_s=PATIENCE_S)
    for number, peers in ((1, "TRL, 1"), (3, "TRL")):
        ours = str(number)
        against = (
            f"{TRL}, {number} run{'s' * (number > 1)} of {times.median(peers):.3f} s a step "
            f"together, ours {times.median(ours):.3f} s; {BATCH} x {SEQUENCE} tokens, losses of "
            f"the first {CHECKED_STEPS} steps within {apart:.1e}; {torch.get_num_threads()} threads"
        )
        yield ratio_row(names[number], times.ratios(peers, ours), BARS[number], against, times)


PARTS = {"gkd": gkd}
