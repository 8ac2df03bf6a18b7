"""Conversations: from JSON lines or Parquet to tokens with a loss mask.

A line or row holds one conversation, in one of three formats:

    {"messages": [{"role": "user", "content": ...}, ...]}
    {"conversations": [{"from": "human", "value": ...}, ...]}
    {"prompt": ..., "completion": ...}

It may also hold `tools`, the functions that the assistant may call. The tokenizer's chat template
renders a conversation and marks the assistant's text. A token is trained if it contains some of
this text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.base import keys
from moesaic.base.errors import DataError
from moesaic.facts.job import DataConfig
from moesaic.models.tokenizer import FileTokenizer, Tokenizer
from moesaic.models.tool_calls import TOOL_CALLS, function_of
from moesaic.train.data.text import TextSource, read_records

if TYPE_CHECKING:
    from moesaic.models.chat import TextSpan

CHAT_FORMATS = ("messages", "conversations", "prompt")
"""Key of each format; the first one that a line has decides."""
CHAT_COLUMNS = (*CHAT_FORMATS, "completion", "tools", "functions")
ROLES = ("system", "user", "assistant", "tool")
ROLE_ALIASES = {"human": "user", "gpt": "assistant"}
_SHOWN_CHARACTERS = 20
"""Characters shown before a wrong one in an error message."""

DEPRECATED_ROLES = {"function": "tool", "developer": "system"}
"""Current names of deprecated roles, whose messages may differ in more than the name."""
ENCODING_VERSION = 6
"""Version of the encoding, to raise whenever the same line gives other tokens or an error."""

Message = dict[str, Any]
Tool = dict[str, Any]


class Conversation(NamedTuple):
    """Conversation rendered by the template."""

    text: str
    assistant_spans: list[TextSpan]
    """Spans of `text` that the assistant wrote."""
    chat_format: str


class EncodedDocuments(NamedTuple):
    """Documents as tokens."""

    tokens: NDArray[Any]
    """Token ids of all documents, concatenated."""
    lengths: NDArray[np.int64]
    """Tokens per document."""
    loss_mask: NDArray[np.bool_] | None
    """True for tokens that are trained; None for all."""


class ChatEncoder:
    """Encoder of conversations into tokens."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        # It imports Jinja, which other runs do not need.
        from moesaic.models.chat import ChatTemplate

        assert isinstance(tokenizer, FileTokenizer), "data.format = chat refuses bytes"
        self._tokenizer, self._end_tokens, self._system = (
            tokenizer,
            tokenizer.added_token_texts(),
            config.system,
        )
        self._template = ChatTemplate(
            Path(tokenizer.name).expanduser(), "choose another data.tokenizer", has_clock=False
        )
        identity = f"{ENCODING_VERSION} {self._template.digest} {self._system!r}"
        self.digest = hashlib.sha256(identity.encode()).hexdigest()
        """Hash of everything besides the tokenizer that determines a conversation's tokens."""

    def read(self, source: TextSource) -> Iterator[Conversation]:
        """Yield the conversations of `source`, in line order."""
        for file in source.files:
            for where, record in read_records(file, CHAT_COLUMNS):
                chat_format, messages = read_messages(record, where)
                tools = read_tools(record, where)
                check_calls(messages, tools, where)
                if self._system is not None and messages[0]["role"] != "system":
                    messages = [{"role": "system", "content": self._system}, *messages]
                yield self._apply_template(chat_format, messages, tools, where)

    def _apply_template(
        self, chat_format: str, messages: list[Message], tools: list[Tool] | None, where: str
    ) -> Conversation:
        try:
            text, spans = self._template.render_with_answers(messages, self._end_tokens, tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        _check_surrogates(text, where)
        if not spans:
            raise DataError(
                f"{where}: the chat template of '{self._tokenizer.name}' marks nothing of this "
                "conversation as written by the assistant: mend its {% generation %} marks"
            )
        return Conversation(text, spans, chat_format)

    def encode(self, conversations: Sequence[Conversation]) -> EncodedDocuments:
        """Return `conversations` as tokens."""
        encoded = self._tokenizer.encode_with_offsets(
            [conversation.text for conversation in conversations]
        )
        loss_masks = [
            _tokens_in_spans(row[1], conversation.assistant_spans)
            for row, conversation in zip(encoded, conversations, strict=True)
        ]
        return EncodedDocuments(
            np.concatenate([np.array(ids, np.uint32) for ids, _ in encoded]),
            np.array([len(ids) for ids, _ in encoded], np.int64),
            np.concatenate(loss_masks),
        )


def _tokens_in_spans(
    token_spans: Sequence[TextSpan], spans: Sequence[TextSpan]
) -> NDArray[np.bool_]:
    """Return true for tokens at `token_spans` that overlap `spans`, except the first, which nothing
    predicts."""
    starts, stops = np.array(token_spans, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(token_spans), np.bool_)
    for start, stop in spans:
        mask |= (stops > start) & (starts < stop)
    mask[:1] = False
    return mask


def read_messages(record: dict[str, Any], where: str) -> tuple[str, list[Message]]:
    """Return the format of a line and its messages in the templates' terms."""
    chat_format = next((key for key in CHAT_FORMATS if key in record), None)
    if chat_format is None or (chat_format == "prompt" and "completion" not in record):
        raise DataError(
            f"{where} holds no conversation but {', '.join(sorted(record)) or 'nothing'}: "
            "give it 'messages' (role, content), 'conversations' (from, value), or 'prompt' and "
            "'completion'"
        )
    if chat_format == "prompt":
        turns = (("user", record["prompt"]), ("assistant", record["completion"]))
        entries: Any = [{"role": role, "content": text} for role, text in turns]
    else:
        entries = record[chat_format]
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f"{where}: '{chat_format}' holds {entries!r:.80}, which is no list of messages: "
            "give it some"
        )
    messages = [
        _parse_message(entry, f"{where}, message {i}") for i, entry in enumerate(entries, start=1)
    ]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(
            f"{where} is a conversation without an answer: add what the assistant says, or "
            "remove the line"
        )
    if roles[0] == "assistant":
        raise DataError(
            f"{where} begins with an answer, and nothing was asked: put the user's message before "
            "it, or remove it"
        )
    return chat_format, messages


