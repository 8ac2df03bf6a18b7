"""Commands of `moesaic` in a test's own process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from moesaic.cli.main import main


class Captured(NamedTuple):
    """Text on both streams."""

    out: str
    err: str


class Capture(Protocol):
    """What a test uses of pytest's `capfd` and `capsys`."""

    def readouterr(self) -> Any:
        """Return the text since the last call."""
        ...


class Commands:
    """Runs commands and returns what they print.

    A line of one string is split at spaces, which `more` words are not.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def run(self, line: str | Sequence[str], *more: str, status: int = 0) -> Captured:
        """Return the text of a command, which must end with `status`."""
        words = line.split() if isinstance(line, str) else line
        self._capture.readouterr()
        found = main([*words, *more])
        captured = Captured(*self._capture.readouterr())
        assert found == status, captured
        return captured

    def output(self, line: str | Sequence[str], *more: str) -> str:
        """Return what a command prints on stdout."""
        return self.run(line, *more).out

    def facts(self, line: str | Sequence[str], *more: str, status: int = 0) -> Any:
        """Return what a command prints with `--json`."""
        return json.loads(self.run(line, "--json", *more, status=status).out)

    def refusal(self, line: str | Sequence[str], *more: str) -> str:
        """Return the sentence with which a command refuses, and which is all that it prints."""
        captured = self.run(line, *more, status=2)
        assert (captured.out, captured.err.count("\n")) == ("", 1), captured
        assert captured.err.startswith("error: "), captured
        return captured.err
