"""Consoles, and progress of training, probes, batches, evaluations and loading.

Progress is a bar on a terminal, and a line every few seconds elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moesaic.base.units import format_bytes, format_clock, plural

if TYPE_CHECKING:
    from moesaic.api.adversarial import PairCounts
    from moesaic.api.batch import BatchCounts

LINE_EVERY_S = 10.0
"""Seconds between two lines without a terminal."""
MAX_MESSAGES, MAX_STEP_LINES = 8, 8
"""Messages that a run shows by default, and parts of it between two lines about steps."""
Output = Literal["stdout", "stderr"] | None
"""Stream for progress; None for none."""


class PipeConsole(Console):
    """Console that discards output once its reader is gone, as with `| head`."""

    def on_broken_pipe(self) -> None:
        """Discard further output."""
        self.quiet = True
        flush_stdout()


def make_console(output: Output) -> Console:
    """Return a console of a stream as it is now, since streams may be redirected meanwhile."""
    return PipeConsole(
        stderr=output == "stderr", quiet=output is None, highlight=False, markup=False,
        soft_wrap=True,
    )  # fmt: skip


def flush_stdout() -> None:
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


class RunProgress:
    """Progress of a run: a bar on a terminal; else the first step, the last, and some between.

    Without `is_verbose` a run prints few lines, however long it is.
    """

    def __init__(
        self, output: Output, every_s: float | None = None, *, is_verbose: bool = False
    ) -> None:
        self._console = make_console(output)
        self._every_s = LINE_EVERY_S if every_s is None else every_s
        self._has_bar = self._console.is_terminal and output is not None
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self._console, speed_estimate_period=60.0, disable=not self._has_bar,
        )  # fmt: skip
        self._total = self._first_step = 0
        self._started_s = self._printed_s = 0.0
        self._is_verbose, self._num_messages, self._next_step = is_verbose, 0, 0
        self._validation_loss: float | None = None
        """Loss of the last validation that a line has shown."""

    def message(self, text: str) -> None:
        """Print a line, unless there were many."""
        self._num_messages += 1
        if self._is_verbose or self._num_messages <= MAX_MESSAGES:
            self._console.print(text)

    def detail(self, text: str) -> None:
        """Print a line if the user wants every one."""
        if self._is_verbose:
            self._console.print(text)

    def start(self, total: int, done: int) -> None:
        """Draw the bar and start the clock."""
        self._bar.start()
        self._bar.add_task("", total=total, completed=done, figures="")
        self._total, self._first_step = total, done
        self._started_s, self._printed_s = time.monotonic(), float("-inf")

    def step(self, figures: Mapping[str, float]) -> None:
        """Move the bar, or print a line if one is due."""
        now, step = time.monotonic(), int(figures["step"])
        if self._has_bar:
            text = format_figures(figures)
            self._bar.update(self._bar.task_ids[0], completed=step, figures=text)
        elif step >= self._total or self._is_due(step, now):
            self._printed_s = now
            self._next_step = step - (self._first_step - self._total) // MAX_STEP_LINES
            per_step = (now - self._started_s) / max(step - self._first_step, 1)
            left = format_clock(per_step * (self._total - step))
            rest = f", {left} left" if step < self._total else ""
            text = format_figures(self._without_old_validation(figures, step))
            self._console.print(f"step {step}/{self._total}: {text}{rest}")

    def _without_old_validation(self, figures: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the figures without the loss of a validation that an earlier line has shown, or
        that the last validation follows."""
        shown, self._validation_loss = self._validation_loss, figures.get("validation_loss")
        is_old = shown == self._validation_loss or step >= self._total
        return {
            name: one for name, one in figures.items() if name != "validation_loss" or not is_old
        }

    def _is_due(self, step: int, now_s: float) -> bool:
        is_late = now_s - self._printed_s >= self._every_s
        return is_late and (self._is_verbose or step >= self._next_step)

    def done(self) -> None:
        """Stop the bar, and count the messages that were not shown."""
        if self._has_bar:
            self._bar.stop()
        hidden, self._num_messages = self._num_messages - MAX_MESSAGES, 0
        if hidden > 0 and not self._is_verbose:
            lines = plural(hidden, "more message")
            self._console.print(f"{lines}: with --verbose, and in the run's events")


