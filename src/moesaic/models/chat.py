"""Chat templates: from messages to the text that a model was taught to answer.

Of a whole conversation they also tell what the assistant says. A template that marks it
(`{% generation %}`) is taken by its word. Of any other, the beginnings of the conversation are
rendered too: an answer is what the text gains from where the model is asked for it.

A template is a Jinja program that came with a model's files, so it runs in Jinja's sandbox, with
the settings and the few functions that templates are written for. It sees the messages, the tools
that may be called, the tokenizer's special tokens, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moesaic.base.errors import DataError
from moesaic.models.calls import CALLS, Marked, Messages, Tools
from moesaic.models.tokenizer import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOOL_USE_FILE,
    FileTokenizer,
)

TOKENS_FILE = "special_tokens_map.json"
DEFAULT = "default"
"""The name of the one that is used where a model has several templates."""
TOOL_USE = "tool_use"
"""The name of the one that goes before it for conversations with tools."""
Span = tuple[int, int]
"""A stretch of text: from here up to there."""

_ANSWER = "Quite so."
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class _Program(NamedTuple):
    """A template that is ready to run."""

    origin: str
    """Where it was found, in words."""
    template: Template
    marked: bool
    """Whether it marks what the assistant says."""
    calls: bool
    """Whether it knows that an assistant may call tools."""


class ChatTemplate:
    """The template that lies beside a tokenizer."""

    def __init__(self, tokenizer: Path, otherwise: str, *, clock: bool = True) -> None:
        """Read the template.

        Args:
            tokenizer: the tokenizer's file, or the directory that holds it.
            otherwise: what a user can do who has no template.
            clock: whether the template may ask for the time; without it, the same messages always
                give the same text.
        """
        directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
        settings = _read(directory / SETTINGS_FILE)
        found = _find(directory, settings, otherwise)
        self._tokens = _special_tokens(directory, settings)
        stated = json.dumps([*(text for _, text in found), self._tokens], sort_keys=True)
        self.digest = hashlib.sha256(stated.encode(errors="surrogatepass")).hexdigest()
        """Hash of all that decides the text of messages, time aside."""
        environment = _environment(clock)
        self._mark: str = getattr(environment, _Generation.MARK)
        self._programs = [_program(environment, origin, text) for origin, text in found]

    def render(self, messages: Messages) -> str:
        """`messages` as text, up to where the model's answer begins."""
        return self._run(messages, None, answered=False).replace(self._mark, "")

    def answers(
        self, messages: Messages, ends: Sequence[str], tools: Tools = None
    ) -> tuple[str, list[Span]]:
        """A whole conversation as text, and where in it the assistant speaks.

        Args:
            messages: the conversation.
            ends: texts that may end a turn. Blanks that the template writes after one of them
                are not the assistant's.
            tools: what the assistant may call.
        """
        program = self._program(tools)
        if not program.calls and any(message.get(CALLS) for message in messages):
            raise DataError(
                f"{program.origin} knows no '{CALLS}', and would write an answer without its "
                "calls: take a model whose template does, or write them into the answer's content"
            )
        parts = self._run(messages, tools, answered=True).split(self._mark)
        self._check(messages, tools, parts)
        text = "".join(parts)
        if program.marked:
            stops = [0, *accumulate(len(part) for part in parts)]
            spans = [(stops[i], stops[i + 1]) for i in range(1, len(parts), 2)]
        else:
            said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [self._answer(messages[: i + 1], tools, text, tuple(ends)) for i in said]
        return text, [(start, stop) for start, stop in spans if start < stop]

    def closing(self, ends: Sequence[str]) -> str | None:
        """Which of `ends` the template closes an answer by; None: by none of them."""
        messages = [
            {"role": "user", "content": "Are you there?"},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text = self._run(messages, None, answered=True).replace(self._mark, "")
        except DataError:  # It takes no talk as plain as this.
            return None
        _, found, rest = text.rpartition(_ANSWER)
        closing = [end for end in ends if found and end and rest.lstrip().startswith(end)]
        return max(closing, key=len, default=None)

    def _check(self, messages: Messages, tools: Tools, parts: Sequence[str]) -> None:
        """That the template leaves out no tool, call, result or message of the system of what it
        wrote in `parts`."""
        program, marked = self._program(tools), Marked(messages, tools)
        if not marked.marks:
            return
        sought = [mark.text for mark in marked.marks]
        try:
            parts = self._run(marked.messages, marked.tools, answered=True).split(self._mark)
        except DataError:  # It takes no names or arguments but those it knows: these have to do.
            sought = [mark.name for mark in marked.marks]
        text = "".join(parts)
        said = "".join(parts[1::2]) if program.marked else text
        for mark, words in zip(marked.marks, sought, strict=True):
            if words not in (said if mark.said else text):
                raise DataError(f"{program.origin} {mark.lost}")

    def _program(self, tools: Tools) -> _Program:
        """The one for conversations with `tools`."""
        return self._programs[0 if tools is None else -1]

    def _answer(self, messages: Messages, tools: Tools, text: str, ends: tuple[str, ...]) -> Span:
        """Where in `text`, which begins with `messages`, the last one of them stands."""
        before = self._run(messages[:-1], tools, answered=False)
        after = self._run(messages, tools, answered=True)
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{self._program(tools).origin} writes message {len(messages)}, an answer, in "
                "other words than it asks the model for it, or rewrites it as the conversation "
                "goes on (thoughts that come or go?): put {% generation %} and {% endgeneration %} "
                "around what the assistant says there"
            )
        bare = after.rstrip()
        return len(before), len(bare if bare.endswith(ends) else after)

    def _run(self, messages: Messages, tools: Tools, answered: bool) -> str:
        """What the template writes, with a mark at both ends of what it marks."""
        stated = [{k: v for k, v in message.items() if v is not None} for message in messages]
        program = self._program(tools)
        try:
            return program.template.render(
                **{
                    **self._tokens, "messages": stated, "tools": tools, "documents": None,
                    "add_generation_prompt": not answered,
                }
            )  # fmt: skip
        except SecurityError as error:
            raise DataError(
                f"{program.origin} does what no template may ({error}): use none from that source"
            ) from None
        except TemplateRefusal as error:
            raise DataError(f"{program.origin} does not take these messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template may fail in any way
            raise DataError(
                f"{program.origin} fails ({type(error).__name__}: {error}): {_remedy(messages)}"
            ) from None


def end_of_turn(template: ChatTemplate, tokenizer: FileTokenizer) -> int | None:
    """The token by which `template` closes an answer; None: it closes answers by plain text."""
    closing = template.closing(tokenizer.added())
    ids = [] if closing is None else tokenizer.encode(closing, whole=True)
    return ids[0] if len(ids) == 1 else None


class TemplateRefusal(TemplateError):
    """A template has called `raise_exception`."""


def _remedy(messages: Messages) -> str:
    """What to do about a template that fails: not all take calls in every form."""
    for number, message in enumerate(messages, start=1):
        if message.get(CALLS) and message.get("content") is None:
            return (
                f"it may not take message {number}, which has '{CALLS}' and no 'content': give it "
                f"some (\"\" is enough for most), or let the template write '{CALLS}' without"
            )
    if any(message.get(CALLS) for message in messages):
        return (
            f"give 'arguments' of '{CALLS}' in the form that it takes, text or object, or mend it"
        )
    return "mend it, or take it from the model's publisher again"


def _program(environment: Environment, origin: str, text: str) -> _Program:
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise DataError(
            f"{origin} is no Jinja template ({error}): mend it, or take it from the model's "
            "publisher again"
        ) from None
    return _Program(origin, template, bool(_MARKED.search(text)), CALLS in text)


def _find(directory: Path, settings: dict[str, Any], otherwise: str) -> list[tuple[str, str]]:
    """The template, in words and as text: a file of its own goes before the settings.

    Where conversations with tools have another one, that is the second.
    """
    files = [directory / name for name in (TEMPLATE_FILE, TOOL_USE_FILE)]
    own, more = ([(f"'{path}'", _text(path))] if path.is_file() else [] for path in files)
    return [*own, *more] if own else [*_stated(directory, settings, otherwise), *more]


def _stated(directory: Path, settings: dict[str, Any], otherwise: str) -> list[tuple[str, str]]:
    """Templates of the settings."""
    own = directory / TEMPLATE_FILE
    origin = f"chat_template of '{directory / SETTINGS_FILE}'"
    stated = settings.get("chat_template")
    found = [stated]
    if isinstance(stated, list):
        named = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}
        if DEFAULT not in named:
            raise DataError(
                f"{origin} is a list without '{DEFAULT}': write the one to use into '{own}'"
            )
        found = [named[name] for name in (DEFAULT, TOOL_USE) if name in named]
    if found[0] is None:
        raise DataError(
            f"the tokenizer in '{directory}' has no chat template: {otherwise}, or write the "
            f"model's template into '{own}'"
        )
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found):
        raise DataError(f"{origin} is no text: mend it, or write the template into '{own}'")
    return [(origin, text) for text in texts]


