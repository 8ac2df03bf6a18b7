"""Progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from moesaic.api import progress
from moesaic.api.batch import BatchCounts
from moesaic.api.progress import LoadingProgress, Output, RunProgress, format_figures


def train(
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    output: Output = "stdout",
    every_s: float = 9.0,
    *,
    steps: int = 10,
    is_verbose: bool = False,
) -> str:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=100, color_system=None, quiet=output is None
    )
    monkeypatch.setattr(progress, "make_console", lambda _: console)
    watched = RunProgress(output, every_s, is_verbose=is_verbose)
    watched.message("resuming from somewhere")
    watched.detail("the kernels")
    watched.start(steps, 3)
    for step in range(4, steps + 1):
        watched.step({"step": step, "loss": 3.0 / step, "tokens_per_s": 12345.6})
        watched.message(f"step {step}: something")
    watched.done()
    return file.getvalue()


def test_lines_come_at_the_first_step_the_last_and_rarely_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = train(monkeypatch, terminal=False).splitlines()
    assert lines[0] == "resuming from somewhere"
    assert lines[1].startswith("step 4/10: loss 0.7500, 12,346 tokens/s, ")
    assert lines[1].endswith(" left")
    shown = [line for line in lines[2:] if not line.endswith("something")]
    assert shown == ["step 10/10: loss 0.3000, 12,346 tokens/s"]


def test_the_lines_of_a_long_run_are_few_unless_all_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = train(monkeypatch, terminal=False, every_s=0.0, steps=1003).splitlines()
    assert len(few) == 8 + 9 + 1
    assert few[-1] == "993 more messages: with --verbose, and in the run's events"
    assert "the kernels" not in few
    every = train(monkeypatch, terminal=False, every_s=0.0, steps=1003, is_verbose=True)
    assert len(every.splitlines()) == 2 + 2 * 1000


def test_a_line_shows_a_validation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have the loss of the last validation; the final one follows the last step."""
    file = io.StringIO()
    monkeypatch.setattr(progress, "make_console", lambda _: Console(file=file, width=100))
    watched = RunProgress("stdout", 0.0, is_verbose=True)
    watched.start(5, 0)
    for step, loss in enumerate((None, 2.5, 2.5, 2.25, 2.0), 1):
        figures = {"step": step, "loss": 3.0, "tokens_per_s": 10.0}
        watched.step(figures if loss is None else {**figures, "validation_loss": loss})
    shown = [line.partition("validation ")[2][:6] for line in file.getvalue().splitlines()]
    assert shown == ["", "2.5000", "", "2.2500", ""]


def test_a_step_without_a_loss_shows_none() -> None:
    """Such as one in which a frozen teacher does not run."""
    figures = {"small/loss": 1.5, "validation_small/loss": 1.0, "tokens_per_s": 10.0}
    assert format_figures(figures) == "small 1.5000, 10 tokens/s"


def test_a_terminal_gets_a_bar_and_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    text = train(monkeypatch, terminal=True)
    assert "resuming from somewhere" in text
    assert "step 10/10" in text
    assert "loss 0.3000, 12,346 tokens/s" in text
    assert train(monkeypatch, terminal=True, output=None) == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_batch_shows_its_answers_and_speed(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = tmp_path / "in.jsonl", io.StringIO()
    source.write_text("{}\n\n{}\n{}")
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    monkeypatch.setattr(progress, "make_console", lambda _: console)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    for is_shown in (False, True):
        assert file.getvalue() == ""
        with progress.batch_progress(source, is_shown) as show:
            show(BatchCounts(answered=1, failed=0, skipped=1, tokens=30))
    assert "2/3 answers" in file.getvalue()
    assert " tokens/s" in file.getvalue()


@pytest.mark.parametrize(
    ("terminal", "first_s", "expected"),
    [
        (False, 0.0, ["loading weights: 1.0 GiB of 3.0 GiB"]),
        (False, 60.0, []),
        (True, 60.0, ["loading", "3.0/3.0 GiB"]),
    ],
)
def test_loading_shows_bytes_if_it_takes_seconds(
    terminal: bool, first_s: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    monkeypatch.setattr(progress, "make_console", lambda _: console)
    with LoadingProgress("stderr", first_s=first_s) as loading:
        for done in (1, 2, 3):
            loading.move(done << 30, 3 << 30)
    text = file.getvalue()
    assert all(words in text for words in expected)
    assert bool(text) == bool(expected)
    assert text.count("GiB of") == len(expected) - 2 * terminal