def format_figures(figures: Mapping[str, float]) -> str:
    """Return loss and speed of a step as text."""
    speed = next(name for name in figures if name.endswith("_per_s"))
    unit = speed.removesuffix("_per_s")
    # A frozen teacher has no loss in steps in which it does not teach.
    texts = [f"loss {figures['loss']:.4f}"] if "loss" in figures else []
    texts += [  # Those of students are "NAME/loss".
        f"{name.removesuffix('/loss')} {value:.4f}"
        for name, value in figures.items()
        if name.endswith("/loss") and not name.startswith("validation_")
    ]
    if "validation_loss" in figures:
        texts.append(f"validation {figures['validation_loss']:.4f}")
    texts.append(f"{figures[speed]:,.0f} {unit}/s")
    if "memory_hit_rate" in figures:
        stall = figures["memory_stall_s"] / max(figures["step_s"], 1e-9)
        texts.append(f"{figures['memory_hit_rate']:.0%} in memory")
        texts.append(f"{stall:.0%} waiting for the drive")
    return ", ".join(texts)


class LoadingProgress:
    """Progress of loading weights: a bar on a terminal; else lines, if it takes seconds."""

    def __init__(self, output: Output, first_s: float = 2.0, every_s: float = LINE_EVERY_S) -> None:
        self._console, self._every_s = make_console(output), every_s
        self._has_bar = self._console.is_terminal and output is not None
        self._first_s = first_s
        self._due_s: float | None = None
        """Time of the next line; None before the first tensor."""
        self._bar = Progress(
            TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True),
            TimeRemainingColumn(compact=True), console=self._console, transient=True,
            disable=not self._has_bar,
        )  # fmt: skip

    def __enter__(self) -> Self:
        """Return the progress."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def move(self, done: int, total: int) -> None:
        """Move the bar to `done` of `total` bytes, or print a line if one is due."""
        now = time.monotonic()
        if self._due_s is None:
            self._due_s = now + self._first_s
        if self._has_bar:
            if not self._bar.task_ids:
                self._bar.start()
                self._bar.add_task("", total=total)
            self._bar.update(self._bar.task_ids[0], completed=done)
            if done >= total:
                self._bar.stop()
        elif done < total and now >= self._due_s:
            self._due_s = now + self._every_s
            self._console.print(f"loading weights: {format_bytes(done)} of {format_bytes(total)}")


@contextmanager
def probe_progress(is_shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Show the progress of `total` measurements; yield a function to call before each one."""
    console = make_console("stderr")
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


@contextmanager
def batch_progress(source: Path, is_shown: bool) -> Iterator[Callable[[BatchCounts], None]]:
    """Show the progress of a batch on stderr; yield a function to call after each answer."""
    with _texts_progress("answers", is_shown) as show:
        total = _count_lines(source)
        yield lambda counts: show(
            counts.answered + counts.failed + counts.skipped, total, counts.tokens
        )


@contextmanager
def pairs_progress(is_shown: bool) -> Iterator[Callable[[PairCounts], None]]:
    """Show the progress of pairs on stderr; yield a function to call after each paragraph."""
    with _texts_progress("paragraphs", is_shown) as show:
        yield lambda counts: show(
            counts.pairs + counts.present + counts.dropped, counts.total, counts.tokens
        )


@contextmanager
def _texts_progress(unit: str, is_shown: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Show the progress of generated texts on stderr; yield a function of those done, their total
    number and the tokens."""
    console = make_console("stderr")
    with Progress(
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=not (is_shown and console.is_terminal),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=0, speed="")
        started_s = printed_s = time.monotonic()

        def show(done: int, total: int, tokens: int) -> None:
            nonlocal printed_s
            now = time.monotonic()
            speed = f"{tokens / max(now - started_s, 1e-9):,.0f} tokens/s"
            bar.update(task, completed=done, total=total, speed=speed)
            if is_shown and not console.is_terminal and now - printed_s >= LINE_EVERY_S:
                printed_s = now
                console.print(f"{done}/{total} {unit}, {speed}")

        yield show


@contextmanager
def evaluation_progress(is_shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of an evaluation on stderr.

    Yield a function of the kind of requests, the number of answers, and the number of requests.
    """
    console = make_console("stderr")
    with Progress(
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}"),
        BarColumn(bar_width=None), TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=not (is_shown and console.is_terminal),
    ) as bar:  # fmt: skip
        task, printed_s = bar.add_task("", total=0, visible=False), time.monotonic()

        def show(kind: str, done: int, total: int) -> None:
            nonlocal printed_s
            now = time.monotonic()
            if done == 0:
                bar.reset(task, total=total, description=kind, visible=True)
            bar.update(task, completed=done)
            if is_shown and not console.is_terminal and now - printed_s >= LINE_EVERY_S:
                printed_s = now
                console.print(f"{done}/{total} {kind}")

        yield show


def _count_lines(path: Path) -> int:
    """Return the number of lines; 0 if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError:
        return 0
