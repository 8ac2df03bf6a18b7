"""Terminal output: text and JSON on stdout, warnings and errors on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text


class PipeConsole(Console):
    """Console that discards output once its reader is gone, as with `| head`."""

    def on_broken_pipe(self) -> None:
        """Discard further output."""
        self.quiet = True
        flush()


def out() -> Console:
    """Return a console of stdout; a new one each time, since stdout may be redirected meanwhile."""
    return PipeConsole(highlight=False, markup=False, soft_wrap=True)


def err() -> Console:
    """Return a console of stderr."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def replace_unencodable() -> None:
    """Replace characters that the encoding of stdout or stderr lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush() -> None:
    """Flush stdout; on an error discard the rest, which would fail again at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError:
        _discard_stdout()
        raise


def _discard_stdout() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


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


def print_note(text: str) -> None:
    """Print a line on stderr, for commands with JSON on stdout."""
    _print_stderr(Text(text))


def print_warning(text: str) -> None:
    """Print a warning on stderr."""
    _print_stderr(Text.assemble(("warning: ", "yellow"), text))


def print_error(text: str) -> None:
    """Print an error on stderr."""
    _print_stderr(Text.assemble(("error: ", "bold red"), text))


def _print_stderr(text: Text) -> None:
    with suppress(OSError):  # The exit status still reports the error.
        err().print(text)
