"""Terminal output: text and JSON on stdout, warnings and errors on stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesaic.api.progress import make_console

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for a character that is not shown."""


def printable(text: str) -> str:
    """Return a model's text without characters that control a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else REPLACEMENT for c in text)


def out() -> Console:
    """Return a console of stdout."""
    return make_console("stdout")


def err() -> Console:
    """Return a console of stderr."""
    return make_console("stderr")


def replace_unencodable() -> None:
    """Replace characters that the encoding of stdout or stderr lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_line(text: str) -> None:
    """Print text on stdout, without wrapping or colour."""
    out().print(Text(text))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Print a table, fitted to the terminal or 200 columns wide in a file or pipe.

    The first `left` columns are aligned to the left. A row of one cell is a heading.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, title in enumerate(titles):
        justify: Literal["left", "right"] = "left" if at < left else "right"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=at == 0)
    for row in rows:
        table.add_row(*row, style="bold" if len(row) == 1 else None)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    console.print(table)


def print_json(value: object) -> None:
    """Print JSON on stdout."""
    print(dumps(value))


def dumps(value: object) -> str:
    """Return JSON as `print_json` prints it."""
    return json.dumps(value, indent=2, default=str)


def print_warning(text: str) -> None:
    """Print a warning on stderr."""
    _print_stderr(Text.assemble(("warning: ", "yellow"), text))


def print_error(text: str) -> None:
    """Print an error on stderr."""
    _print_stderr(Text.assemble(("error: ", "bold red"), text))


def _print_stderr(text: Text) -> None:
    with suppress(OSError):  # The exit status still reports the error.
        err().print(text)
