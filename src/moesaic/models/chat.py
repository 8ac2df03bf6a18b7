"""Chat templates: render messages as the text that a model was trained on.

For a whole conversation they also find the assistant's answers. A template may mark them with `{%
generation %}`. For any other template, each prefix of the conversation is rendered too: an answer
is the text after its generation prompt.

A template is a Jinja program from a model's files, so it runs in Jinja's sandbox. It sees the
messages, the tools, the tokenizer's special tokens and the few functions that templates expect.
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
from moesaic.models.tokenizer import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOOL_USE_FILE,
    FileTokenizer,
    read_json_object,
)
from moesaic.models.tool_calls import TOOL_CALLS, MarkedConversation, Messages, Tools

TOKENS_FILE = "special_tokens_map.json"
DEFAULT_TEMPLATE = "default"
"""Name of the template to use if a model has several."""
TOOL_USE_TEMPLATE = "tool_use"
"""Name of the preferred template for conversations with tools."""
TextSpan = tuple[int, int]
"""Characters [start, stop) of a text."""

_SAMPLE_ANSWER = "Quite so."
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class _CompiledTemplate(NamedTuple):
    """Compiled template."""

    origin: str
    """Its source, for messages."""
    template: Template
    marks_answers: bool
    """True if it marks the assistant's answers."""
    supports_tool_calls: bool
    """True if it mentions tool calls."""


