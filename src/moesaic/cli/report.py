"""`moesaic report`: a page about one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.api.run import Run
from moesaic.base.errors import ConfigError
from moesaic.cli import flags, screen
from moesaic.cli.flags import Json

RunPath = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", show_default="RUN/report.html",
        help="To write the page elsewhere.",
    ),
]  # fmt: skip


def report(run: RunPath = None, out: Out = None, as_json: Json = False) -> int:
    """Write a self-contained HTML page about one run, and print its problems and warnings.

    With --json the figures are printed, and a page is written only with --out.
    """
    directory = flags.require(run, "RUN", "report")
    if out is not None and out.is_dir():
        raise ConfigError(
            f"--out '{out}' is a directory: name a file, such as {out / 'report.html'}"
        )
    if out is not None:
        flags.check_parent("--out", out)
    opened = Run.open(directory)
    facts = opened.summary()
    page = opened.report(out) if out is not None or not as_json else None
    if as_json:
        screen.print_json(facts)
        return 0
    for finding in facts["findings"]:
        if finding["severity"] == "problem":
            screen.print_line(f"{finding['title']}. {finding['text']}")
        elif finding["severity"] == "warning":
            screen.print_line(f"{finding['title']}.")
    screen.print_line(f"wrote {page}")
    return 0
