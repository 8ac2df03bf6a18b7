"""`moesaic generate`: text generation with a run, a checkpoint or a Hugging Face model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moesaic.api.batch import run_batch
from moesaic.api.engine import Engine
from moesaic.api.generation import Generation
from moesaic.api.progress import batch_progress, pairs_progress
from moesaic.api.start import exit_on_interrupt, import_module
from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Sets
from moesaic.serve.config import AdversarialConfig, EngineConfig, GenerateConfig

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

Controls = Annotated[
    list[str] | None,
    typer.Option(
        "--control", metavar="KEY=VALUE,...", show_default=False,
        help="Attributes of the text, for models trained with \\[control]: genre=docs,length=80.",
    ),
]  # fmt: skip

Input = Annotated[
    Path | None,
    typer.Option(
        "--input", metavar="FILE.jsonl", show_default=False,
        help="A batch instead of prompts: one request per line, in OpenAI's form. With "
        "--adversarial: text.",
    ),
]  # fmt: skip
Adversarial = Annotated[
    bool,
    typer.Option(
        "--adversarial",
        help="Write originals and continuations of the text in --input, with labels, for a "
        "\\[credibility] job.",
    ),
]
BestOf = Annotated[
    int | None,
    typer.Option(
        "--best-of", metavar="N", show_default=False,
        help="Generate N texts per prompt and keep the best one (the best n, with --set n).",
    ),
]  # fmt: skip
Rank = Annotated[
    str | None,
    typer.Option(
        "--rank", metavar="SCORE", show_default=False,
        help="Score for --best-of: likelihood (default), or credibility, by the model's classifier "
        "of original text.",
    ),
]  # fmt: skip
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FILE.jsonl", show_default=False,
        help="Answers of the batch; what is there already is skipped.",
    ),
]  # fmt: skip

_NO_RANKING = {"best_of": None, "rank": None}


def generate(  # noqa: PLR0913 - a parameter for each flag
    model: Model = None,
    prompt: Prompts = None,
    chat: Chat = False,
    control: Controls = None,
    source: Input = None,
    target: Output = None,
    best_of: BestOf = None,
    rank: Rank = None,
    adversarial: Adversarial = False,
    sets: Sets = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Continue text with a trained model. With --json also token ids are printed."""
    kind: type[GenerateConfig | AdversarialConfig]
    kind = AdversarialConfig if adversarial else GenerateConfig
    if explain is not None:
        flags.print_explanation(kind, explain, as_json)
        return 0
    path = flags.require(model, "MODEL", "generate")
    config = flags.parse_settings(kind, [*_control_sets(control or ()), *(sets or ())])
    ranking: dict[str, Any] = {"best_of": best_of, "rank": rank}
    _check_flags(adversarial, source, chat, ranking)
    if chat and config.control.given:
        raise ConfigError(
            "--control names attributes of a text, and --chat sends a message: remove one of them"
        )
    if config.control.given and not prompt and source is target is None:
        prompt = [""]  # Attributes alone are a prompt.
    prompts = _read_prompts(prompt, source, target)
    loading = set(EngineConfig.model_fields)
    settings = {"chat": chat, **config.model_dump(exclude=loading)}
    with exit_on_interrupt():
        import_module("moesaic.serve.engine_thread")
        import_module("moesaic.serve.loading")
    with Engine(path, **config.model_dump(include=loading)) as engine:
        for warning in engine.warnings:
            screen.print_warning(warning)
        if source is not None and target is not None:
            run = _write_pairs if adversarial else _run_batch
            run(engine, source, target, settings, as_json)
        elif as_json:
            rows = engine.generate(prompts, **ranking, **settings)
            screen.print_json([row._asdict() for row in rows])
        elif len(prompts) == config.n == 1 and ranking == _NO_RANKING:
            _print_stream(engine, prompts[0], settings)
        else:
            rows = engine.generate(prompts, **ranking, **settings)
            print("\n".join(_describe(row, rank) for row in rows), end="")
            if ranking != _NO_RANKING:
                _warn_of_cut_texts(rows, config.max_tokens)
    return 0


def _warn_of_cut_texts(rows: Sequence[Generation], max_tokens: int) -> None:
    """Say how many ranked texts did not end by themselves."""
    num_cut = sum(row.finish_reason == "length" for row in rows)
    if num_cut:
        screen.print_warning(
            f"max_tokens = {max_tokens} cut {num_cut} of {len(rows)} texts, which were ranked "
            "without a sentence that is not complete: raise it (--set max_tokens=N) to rank whole "
            "ones"
        )


