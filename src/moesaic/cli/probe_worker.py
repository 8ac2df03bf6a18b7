"""Work of one rank in a probe, and entry point of ranks that `moesaic probe` starts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic import __version__
from moesaic.api.cluster import MEMORY_HINT, measure
from moesaic.api.launch import is_leader, run_reporting_errors
from moesaic.api.progress import probe_progress
from moesaic.api.start import exit_on_interrupt
from moesaic.base.config import parse
from moesaic.base.units import format_quantity
from moesaic.cli import flags, screen
from moesaic.dist.probe.settings import ProbeConfig

if TYPE_CHECKING:
    from moesaic.dist.probe.probe import ProbeResult


@dataclass(frozen=True)
class ProbeTask:
    """Task of a probe, the same on every rank."""

    settings: dict[str, Any]
    out: str
    """File to write."""
    as_json: bool
    """Print JSON."""
    command: list[str]
    """Command line of the user."""


def run_probe_task(task: ProbeTask) -> None:
    """Measure; rank 0 writes the file and prints the result."""
    with exit_on_interrupt():
        from moesaic.dist.probe.probe import num_phases

    config = parse(ProbeConfig, task.settings, "settings")
    with probe_progress(is_leader(), num_phases(config)) as watch:
        result = measure(config, watch)
    if result is not None:
        for note in result.notes:
            screen.print_warning(note)
        _write(Path(task.out), result, config.repeats)
        _print_result(task, result)


def _write(path: Path, result: ProbeResult, repeats: int) -> None:
    opening = (
        f"# Measured by moesaic {__version__} on {datetime.now():%Y-%m-%d %H:%M}, "
        f"{repeats} repeats.\n# {_describe_noise(result)}.\n"
        "# Units: bytes, seconds, bytes per second, operations per second. docs/facts.md explains\n"
        "# the keys; so does `moesaic plan --explain cluster.hosts`.\n"
        + "".join(f"# {note}.\n" for note in result.notes)
        + "\n"
    )
    flags.write_new_file("--out", path, opening + result.cluster.to_toml())


def _describe_noise(result: ProbeResult) -> str:
    median_range, p90_range = result.repeat_ranges
    return (
        f"Repeats of {len(result.relative_ranges):,} points differ by {median_range:.0%} (median) "
        f"and {p90_range:.0%} (90th percentile)"
    )


def _print_result(task: ProbeTask, result: ProbeResult) -> None:
    from moesaic.dist.probe.cluster import headlines

    figures = list(headlines(result.cluster))
    median_range, p90_range = result.repeat_ranges
    if task.as_json:
        screen.print_json(
            {
                "out": task.out,
                "figures": [figure._asdict() for figure in figures],
                "points": {
                    "count": len(result.relative_ranges), "relative_range_median": median_range,
                    "relative_range_p90": p90_range,
                },
                "notes": result.notes,
                "cluster": result.cluster.model_dump(mode="json", by_alias=True),
            }
        )  # fmt: skip
        return
    table, subject = list[tuple[str, ...]](), ""
    for figure in figures:
        if figure.subject != subject:
            subject = figure.subject
            table.append((subject,))
        table.append((f"  {figure.metric}", format_quantity(figure.value, figure.unit)))
    screen.print_table(("", "figure"), table)
    screen.print_line(f"\n{_describe_noise(result)}.")
    screen.print_line(f"wrote {task.out}")


def encode(task: ProbeTask) -> str:
    """Return the task as an argument of a rank's process."""
    return json.dumps(asdict(task))


def main() -> int:
    """Run the task in the first argument, as one rank; return the exit status."""
    task = ProbeTask(**json.loads(sys.argv[1]))
    sys.argv = task.command
    return run_reporting_errors(lambda: run_probe_task(task), MEMORY_HINT)
