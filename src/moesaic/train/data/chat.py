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
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.base import keys
from moesaic.base.errors import DataError
from moesaic.facts.job import DataConfig
from moesaic.models.chat import TOOL_CALLS, ChatTemplate, TextSpan, function_of
from moesaic.models.tokenizer import FileTokenizer, Tokenizer
from moesaic.train.data.corpus import BATCH_CHARACTERS, EncodedDocuments, Extra, split_batches
from moesaic.train.data.sources import TextSource
from moesaic.train.data.text import read_records

CHAT_FORMATS = ("messages", "conversations", "prompt")
"""Key of each format; the first one that a line has decides."""
CHAT_COLUMNS = (*CHAT_FORMATS, "completion", "tools")
ROLES = ("system", "user", "assistant", "tool")
ROLE_ALIASES = {"human": "user", "gpt": "assistant"}
ENCODING_VERSION = 7
"""Version of the encoding, to raise whenever the same line gives other tokens or an error."""

Message = dict[str, Any]
Tool = dict[str, Any]


class Conversation(NamedTuple):
    """Conversation rendered by the template."""

    text: str
    assistant_spans: list[TextSpan]
    """Spans of `text` that the assistant wrote."""


class ChatEncoder:
    """Encoder of conversations into tokens; see `DocumentEncoder`."""

    extra: ClassVar[Extra] = "loss_mask"

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        assert isinstance(tokenizer, FileTokenizer), "data.format = chat refuses bytes"
        self._tokenizer, self._system = tokenizer, config.system
        self._end_tokens = tokenizer.added_token_texts()
        self._template = ChatTemplate(Path(tokenizer.name).expanduser(), has_clock=False)
        identity = f"{ENCODING_VERSION} {self._template.digest} {self._system!r}"
        self.digest = hashlib.sha256(identity.encode()).hexdigest()
        """Hash of everything besides the tokenizer that determines a conversation's tokens."""

    def read(self, source: TextSource) -> Iterator[Conversation]:
        """Yield the conversations of `source`, in line order."""
        for file in source.files:
            for where, record in read_records(file, CHAT_COLUMNS):
                messages, tools = _read_messages(record, where), _read_tools(record, where)
                if self._system is not None and messages[0]["role"] != "system":
                    messages = [{"role": "system", "content": self._system}, *messages]
                yield self._apply_template(messages, tools, where)

    def _apply_template(
        self, messages: list[Message], tools: list[Tool] | None, where: str
    ) -> Conversation:
        try:
            text, spans = self._template.render_with_answers(messages, self._end_tokens, tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if not spans:
            raise DataError(
                f"{where}: the chat template of '{self._tokenizer.name}' marks nothing of this "
                "conversation as written by the assistant: mend its {% generation %} marks"
            )
        return Conversation(text, spans)

    def encode(self, source: TextSource) -> Iterator[EncodedDocuments]:
        """Yield the conversations of `source` as tokens, some at a time."""
        # Token offsets take far more memory than token ids.
        limit = BATCH_CHARACTERS >> 4
        for conversations in split_batches(self.read(source), lambda one: len(one.text), limit):
            yield self._encode(conversations)

    def _encode(self, conversations: Sequence[Conversation]) -> EncodedDocuments:
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


def _read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """Return the messages of a line in the templates' terms."""
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
        entries = _check_objects(record[chat_format], f"{where}: '{chat_format}'")
    messages = [
        _parse_message(entry, f"{where}, message {i}") for i, entry in enumerate(entries, start=1)
    ]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise DataError(
            f"{where} is a conversation without an answer, or begins with one: add what the user "
            "or the assistant says, or remove the line"
        )
    return messages


def _read_tools(record: dict[str, Any], where: str) -> list[Tool] | None:
    """Return the tools of a line, or None.

    Tools may be JSON text, because a table column cannot hold tools with different parameters.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _parse_json(tools) if tools.strip() else None
    if tools is None:
        return None
    for number, tool in enumerate(_check_objects(tools, f"{where}: 'tools'"), start=1):
        _check_function(tool, f"{where}, tool {number}")
    return list(tools)


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text, or the text if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_objects(value: Any, label: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise DataError(f"{label} holds {value!r:.80}, which is no list of objects: give it one")
    return value


def _check_function(one: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the function of a call or tool; raise if it has no name."""
    function = function_of(one)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{where} holds {function!r:.80}, which names no function: give its 'name'")
    return dict(function)


def _check_call(call: dict[str, Any], where: str) -> None:
    arguments = _check_function(call, where).get("arguments")
    # Tables cannot distinguish null from missing.
    given = _parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, dict):
        raise DataError(
            f"{where}: 'arguments' holds {arguments!r:.80}, which is neither an object nor its "
            "JSON: give {} if there are none"
        )


def _parse_message(one: dict[str, Any], where: str) -> Message:
    """Return a message in the templates' terms; raise unless it has a role and some content."""
    rest = {key: value for key, value in one.items() if key not in ("from", "value")}
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    role = next((name for alias, name in ROLE_ALIASES.items() if alias == role), role)
    if role not in ROLES:
        raise DataError(
            f"{where} is of role {role!r}: write {keys.join_words(list(ROLES))} (or "
            f"{keys.join_words(list(ROLE_ALIASES))})"
        )
    calls = one.get(TOOL_CALLS) or ()
    if role == "assistant":
        _check_not_excluded(one, where)
    elif calls:
        raise DataError(f"{where} is of role '{role}' and holds '{TOOL_CALLS}': remove them")
    for number, call in enumerate(calls and _check_objects(calls, f"{where}: '{TOOL_CALLS}'"), 1):
        _check_call(call, f"{where}, call {number}")
    if calls and content is None:
        return {**rest, "role": role}
    if not isinstance(content, str):
        raise DataError(
            f"{where} holds {content!r}, which is no text: give its content as a string"
        )
    if role == "assistant" and not calls and not content.strip():
        raise DataError(f"{where} is an empty answer: write one, or remove the line")
    return {**rest, "role": role, "content": content}


def _check_not_excluded(message: Message, where: str) -> None:
    """Raise for an answer that other programs would exclude from training."""
    for key in ("weight", "train"):
        # A number or a boolean; fractional weights are not supported.
        if message.get(key, 1) not in (1, None):
            raise DataError(
                f"{where} is an answer with '{key}' = {message[key]!r}, and all answers are learnt "
                "here: let the user say it, or remove the key"
            )
