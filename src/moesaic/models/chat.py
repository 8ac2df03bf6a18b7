"""Chat templates: render messages as the text that a model was trained on.

For a whole conversation they also find the assistant's answers. A template may mark them with `{%
generation %}`. For any other template, each prefix of the conversation is rendered too: an answer
is the text after its generation prompt.

Templates silently drop tools they do not support, and some drop system messages. A whole
conversation is therefore rendered a second time, with a unique marker in each tool, call, result
and system message. A part is lost if its marker is missing from the text.

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

from moesaic.base.errors import DataError
from moesaic.models.tokenizer import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOOL_USE_FILE,
    FileTokenizer,
    read_json_object,
    special_tokens,
)

DEFAULT_TEMPLATE = "default"
"""Name of the template to use if a model has several."""
TOOL_USE_TEMPLATE = "tool_use"
"""Name of the preferred template for conversations with tools."""
TOOL_CALLS = "tool_calls"
"""Key of a message that holds an assistant's calls."""

TextSpan = tuple[int, int]
"""Characters [start, stop) of a text."""
Messages = Sequence[dict[str, Any]]
"""Messages of a conversation, each with a `role` (system, user, assistant, tool) and `content` or
`tool_calls`. A key with the value None counts as absent."""
Tools = Sequence[dict[str, Any]] | None
"""JSON schemas of the tools; None if the conversation declares none."""

_SAMPLE_ANSWER = "Quite so."
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class _CompiledTemplate(NamedTuple):
    origin: str
    """Its source, for messages."""
    template: Template
    marks_answers: bool
    """True if it marks the assistant's answers."""


class ChatTemplate:
    """Chat template beside a tokenizer."""

    def __init__(self, tokenizer: Path, *, has_clock: bool = True) -> None:
        """Read the template.

        Args:
            tokenizer: the tokenizer's file, or its directory.
            has_clock: whether the template may read the time; without it, rendering is
                reproducible.
        """
        directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
        settings = read_json_object(directory / SETTINGS_FILE)
        found = _find_templates(directory, settings)
        self._special_tokens = special_tokens(directory)
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
        parts = self._render(messages, tools, is_complete=True).split(self._marker)
        self._check_nothing_lost(messages, tools)
        text = "".join(parts)
        if self._template_for(tools).marks_answers:
            offsets = [0, *accumulate(len(part) for part in parts)]
            spans = [(offsets[i], offsets[i + 1]) for i in range(1, len(parts), 2)]
        else:
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [
                self._find_answer(messages[: i + 1], tools, text, tuple(turn_ends)) for i in answers
            ]
        return text, [(start, stop) for start, stop in spans if start < stop]

    def end_of_turn_id(self, tokenizer: FileTokenizer) -> int | None:
        """Return the token that the template writes after an answer; None if it is not one."""
        messages = [
            {"role": "user", "content": "Are you there?"},
            {"role": "assistant", "content": _SAMPLE_ANSWER},
        ]
        try:
            text = self._render(messages, None, is_complete=True).replace(self._marker, "")
        except DataError:  # The template rejects this minimal conversation.
            return None
        _, answer, rest = text.rpartition(_SAMPLE_ANSWER)
        tokens = tokenizer.added_token_texts() if answer else []
        closing = max((end for end in tokens if rest.lstrip().startswith(end)), key=len, default="")
        ids = tokenizer.encode(closing, has_special_tokens=True)
        return ids[0] if len(ids) == 1 else None

    def _check_nothing_lost(self, messages: Messages, tools: Tools) -> None:
        """Raise if the template drops a tool, call, result or system message."""
        program, marked = self._template_for(tools), _MarkedConversation(messages, tools)
        if not marked.markers:
            return
        try:
            text = self._render(marked.messages, marked.tools, is_complete=True)
        except DataError:  # The template accepts only some names or arguments.
            return
        answers = "".join(text.split(self._marker)[1::2]) if program.marks_answers else text
        for marker in marked.markers:
            if marker.text not in (answers if marker.by_assistant else text):
                raise DataError(
                    f"{program.origin} leaves out {marker.part}: use a model whose template "
                    "supports it, or put it into the content of another message"
                )

    def _template_for(self, tools: Tools) -> _CompiledTemplate:
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
                f"{program.origin} fails ({type(error).__name__}: {error}): fix it, or give "
                f"'content' beside '{TOOL_CALLS}' and 'arguments' in the form that it supports"
            ) from None