def check_calls(messages: Sequence[Message], tools: Sequence[Tool] | None, where: str) -> None:
    """Raise for calls of functions that are not in `tools`, and for results without a call.

    Without tools, or with calls inside the text of answers, nothing can be checked.
    """
    offered_names = {function_of(tool)["name"] for tool in tools or ()}
    call_ids, has_answer = list[Any](), False
    for number, message in enumerate(messages, start=1):
        label, role = f"{where}, message {number}", message["role"]
        for call in message.get(TOOL_CALLS) or () if role == "assistant" else ():
            name = function_of(call)["name"]
            if offered_names and name not in offered_names:
                raise DataError(
                    f"{label} calls '{name}', which is not among 'tools' "
                    f"({', '.join(sorted(offered_names))}): add it, or mend the call"
                )
            call_ids.append(call.get("id"))
        has_answer |= role == "assistant"
        call_id = message.get("tool_call_id")
        if role == "tool" and (not has_answer or not _matches_call(call_id, call_ids)):
            described = (
                "a result" if call_id is None else f"the result of tool_call_id = {call_id!r}"
            )
            raise DataError(
                f"{label} is {described} without a call: put the assistant's call before it, or "
                "remove it"
            )


def _matches_call(call_id: Any, call_ids: Sequence[Any]) -> bool:
    """Return true if a result may belong to one of the calls; missing ids match anything."""
    return call_id is None or not call_ids or None in call_ids or call_id in call_ids