class ChatTemplate:
    """Chat template beside a tokenizer."""

    def __init__(self, tokenizer: Path, fallback_hint: str, *, has_clock: bool = True) -> None:
        """Read the template.

        Args:
            tokenizer: the tokenizer's file, or its directory.
            fallback_hint: advice in the error message if there is no template.
            has_clock: whether the template may read the time; without it, rendering is
                reproducible.
        """
        directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
        settings = read_json_object(directory / SETTINGS_FILE)
        found = _find_templates(directory, settings, fallback_hint)
        self._special_tokens = _special_tokens(directory, settings)
        state = json.dumps([*(text for _, text in found), self._special_tokens], sort_keys=True)
        self.digest = hashlib.sha256(state.encode(errors="surrogatepass")).hexdigest()
        """Hash of everything that determines the rendered text, except the time."""
        environment = _make_environment(has_clock)
        self._marker: str = getattr(environment, _GenerationExtension.MARKER)
        self._templates = [_compile_template(environment, origin, text) for origin, text in found]

    def render(self, messages: Messages) -> str:
        """Return `messages` as text, up to the start of the model's answer."""
        return self._render(messages, None, is_complete=False).replace(self._marker, "")

    def render_with_answers(
        self, messages: Messages, turn_ends: Sequence[str], tools: Tools = None
    ) -> tuple[str, list[TextSpan]]:
        """Return a whole conversation as text, and the spans of the assistant's answers.

        Args:
            messages: the conversation.
            turn_ends: texts that may end a turn; whitespace after one of them is not part of the
                answer.
            tools: tools of the conversation.
        """
        program = self._template_for(tools)
        if not program.supports_tool_calls and any(message.get(TOOL_CALLS) for message in messages):
            raise DataError(
                f"{program.origin} knows no '{TOOL_CALLS}' and would drop the calls of an answer: "
                "use a model whose template supports them, or put them into the answer's content"
            )
        parts = self._render(messages, tools, is_complete=True).split(self._marker)
        self._check_nothing_lost(messages, tools, parts)
        text = "".join(parts)
        if program.marks_answers:
            offsets = [0, *accumulate(len(part) for part in parts)]
            spans = [(offsets[i], offsets[i + 1]) for i in range(1, len(parts), 2)]
        else:
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [
                self._find_answer(messages[: i + 1], tools, text, tuple(turn_ends)) for i in answers
            ]
        return text, [(start, stop) for start, stop in spans if start < stop]

    def find_turn_end(self, turn_ends: Sequence[str]) -> str | None:
        """Return the longest of `turn_ends` that the template writes after an answer, or None."""
        messages = [
            {"role": "user", "content": "Are you there?"},
            {"role": "assistant", "content": _SAMPLE_ANSWER},
        ]
        try:
            text = self._render(messages, None, is_complete=True).replace(self._marker, "")
        except DataError:  # The template rejects this minimal conversation.
            return None
        _, answer, rest = text.rpartition(_SAMPLE_ANSWER)
        closing = [end for end in turn_ends if answer and end and rest.lstrip().startswith(end)]
        return max(closing, key=len, default=None)

    def _check_nothing_lost(self, messages: Messages, tools: Tools, parts: Sequence[str]) -> None:
        """Raise if the template dropped a tool, call, result or system message from `parts`."""
        program, marked = self._template_for(tools), MarkedConversation(messages, tools)
        if not marked.markers:
            return
        expected = [marker.text for marker in marked.markers]
        try:
            parts = self._render(marked.messages, marked.tools, is_complete=True).split(
                self._marker
            )
        # The template rejects unknown names or arguments, so look for the plain names.
        except DataError:
            expected = [marker.name for marker in marked.markers]
        text = "".join(parts)
        answers = "".join(parts[1::2]) if program.marks_answers else text
        for marker, needle in zip(marked.markers, expected, strict=True):
            if needle not in (answers if marker.by_assistant else text):
                raise DataError(f"{program.origin} {marker.error}")

    def _template_for(self, tools: Tools) -> _CompiledTemplate:
        """Return the template for conversations with or without `tools`."""
        return self._templates[0 if tools is None else -1]

    def _find_answer(
        self, messages: Messages, tools: Tools, text: str, turn_ends: tuple[str, ...]
    ) -> TextSpan:
        """Return the span in `text` of the last of `messages`, with which `text` starts."""
        before = self._render(messages[:-1], tools, is_complete=False)
        after = self._render(messages, tools, is_complete=True)
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{self._template_for(tools).origin} writes message {len(messages)}, an answer, in "
                "other words later in the conversation (does it drop thoughts?), or not right "
                "after its generation prompt: put {% generation %} and {% endgeneration %} around "
                "the answers in the template"
            )
        bare = after.rstrip()
        return len(before), len(bare if bare.endswith(turn_ends) else after)

    def _render(self, messages: Messages, tools: Tools, is_complete: bool) -> str:
        """Render the template, with a marker at both ends of each marked answer."""
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        program = self._template_for(tools)
        try:
            return program.template.render(
                **{
                    **self._special_tokens, "messages": given, "tools": tools, "documents": None,
                    "add_generation_prompt": not is_complete,
                }
            )  # fmt: skip
        except SecurityError as error:
            raise DataError(
                f"{program.origin} is unsafe ({error}): use no template from that source"
            ) from None
        except TemplateRefusal as error:
            raise DataError(f"{program.origin} rejects these messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template may fail in any way
            raise DataError(
                f"{program.origin} fails ({type(error).__name__}: {error}): "
                f"{_suggest_fix(messages)}"
            ) from None


def end_of_turn_id(template: ChatTemplate, tokenizer: FileTokenizer) -> int | None:
    """Return the token with which `template` ends an answer; None if it is not one token."""
    closing = template.find_turn_end(tokenizer.added_token_texts())
    ids = [] if closing is None else tokenizer.encode(closing, with_special_tokens=True)
    return ids[0] if len(ids) == 1 else None


class TemplateRefusal(TemplateError):
    """Error that a template raised with `raise_exception`."""


def _suggest_fix(messages: Messages) -> str:
    """Return advice for a template that fails: not all support every form of tool calls."""
    for number, message in enumerate(messages, start=1):
        if message.get(TOOL_CALLS) and message.get("content") is None:
            return (
                f"it may not support message {number}, which has '{TOOL_CALLS}' and no 'content': "
                f'give it some ("" is enough for most), or make the template accept '
                f"'{TOOL_CALLS}' alone"
            )
    if any(message.get(TOOL_CALLS) for message in messages):
        return (
            f"give 'arguments' of '{TOOL_CALLS}' in the form that it supports, text or object, or "
            "fix the template"
        )
    return "fix it, or download it again from the model's publisher"


def _compile_template(environment: Environment, origin: str, text: str) -> _CompiledTemplate:
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise DataError(
            f"{origin} is no Jinja template ({error}): fix it, or download it again from the "
            "model's publisher"
        ) from None
    return _CompiledTemplate(
        origin, template, bool(_GENERATION_TAG.search(text)), TOOL_CALLS in text
    )


def _find_templates(
    directory: Path, settings: dict[str, Any], fallback_hint: str
) -> list[tuple[str, str]]:
    """Return (source, text) of the template, and of the tool template if there is one.

    A template file takes precedence over the settings.
    """
    files = [directory / name for name in (TEMPLATE_FILE, TOOL_USE_FILE)]
    own, tool_use = ([(f"'{path}'", _read_text(path))] if path.is_file() else [] for path in files)
    return (
        [*own, *tool_use]
        if own
        else [*_templates_in_settings(directory, settings, fallback_hint), *tool_use]
    )


def _templates_in_settings(
    directory: Path, settings: dict[str, Any], fallback_hint: str
) -> list[tuple[str, str]]:
    """Return (source, text) of the templates in the tokenizer settings."""
    own = directory / TEMPLATE_FILE
    origin = f"chat_template of '{directory / SETTINGS_FILE}'"
    setting = settings.get("chat_template")
    candidates = [setting]
    if isinstance(setting, list):
        by_name = {one.get("name"): one.get("template") for one in setting if isinstance(one, dict)}
        if DEFAULT_TEMPLATE not in by_name:
            raise DataError(
                f"{origin} is a list without '{DEFAULT_TEMPLATE}': write the template to use into "
                f"'{own}'"
            )
        candidates = [
            by_name[name] for name in (DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE) if name in by_name
        ]
    if candidates[0] is None:
        raise DataError(
            f"the tokenizer in '{directory}' has no chat template: {fallback_hint}, or write the "
            f"model's template into '{own}'"
        )
    texts = [one for one in candidates if isinstance(one, str)]
    if len(texts) < len(candidates):
        raise DataError(f"{origin} is no text: fix it, or write the template into '{own}'")
    return [(origin, text) for text in texts]


def _special_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the other special tokens."""
    # The older file only applies to settings of its age, which list no added tokens.
    is_newer = "added_tokens_decoder" in settings
    declared = settings if is_newer else {**settings, **read_json_object(directory / TOKENS_FILE)}
    tokens = {key: value for key, value in declared.items() if key.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}): restore it") from None


def _make_environment(has_clock: bool) -> ImmutableSandboxedEnvironment:
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationExtension, loopcontrols]
    )
    result.filters["tojson"] = _to_json
    result.globals |= {
        "raise_exception": _raise_exception, "namespace": _SafeNamespace, "dict": _make_dict,
    }  # fmt: skip
    if has_clock:
        result.globals["strftime_now"] = _strftime_now
    return result


class _GenerationExtension(Extension):
    """Jinja extension for `{% generation %}`, which marks an assistant's answer."""

    MARKER = "generation_mark"

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}
        # Random, so that no message can contain it.
        environment.extend(**{self.MARKER: f"\ufdd0{uuid4().hex}\ufdd1"})

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the statements up to `{% endgeneration %}`, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.TemplateData(getattr(self.environment, self.MARKER), lineno=line)
        ends = [nodes.Output([mark], lineno=line) for _ in range(2)]
        return nodes.Scope([ends[0], *body, ends[1]], lineno=line)


class _SafeNamespace(Namespace):
    """Jinja namespace without private names, which could reach Python internals."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):  # args[0] is self; a value may also be named self.
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it sets {name!r} of a namespace")


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """Return a dict without exposing the attributes of the class."""
    return dict(*args, **values)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as the `json` module writes it; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
