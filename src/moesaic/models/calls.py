"""Tools that an assistant may call, its calls, and what a template must not lose of a conversation.

Templates that know no tools, or other ones than a conversation has, leave them out without a word,
and some do so with what the system says. So a conversation is written once more with a mark in each
tool, call, result and message of the system: what is lost, lacks its mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

CALLS = "tool_calls"
"""The key of a message under which an assistant's calls are."""

Messages = Sequence[dict[str, Any]]
"""What was said: each message with a `role` (system, user, assistant, tool) and its `content`, or
the `tool_calls` of an assistant. A key of a message that has None is as good as missing."""
Tools = Sequence[dict[str, Any]] | None
"""What may be called: JSON schemas; None where that is not said."""


_CALL = (
    "leaves a call of '{name}' out of message {number}, an answer: let it write '" + CALLS + "' "
    "whatever 'content' is beside them, within what the assistant says, or write calls into the "
    "answer's content"
)
_RESULT = (
    "leaves out message {number}, which is of the role tool: take a model whose template writes "
    "those, or let the user say what it holds"
)
_SYSTEM = (
    "leaves out message {number}, which is of the role system: take a model whose template writes "
    "those, let the user say what it holds, or remove it (data.system, if that is where it is from)"
)
_TOOL = (
    "leaves out the tool '{name}': take a model whose template writes tools, say in the system "
    "message what there is, or leave 'tools' out"
)


class Mark(NamedTuple):
    """What tells whether a part of a conversation was written."""

    text: str
    name: str
    """What is there without a mark: the function's; empty of messages."""
    said: bool
    """Whether the assistant says that part."""
    lost: str
    """What is wrong, and what to do, where it is not there."""


class Marked:
    """A conversation with a mark in each tool, call, result and message of the system."""

    def __init__(self, messages: Messages, tools: Tools) -> None:
        self.marks: list[Mark] = []
        # Digits, which no template has a reason to write in another way.
        self._seal = str(uuid4().int)
        self.messages = [self._message(one, i) for i, one in enumerate(messages, start=1)]
        self.tools = tools and [self._named(tool, False, _TOOL) for tool in tools]

    def _message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        lost = {"tool": _RESULT, "system": _SYSTEM}.get(message["role"])
        if lost is not None:
            return {**message, "content": message["content"] + self._put(False, lost, number)}
        if not message.get(CALLS):
            return message
        return {**message, CALLS: [self._named(one, True, _CALL, number) for one in message[CALLS]]}

    def _named(self, one: dict[str, Any], said: bool, lost: str, number: int = 0) -> dict[str, Any]:
        return _with(one, self._put(said, lost, number, function_of(one)["name"]))

    def _put(self, said: bool, lost: str, number: int, name: str = "") -> str:
        text = f"{self._seal}{len(self.marks):08}"
        self.marks.append(Mark(text, name, said, lost.format(number=number, name=name)))
        return text


def function_of(one: dict[str, Any]) -> Any:
    """What names the function of a call or tool: an object of its own, or itself."""
    return one.get("function", one)


def _with(one: dict[str, Any], text: str) -> dict[str, Any]:
    """A call or tool with `text` in its name and in its arguments.

    Some templates write a call's `id` in place of its name.
    """
    if "function" in one:
        return {**one, "function": _with(one["function"], text)}
    more: dict[str, Any] = {"name": one["name"] + text}
    given = one.get("arguments")
    if isinstance(given, dict):
        more["arguments"] = {**given, text: text}
    elif isinstance(given, str):
        more["arguments"] = given + text
    return {**one, **more}
