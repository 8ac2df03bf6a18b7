"""`moesaic report`: a page about one run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.base.config import Section
from moesaic.base.errors import UserError
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets

Runs = Annotated[
    list[Path] | None, typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)
]


class ReportConfig(Section):
    """Settings of a report: none."""


def report(
    runs: Runs = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Write a self-contained HTML page about one run, or a comparison of several.

    The page of one run is RUN/report.html unless --out FILE names another. With --json the figures
    are printed, and a page is written only with --out.
    """
    if explain is not None:
        flags.print_explanation(ReportConfig, explain, as_json)
        return 0
    flags.parse_settings(ReportConfig, sets)
    flags.require(runs[0] if runs else None, "RUN", "report")
    assert runs
    if out is None and len(runs) > 1 and not as_json:
        raise UserError("--out is missing: name the file that compares the runs")
    if out is not None and out.is_dir():
        raise UserError(f"--out '{out}' is a directory: name a file, such as {out / 'report.html'}")
    from moesaic.report import RunStats, summary, write_report

    facts = [summary(RunStats.read(run)) for run in runs]
    page = out or (None if as_json else runs[0] / "report.html")
    if page is not None and not dry_run:
        write_report(runs, page)
    if as_json:
        screen.print_json(facts[0] if len(facts) == 1 else facts)
    elif dry_run:
        screen.print_line(f"would write {page}")
    else:
        screen.print_line(f"wrote {page}")
    return 0
