"""`moesaic predict`: click probabilities of a trained recommender."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from moesaic.base.errors import ConfigError
from moesaic.cli import flags, screen
from moesaic.cli.flags import Json

Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", show_default=False,
        help='Run of kind "ctr", a checkpoint of it, or its export.',
    ),
]  # fmt: skip
Data = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="FILE", show_default="the job's validation samples",
        help="File, directory or glob in the format of the job, with or without labels.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", show_default=False,
        help="To write the probabilities, one a sample: .parquet or .csv.",
    ),
]  # fmt: skip


def predict(run: Source = None, data: Data = None, out: Out = None, as_json: Json = False) -> int:
    """Predict clicks with a trained recommender, and measure the predictions if there are labels.

    Without --data the validation samples of the job are predicted.
    """
    path = flags.require(run, "RUN", "predict")
    _check_out(out)
    from moesaic.api.recommender import predict as predict_clicks

    with Progress(
        TextColumn("predicting"), TextColumn("{task.completed:,} samples"), TimeElapsedColumn(),
        console=screen.err(), transient=True, disable=not screen.err().is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("predicting", total=None)
        facts = predict_clicks(path, data, out, lambda done: bar.update(task, completed=done))
    for text in (*facts["warnings"], *facts["remarks"]):
        screen.print_warning(text)
    if as_json:
        screen.print_json(facts)
        return 0
    screen.print_line(
        f"{facts['model']}: {facts['samples']:,} {'' if data else 'validation '}samples, "
        f"{facts['samples_per_s']:,.0f} a second"
    )
    for name, value in (facts["metrics"] or {}).items():
        best = f"  (best possible {facts['best_auc']:.4f})" if facts["best_auc"] else ""
        screen.print_line(f"  {name.replace('_', ' '):<20}{value:.4f}{best * (name == 'auc')}")
    if out is not None:
        screen.print_line(f"wrote {out}")
    return 0


def _check_out(out: Path | None) -> None:
    """Raise ConfigError unless a file of probabilities can have this name."""
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--out '{out}' is of no known format: name a file .parquet or .csv")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out '{out}' is a directory: name a file")