class TemplateRefusal(TemplateError):
    """Error that a template raised with `raise_exception`."""


class _Marker(NamedTuple):
    """Marker in one part of a conversation."""

    text: str
    part: str
    """Description of the part."""
    by_assistant: bool
    """True if the part belongs to an assistant's answer."""


class _MarkedConversation:
    """Conversation with a marker in each tool, call, result and system message."""

    def __init__(self, messages: Messages, tools: Tools) -> None:
        self.markers: list[_Marker] = []
        # Digits only: no template has a reason to escape them.
        self._nonce = str(uuid4().int)
        self.messages = [self._mark_message(one, i) for i, one in enumerate(messages, start=1)]
        self.tools = tools and [self._mark_named(tool, "the tool") for tool in tools]

    def _mark_message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        if message["role"] in ("tool", "system"):
            part = f"message {number}, which is of the role {message['role']}"
            return {**message, "content": message["content"] + self._add_marker(part)}
        if not message.get(TOOL_CALLS):
            return message
        part = f"of message {number}, an answer, the call of"
        calls = [self._mark_named(one, part, by_assistant=True) for one in message[TOOL_CALLS]]
        return {**message, TOOL_CALLS: calls}

    def _mark_named(
        self, item: dict[str, Any], part: str, by_assistant: bool = False
    ) -> dict[str, Any]:
        part = f"{part} '{function_of(item)['name']}'"
        return _append_text(item, self._add_marker(part, by_assistant))

    def _add_marker(self, part: str, by_assistant: bool = False) -> str:
        text = f"{self._nonce}{len(self.markers):08}"
        self.markers.append(_Marker(text, part, by_assistant))
        return text


def function_of(item: dict[str, Any]) -> Any:
    """Return the function object of a call or tool, which may be the item itself."""
    return item.get("function", item)


def _append_text(item: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a call or tool with `text` appended to its name and added to its arguments.

    The arguments carry it too, because some templates write a call's `id` in place of its name.
    """
    if "function" in item:
        return {**item, "function": _append_text(item["function"], text)}
    changed: dict[str, Any] = {"name": item["name"] + text}
    arguments = item.get("arguments")
    if isinstance(arguments, dict):
        changed["arguments"] = {**arguments, text: text}
    elif isinstance(arguments, str):
        changed["arguments"] = arguments + text
    return {**item, **changed}


def _compile_template(environment: Environment, origin: str, text: str) -> _CompiledTemplate:
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise DataError(
            f"{origin} is no Jinja template ({error}): fix it, or download it again from the "
            "model's publisher"
        ) from None
    return _CompiledTemplate(origin, template, bool(_GENERATION_TAG.search(text)))


def _find_templates(directory: Path, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (source, text) of the template, and of the tool template if there is one.

    A template file takes precedence over the settings.
    """
    origin = f"chat_template of '{directory / SETTINGS_FILE}'"
    stated = settings.get("chat_template")
    if not isinstance(stated, list):
        stated = [{"name": DEFAULT_TEMPLATE, "template": stated}]
    texts = {one.get("name"): one.get("template") for one in stated}
    found = {name: (origin, text) for name, text in texts.items() if isinstance(text, str)}
    own, tool_use = directory / TEMPLATE_FILE, directory / TOOL_USE_FILE
    if own.is_file():
        found = {DEFAULT_TEMPLATE: (f"'{own}'", _read_text(own))}
    if tool_use.is_file():
        found[TOOL_USE_TEMPLATE] = f"'{tool_use}'", _read_text(tool_use)
    if DEFAULT_TEMPLATE not in found:
        raise DataError(
            f"the tokenizer in '{directory}' has no chat template: choose another one, or write "
            f"the model's template into '{own}'"
        )
    return [found[name] for name in (DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE) if name in found]


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
    result.globals["raise_exception"] = _raise_exception
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
