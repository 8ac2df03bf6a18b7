"""`moesaic inspect`: contents and integrity of runs, checkpoints and model directories.

For a job it shows the first training samples. Tokens in the loss are marked, and keys of clicks are
shown by slot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moesaic.api.inspection import inspect_path
from moesaic.base.units import format_bytes
from moesaic.cli import flags, screen
from moesaic.cli.flags import Json

Target = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", show_default=False,
        help="Run, checkpoint, exported directory, or job file for its samples.",
    ),
]  # fmt: skip

Verify = Annotated[
    bool,
    typer.Option(
        "--verify", metavar="",
        help="After copies or disk errors: read every file of a checkpoint and check its hash.",
    ),
]  # fmt: skip
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples", metavar="N", min=1, show_default="2",
        help="For more or fewer samples of a job.",
    ),
]  # fmt: skip


def inspect(
    path: Target = None, verify: Verify = False, samples: Samples = None, as_json: Json = False
) -> int:
    """Show what a directory contains and whether it is intact, or samples of a job."""
    target = flags.require(path, "PATH", "inspect")
    facts = inspect_path(target, verify=verify, samples=samples, log=screen.err().print)
    if as_json:
        screen.print_json(facts)
    else:
        _print(facts)
    return 2 if facts.get("damaged") else 0


def _print(facts: dict[str, Any]) -> None:
    screen.print_line(f"{facts['path']}: {facts['kind']}")
    for name, value in facts.items():
        if name in ("kind", "path") or value is None or value in ([], {}):
            continue
        _print_row(name, value)


def _print_row(name: str, value: Any) -> None:
    label = f"  {name.replace('_', ' '):<18}"
    if name in ("warnings", "damaged"):
        for text in value:
            (screen.print_error if name == "damaged" else screen.print_warning)(text)
    elif name in ("checkpoints", "students"):
        screen.print_line(label.rstrip())
        describe = _describe_student if name == "students" else _describe_checkpoint
        for row in value:
            screen.print_line(f"    {describe(row)}")
    elif name in ("samples", "clicks"):
        for number, row in enumerate(value):
            (_print_text if name == "samples" else _print_click)(number, row)
    elif name == "table":
        _print_table(value)
    elif name == "files":
        screen.print_line(f"{label}{len(value)}, {format_bytes(sum(value.values()))}")
    else:
        screen.print_line(
            f"{label}{format_bytes(value) if name == 'bytes' else _format_value(value)}"
        )


def _describe_checkpoint(row: dict[str, Any]) -> str:
    """Return a checkpoint of a run in words."""
    state = "intact (hashes checked)" if row["verified"] else "intact (sizes checked)"
    return f"step {row['step']:<8} {format_bytes(row['bytes']):>10}  {state}"


def _describe_student(row: dict[str, Any]) -> str:
    """Return a student of a run or checkpoint in words."""
    losses = [
        f"{key.replace('_', ' ')} {row[key]:.4f}"
        for key in ("loss", "validation_loss")
        if row.get(key) is not None
    ]
    teacher = "the teacher" if row["teacher"] == "model" else row["teacher"]
    words = [f"{row['parameters']:,} parameters", f"learns from {teacher}", *losses]
    return f"{row['name']:<16}{', '.join(words)}"


def _print_text(number: int, row: dict[str, Any]) -> None:
    """Print a sample of text, with its tokens in the loss highlighted."""
    screen.print_line(f"\nsample {number}: {row['targets']} tokens in the loss")
    labels = row.get("labels", [None] * len(row["documents"]))
    for document, label in zip(row["documents"], labels, strict=True):
        if label is not None:
            screen.print_line(f"label: {label}")
        screen.out().print(_highlight_targets(document))


def _print_click(number: int, row: dict[str, Any]) -> None:
    """Print a sample of clicks: its label, dense features, and the keys of each slot."""
    words = ["click" if row["label"] else "no click", f"day {row['day']}"]
    words += [f"weight {row['weight']:g}"] if row["weight"] != 1 else []
    words += [f"user {row['user']}"] if row["user"] is not None else []
    screen.print_line(f"\nsample {number}: {', '.join(words)}")
    if row["dense"]:
        screen.print_line(f"  {'dense':<18}{' '.join(f'{one:.4g}' for one in row['dense'])}")
    for slot, keys in row["keys"].items():
        shown = " ".join(map(str, keys)) or "-"
        screen.print_line(f"  {f'slot {screen.printable(slot)}':<18}{shown}")


def _rows_of(passes: dict[str, Any], tier: str) -> str:
    """Return the rows and bytes of a tier in words; records of old runs have no rows."""
    rows, size = passes.get(f"{tier}_rows"), format_bytes(passes[f"{tier}_bytes"])
    return size if rows is None else f"{rows:,} rows ({size})"


def _print_table(table: dict[str, Any]) -> None:
    """Print the rows of an embedding table, and its hottest keys."""
    screen.print_line(
        f"  {'table':<18}{table['rows']:,} rows of {table['dim']} numbers, {table['optimizer']}, "
        f"{format_bytes(table['row_bytes'])} each; {format_bytes(table['file_bytes'])} of files; "
        f"day {table['day']}"
    )
    passes = table.get("passes")
    if passes:
        screen.print_line(
            f"  {'last pass':<18}rank 0: {_rows_of(passes, 'memory')} in memory, "
            f"{_rows_of(passes, 'drive')} on the drive; "
            f"{passes['hit_rate']:.0%} of rows found in memory"
        )
    rows = [
        (f"  {one['key']}", f"{one['show']:,.1f}", f"{one['click']:,.1f}", f"{one['score']:,.2f}")
        for one in table["hottest"]
    ]
    screen.print_table(("  hottest keys", "shows", "clicks", "score"), rows)


def _highlight_targets(document: list[dict[str, Any]]) -> Text:
    """Return a document with the tokens in the loss highlighted, by colour or in brackets."""
    coloured, text = screen.out().is_terminal, Text()
    for span in document:
        shown = screen.printable(span["text"])
        if not span["in_loss"]:
            text.append(shown, "dim")
        elif coloured:
            text.append(shown, "bold green")
        else:
            text.append(f"\u27e6{shown}\u27e7")
    return text


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
