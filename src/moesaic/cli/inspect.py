"""`moesaic inspect`: what a run, checkpoint or model directory holds, and whether it is whole.

Of a job it shows the first samples that a run would learn from, and which of their tokens count.
"""

from __future__ import annotations

import hashlib
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.text import Text

from moesaic.base.config import Section, parse
from moesaic.base.errors import ConfigError, StoreError, unwritable
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import count

Target = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", show_default=False,
        help="A run, a checkpoint, a Hugging Face directory, or a job for its samples.",
    ),
]  # fmt: skip

BROKEN = "\N{REPLACEMENT CHARACTER}"


class InspectConfig(Section):
    """How closely to look."""

    verify: bool = False
    """Read every file: a checkpoint's are held against their hashes, a Hugging Face directory's
    hashes are shown."""
    samples: int = Field(default=2, ge=1)
    """How many samples of a job are shown."""


def inspect(
    path: Target = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Say what a directory holds and whether it is whole, or show the samples of a job."""
    if explain is not None:
        flags.explain(InspectConfig, explain, as_json)
        return 0
    target = flags.need(path, "PATH", "inspect")
    config = flags.settings(InspectConfig, sets)
    if target.suffix == ".toml":
        facts = _look_at_job(target, config.samples)
    else:
        facts = look(target, config.verify and not dry_run)
    if out is not None:
        _write(out, facts, dry_run)
    if as_json:
        screen.as_json(facts)
    else:
        _print(facts)
    return 2 if facts.get("damaged") else 0


def look(path: Path, verify: bool) -> dict[str, Any]:
    """What `path` holds, as plain data; its `damaged` lists what is not whole."""
    if (path / "config.json").is_file():
        return _look_at_huggingface(path, verify)
    if (path / "manifest.json").is_file() or (path / "COMMIT").is_file():
        return _look_at_checkpoint(path, verify)
    if (path / "job.json").is_file() or (path / "checkpoints").is_dir():
        return _look_at_run(path, verify)
    from moesaic.models.hf.config import what_else

    other = "; plans, workloads and clusters are for `moesaic plan`" if path.is_file() else ""
    raise ConfigError(
        f"'{path}' {what_else(path)}: "
        f"give a run, a checkpoint or a Hugging Face model directory{other}"
    )


def _look_at_huggingface(path: Path, verify: bool) -> dict[str, Any]:
    from moesaic.models.hf.config import read_config
    from moesaic.models.hf.reader import HFSource, scan

    model, warnings = read_config(path)
    source = HFSource(path, model)
    stored = scan(path)
    files = sorted({tensor.file for tensor in stored.values()})
    facts = {
        "kind": "Hugging Face model", "path": str(path), **_describe_model(model),
        "tensors": len(stored), "dtypes": sorted({tensor.dtype for tensor in stored.values()}),
        "files": {file.name: file.stat().st_size for file in files},
        "tokenizer": (path / "tokenizer.json").is_file(),
        "warnings": [*warnings, *source.notes],
    }  # fmt: skip
    if verify:
        facts["sha256"] = {file.name: _hash(file) for file in files}
    return facts


def _look_at_checkpoint(path: Path, verify: bool) -> dict[str, Any]:
    from moesaic.dist.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    checkpoint.verify() if verify else checkpoint.check_sizes()
    facts, tensors = checkpoint.facts, checkpoint.tensors
    raw = (facts.get("job") or facts).get("model")
    model = parse(ModelConfig, raw, f"checkpoint '{path}'") if isinstance(raw, dict) else None
    return {
        "kind": "checkpoint", "path": str(path), "step": checkpoint.step,
        **(_describe_model(model) if model else {}),
        "counters": checkpoint.counters, "tensors": len(tensors),
        "holds": sorted({key.partition("/")[0] for key in tensors}),
        "dtypes": sorted({record.dtype for record in tensors.values()}),
        "bytes": checkpoint.num_bytes, "plan": facts.get("plan"), "verified": verify,
    }  # fmt: skip


def _look_at_job(path: Path, num: int) -> dict[str, Any]:
    """The first samples of a job; its text is tokenised if it was not yet."""
    from moesaic.dist.world import World
    from moesaic.train.data import TextData, documents_of
    from moesaic.train.jobfile import check_inputs, load_job

    loaded = load_job(path)
    job = loaded.job
    check_inputs(job, str(path))
    data = TextData.open(job.data, job.seed, World.solo(), screen.err().print)
    batch = data.train.batch(range(num))
    rows = []
    for row in range(num):
        found = [pair for pair in documents_of(batch, row) if any(pair[1])]
        documents = [
            [
                {"counts": counts, "text": data.tokenizer.decode([t for _, t in part], whole=True)}
                for counts, part in groupby(zip(counted, tokens, strict=True), itemgetter(0))
            ]
            for tokens, counted in found
        ]
        targets = sum(sum(counted) for _, counted in found)
        rows.append({"targets": targets, "documents": documents})
    return {
        "kind": "job", "path": str(path), "sequence": job.data.sequence,
        "samples_in_all": len(data.train), "samples": rows, "warnings": loaded.warnings,
    }  # fmt: skip


def _look_at_run(path: Path, verify: bool) -> dict[str, Any]:
    from moesaic.dist.checkpoint import committed
    from moesaic.report import RunFacts, summary

    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    head: dict[str, Any] = {}
    try:
        head = summary(RunFacts.read(path))
    except StoreError as error:
        damaged.append(str(error))
    for place in committed(path / "checkpoints"):
        try:
            found = _look_at_checkpoint(place, verify)
        except StoreError as error:
            damaged.append(str(error))
            continue
        rows.append({key: found[key] for key in ("step", "path", "bytes", "verified")})
    names = (
        "status", "step", "planned_steps", "loss", "validation_loss", "ranks", "device",
        "parameters_total", "parameters_active",
    )  # fmt: skip
    return {
        "kind": "run", "path": str(path), **{name: head.get(name) for name in names},
        "checkpoints": rows, "damaged": damaged,
    }  # fmt: skip


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    counts = count(model)
    return {
        "family": model.family, "layers": model.layers, "hidden": model.hidden,
        "experts": model.experts, "top_k": model.top_k, "vocab": model.vocab,
        "parameters_total": counts.total, "parameters_active": counts.active,
    }  # fmt: skip


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(out: Path, facts: dict[str, Any], dry_run: bool) -> None:
    if dry_run:
        return
    try:
        out.write_text(screen.dumps(facts) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(f"--out '{out}'", error) from None


def _print(facts: dict[str, Any]) -> None:
    screen.say(f"{facts['path']}: {facts['kind']}")
    for name, value in facts.items():
        if name in ("kind", "path") or value is None or value in ([], {}):
            continue
        _print_row(name, value)


def _print_row(name: str, value: Any) -> None:
    label = f"  {name.replace('_', ' '):<18}"
    if name in ("warnings", "damaged"):
        for text in value:
            (screen.fail if name == "damaged" else screen.warn)(text)
    elif name == "checkpoints":
        screen.say(label.rstrip())
        for row in value:
            state = "whole, hashes checked" if row["verified"] else "whole by its sizes"
            screen.say(f"    step {row['step']:<8} {screen.size(row['bytes']):>10}  {state}")
    elif name == "samples":
        for number, row in enumerate(value):
            screen.say(f"\nsample {number}: {row['targets']} tokens count")
            for document in row["documents"]:
                screen.out().print(_marked(document))
    elif name == "files":
        screen.say(f"{label}{len(value)}, {screen.size(sum(value.values()))}")
    else:
        screen.say(f"{label}{screen.size(value) if name == 'bytes' else _words(value)}")


def _marked(document: list[dict[str, Any]]) -> Text:
    """A document in which what counts stands out, by colour or else in brackets."""
    coloured, text = screen.out().is_terminal, Text()
    for part in document:
        # Text can hold what would command the terminal.
        shown = "".join(c if c in "\n\t" or c.isprintable() else BROKEN for c in part["text"])
        if not part["counts"]:
            text.append(shown, "dim")
        elif coloured:
            text.append(shown, "bold green")
        else:
            text.append(f"\u27e6{shown}\u27e7")
    return text


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
