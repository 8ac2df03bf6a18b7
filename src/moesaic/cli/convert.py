"""`moesaic convert`: conversion of runs, checkpoints and Hugging Face directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.api.model import convert as convert_model
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Sets
from moesaic.models.hf.settings import ConvertConfig

Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="SOURCE",
        help="Run, checkpoint or Hugging Face directory.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", show_default=False,
        help="Always: directory to write, which must not exist yet.",
    ),
]  # fmt: skip
Packed = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="Write each expert in one piece, for serving from a drive: short for to=packed.",
    ),
]
Student = Annotated[
    str | None,
    typer.Option(
        "--student", metavar="NAME", show_default=False,
        help="Write this student of a run instead of its teacher: short for student=NAME.",
    ),
]  # fmt: skip


def convert(
    source: Source = None,
    sets: Sets = None,
    out: Out = None,
    packed: Packed = False,
    student: Student = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Convert a model to a Hugging Face directory, a checkpoint, or a LoRA adapter.

    A recommender becomes a directory of its weights and its table, for serving.
    """
    if explain is not None:
        flags.print_explanation(ConvertConfig, explain, as_json)
        return 0
    path = flags.require(source, "SOURCE", "convert")
    config = flags.parse_settings(ConvertConfig, sets)
    if packed:
        if config.to not in ("huggingface", "packed"):
            raise ConfigError(f'--packed with to = "{config.to}": leave out one of them')
        config = config.model_copy(update={"to": "packed"})
    if student is not None:
        config = config.model_copy(update={"student": student})
    if out is None:
        raise ConfigError("--out is missing: name a directory that does not exist yet")
    if ".." in out.parts:  # The directory is renamed at the end; resolve it now.
        out = Path(os.path.realpath(out))
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TimeRemainingColumn(compact=True), console=screen.err(), transient=True,
        disable=not screen.err().is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("writing", total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        origin = convert_model(path, out, on_progress=move, **config.model_dump())
    for warning in origin.warnings:
        screen.print_warning(warning)
    written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if as_json:
        screen.print_json({"from": str(origin.path), "out": str(out), "bytes": written})
    else:
        form = "recommender" if (out / "table.json").is_file() else config.to
        screen.print_line(f"wrote {out} from {origin.path}: {format_bytes(written)}, {form}")
    return 0
