"""Tool calls in conversations, and a check that a chat template renders all of them.

Templates silently drop tools they do not support, and some drop system messages. The check
therefore renders the conversation a second time, with a unique marker in each tool, call, result
and system message. A part is lost if its marker is missing from the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

TOOL_CALLS = "tool_calls"
"""Key of a message that holds an assistant's calls."""

Messages = Sequence[dict[str, Any]]
"""Messages of a conversation, each with a `role` (system, user, assistant, tool) and `content` or
`tool_calls`. A key with the value None counts as absent."""
Tools = Sequence[dict[str, Any]] | None
"""JSON schemas of the tools; None if the conversation declares none."""


_CALL_LOST = (
    "leaves a call of '{name}' out of message {number}, an answer: let it write '"
    + TOOL_CALLS
    + "' inside the assistant's answer, with or without 'content', or put the calls into the "
    "answer's content"
)
_RESULT_LOST = (
    "leaves out message {number}, which is of the role tool: use a model whose template supports "
    "that role, or put the result into a user message"
)
_SYSTEM_LOST = (
    "leaves out message {number}, which is of the role system: use a model whose template supports "
    "that role, put the text into a user message, or remove it (data.system, if it comes "
    "from there)"
)
_TOOL_LOST = (
    "leaves out the tool '{name}': use a model whose template supports tools, describe them in the "
    "system message, or remove 'tools'"
)


class Marker(NamedTuple):
    """Marker in one part of a conversation."""

    text: str
    name: str
    """Function name to look for if markers cannot be rendered; empty for messages."""
    by_assistant: bool
    """True if the part belongs to an assistant's answer."""
    error: str
    """Error message if the part is missing, with the remedy."""


class MarkedConversation:
    """Conversation with a marker in each tool, call, result and system message."""

    def __init__(self, messages: Messages, tools: Tools) -> None:
        self.markers: list[Marker] = []
        # Digits only: no template has a reason to escape them.
        self._nonce = str(uuid4().int)
        self.messages = [self._mark_message(one, i) for i, one in enumerate(messages, start=1)]
        self.tools = tools and [self._mark_named(tool, False, _TOOL_LOST) for tool in tools]

    def _mark_message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        error = {"tool": _RESULT_LOST, "system": _SYSTEM_LOST}.get(message["role"])
        if error is not None:
            return {
                **message,
                "content": message["content"] + self._add_marker(False, error, number),
            }
        if not message.get(TOOL_CALLS):
            return message
        return {
            **message,
            TOOL_CALLS: [
                self._mark_named(one, True, _CALL_LOST, number) for one in message[TOOL_CALLS]
            ],
        }

    def _mark_named(
        self, item: dict[str, Any], by_assistant: bool, error: str, number: int = 0
    ) -> dict[str, Any]:
        return _append_text(
            item, self._add_marker(by_assistant, error, number, function_of(item)["name"])
        )

    def _add_marker(self, by_assistant: bool, error: str, number: int, name: str = "") -> str:
        text = f"{self._nonce}{len(self.markers):08}"
        self.markers.append(
            Marker(text, name, by_assistant, error.format(number=number, name=name))
        )
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
