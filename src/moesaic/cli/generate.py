"""`moesaic generate`: what a run, a checkpoint or a Hugging Face model makes of prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moesaic.base import keys
from moesaic.base.errors import ConfigError, UserError, unwritable
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.start import at_once
from moesaic.serve.config import GenerateConfig

if TYPE_CHECKING:
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.hf.origin import Origin
    from moesaic.models.tokenizer import Tokenizer

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="A run, a checkpoint or a Hugging Face directory.", show_default=False
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", metavar="TEXT", show_default=False,
        help="Text to go on from; may be given again. Without it: all of stdin.",
    ),
]  # fmt: skip

Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Put each prompt to the model as a message, by its own chat template."
    ),
]

BROKEN = "\N{REPLACEMENT CHARACTER}"


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
        flags.explain(GenerateConfig, explain, as_json)
        return 0
    path = flags.need(model, "MODEL", "generate")
    config = flags.settings(GenerateConfig, sets)
    prompts = _read_prompts(prompt)
    with at_once():
        from moesaic.models.hf.origin import open_origin

    origin = open_origin(path)
    for warning in origin.warnings:
        screen.warn(warning)
    tokenizer = _tokenizer(origin, config)
    template = _template(tokenizer) if chat else None
    ids = _encode(tokenizer, prompts, template, config.system)
    _check(origin, config, prompts, ids)
    if dry_run:
        _tell(origin, config, ids, as_json)
        return 0
    stream = Stream(tokenizer) if len(prompts) == 1 and not as_json and out is None else None
    if stream is not None and sys.stdout.isatty():
        screen.out().print(Text(prompts[0], style="dim"), end="\n" if chat else "")
    rows = _generate(origin, config, ids, _ends(origin, tokenizer, template), stream)
    if stream is not None:
        stream.close()
        return 0
    results = [
        {"prompt": text, "prompt_tokens": row, "tokens": new, "text": tokenizer.decode(new)}
        for text, row, new in zip(prompts, ids, rows, strict=True)
    ]
    _give(results, out, as_json)
    return 0


def _read_prompts(given: Sequence[str] | None) -> list[str]:
    if given:
        return list(given)
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt TEXT, or text on stdin")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UserError("stdin holds no text: give --prompt TEXT, or text on stdin")
    return [text]


def _tokenizer(origin: Origin, config: GenerateConfig) -> Tokenizer:
    from moesaic.models.tokenizer import open_tokenizer

    data = (origin.facts.get("job") or {}).get("data") or {}
    if config.tokenizer is not None:
        tokenizer = open_tokenizer(config.tokenizer, key="tokenizer")
    elif data.get("tokenizer") == "bytes":
        tokenizer = open_tokenizer("bytes")
    else:
        homes = [file.parent for file in origin.companions if file.name == "tokenizer.json"]
        if not homes:
            raise ConfigError(
                f"'{origin.path}' has no tokenizer.json: name one with --set tokenizer=PATH"
            )
        tokenizer = open_tokenizer(str(homes[0]), data.get("end_token"))
    if tokenizer.size > origin.model.vocab:
        raise ConfigError(
            f"the model has a vocabulary of {origin.model.vocab}, and the tokenizer "
            f"'{tokenizer.name}' has {tokenizer.size} ids: --set tokenizer=PATH of the one that "
            "the model was trained with"
        )
    return tokenizer


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.name == "bytes":
        raise UserError("--chat needs a chat template, and plain bytes have none: leave it out")
    from moesaic.models.chat import ChatTemplate

    return ChatTemplate(Path(tokenizer.name).expanduser(), "leave out --chat")


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
    return [tokenizer.encode(template.render(said), whole=True) for said in messages]


def _ends(origin: Origin, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """What ends a row: what the model's files name, else the tokenizer's own; in a chat the end of
    an answer too."""
    ends = set(origin.end_ids() or [tokenizer.end_id])
    if template is not None:
        from moesaic.models.chat import end_of_turn
        from moesaic.models.tokenizer import FileTokenizer

        assert isinstance(tokenizer, FileTokenizer), "bytes have no template"
        end = end_of_turn(template, tokenizer)
        ends |= set() if end is None else {end}
    return sorted(ends)


def _check(
    origin: Origin, config: GenerateConfig, prompts: Sequence[str], ids: Sequence[Sequence[int]]
) -> None:
    """What the engine would refuse, in the command line's words and before weights are read."""
    limit = origin.model.max_positions
    for text, row in zip(prompts, ids, strict=True):
        if not row:
            raise UserError(f"--prompt {keys.show(text)} holds no token: give some text")
        if len(row) + config.max_tokens > limit:
            raise UserError(
                f"--prompt {keys.show(text)} of {len(row)} tokens and max_tokens = "
                f"{config.max_tokens} are more than the model's {limit} positions: "
                "shorten it, or --set max_tokens=N"
            )


def _generate(
    origin: Origin,
    config: GenerateConfig,
    ids: Sequence[Sequence[int]],
    ends: Sequence[int],
    stream: Callable[[int, int], None] | None,
) -> list[list[int]]:
    with at_once():
        from moesaic.dist import device
        from moesaic.dist.products import check
        from moesaic.serve.generate import Sampling, generate
        from moesaic.serve.loading import load_model

    place = device.resolve(config.device, key="device")
    check(config.grouped_mm if origin.model.experts else "auto", place, key="grouped_mm")
    device.activate(place)
    model = load_model(origin, place, config.precision, config.grouped_mm)
    sampling = Sampling(config.temperature, config.top_p, config.seed)
    return generate(model, ids, config.max_tokens, end_ids=ends, sampling=sampling, on_token=stream)


class Stream:
    """Prints the text of one row as its tokens come, whole characters only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def __call__(self, row: int, token: int) -> None:
        """One more token."""
        del row
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(BROKEN):
            self._print(text)

    def close(self) -> None:
        """Print what is left."""
        self._print(self._tokenizer.decode(self._ids))
        print()

    def _print(self, text: str) -> None:
        new = text[self._shown :]
        if sys.stdout.isatty():
            # A byte-level model can write what would command the terminal.
            new = "".join(c if c in "\n\t" or c.isprintable() else BROKEN for c in new)
        print(new, end="", flush=True)
        self._shown = len(text)


def _give(results: list[dict[str, Any]], out: Path | None, as_json: bool) -> None:
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
        raise unwritable(f"--out '{out}'", error) from None


def _tell(
    origin: Origin, config: GenerateConfig, ids: Sequence[Sequence[int]], as_json: bool
) -> None:
    facts = {
        "model": str(origin.path), "settings": config.model_dump(),
        "prompt_tokens": [len(row) for row in ids],
    }  # fmt: skip
    if as_json:
        screen.as_json(facts)
        return
    screen.say(f"# {origin.path}: prompts of {', '.join(str(len(row)) for row in ids)} tokens\n")
    screen.say(config.to_toml().rstrip())
