"""Losses of distillation: logits against `F.kl_div`, attention targets against the teacher's step.

The logits of a teacher and a student follow from their hidden states. Both sides return the loss
and the gradients of the student's hidden states and projection. The teacher is frozen.

The teacher of the attention part is a dense model whose step is a whole update. The targets are
the attention probabilities of its last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.training import Ours
from moesaic.base.config import parse
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.divergence import attention_divergence
from moesaic.nn.inputs import HeadFollower
from moesaic.nn.loss import head_loss
from moesaic.nn.reports import AttentionReport
from moesaic.testing.memory import peak_allocated
from moesaic.train.objectives.lm import make_inputs

TOKENS, VOCAB, TEACHER_WIDTH, STUDENT_WIDTH = 4096, 32_768, 512, 256
SPEED_BAR, MEMORY_BAR, ATTENTION_BAR = ">= 1.0", "<= 0.125", "<= 0.03"
TOLERANCE = 1e-4
"""Relative difference of the losses and gradients of both sides."""
BATCH, SEQUENCE, STUDENTS = 8, 512, 3
TORCH = f"torch {torch.__version__}"


def logits(rounds: int) -> Iterator[measure.Row]:
    """Measure speed and memory of the divergence of logits against whole logits."""
    draw = torch.Generator().manual_seed(0)
    teacher, student = (
        (torch.randn(TOKENS, width, generator=draw), torch.randn(VOCAB, width, generator=draw) / 16)
        for width in (TEACHER_WIDTH, STUDENT_WIDTH)
    )
    targets = torch.randint(VOCAB, (TOKENS,), generator=draw)
    leaves = [x.requires_grad_() for x in student]

    def ours() -> tuple[Tensor, ...]:
        follower = HeadFollower(*student, text=0.0, logits=1.0)
        _, losses = head_loss(*teacher, targets, 1.0, followers=[follower])
        assert losses is not None
        return losses.loss[0].detach(), *torch.autograd.grad(losses.loss[0], leaves)

    def whole() -> tuple[Tensor, ...]:
        target = F.log_softmax(F.linear(*teacher), dim=-1)
        log_q = F.log_softmax(F.linear(*student), dim=-1)
        loss = F.kl_div(log_q, target, reduction="sum", log_target=True)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    for first, second in zip(ours(), whole(), strict=True):
        if float((first - second).norm()) > TOLERANCE * float(second.norm()):
            raise ValueError("moesaic and F.kl_div have other losses or gradients")
    name = f"divergence of logits, {VOCAB:,} words, {TOKENS:,} tokens"
    against = f"F.kl_div on whole logits, {TORCH}, {torch.get_num_threads()} threads"
    times = measure.interleave({"whole": whole, "ours": ours}, rounds)
    speed = measure.compare(f"{name}, speed", times, "whole", "ours", against=against)
    yield replace(speed, bar=SPEED_BAR, holds=measure.holds(SPEED_BAR, speed.value))
    peaks = peak_allocated(ours, whole)
    yield measure.row(
        f"{name}, peak memory beyond inputs", peaks[0] / peaks[1], "ratio", bar=MEMORY_BAR,
        against=f"{against}: {peaks[1] / 1e6:,.0f} MB", repeats=1,
    )  # fmt: skip


def teacher_job() -> Job:
    """Return the job of a dense teacher of 30 million parameters."""
    raw: dict[str, object] = {
        "model": {
            "family": "llama", "vocab": 8192, "hidden": 512, "layers": 8, "heads": 8,
            "kv_heads": 4, "head_dim": 64, "ffn": 1408,
        },
        "data": {"path": "unused", "sequence": SEQUENCE},
        "train": {"steps": 1_000_000, "batch": BATCH, "device": "cpu"},
    }  # fmt: skip
    return parse(Job, raw, "benchmark")


def attention(rounds: int) -> Iterator[measure.Row]:
    """Measure the targets of attention, and the losses of students, over the teacher's step."""
    ours = Ours(teacher_job(), World.solo())
    teacher, metadata = kept(ours)
    weights = torch.full((BATCH, SEQUENCE), 1 / (BATCH * SEQUENCE))
    students = [
        AttentionReport(*(torch.randn(BATCH, 8, SEQUENCE, 32).requires_grad_() for _ in "qk"))
        for _ in range(STUDENTS)
    ]

    def losses(number: int) -> Callable[[], object]:
        def run() -> None:
            total = attention_divergence(teacher, students[:number], metadata, weights).sum()
            if number:
                total.backward()

        return run

    contenders = {str(number): losses(number) for number in (0, 1, STUDENTS)}
    times = measure.interleave({"step": ours.step, **contenders}, rounds)
    words = f"{BATCH} x {SEQUENCE} tokens"
    for number, what, bar in (
        (0, "attention targets", ATTENTION_BAR),
        (1, "attention targets and the loss of 1 student", ""),
        (STUDENTS, f"attention targets and the losses of {STUDENTS} students", ""),
    ):
        row = measure.compare(
            f"{what}, {words}, time", times, str(number), "step",
            against="the teacher's step, 8 dense layers of 512 channels",
        )  # fmt: skip
        yield replace(row, bar=bar, holds=measure.holds(bar, row.value))


def kept(ours: Ours) -> tuple[AttentionReport, AttentionMetadata]:
    """Return queries and keys of the last layer for one batch, and its metadata."""
    job, model = ours.run.job, ours.run.part.model
    batch = ours.samples.batch(range(BATCH))
    inputs = replace(
        make_inputs(model, batch, job, 0), keep=frozenset({"queries_and_keys"}),
        keep_layers=frozenset({job.model.layers - 1}),
    )  # fmt: skip
    with torch.no_grad():
        _, reports = model(batch.inputs, inputs)
    report = reports[f"layers.{job.model.layers - 1}"].attention
    assert report is not None
    assert inputs.attention is not None
    return report, inputs.attention


PARTS = {"logits": logits, "attention": attention}
