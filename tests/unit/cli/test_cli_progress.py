from __future__ import annotations

import io

from rich.console import Console

from moesaic.cli.progress import (
    NoProgress,
    ProgressBar,
    ProgressLines,
    make_progress,
)


def figures(step: int) -> dict[str, float]:
    return {"step": step, "loss": 3.0 / step, "tokens_per_s": 12345.6}


def train(terminal: bool, every_s: float | None = None) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    watched = (
        ProgressLines(console, every_s)
        if every_s is not None
        else make_progress(console, is_shown=True)
    )
    watched.message("resuming from somewhere")
    watched.start(10, 3)
    for step in range(4, 11):
        watched.step(figures(step))
    watched.done()
    return file.getvalue()


def test_lines_come_at_the_first_step_the_last_and_rarely_between() -> None:
    lines = train(terminal=False).splitlines()
    assert lines[0] == "resuming from somewhere"
    assert lines[1].startswith("step 4/10: loss 0.7500, 12,346 tokens/s, ")
    assert lines[1].endswith(" left")
    assert lines[2:] == ["step 10/10: loss 0.3000, 12,346 tokens/s"]
    assert len(train(terminal=False, every_s=0.0).splitlines()) == 1 + 7


def test_a_terminal_gets_a_bar() -> None:
    text = train(terminal=True)
    assert "resuming from somewhere" in text
    assert "step 10/10" in text
    assert "loss 0.3000, 12,346 tokens/s" in text


def test_other_ranks_are_silent() -> None:
    file = io.StringIO()
    assert isinstance(make_progress(Console(file=file), is_shown=False), NoProgress)
    assert isinstance(
        make_progress(Console(file=file, force_terminal=True), is_shown=True), ProgressBar
    )
