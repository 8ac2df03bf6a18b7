"""What a person sees: plain sentences on stdout, warnings and errors on stderr, JSON when asked."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress

from rich.console import Console, RenderableType
from rich.text import Text


class Patient(Console):
    """A console whose reader may leave, as `head` does: what it prints then goes nowhere."""

    def on_broken_pipe(self) -> None:
        """Go on without it."""
        self.quiet = True
        flush()


def out() -> Console:
    """The console of stdout; made anew each time, for it may have been redirected since."""
    return Patient(highlight=False, markup=False, soft_wrap=True)


def err() -> Console:
    """The console of stderr."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def write_anything() -> None:
    """Let a terminal or pipe that knows few letters have a mark in place of the others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush() -> None:
    """Write what is left for stdout; what it refuses is dropped, or the end would fail again."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up()
    except OSError:
        _give_up()
        raise


def _give_up() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say(text: str) -> None:
    """A line or more on stdout, never wrapped or coloured."""
    out().print(Text(text))


def show(renderable: RenderableType) -> None:
    """A table or the like, fitted to the terminal; to a file or pipe, as wide as it needs."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    console.print(renderable)


def as_json(value: object) -> None:
    """JSON on stdout, and nothing else."""
    print(dumps(value))


def dumps(value: object) -> str:
    """JSON as it is printed."""
    return json.dumps(value, indent=2, default=str)


def note(text: str) -> None:
    """A line on stderr, where stdout is for JSON."""
    _on_stderr(Text(text))


def warn(text: str) -> None:
    """A warning on stderr."""
    _on_stderr(Text.assemble(("warning: ", "yellow"), text))


def fail(text: str) -> None:
    """An error on stderr."""
    _on_stderr(Text.assemble(("error: ", "bold red"), text))


def _on_stderr(text: Text) -> None:
    with suppress(OSError):  # Where it takes nothing, the exit status still says what happened.
        err().print(text)


def size(num_bytes: float) -> str:
    """Bytes for people: 3.2 GiB."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def quantity(value: float, unit: str) -> str:
    """A figure for people: 12.3 GB/s."""
    scales = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
    prefix = next((name for name, scale in scales.items() if value >= scale), "n")
    return f"{value / scales[prefix]:.3g} {prefix}{unit}"
