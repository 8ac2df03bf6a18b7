"""Progress of training and probes: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moesaic.base.units import format_clock
from moesaic.cli import screen

if TYPE_CHECKING:
    from moesaic.train.trainer import Progress as Watcher

LINE_EVERY_S = 10.0
"""Seconds between two lines without a terminal."""


def make_progress(console: Console, is_shown: bool) -> Watcher:
    """Return the progress display of a run; without `is_shown`, one that prints nothing."""
    if not is_shown:
        return NoProgress()
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


class NoProgress:
    """Progress of other ranks than rank 0: none."""

    def message(self, text: str) -> None:
        """Do nothing."""

    def start(self, total: int, done: int) -> None:
        """Do nothing."""

    def step(self, figures: Mapping[str, float]) -> None:
        """Do nothing."""

    def done(self) -> None:
        """Do nothing."""


class ProgressBar:
    """Progress as a live bar."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            speed_estimate_period=60.0,
        )
        self._task: TaskID | None = None

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text)

    def start(self, total: int, done: int) -> None:
        """Draw the bar."""
        self._progress.start()
        self._task = self._progress.add_task("", total=total, completed=done, figures="")

    def step(self, figures: Mapping[str, float]) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(
                self._task, completed=int(figures["step"]), figures=format_figures(figures)
            )

    def done(self) -> None:
        """Stop the bar."""
        self._progress.stop()


class ProgressLines:
    """Progress as lines: the first step, the last, and every few seconds between."""

    def __init__(self, console: Console, every_s: float = LINE_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._total = self._first_step = 0
        self._started_s = self._printed_s = 0.0

    def message(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)

    def start(self, total: int, done: int) -> None:
        """Start the clock."""
        self._total, self._first_step = total, done
        self._started_s, self._printed_s = time.monotonic(), float("-inf")

    def step(self, figures: Mapping[str, float]) -> None:
        """Print a line if one is due."""
        now, step = time.monotonic(), int(figures["step"])
        if step < self._total and now - self._printed_s < self._every_s:
            return
        self._printed_s = now
        per_step = (now - self._started_s) / max(step - self._first_step, 1)
        left = format_clock(per_step * (self._total - step))
        rest = f", {left} left" if step < self._total else ""
        self._console.print(f"step {step}/{self._total}: {format_figures(figures)}{rest}")

    def done(self) -> None:
        """Do nothing."""


def format_figures(figures: Mapping[str, float]) -> str:
    """Return loss and speed of a step as text."""
    speed = next(name for name in figures if name.endswith("_per_s"))
    unit = speed.removesuffix("_per_s")
    return f"loss {figures['loss']:.4f}, {figures[speed]:,.0f} {unit}/s"


@contextmanager
def probe_progress(is_shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Show the progress of `total` measurements; yield a function to call before each one."""
    console = screen.err()
    with Progress(
        TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not (is_shown and console.is_terminal),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=total)
        num_started, printed_s = 0, time.monotonic()

        def start(name: str) -> None:
            nonlocal num_started, printed_s
            bar.update(task, completed=num_started, description=name)
            num_started += 1
            is_due = time.monotonic() - printed_s > LINE_EVERY_S
            if is_shown and not console.is_terminal and is_due:
                printed_s = time.monotonic()
                console.print(f"measuring {name} ({num_started} of {total})")

        yield start
