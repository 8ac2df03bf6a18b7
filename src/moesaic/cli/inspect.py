"""`moesaic inspect`: contents and integrity of runs, checkpoints and model directories.

For a job it shows the first training samples and marks the tokens in the loss.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.units import format_bytes
from moesaic.cli import flags, screen
from moesaic.cli.flags import Json
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import count_parameters

Target = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", show_default=False,
        help="Run, checkpoint, Hugging Face directory, or job file for its samples.",
    ),
]  # fmt: skip

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


Verify = Annotated[
    bool,
    typer.Option(
        "--verify", metavar="",
        help="After copies or disk errors: read every file of a checkpoint and check its hash.",
    ),
]  # fmt: skip
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples", metavar="N", min=1, show_default="2",
        help="For more or fewer samples of a job.",
    ),
]  # fmt: skip


def inspect(
    path: Target = None, verify: Verify = False, samples: Samples = None, as_json: Json = False
) -> int:
    """Show what a directory contains and whether it is intact, or samples of a job."""
    target = flags.require(path, "PATH", "inspect")
    is_job = target.suffix == ".toml"
    if samples is not None and not is_job:
        raise ConfigError(f"--samples needs a job file, and '{target}' is none: remove --samples")
    if verify and (is_job or (target / "config.json").is_file()):
        raise ConfigError(
            f"--verify needs a run or checkpoint, and '{target}' is none: remove --verify"
        )
    facts = _inspect_job(target, samples or 2) if is_job else _inspect_directory(target, verify)
    if as_json:
        screen.print_json(facts)
    else:
        _print(facts)
    return 2 if facts.get("damaged") else 0


def _inspect_directory(path: Path, verify: bool) -> dict[str, Any]:
    """Return the contents of `path` as plain data; `damaged` lists damage."""
    if (path / "config.json").is_file():
        return _inspect_huggingface(path)
    if (path / "manifest.json").is_file() or (path / "COMMIT").is_file():
        return _inspect_checkpoint(path, verify)
    if (path / "job.json").is_file() or (path / "checkpoints").is_dir():
        return _inspect_run(path, verify)
    from moesaic.models.hf.config import describe_path

    hint = "; for a plan, workload or cluster use `moesaic plan`" if path.is_file() else ""
    raise ConfigError(
        f"'{path}' {describe_path(path)}: "
        f"give a run, a checkpoint or a Hugging Face model directory{hint}"
    )


def _inspect_huggingface(path: Path) -> dict[str, Any]:
    from moesaic.models.hf.config import read_config
    from moesaic.models.hf.reader import HFSource, scan_weights

    model, warnings = read_config(path)
    source = HFSource(path, model)
    stored = scan_weights(path)
    files = sorted({tensor.file for tensor in stored.values()})
    return {
        "kind": "Hugging Face model", "path": str(path), **_describe_model(model),
        "tensors": len(stored), "dtypes": sorted({tensor.dtype for tensor in stored.values()}),
        "files": {file.name: file.stat().st_size for file in files},
        "tokenizer": (path / "tokenizer.json").is_file(),
        "warnings": [*warnings, *source.notes],
    }  # fmt: skip


def _inspect_checkpoint(path: Path, verify: bool) -> dict[str, Any]:
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
        "tensor_kinds": sorted({key.partition("/")[0] for key in tensors}),
        "dtypes": sorted({record.dtype for record in tensors.values()}),
        "bytes": checkpoint.num_bytes, "plan": facts.get("plan"), "verified": verify,
    }  # fmt: skip


def _inspect_job(path: Path, num_samples: int) -> dict[str, Any]:
    """Return the first samples of a job; tokenise its text if that was not done."""
    from moesaic.dist.world import World
    from moesaic.train.data.batch import split_documents
    from moesaic.train.data.text_data import TextData
    from moesaic.train.job_file import check_inputs, load_job

    loaded = load_job(path)
    job = loaded.job
    check_inputs(loaded)
    data = TextData.open(job.data, job.seed, World.solo(), screen.err().print)
    batch = data.train.batch(range(num_samples))
    rows = []
    for row in range(num_samples):
        with_targets = [pair for pair in split_documents(batch, row) if any(pair[1])]
        documents = [
            [
                {
                    "in_loss": in_loss,
                    "text": data.tokenizer.decode([t for _, t in span], with_special_tokens=True),
                }
                for in_loss, span in groupby(zip(mask, tokens, strict=True), itemgetter(0))
            ]
            for tokens, mask in with_targets
        ]
        targets = sum(sum(mask) for _, mask in with_targets)
        rows.append({"targets": targets, "documents": documents})
    return {
        "kind": "job", "path": str(path), "sequence": job.data.sequence,
        "num_samples": len(data.train), "samples": rows, "warnings": loaded.warnings,
    }  # fmt: skip


def _inspect_run(path: Path, verify: bool) -> dict[str, Any]:
    from moesaic.dist.checkpoint import list_committed
    from moesaic.report import RunStats, summary

    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    head: dict[str, Any] = {}
    try:
        head = summary(RunStats.read(path))
    except StoreError as error:
        damaged.append(str(error))
    for directory in list_committed(path / "checkpoints"):
        try:
            facts = _inspect_checkpoint(directory, verify)
        except StoreError as error:
            damaged.append(str(error))
            continue
        rows.append({key: facts[key] for key in ("step", "path", "bytes", "verified")})
    names = (
        "status", "step", "planned_steps", "loss", "validation_loss", "ranks", "device",
        "parameters_total", "parameters_active",
    )  # fmt: skip
    return {
        "kind": "run", "path": str(path), **{name: head.get(name) for name in names},
        "checkpoints": rows, "damaged": damaged,
    }  # fmt: skip


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    counts = count_parameters(model)
    return {
        "family": model.family, "layers": model.layers, "hidden": model.hidden,
        "experts": model.experts, "top_k": model.top_k, "vocab": model.vocab,
        "parameters_total": counts.total, "parameters_active": counts.active,
    }  # fmt: skip


def _print(facts: dict[str, Any]) -> None:
    screen.print_line(f"{facts['path']}: {facts['kind']}")
    for name, value in facts.items():
        if name in ("kind", "path") or value is None or value in ([], {}):
            continue
        _print_row(name, value)


def _print_row(name: str, value: Any) -> None:
    label = f"  {name.replace('_', ' '):<18}"
    if name in ("warnings", "damaged"):
        for text in value:
            (screen.print_error if name == "damaged" else screen.print_warning)(text)
    elif name == "checkpoints":
        screen.print_line(label.rstrip())
        for row in value:
            state = "intact (hashes checked)" if row["verified"] else "intact (sizes checked)"
            screen.print_line(
                f"    step {row['step']:<8} {format_bytes(row['bytes']):>10}  {state}"
            )
    elif name == "samples":
        for number, row in enumerate(value):
            screen.print_line(f"\nsample {number}: {row['targets']} tokens in the loss")
            for document in row["documents"]:
                screen.out().print(_highlight_targets(document))
    elif name == "files":
        screen.print_line(f"{label}{len(value)}, {format_bytes(sum(value.values()))}")
    else:
        screen.print_line(
            f"{label}{format_bytes(value) if name == 'bytes' else _format_value(value)}"
        )


def _highlight_targets(document: list[dict[str, Any]]) -> Text:
    """Return a document with the tokens in the loss highlighted, by colour or in brackets."""
    coloured, text = screen.out().is_terminal, Text()
    for span in document:
        # Text may contain terminal escape sequences.
        shown = "".join(c if c in "\n\t" or c.isprintable() else REPLACEMENT for c in span["text"])
        if not span["in_loss"]:
            text.append(shown, "dim")
        elif coloured:
            text.append(shown, "bold green")
        else:
            text.append(f"\u27e6{shown}\u27e7")
    return text


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
