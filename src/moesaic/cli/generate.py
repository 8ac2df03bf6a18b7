"""`moesaic generate`: text generation with a run, a checkpoint or a Hugging Face model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from moesaic.api.model import load
from moesaic.api.start import exit_on_interrupt, import_module
from moesaic.base.errors import ConfigError
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Sets
from moesaic.serve.config import GenerateConfig

if TYPE_CHECKING:
    from moesaic.models.tokenizer import Tokenizer

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="Run, checkpoint or Hugging Face directory.", show_default=False
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", metavar="TEXT", show_default=False,
        help="Text to continue; repeatable. Unset: stdin.",
    ),
]  # fmt: skip

Chat = Annotated[
    bool,
    typer.Option("--chat", help="For models trained on chats: send each prompt as a user message."),
]

_LOADING = {"device", "precision", "grouped_mm", "tokenizer"}
"""Settings of loading a model; the others are of generating text."""


def generate(
    model: Model = None,
    prompt: Prompts = None,
    chat: Chat = False,
    sets: Sets = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Continue text with a trained model. With --json also token ids are printed."""
    if explain is not None:
        flags.print_explanation(GenerateConfig, explain, as_json)
        return 0
    path = flags.require(model, "MODEL", "generate")
    config = flags.parse_settings(GenerateConfig, sets)
    prompts = _read_prompts(prompt)
    with exit_on_interrupt():
        import_module("moesaic.serve.loading")
    loaded = load(path, **config.model_dump(include=_LOADING))
    for warning in loaded.warnings:
        screen.print_warning(warning)
    stream = TextStreamer(loaded.tokenizer) if len(prompts) == 1 and not as_json else None
    if stream is not None and sys.stdout.isatty():
        screen.out().print(Text(prompts[0], style="dim"), end="\n" if chat else "")
    settings = config.model_dump(exclude=_LOADING)
    rows = loaded.generate(*prompts, chat=chat, on_token=stream, **settings)
    if stream is not None:
        stream.close()
    elif as_json:
        screen.print_json([row._asdict() for row in rows])
    else:
        print("\n".join(f"--- {row.prompt}\n{row.text}\n" for row in rows), end="")
    return 0


def _read_prompts(given: Sequence[str] | None) -> list[str]:
    if given:
        return list(given)
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("there is no prompt: give --prompt TEXT, or text on stdin")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("stdin is empty: give --prompt TEXT, or text on stdin")
    return [text]


class TextStreamer:
    """Printer of a text while its tokens arrive, in whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def __call__(self, row: int, token: int) -> None:
        """Add a token and print the new text."""
        del row
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(screen.REPLACEMENT):
            self._print(text)

    def close(self) -> None:
        """Print the rest."""
        self._print(self._tokenizer.decode(self._ids))
        print()

    def _print(self, text: str) -> None:
        new = text[self._shown :]
        if sys.stdout.isatty():
            new = screen.printable(new)
        print(new, end="", flush=True)
        self._shown = len(text)
