"""`moesaic generate`: text generation with a run, a checkpoint or a Hugging Face model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moesaic.base import keys
from moesaic.base.errors import ConfigError, UserError, write_error
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.start import exit_on_interrupt
from moesaic.serve.config import GenerateConfig

if TYPE_CHECKING:
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.hf.origin import Origin
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
    typer.Option(
        "--chat", help="Send each prompt as a user message, by the model's chat template."
    ),
]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def generate(
    model: Model = None,
    prompt: Prompts = None,
    chat: Chat = False,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Continue text with a trained model."""
    if explain is not None:
        flags.print_explanation(GenerateConfig, explain, as_json)
        return 0
    path = flags.require(model, "MODEL", "generate")
    config = flags.parse_settings(GenerateConfig, sets)
    prompts = _read_prompts(prompt)
    with exit_on_interrupt():
        from moesaic.models.hf.origin import open_origin

    origin = open_origin(path)
    for warning in origin.warnings:
        screen.print_warning(warning)
    tokenizer = _tokenizer(origin, config)
    template = _template(tokenizer) if chat else None
    ids = _encode(tokenizer, prompts, template, config.system)
    _check_lengths(origin, config, prompts, ids)
    if dry_run:
        _print_dry_run(origin, config, ids, as_json)
        return 0
    stream = TextStreamer(tokenizer) if len(prompts) == 1 and not as_json and out is None else None
    if stream is not None and sys.stdout.isatty():
        screen.out().print(Text(prompts[0], style="dim"), end="\n" if chat else "")
    rows = _generate(origin, config, ids, _end_ids(origin, tokenizer, template), stream)
    if stream is not None:
        stream.close()
        return 0
    results = [
        {"prompt": text, "prompt_tokens": row, "tokens": new, "text": tokenizer.decode(new)}
        for text, row, new in zip(prompts, ids, rows, strict=True)
    ]
    _write_results(results, out, as_json)
    return 0


def _read_prompts(given: Sequence[str] | None) -> list[str]:
    if given:
        return list(given)
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt TEXT, or text on stdin")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UserError("stdin is empty: give --prompt TEXT, or text on stdin")
    return [text]


def _tokenizer(origin: Origin, config: GenerateConfig) -> Tokenizer:
    from moesaic.models.tokenizer import open_tokenizer

    data = (origin.facts.get("job") or {}).get("data") or {}
    if config.tokenizer is not None:
        tokenizer = open_tokenizer(config.tokenizer, key="tokenizer")
    elif data.get("tokenizer") == "bytes":
        tokenizer = open_tokenizer("bytes")
    else:
        directories = [file.parent for file in origin.companions if file.name == "tokenizer.json"]
        if not directories:
            raise ConfigError(
                f"'{origin.path}' has no tokenizer.json: name one with --set tokenizer=PATH"
            )
        tokenizer = open_tokenizer(str(directories[0]), data.get("end_token"))
    if tokenizer.size > origin.model.vocab:
        raise ConfigError(
            f"the tokenizer '{tokenizer.name}' has {tokenizer.size} ids, but the model has "
            f"model.vocab = {origin.model.vocab}: name the tokenizer that the model was trained "
            "with (--set tokenizer=PATH)"
        )
    return tokenizer


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.name == "bytes":
        raise UserError("--chat needs a chat template, and the bytes tokenizer has none: remove it")
    from moesaic.models.chat import ChatTemplate

    return ChatTemplate(Path(tokenizer.name).expanduser())


def _encode(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    template: ChatTemplate | None,
    system: str | None,
) -> list[list[int]]:
    if template is None:
        if system is not None:
            raise UserError(f"system = {keys.show(system)} needs a chat: add --chat, or remove it")
        return [tokenizer.encode(text) for text in prompts]
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [[*opening, {"role": "user", "content": text}] for text in prompts]
    return [tokenizer.encode(template.render(chat), with_special_tokens=True) for chat in messages]


def _end_ids(origin: Origin, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """Return the ids that end a text: those of the model's files, else the tokenizer's own.

    In a chat the end of an answer also counts.
    """
    ends = set(origin.end_ids() or [tokenizer.end_id])
    if template is not None:
        from moesaic.models.tokenizer import FileTokenizer

        assert isinstance(tokenizer, FileTokenizer), "the bytes tokenizer has no template"
        end = template.end_of_turn_id(tokenizer)
        ends |= set() if end is None else {end}
    return sorted(ends)


def _check_lengths(
    origin: Origin, config: GenerateConfig, prompts: Sequence[str], ids: Sequence[Sequence[int]]
) -> None:
    """Raise UserError for prompts that are empty or too long, before weights are read."""
    limit = origin.model.max_positions
    for text, row in zip(prompts, ids, strict=True):
        if not row:
            raise UserError(f"--prompt {keys.show(text)} has no tokens: give some text")
        if len(row) + config.max_tokens > limit:
            raise UserError(
                f"--prompt {keys.show(text)} ({len(row)} tokens) and max_tokens = "
                f"{config.max_tokens} exceed the model's {limit} positions: shorten the prompt, or "
                "lower max_tokens"
            )


def _generate(
    origin: Origin,
    config: GenerateConfig,
    ids: Sequence[Sequence[int]],
    end_ids: Sequence[int],
    stream: Callable[[int, int], None] | None,
) -> list[list[int]]:
    with exit_on_interrupt():
        from moesaic.kernels import device
        from moesaic.kernels.grouped_mm import check_backend
        from moesaic.serve.generate import Sampling, generate
        from moesaic.serve.loading import load_model

    torch_device = device.resolve(config.device, key="device")
    check_backend(
        config.grouped_mm if origin.model.experts else "auto", torch_device, key="grouped_mm"
    )
    device.activate(torch_device)
    model = load_model(origin, torch_device, config.precision, config.grouped_mm)
    sampling = Sampling(config.temperature, config.top_p, config.seed)
    return generate(
        model, ids, config.max_tokens, end_ids=end_ids, sampling=sampling, on_token=stream
    )


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
        if not text.endswith(REPLACEMENT):
            self._print(text)

    def close(self) -> None:
        """Print the rest."""
        self._print(self._tokenizer.decode(self._ids))
        print()

    def _print(self, text: str) -> None:
        new = text[self._shown :]
        if sys.stdout.isatty():
            # A byte-level model can generate terminal escape sequences.
            new = "".join(c if c in "\n\t" or c.isprintable() else REPLACEMENT for c in new)
        print(new, end="", flush=True)
        self._shown = len(text)


def _write_results(results: list[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    if as_json:
        text = screen.dumps(results) + "\n"
    elif len(results) == 1:
        text = f"{results[0]['text']}\n"
    else:
        text = "\n".join(f"--- {row['prompt']}\n{row['text']}\n" for row in results)
    if out is None:
        print(text, end="")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(f"--out '{out}'", error) from None


def _print_dry_run(
    origin: Origin, config: GenerateConfig, ids: Sequence[Sequence[int]], as_json: bool
) -> None:
    facts = {
        "model": str(origin.path), "settings": config.model_dump(),
        "prompt_tokens": [len(row) for row in ids],
    }  # fmt: skip
    if as_json:
        screen.print_json(facts)
        return
    screen.print_line(
        f"# {origin.path}: prompts of {', '.join(str(len(row)) for row in ids)} tokens\n"
    )
    screen.print_line(config.to_toml().rstrip())
