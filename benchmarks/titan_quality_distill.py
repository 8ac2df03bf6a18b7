"""Part `distillation`: students of a frozen teacher against the same student alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks import titan_quality_runs as runs
from benchmarks import titan_quality_text as text
from moesaic import Run
from moesaic.api.model import convert

WORDS, VOCAB = 1023, 1024
SEQUENCE, BATCH, STEPS = 128, 8, 250
TEACHER_STEPS = 4 * STEPS
LR = 3e-3
SEEDS = (1, 2, 3)
TEACHER = {
    "preset": "tiny-dense", "vocab": VOCAB, "hidden": 192, "layers": 3, "heads": 6, "kv_heads": 6,
    "head_dim": 32, "ffn": 512,
}  # fmt: skip
STUDENT = {**TEACHER, "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 192}
ASSISTANT = {**TEACHER, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 384}
VALIDATION_SHARE = 0.05
"""Share of sources held out for validation."""
ALONE, DISTILLED = "alone", "distilled (text, logits)"
STUDENTS: dict[str, dict[str, Any]] = {
    ALONE: {"losses": {"text": 1.0}},
    DISTILLED: {"losses": {"text": 1.0, "logits": 1.0}},
    "distilled, with attention in an auxiliary layer": {
        "losses": {"text": 1.0, "logits": 1.0, "attention": 1.0}, "auxiliary_layer": True,
    },
    "distilled, with relations, no auxiliary layer": {
        "losses": {"text": 1.0, "logits": 1.0, "relations": 1.0}, "auxiliary_layer": False,
    },
    "distilled by an assistant": {
        "losses": {"text": 1.0, "logits": 1.0}, "teacher": "assistant",
    },
}  # fmt: skip
"""Losses and teacher of the student in each run; its initial weights and batches are the same."""


def write_text(directory: Path) -> None:
    """Write sources to learn, others for validation, and the tokenizer to `directory`."""
    documents: dict[str, list[str]] = {}
    for one in (*text.help_topics(), *text.docstrings(), *text.manuals("158")):
        if one.text.isascii():
            documents.setdefault(one.source, []).append(one.text)
    joined = {name: "\n\n".join(parts) for name, parts in documents.items()}
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    for name, document in joined.items():
        part = "validation" if text.share(name) < VALIDATION_SHARE else "train"
        parts[part].append(document)
    for part, found in parts.items():
        text.write_lines(directory / f"{part}.jsonl", ({"text": one} for one in found))
    text.make_tokenizer(parts["train"], WORDS, directory / "tokenizer")


def job(directory: Path, seed: int, steps: int, model: dict[str, Any]) -> dict[str, Any]:
    """Return a job without students."""
    return {
        "seed": seed, "model": model,
        "data": {
            "path": str(directory / "train.jsonl"), "sequence": SEQUENCE,
            "validation_path": str(directory / "validation.jsonl"),
            "tokenizer": str(directory / "tokenizer"), "end_token": text.END,
            "cache": str(directory / "cache"),
        },
        "train": {"steps": steps, "batch": BATCH, "validation_samples": 256},
        "optimizer": {"lr": LR}, "schedule": {"kind": "cosine", "warmup": 25},
    }  # fmt: skip


def student_loss(directory: Path, kind: str, seed: int) -> tuple[float, float]:
    """Return the validation loss of a student, and the minutes of its run."""
    tables = job(directory, seed, STEPS, {"from": str(directory / "teacher")})
    student = {"name": "student", "model": STUDENT, **STUDENTS[kind]}
    others = [{"name": "assistant", "model": ASSISTANT, "losses": {"text": 1.0, "logits": 1.0}}]
    tables["student"] = [*(others if "teacher" in student else []), student]
    tables["distill"] = {"frozen": True}
    with tempfile.TemporaryDirectory() as home:
        run, minutes = runs.train(Path(home) / "run", tables)
        return runs.last_figures(run)["student/loss"], minutes


def teacher_directory() -> Path:
    """Return the directory of the text and the teacher, made on first use."""
    tables = job(Path(), 0, TEACHER_STEPS, TEACHER)
    digest = hashlib.sha256(json.dumps(tables).encode()).hexdigest()[:8]
    directory = measure.ROOT / "build" / "titan-quality" / f"teacher-{digest}"
    if not (directory / "teacher").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_text(directory)
        run, minutes = runs.train(directory / "run", job(directory, 0, TEACHER_STEPS, TEACHER))
        print(f"  teacher in {minutes:.1f} minutes", flush=True)
        convert(run.directory, directory / "teacher")
    return directory


def distillation(rounds: int) -> Iterator[measure.Row]:
    """Compare validation losses at equal steps, for three seeds."""
    del rounds  # Seeds are fixed.
    directory = teacher_directory()
    teacher = runs.last_figures(Run.open(directory / "run"))["loss"]
    alone = losses(directory, ALONE)
    for kind in STUDENTS:
        if kind != ALONE:
            yield row(kind, teacher, alone, losses(directory, kind))


def losses(directory: Path, kind: str) -> list[float]:
    """Return the validation losses of a student, by seed."""
    found = []
    for seed in SEEDS:
        loss, minutes = student_loss(directory, kind, seed)
        found.append(loss)
        print(f"  {kind}, seed {seed}: {loss:.4f}, {60 * minutes:.0f} s", flush=True)
    return found


def row(kind: str, teacher: float, alone: list[float], found: list[float]) -> measure.Row:
    """Return how far a student is below the same one alone; the interval is over seeds."""
    gains = 1 - np.array(found) / np.array(alone)
    values, others = (", ".join(f"{one:.3f}" for one in row) for row in (found, alone))
    return measure.row(
        f"{kind}: validation loss below the same student alone", float(gains.mean()), "share",
        bar=">= 0.01" if kind == DISTILLED else "",
        against=f"{values}; alone {others}; teacher {teacher:.3f} (seeds "
        f"{', '.join(map(str, SEEDS))}; {STEPS} steps, teacher {TEACHER_STEPS})",
        interval=runs.t_interval(gains), repeats=len(SEEDS),
    )  # fmt: skip


PARTS = {"distillation": distillation}
