"""What a person watches while a run trains: a bar on a terminal, a line now and then elsewhere."""

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

from moesaic.cli import screen

if TYPE_CHECKING:
    from moesaic.train.trainer import Progress as Watcher

LINE_EVERY_S = 10.0
"""Pause between two lines where there is no terminal."""


def watcher(console: Console, shown: bool) -> Watcher:
    """Who watches a run: nobody, unless it is `shown`."""
    if not shown:
        return Nobody()
    return Bar(console) if console.is_terminal else Lines(console)


class Nobody:
    """Watches nothing: ranks other than the first."""

    def message(self, text: str) -> None:
        """Nothing."""

    def start(self, total: int, done: int) -> None:
        """Nothing."""

    def step(self, figures: Mapping[str, float]) -> None:
        """Nothing."""

    def done(self) -> None:
        """Nothing."""


class Bar:
    """A live bar."""

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
        """Say something above the bar."""
        self._progress.console.print(text)

    def start(self, total: int, done: int) -> None:
        """Draw the bar."""
        self._progress.start()
        self._task = self._progress.add_task("", total=total, completed=done, figures="")

    def step(self, figures: Mapping[str, float]) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(
                self._task, completed=int(figures["step"]), figures=describe(figures)
            )

    def done(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Lines:
    """A line at the first step, at the last, and every few seconds between."""

    def __init__(self, console: Console, every_s: float = LINE_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._total = self._before = 0
        self._began_s = self._said_s = 0.0

    def message(self, text: str) -> None:
        """Say something."""
        self._console.print(text)

    def start(self, total: int, done: int) -> None:
        """Note the time."""
        self._total, self._before = total, done
        self._began_s, self._said_s = time.monotonic(), float("-inf")

    def step(self, figures: Mapping[str, float]) -> None:
        """Print a line if it is time."""
        now, step = time.monotonic(), int(figures["step"])
        if step < self._total and now - self._said_s < self._every_s:
            return
        self._said_s = now
        per_step = (now - self._began_s) / max(step - self._before, 1)
        left = duration(per_step * (self._total - step))
        rest = f", {left} left" if step < self._total else ""
        self._console.print(f"step {step}/{self._total}: {describe(figures)}{rest}")

    def done(self) -> None:
        """Nothing is left to say."""


def describe(figures: Mapping[str, float]) -> str:
    """Loss and speed of a step."""
    return f"loss {figures['loss']:.4f}, {figures['tokens_per_s']:,.0f} tokens/s"


def duration(seconds: float) -> str:
    """1:02:03, 2:03 or 3 s."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def watched(shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Who is told of each part of so many that is about to be measured; it is `shown`, or not."""
    console = screen.err()
    with Progress(
        TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not (shown and console.is_terminal),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=total)
        begun, told_s = 0, time.monotonic()

        def watch(name: str) -> None:
            nonlocal begun, told_s
            bar.update(task, completed=begun, description=name)
            begun += 1
            if shown and not console.is_terminal and time.monotonic() - told_s > LINE_EVERY_S:
                told_s = time.monotonic()
                console.print(f"measuring {name}, part {begun} of {total}")

        yield watch
