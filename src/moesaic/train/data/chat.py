"""Conversations: from JSON lines or Parquet to tokens, and to which of them a model learns to say.

A line or row holds one conversation, in one of three forms:

    {"messages": [{"role": "user", "content": ...}, ...]}
    {"conversations": [{"from": "human", "value": ...}, ...]}
    {"prompt": ..., "completion": ...}

Beside it may lie `tools`, what the assistant may call. The tokenizer's own chat template writes
all that, and says what of it the assistant speaks. A token counts if it holds some of that.
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
from moesaic.models.calls import CALLS, function_of
from moesaic.models.tokenizer import FileTokenizer, Tokenizer
from moesaic.train.data.text import TextSource, read_records

if TYPE_CHECKING:
    from moesaic.models.chat import Span

FORMS = ("messages", "conversations", "prompt")
"""The key by which each form is known; the first that a line has goes."""
COLUMNS = (*FORMS, "completion", "tools", "functions")
ROLES = ("system", "user", "assistant", "tool")
OTHER_NAMES = {"human": "user", "gpt": "assistant"}
_NEAR = 20
"""Characters that are shown before one that is wrong."""

FORMER_NAMES = {"function": "tool", "developer": "system"}
"""What others call roles, where more than the name may differ."""
READING = 6
"""Goes up when the same line comes to mean other tokens, or none."""

Message = dict[str, Any]
Tool = dict[str, Any]


class Talk(NamedTuple):
    """One conversation, written by the template."""

    text: str
    spans: list[Span]
    """Where in it the assistant speaks."""
    form: str


class Encoded(NamedTuple):
    """Documents as tokens."""

    tokens: NDArray[Any]
    """All ids, one document after another."""
    lengths: NDArray[np.int64]
    """How many each document has."""
    counted: NDArray[np.bool_] | None
    """Which tokens are to be learnt; None: all."""


class Chat:
    """How conversations become tokens."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        from moesaic.models.chat import ChatTemplate  # Brings Jinja along, which other runs spare.

        assert isinstance(tokenizer, FileTokenizer), "data.format = chat refuses bytes"
        self._tokenizer, self._ends, self._system = tokenizer, tokenizer.added(), config.system
        self._template = ChatTemplate(
            Path(tokenizer.name).expanduser(), "choose another data.tokenizer", clock=False
        )
        stated = f"{READING} {self._template.digest} {self._system!r}"
        self.digest = hashlib.sha256(stated.encode()).hexdigest()
        """Hash of all that decides the tokens of a conversation, the tokenizer aside."""

    def read(self, source: TextSource) -> Iterator[Talk]:
        """The conversations of `source`, in the order of its lines."""
        for file in source.files:
            for where, record in read_records(file, COLUMNS):
                form, messages = read_messages(record, where)
                tools = read_tools(record, where)
                check_calls(messages, tools, where)
                if self._system is not None and messages[0]["role"] != "system":
                    messages = [{"role": "system", "content": self._system}, *messages]
                yield self._write(form, messages, tools, where)

    def _write(
        self, form: str, messages: list[Message], tools: list[Tool] | None, where: str
    ) -> Talk:
        try:
            text, spans = self._template.answers(messages, self._ends, tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        _refuse_torn(text, where)
        if not spans:
            raise DataError(
                f"{where}: the chat template of '{self._tokenizer.name}' marks nothing of this "
                "conversation as said by the assistant: mend its {% generation %} marks"
            )
        return Talk(text, spans, form)

    def encode(self, talks: Sequence[Talk]) -> Encoded:
        """`talks` as tokens."""
        rows = self._tokenizer.encode_places([talk.text for talk in talks])
        counted = [_overlap(row[1], talk.spans) for row, talk in zip(rows, talks, strict=True)]
        return Encoded(
            np.concatenate([np.array(ids, np.uint32) for ids, _ in rows]),
            np.array([len(ids) for ids, _ in rows], np.int64),
            np.concatenate(counted),
        )


def _overlap(places: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which of the tokens at `places` hold some of `spans`; the first follows nothing."""
    starts, stops = np.array(places, np.int64).reshape(-1, 2).T
    counted = np.zeros(len(places), np.bool_)
    for start, stop in spans:
        counted |= (stops > start) & (starts < stop)
    counted[:1] = False
    return counted


def read_messages(record: dict[str, Any], where: str) -> tuple[str, list[Message]]:
    """The form of a line, and its messages in the words of templates."""
    form = next((key for key in FORMS if key in record), None)
    if form is None or (form == "prompt" and "completion" not in record):
        raise DataError(
            f"{where} holds no conversation but {', '.join(sorted(record)) or 'nothing'}: "
            "give it 'messages' (role, content), 'conversations' (from, value), or 'prompt' and "
            "'completion'"
        )
    if form == "prompt":
        pair = (("user", record["prompt"]), ("assistant", record["completion"]))
        said: Any = [{"role": role, "content": text} for role, text in pair]
    else:
        said = record[form]
    if not isinstance(said, list) or not said:
        raise DataError(
            f"{where}: '{form}' holds {said!r:.80}, which is no list of messages: give it some"
        )
    messages = [_message(one, f"{where}, message {i}") for i, one in enumerate(said, start=1)]
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
    return form, messages


def check_calls(messages: Sequence[Message], tools: Sequence[Tool] | None, where: str) -> None:
    """Refuse calls of what is not among `tools`, and results of what nobody called.

    Where nothing is said of tools, or calls stand in the text of answers, nothing is known of that.
    """
    offered = {function_of(tool)["name"] for tool in tools or ()}
    called, answered = list[Any](), False
    for number, message in enumerate(messages, start=1):
        named, role = f"{where}, message {number}", message["role"]
        for call in message.get(CALLS) or () if role == "assistant" else ():
            name = function_of(call)["name"]
            if offered and name not in offered:
                raise DataError(
                    f"{named} calls '{name}', which is not among 'tools' "
                    f"({', '.join(sorted(offered))}): add it, or mend the call"
                )
            called.append(call.get("id"))
        answered |= role == "assistant"
        of = message.get("tool_call_id")
        if role == "tool" and (not answered or not _known(of, called)):
            what = "a result" if of is None else f"the result of tool_call_id = {of!r}"
            raise DataError(
                f"{named} is {what}, and nobody called for it: put the assistant's call before it, "
                "or remove it"
            )


def _known(of: Any, called: Sequence[Any]) -> bool:
    """Whether a result is that of one of the calls, as far as either says which it is."""
    return of is None or not called or None in called or of in called


def read_tools(record: dict[str, Any], where: str) -> list[Tool] | None:
    """What the assistant of a line may call; None where it does not say.

    Text is taken for JSON: as columns, tables could not hold tools of unlike parameters.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):  # Text that is no JSON is no list either.
            tools = json.loads(tools) if tools.strip() else None
    if record.get("functions"):
        raise DataError(f"{where} holds 'functions': write 'tools', which came in its place")
    if tools is None:
        return None
    found = _objects(tools, f"{where}: 'tools'", "or its JSON, or none")
    for number, tool in enumerate(found, start=1):
        _function(tool, f"{where}, tool {number}")
    return found


def _objects(value: Any, named: str, otherwise: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise DataError(
            f"{named} holds {value!r:.80}, which is no list of objects: give it one, {otherwise}"
        )
    return value


def _function(one: dict[str, Any], where: str) -> dict[str, Any]:
    """The function of a call or tool, which has a name; of what JSON knows, as templates ask."""

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


def _calls(value: Any, where: str) -> None:
    """Refuse what are no calls of functions."""
    found = _objects(value, f"{where}: '{CALLS}'", "or leave it out")
    for number, call in enumerate(found, start=1):
        named = f"{where}, call {number}"
        function = _function(call, named)
        arguments = function.get("arguments")
        if arguments is None:  # As columns, tables do not tell what is null from what is missing.
            raise DataError(f"{named} has no 'arguments': give {{}} if there are none")
        holds = f"{named}: 'arguments' holds {arguments!r:.80}, which is"
        if not isinstance(arguments, (dict, str)):
            raise DataError(f"{holds} neither an object nor text: give {{}} if there are none")
        if isinstance(arguments, str) and not _is_object(arguments):
            raise DataError(f"{holds} no object in JSON: mend it, or give {{}} if there are none")


def _is_object(text: str) -> bool:
    """Whether `text` is an object in JSON."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _message(one: Any, where: str) -> Message:
    if not isinstance(one, dict):
        raise DataError(f"{where} is no object: give it a role and content")
    rest = {key: value for key, value in one.items() if key not in ("from", "value")}
    role, content = _role(one, where), one.get("content", one.get("value"))
    if one.get("function_call") is not None:
        raise DataError(
            f"{where} holds 'function_call': write '{CALLS}', a list, which came in its place"
        )
    if role == "assistant":
        _refuse_left_out(one, where)
    calls = one.get(CALLS)
    if calls and role != "assistant":
        raise DataError(f"{where} is of role '{role}' and holds '{CALLS}': remove them")
    if calls:
        _calls(calls, where)
        if content is None:
            return {**rest, "role": role}
    if not isinstance(content, str):
        raise DataError(
            f"{where} holds {content!r}, which is no text: give its content as a string"
        )
    if role == "assistant" and not calls and not content.strip():
        raise DataError(f"{where} is an empty answer: write one, or remove the line")
    return {**rest, "role": role, "content": content}


def _role(one: Message, where: str) -> str:
    """Whose a message is, in the words of templates."""
    role = one.get("role", one.get("from"))
    role = OTHER_NAMES.get(role, role) if isinstance(role, str) else role
    if isinstance(role, str) and role in FORMER_NAMES:
        raise DataError(f"{where} is of role '{role}': write '{FORMER_NAMES[role]}'")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(
            f"{where} is of role {role!r}: write {keys.listed(list(ROLES))} (or "
            f"{keys.listed(list(OTHER_NAMES))})"
        )
    return role


def _refuse_torn(text: str, where: str) -> None:
    """Raise for halves of a character, which have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - _NEAR) : error.start + 1]
        raise DataError(
            f"{where} holds half of a character, at the end of {near!r}: write the character, or "
            "remove the half"
        ) from None


def _refuse_left_out(message: Message, where: str) -> None:
    """Raise for an answer that other programs would not learn."""
    for key in ("weight", "train"):
        if message.get(key, 1) not in (1, None):  # As a number or a truth; 0.5 of it is not learnt.
            raise DataError(
                f"{where} is an answer with '{key}' = {message[key]!r}, and all answers are learnt "
                "here: let the user say it, or remove the key"
            )
