"""The front door: `moesaic VERB ...`.

Exit status: 0 done; 1 a bug of ours, with its traceback; 2 a mistake of the user's, with one
sentence; 75 cut off from outside, start again with --resume; 130 interrupted. An interrupt that
comes while something is imported ends the process itself, which is 130 to a shell.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from moesaic import __version__
from moesaic.base.errors import UserError, as_user_error
from moesaic.cli import screen, start
from moesaic.cli.launch import INTERRUPTED, CutOff, speaker
from moesaic.cli.rank import LESS_MEMORY

VERBS = (
    "train", "generate", "convert", "inspect", "report", "replay", "probe", "plan", "calibrate",
    "trace", "bench",
)  # fmt: skip
"""Each is a function of the module of its name."""
USER_ERROR = 2
MORE_MEMORY = {"train": LESS_MEMORY, "generate": "give fewer prompts, or lower max_tokens"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. A bug of ours leaves as the exception it is."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    screen.write_anything()
    try:
        status = application(given[0])(
            args=spell_out(given), prog_name="moesaic", standalone_mode=False
        )
        screen.flush()
    except UserError as error:
        screen.fail(f"{speaker()}{error}")
        return USER_ERROR
    except typer.TyperException as error:
        screen.fail(_usage(error.format_message(), given[0]))
        return USER_ERROR
    except CutOff as error:
        screen.fail(str(error))
        return error.status
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except (OSError, MemoryError, RuntimeError) as error:
        mistake = as_user_error(
            error, MORE_MEMORY.get(given[0], "free some, or use a larger machine")
        )
        if mistake is None:
            raise
        with suppress(OSError):
            screen.flush()
        screen.fail(f"{speaker()}{mistake}")
        return USER_ERROR
    if status == INTERRUPTED:
        screen.err().print("interrupted")
    return int(status or 0)


def application(verb: str = "") -> typer.Typer:
    """The verbs; if `verb` is one, it alone, as the others' imports take time."""
    app = typer.Typer(
        help="Train and serve mixture-of-experts models, exactly, on whatever machines you have.",
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(_opening)
    for name in (verb,) if verb in VERBS else VERBS:
        command = getattr(start.importing(f"moesaic.cli.{name}"), name)
        app.command(help=_flowing(command.__doc__ or ""))(command)
    return app


def _flowing(text: str) -> str:
    """A docstring for a screen of any width: lines end where paragraphs do."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _version(asked: bool) -> None:
    if asked:
        screen.say(f"moesaic {__version__}")
        raise typer.Exit


def _opening(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train and serve mixture-of-experts models, exactly, on whatever machines you have."""


def spell_out(arguments: Sequence[str]) -> list[str]:
    """`--resume` without a value as `--resume auto`."""
    result: list[str] = []
    for place, argument in enumerate(arguments):
        if argument in ("--out=", "") and (argument or (place and arguments[place - 1] == "--out")):
            raise UserError("--out '' is empty: give a path")
        result.append(argument)
        following = arguments[place + 1] if place + 1 < len(arguments) else "-"
        if argument == "--resume" and (following.startswith("-") or following.endswith(".toml")):
            result.append("auto")
    return result


def _usage(message: str, verb: str) -> str:
    """A complaint of the parser as one sentence."""
    sentence = " ".join(message.split()).rstrip(".")
    where = "moesaic --help" if verb.startswith("-") else f"moesaic {verb} --help"
    where = "moesaic --help" if sentence.startswith("No such command") else where
    return f"{sentence[:1].lower()}{sentence[1:]} (see {where})"
