"""Writing a report: one run's page, or several runs on one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesaic.base.errors import StoreError, unwritable
from moesaic.base.files import replacing
from moesaic.report import comparison, page
from moesaic.report.facts import RunFacts


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the report of the runs at `run_dirs` to `out`; the file appears whole or not at all."""
    if not run_dirs:
        raise StoreError("no run directory was given: name one or more")
    runs = [RunFacts.read(run_dir) for run_dir in run_dirs]
    text = page.render(runs[0]) if len(runs) == 1 else comparison.render(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(f"the report '{out}'", error) from None
