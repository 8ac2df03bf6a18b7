"""Report of a run: charts, findings and headline numbers, read from run directories alone.

`write_report` writes one self-contained HTML file; `summary` returns the headline as plain JSON.
"""

from __future__ import annotations

from pathlib import Path

from moesaic.base.errors import write_error
from moesaic.base.files import atomic_replace
from moesaic.report import page
from moesaic.report.run_stats import RunStats
from moesaic.report.summary import summary

__all__ = ["RunStats", "summary", "write_report"]


def write_report(run_dir: Path, out: Path) -> None:
    """Write the page of a run to `out`, atomically."""
    text = page.render(RunStats.read(run_dir))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(out) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(f"the report '{out}'", error) from None
