"""`moesaic report`: a page about one run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.api.run import Run
from moesaic.base.errors import ConfigError
from moesaic.cli import flags, screen
from moesaic.cli.flags import Json

Runs = Annotated[
    list[Path] | None, typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", show_default="RUN/report.html",
        help="To compare several runs, or to write the page elsewhere.",
    ),
]  # fmt: skip


def report(runs: Runs = None, out: Out = None, as_json: Json = False) -> int:
    """Write a self-contained HTML page about one run, or a comparison of several.

    With --json the figures are printed, and a page is written only with --out.
    """
    flags.require(runs[0] if runs else None, "RUN", "report")
    assert runs
    if out is None and len(runs) > 1 and not as_json:
        raise ConfigError("--out is missing: name the file that compares the runs")
    if out is not None and out.is_dir():
        raise ConfigError(
            f"--out '{out}' is a directory: name a file, such as {out / 'report.html'}"
        )
    from moesaic.report import write_report

    facts = [Run.open(run).summary() for run in runs]
    if out is not None or not as_json:
        page = out or runs[0] / "report.html"
        write_report(runs, page)
    if as_json:
        screen.print_json(facts[0] if len(facts) == 1 else facts)
    else:
        screen.print_line(f"wrote {page}")
    return 0