def _special_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and their kin."""
    # The older file counts only beside settings of its own age, which list no added tokens.
    newer = "added_tokens_decoder" in settings
    stated = settings if newer else {**settings, **_read(directory / TOKENS_FILE)}
    tokens = {key: value for key, value in stated.items() if key.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not JSON ({error}): mend or remove it") from None
    return content if isinstance(content, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}): restore it") from None


def _environment(clock: bool) -> ImmutableSandboxedEnvironment:
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    result.filters["tojson"] = _to_json
    result.globals |= {
        "raise_exception": _refuse, "namespace": _Names, "dict": _table,
    }  # fmt: skip
    if clock:
        result.globals["strftime_now"] = _now
    return result


class _Generation(Extension):
    """`{% generation %}`, which marks what a model says."""

    MARK = "generation_mark"

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}
        # No message can hold it, as nobody knows it.
        environment.extend(**{self.MARK: f"\ufdd0{uuid4().hex}\ufdd1"})

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements up to `{% endgeneration %}`, with variables of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.TemplateData(getattr(self.environment, self.MARK), lineno=line)
        ends = [nodes.Output([mark], lineno=line) for _ in range(2)]
        return nodes.Scope([ends[0], *body, ends[1]], lineno=line)


class _Names(Namespace):
    """Variables that live beyond a loop; no name may lead into Python's own."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):  # the first is self, which may also name a value
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it sets {name!r} of a namespace")


def _table(*args: Any, **values: Any) -> dict[Any, Any]:
    """`dict` without the attributes of a class."""
    return dict(*args, **values)


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the `json` module has it: Jinja's own filter escapes what HTML would misread."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
