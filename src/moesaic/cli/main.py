"""Entry point of the command line: `moesaic VERB ...`.

Exit status: 0 success; 1 a bug, with a traceback; 2 a user error, in one sentence; 3 the job does
not fit; 75 ended from outside, continue with --resume; 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Annotated

import typer

from moesaic import __version__
from moesaic.api import start
from moesaic.api.launch import (
    EXIT_DOES_NOT_FIT,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    RankFailed,
    RunInterrupted,
    is_leader,
    message_prefix,
)
from moesaic.api.progress import flush_stdout
from moesaic.api.train_worker import MEMORY_HINT
from moesaic.base.errors import ConfigError, DoesNotFitError, UserError, as_user_error
from moesaic.cli import screen

VERBS = (
    "train", "generate", "serve", "eval", "predict", "convert", "inspect", "report", "replay",
    "probe", "plan", "calibrate", "trace", "bench",
)  # fmt: skip
"""Verbs; each is a function in the module of the same name."""
_VERBS_WITH_SETTINGS = (
    "train",
    "generate",
    "serve",
    "eval",
    "convert",
    "replay",
    "probe",
    "plan",
    "bench",
)
_VERBS_THAT_COMPUTE = ("inspect", "report", "replay", "plan", "calibrate", "trace")
"""Verbs that leave nothing behind until they end, so that SIGINT ends them without unwinding: a
library that they call or import may swallow an error."""
MEMORY_HINTS = {
    "train": MEMORY_HINT, "generate": "lower cache_tokens or tokens_per_pass",
    "serve": "lower cache_tokens or tokens_per_pass",
    "eval": "lower cache_tokens or tokens_per_pass",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; bugs propagate as exceptions."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    screen.replace_unencodable()
    computes = given[0] in _VERBS_THAT_COMPUTE
    try:
        with start.exit_on_interrupt() if computes else nullcontext():
            status = make_app(given[0])(
                args=expand_resume(given), prog_name="moesaic", standalone_mode=False
            )
            flush_stdout()
    except UserError as error:
        screen.print_error(f"{message_prefix()}{error}")
        return _status_of(error)
    except typer.TyperException as error:
        _print_usage_error(error, given[0])
        return EXIT_USER_ERROR
    except RunInterrupted as error:
        # All ranks end alike after a save, or by an interrupt from the terminal.
        if is_leader() or not (error.is_saved or error.status == EXIT_INTERRUPTED):
            _print_end(error)
        return error.status
    except RankFailed as error:
        screen.err().print(str(error).rstrip())
        screen.print_error("a rank failed because of a bug in moesaic; see the traceback above")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        status = EXIT_INTERRUPTED
    except (OSError, MemoryError, RuntimeError) as error:
        user_error = as_user_error(
            error, MEMORY_HINTS.get(given[0], "free some, or use a larger machine")
        )
        if user_error is None:
            raise
        with suppress(OSError):
            flush_stdout()
        screen.print_error(f"{message_prefix()}{user_error}")
        return _status_of(user_error)
    if status == EXIT_INTERRUPTED and is_leader():
        screen.err().print("interrupted")
    return int(status or 0)


def _print_end(error: RunInterrupted) -> None:
    """Print why a run has ended early; an interrupt is no error."""
    say = screen.err().print if error.status == EXIT_INTERRUPTED else screen.print_error
    with suppress(OSError):  # The exit status still tells it.
        say(f"{message_prefix()}{error}")


def _status_of(error: UserError) -> int:
    return EXIT_DOES_NOT_FIT if isinstance(error, DoesNotFitError) else EXIT_USER_ERROR


def make_app(verb: str = "") -> typer.Typer:
    """Return the app with all verbs, or only with `verb` to save the imports of the others."""
    app = typer.Typer(
        help="Train mixture-of-experts models on any number of CPUs and GPUs.",
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(_root_callback)
    for name in (verb,) if verb in VERBS else VERBS:
        command = getattr(start.import_module(f"moesaic.cli.{name}"), name)
        app.command(help=_unwrap_docstring(command.__doc__ or ""))(command)
    return app


def _unwrap_docstring(text: str) -> str:
    """Return a docstring with one line per paragraph, for screens of any width."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _print_version(requested: bool) -> None:
    if requested:
        screen.print_line(f"moesaic {__version__}")
        raise typer.Exit


def _root_callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train mixture-of-experts models on any number of CPUs and GPUs."""


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--resume auto` for a `--resume` without a value."""
    result: list[str] = []
    for index, argument in enumerate(arguments):
        if argument in ("--out=", "") and (argument or (index and arguments[index - 1] == "--out")):
            raise ConfigError("--out '' is empty: give a path")
        result.append(argument)
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        if argument == "--resume" and (following.startswith("-") or following.endswith(".toml")):
            result.append("auto")
    return result


def _print_usage_error(error: typer.TyperException, verb: str) -> None:
    """Print an error of the parser as one sentence; all ranks have the same one."""
    if not is_leader():
        return
    sentence = " ".join(error.format_message().split()).rstrip(".")
    found = re.match(r"No such option: --([\w-]+)", sentence)
    if found and verb in _VERBS_WITH_SETTINGS:
        sentence += f"; a setting is given as --set {found[1].replace('-', '_')}=VALUE"
    where = "moesaic --help" if verb.startswith("-") else f"moesaic {verb} --help"
    where = "moesaic --help" if sentence.startswith("No such command") else where
    screen.print_error(f"{sentence[:1].lower()}{sentence[1:]} (see {where})")