def read_tools(record: dict[str, Any], where: str) -> list[Tool] | None:
    """Return the tools of a line, or None.

    Tools may be JSON text, because a table column cannot hold tools with different parameters.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):  # Text that is not JSON is no list either.
            tools = json.loads(tools) if tools.strip() else None
    if record.get("functions"):
        raise DataError(f"{where} holds 'functions': write 'tools', which came in its place")
    if tools is None:
        return None
    checked = _check_objects(tools, f"{where}: 'tools'", "or its JSON, or none")
    for number, tool in enumerate(checked, start=1):
        _check_function(tool, f"{where}, tool {number}")
    return checked


def _check_objects(value: Any, label: str, remedy: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise DataError(
            f"{label} holds {value!r:.80}, which is no list of objects: give it one, {remedy}"
        )
    return value


def _check_function(one: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the named function of a call or tool; raise if it cannot be JSON."""

    def refuse(value: Any) -> None:
        raise DataError(f"{where} holds {value!r:.80}, which JSON does not know: give it as text")

    try:
        json.dumps(one, default=refuse)
    except (TypeError, RecursionError) as error:
        raise DataError(f"{where} cannot be JSON ({error}): mend the file") from None
    function = function_of(one)
    if not isinstance(function, dict):
        raise DataError(
            f"{where}: 'function' holds {function!r:.80}, which is no object: give it a name"
        )
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(
            f"{where}: 'name' holds {name!r:.80}, which names no function: give it as text"
        )
    return function


def _check_tool_calls(value: Any, where: str) -> None:
    """Raise unless `value` is a list of function calls."""
    calls = _check_objects(value, f"{where}: '{TOOL_CALLS}'", "or leave it out")
    for number, call in enumerate(calls, start=1):
        label = f"{where}, call {number}"
        function = _check_function(call, label)
        arguments = function.get("arguments")
        if arguments is None:  # Tables cannot distinguish null from missing.
            raise DataError(f"{label} has no 'arguments': give {{}} if there are none")
        prefix = f"{label}: 'arguments' holds {arguments!r:.80}, which is"
        if not isinstance(arguments, (dict, str)):
            raise DataError(f"{prefix} neither an object nor text: give {{}} if there are none")
        if isinstance(arguments, str) and not _is_json_object(arguments):
            raise DataError(f"{prefix} no object in JSON: mend it, or give {{}} if there are none")


def _is_json_object(text: str) -> bool:
    """Return true if `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parse_message(one: Any, where: str) -> Message:
    if not isinstance(one, dict):
        raise DataError(f"{where} is no object: give it a role and content")
    rest = {key: value for key, value in one.items() if key not in ("from", "value")}
    role, content = _parse_role(one, where), one.get("content", one.get("value"))
    if one.get("function_call") is not None:
        raise DataError(
            f"{where} holds 'function_call': write '{TOOL_CALLS}', a list, which came in its place"
        )
    if role == "assistant":
        _check_not_excluded(one, where)
    calls = one.get(TOOL_CALLS)
    if calls and role != "assistant":
        raise DataError(f"{where} is of role '{role}' and holds '{TOOL_CALLS}': remove them")
    if calls:
        _check_tool_calls(calls, where)
        if content is None:
            return {**rest, "role": role}
    if not isinstance(content, str):
        raise DataError(
            f"{where} holds {content!r}, which is no text: give its content as a string"
        )
    if role == "assistant" and not calls and not content.strip():
        raise DataError(f"{where} is an empty answer: write one, or remove the line")
    return {**rest, "role": role, "content": content}


def _parse_role(one: Message, where: str) -> str:
    """Return the role of a message in the templates' terms."""
    role = one.get("role", one.get("from"))
    role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if isinstance(role, str) and role in DEPRECATED_ROLES:
        raise DataError(f"{where} is of role '{role}': write '{DEPRECATED_ROLES[role]}'")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(
            f"{where} is of role {role!r}: write {keys.join_words(list(ROLES))} (or "
            f"{keys.join_words(list(ROLE_ALIASES))})"
        )
    return role


def _check_surrogates(text: str, where: str) -> None:
    """Raise for unpaired surrogates, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - _SHOWN_CHARACTERS) : error.start + 1]
        raise DataError(
            f"{where} holds half of a character, at the end of {shown!r}: write the character, or "
            "remove the half"
        ) from None


def _check_not_excluded(message: Message, where: str) -> None:
    """Raise for an answer that other programs would exclude from training."""
    for key in ("weight", "train"):
        # A number or a boolean; fractional weights are not supported.
        if message.get(key, 1) not in (1, None):
            raise DataError(
                f"{where} is an answer with '{key}' = {message[key]!r}, and all answers are learnt "
                "here: let the user say it, or remove the key"
            )
