"""Report of a run: charts, findings and headline numbers, read from run directories alone.

`write_report` writes one self-contained HTML file; `summary` returns the headline as plain JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesaic.base.errors import StoreError, write_error
from moesaic.base.files import atomic_replace
from moesaic.report import comparison, page
from moesaic.report.run_stats import RunStats
from moesaic.report.summary import summary

__all__ = ["RunStats", "summary", "write_report"]


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the page of one run, or several runs on one page, to `out`, atomically."""
    if not run_dirs:
        raise StoreError("no run directory was given: name one or more")
    runs = [RunStats.read(run_dir) for run_dir in run_dirs]
    text = page.render(runs[0]) if len(runs) == 1 else comparison.render(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(out) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(f"the report '{out}'", error) from None