def _check_flags(
    adversarial: bool, source: Path | None, chat: bool, ranking: Mapping[str, object]
) -> None:
    """Raise for flags that exclude each other."""
    if source is not None and ranking != _NO_RANKING:
        raise ConfigError("--input ranks no texts: remove --best-of and --rank")
    if adversarial and source is None:
        raise ConfigError(
            "--adversarial needs a text and a file to write: give --input PATH and --output FILE"
        )
    if adversarial and chat:
        raise ConfigError("--adversarial continues paragraphs: remove --chat")


def _describe(row: Generation, rank: str | None) -> str:
    """Return a text under its prompt, with the score of a ranked one."""
    score = "" if row.score is None else f"[{rank or 'likelihood'} {row.score:.4f}] "
    return f"--- {score}{row.prompt}\n{row.text}\n"


def _control_sets(items: Sequence[str]) -> list[str]:
    """Return the items of `--control` as items of `--set`.

    An item without `=` is one more keyword: keywords=list,sort,length=80.
    """
    values: dict[str, list[str]] = {}
    key = ""
    for item in ",".join(items).split(",") if items else ():
        name, separator, value = item.partition("=")
        if separator:
            key = name.strip()
        elif key != "keywords":
            raise ConfigError(
                f"--control: '{item}' is not of the form key=value, as in genre=docs,length=80"
            )
        given = values.setdefault(key, [])
        if given and key != "keywords":
            raise ConfigError(f"--control: {key} stands twice: a text has one")
        given.append((value if separator else name).strip())
    return [f"control.{name}={_control_value(name, given)}" for name, given in values.items()]


def _control_value(name: str, given: list[str]) -> str:
    """Return the value of an attribute as TOML: numbers and lists as such, all else as text."""
    is_number = name in ("length", "soft_prompts") and given[-1].isdecimal()
    return given[-1] if is_number else keys.toml(given if name == "keywords" else given[-1])


def _run_batch(
    engine: Engine, source: Path, target: Path, settings: dict[str, Any], as_json: bool
) -> None:
    with batch_progress(source, is_shown=not as_json) as on_progress:
        counts = run_batch(engine, source, target, on_progress=on_progress, **settings)
    if as_json:
        screen.print_json(counts._asdict())
        return
    skipped = f", {counts.skipped} skipped" if counts.skipped else ""
    screen.print_line(
        f"{counts.answered} answered, {counts.failed} failed{skipped}: {target} "
        f"({counts.tokens:,} new tokens)"
    )


def _write_pairs(
    engine: Engine, source: Path, target: Path, settings: dict[str, Any], as_json: bool
) -> None:
    from moesaic.api.adversarial import build_pairs  # Imports torch.

    del settings["chat"]
    with pairs_progress(is_shown=not as_json) as on_progress:
        counts = build_pairs(engine, source, target, on_progress=on_progress, **settings)
    if as_json:
        screen.print_json(counts._asdict())
        return
    present = f", {counts.present} there already" if counts.present else ""
    dropped = ""
    if counts.dropped:
        reason = f"nothing complete behind the prefix within max_tokens = {settings['max_tokens']}"
        dropped = f", {counts.dropped} of {counts.total} paragraphs dropped ({reason})"
    screen.print_line(
        f"{counts.pairs} pairs written{present}{dropped}: {target} ({counts.tokens:,} new tokens)"
    )


def _print_stream(engine: Engine, prompt: str, settings: dict[str, Any]) -> None:
    """Print a text while it is made; whatever interrupts it is told on a line of its own."""
    pieces = engine.stream(prompt, **settings)
    is_terminal = has_begun = sys.stdout.isatty()
    if is_terminal:
        end = "\n" if settings["chat"] else ""
        screen.out().print(Text(prompt, style="dim"), end=end)
    try:
        for piece in pieces:
            print(screen.printable(piece) if is_terminal else piece, end="", flush=True)
            has_begun = True
    except BaseException:
        if has_begun:
            print(flush=True)
        raise
    print()


def _read_prompts(
    given: Sequence[str] | None, source: Path | None, target: Path | None
) -> list[str]:
    """Return the prompts of the command line or stdin; none for a batch."""
    if source is not None or target is not None:
        if given:
            raise ConfigError("--prompt and a batch exclude each other: remove one of them")
        if source is None or target is None:
            raise ConfigError("a batch needs both files: give --input FILE and --output FILE")
        return []
    if given:
        return list(given)
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("there is no prompt: give --prompt TEXT, or text on stdin")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("stdin is empty: give --prompt TEXT, or text on stdin")
    return [text]
