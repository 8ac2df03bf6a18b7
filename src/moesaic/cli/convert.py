"""`moesaic convert`: a run, a checkpoint or a Hugging Face directory into another form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.base.errors import UserError
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.models.hf.settings import ConvertConfig

Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="SOURCE",
        help="A run, a checkpoint or a Hugging Face directory.",
        show_default=False,
    ),
]


def convert(
    source: Source = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Write a model in another form: as a Hugging Face directory, as a checkpoint, or of a LoRA run
    the adapter alone."""
    if explain is not None:
        flags.explain(ConvertConfig, explain, as_json)
        return 0
    path = flags.need(source, "SOURCE", "convert")
    config = flags.settings(ConvertConfig, sets)
    if out is None:
        raise UserError("--out is missing: name the directory to write, which must not exist yet")
    if ".." in out.parts:  # What is written takes its name at the end, wherever that is then.
        out = Path(os.path.realpath(out))
    for warning in config.idle():
        screen.warn(warning)
    if dry_run:
        _tell(path, out, config, as_json)
        return 0
    import torch

    from moesaic.dist import device
    from moesaic.models.hf.convert import convert as engine

    device.activate(torch.device("cpu"))  # Tensors of many sizes come and go.

    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TimeRemainingColumn(compact=True), console=screen.err(), transient=True,
        disable=not screen.err().is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("writing", total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        origin = engine(path, out, config.to, config.dtype, config.max_shard_bytes, move)
    for warning in origin.warnings:
        screen.warn(warning)
    written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if as_json:
        screen.as_json({"from": str(origin.path), "out": str(out), "bytes": written})
    else:
        screen.say(f"wrote {out} from {origin.path}: {screen.size(written)}, {config.to}")
    return 0


def _tell(path: Path, out: Path, config: ConvertConfig, as_json: bool) -> None:
    from moesaic.facts.workload import count
    from moesaic.facts.workload.finetune import adapters
    from moesaic.models.hf.adapter import alone
    from moesaic.models.hf.origin import open_origin
    from moesaic.models.hf.shards import refuse_occupied

    refuse_occupied(out)
    origin = open_origin(path)
    for warning in origin.warnings:
        screen.warn(warning)
    if config.to == "adapter":
        total = sum(one.size for one in adapters(origin.model, alone(origin)))
        counted = {"total": total}
    else:
        counts = count(origin.model)
        counted = {"total": counts.total, "active": counts.active}
    if as_json:
        screen.as_json(
            {
                "from": str(origin.path), "out": str(out), "settings": config.model_dump(),
                "parameters": counted,
            }
        )  # fmt: skip
        return
    screen.say(f"# {origin.path} -> {out}: {counted['total']:,} parameters\n")
    screen.say(config.to_toml().rstrip())
