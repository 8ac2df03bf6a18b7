"""Control prompts: attributes of a text as plain tokens before it.

A prompt names the attributes in this order, and only those that are given:

    [docs-0][docs-1] [t] topic [/t] [k] one, two [/k] [senti] neutral [/senti]
    [w] About 80 words [/w]

The text follows. Each soft prompt of a genre and each tag is one special token of the tokenizer.
Blanks around a tag belong to it, so a prompt has the same ids with and without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base import keys
from moesaic.base.errors import ConfigError, DataError
from moesaic.facts.job.control import ATTRIBUTES, SOFT_PROMPTS, ControlConfig, ControlValues
from moesaic.models.hf.special_tokens import GENERATION_CONFIG_NAME
from moesaic.models.tokenizer import (
    DEFAULT_SETTINGS,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    FileTokenizer,
    Tokenizer,
    parse_tokenizer,
    read_json_object,
    replace_surrogates,
    to_json,
)

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import AddedToken

TAGS = {
    "topic": ("[t]", "[/t]"), "keywords": ("[k]", "[/k]"), "sentiment": ("[senti]", "[/senti]"),
    "length": ("[w]", "[/w]"),
}  # fmt: skip
"""Tokens around the value of an attribute."""
_TAG_TEXTS = tuple(tag for pair in TAGS.values() for tag in pair)
_SETTING, _SUPPRESSED = "control", "suppress_tokens"
_HIDDEN = "\ue000{}\ue000"
"""Name that replaces a control token, so that no text contains it."""

Value = str | int | list[str]


def soft_prompts(genre: str) -> list[str]:
    """Return the tokens of a genre."""
    return [f"[{genre}-{index}]" for index in range(SOFT_PROMPTS)]


def value_text(attribute: str, value: Value) -> str:
    """Return the text of a value between its tags."""
    if attribute == "length":
        return f"About {value} words"
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return text.strip()


def prompt_text(values: ControlValues) -> str:
    """Return a prompt as text."""
    given = values.given
    parts = []
    if genre := given.pop("genre", None):
        parts.append("".join(soft_prompts(str(genre))[: values.soft_prompts]))
    for attribute, value in given.items():
        begin, end = TAGS[attribute]
        parts.append(f"{begin} {value_text(attribute, value)} {end}")
    return " ".join(part for part in parts if part)


class ControlTokenizer(FileTokenizer):
    """A tokenizer with soft prompts and tags added, in memory until a run writes its files.

    Its settings name the genres and attributes. Its generation settings keep transformers from
    generating the new tokens.
    """

    def __init__(self, base: Tokenizer, control: ControlConfig) -> None:
        self.name, self._files = base.name, base.files()
        label = f"data.tokenizer = {keys.show(base.name)}"
        self._tokenizer = parse_tokenizer(self._files[TOKENIZER_FILE], label)
        self._end_token = str(self._tokenizer.id_to_token(base.end_id))
        settings = json.loads(self._files.get(SETTINGS_FILE, DEFAULT_SETTINGS))
        before = settings.get(_SETTING) or {}
        genres = list(dict.fromkeys([*before.get("genres", ()), *control.genres]))
        attributes = {*before.get("attributes", ()), *control.labellers}
        tokens = _add_tokens(self._tokenizer, genres, label)
        settings[_SETTING] = {
            "genres": genres, "attributes": [name for name in ATTRIBUTES if name in attributes],
        }  # fmt: skip
        if "added_tokens_decoder" in settings:
            settings["added_tokens_decoder"] |= _describe_tokens(tokens)
        content = self._tokenizer.to_str(pretty=True).encode()
        self._files |= {
            TOKENIZER_FILE: content,
            SETTINGS_FILE: to_json(settings),
            GENERATION_CONFIG_NAME: _generation_settings(base.name, list(tokens)),
        }
        self._measure(content)

    def files(self) -> dict[str, bytes]:
        """See `Tokenizer`."""
        return dict(self._files)


def _add_tokens(tokenizer: Any, genres: Sequence[str], label: str) -> dict[int, AddedToken]:
    """Add the tokens of prompts to a tokenizer; return them by id."""
    from tokenizers import AddedToken

    added_before = tokenizer.get_added_tokens_decoder()
    before = {number: text for text, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    # Blanks around a tag are part of it.
    added = [
        AddedToken(text, special=True, normalized=False, lstrip=text in _TAG_TEXTS, rstrip=True)
        for text in (*_TAG_TEXTS, *(one for genre in genres for one in soft_prompts(genre)))
    ]
    tokenizer.add_special_tokens(added)
    found = {tokenizer.token_to_id(one.content): one for one in added}
    for number, one in found.items():
        if number in before and number not in added_before:
            raise DataError(
                f"{label} uses id {number} for the ordinary token '{before[number]}', and "
                f"[control] needs it for '{one.content}': use another tokenizer"
            )
    return found


def _describe_tokens(tokens: dict[int, AddedToken]) -> dict[str, dict[str, object]]:
    """Return tokens in the form of tokenizer_config.json."""
    return {
        str(number): {
            "content": one.content, "lstrip": one.lstrip, "normalized": one.normalized,
            "rstrip": one.rstrip, "single_word": one.single_word, "special": one.special,
        }
        for number, one in tokens.items()
    }  # fmt: skip


def _generation_settings(tokenizer: str, reserved: list[int]) -> bytes:
    """Return the generation settings beside a tokenizer, which also suppress the `reserved` ids."""
    settings = read_json_object(Path(tokenizer).expanduser() / GENERATION_CONFIG_NAME)
    before = settings.get(_SUPPRESSED) or []
    return to_json({**settings, _SUPPRESSED: sorted({*before, *reserved})})


def _find_ids(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str]) -> list[int]:
    """Return the ids of control tokens, which the settings of the tokenizer promise."""
    ids = [tokenizer.token_to_id(token) for token in tokens]
    found = [number for number in ids if number is not None]
    if len(found) < len(ids):
        raise DataError(
            f"{TOKENIZER_FILE} lacks '{tokens[ids.index(None)]}', although {SETTINGS_FILE} names "
            f"its genre or tag under '{_SETTING}': restore the tokenizer's files"
        )
    return found


class ControlPrompts:
    """Prompts and texts as ids of a tokenizer with control tokens."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer, self._files = tokenizer, tokenizer.files()
        settings = json.loads(self._files[SETTINGS_FILE])[_SETTING]
        self.genres: tuple[str, ...] = tuple(settings["genres"])
        self.attributes: tuple[str, ...] = tuple(settings["attributes"])
        """Attributes that the model was trained on."""
        parsed = parse_tokenizer(self._files[TOKENIZER_FILE], tokenizer.name)
        self._tags = {name: _find_ids(parsed, pair) for name, pair in TAGS.items()}
        found = [_find_ids(parsed, soft_prompts(genre)) for genre in self.genres]
        self.soft_ids: NDArray[np.int64] = np.array(found, np.int64).reshape(-1, SOFT_PROMPTS)
        """Ids of the soft prompts of each genre, [genres, 64]."""
        tags = chain.from_iterable(self._tags.values())
        self.reserved_ids: tuple[int, ...] = tuple(sorted({*tags, *self.soft_ids.ravel().tolist()}))
        """Ids that only prompts have."""

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> ControlPrompts | None:
        """Return the prompts of a tokenizer; None if it has no control tokens."""
        if not isinstance(tokenizer, FileTokenizer):
            return None
        settings = json.loads(tokenizer.files().get(SETTINGS_FILE, DEFAULT_SETTINGS))
        return cls(tokenizer) if _SETTING in settings else None

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer with other names for its control tokens, so that it encodes their usual
        names as plain text."""
        content = json.loads(self._files[TOKENIZER_FILE])
        reserved = set(self.reserved_ids)
        content["added_tokens"] = [
            {**one, "content": _HIDDEN.format(one["id"]), "lstrip": False, "rstrip": False}
            if one["id"] in reserved
            else one
            for one in content["added_tokens"]
        ]
        return parse_tokenizer(json.dumps(content).encode(), self._tokenizer.name)

    @cached_property
    def start_ids(self) -> list[int]:
        """Ids that the tokenizer puts before each text, such as `<s>`."""
        ids: list[int] = self._plain.encode(self._hidden_tag).ids
        return ids[: ids.index(self.reserved_ids[0])]

    @property
    def _hidden_tag(self) -> str:
        return _HIDDEN.format(self.reserved_ids[0])

    def encode_texts(self, texts: Sequence[str], *, has_prompt: bool = True) -> list[list[int]]:
        """Return the ids of texts, each behind a prompt or alone.

        Names of control tokens in a text are plain text. Some tokenizers mark the first word of a
        text that stands alone, and not that of a text behind a prompt.
        """
        before = self._hidden_tag if has_prompt else ""
        encodings = self._plain.encode_batch_fast(
            [before + replace_surrogates(text) for text in texts], add_special_tokens=False
        )
        return [encoding.ids[int(has_prompt) :] for encoding in encodings]

    def encode_values(self, attribute: str, values: Sequence[Value | None]) -> list[list[int]]:
        """Return the ids of values with their tags; an empty list for None."""
        begin, end = self._tags[attribute]
        texts = ["" if one is None else value_text(attribute, one) for one in values]
        return [
            [begin, *ids, end] if text else []
            for text, ids in zip(texts, self.encode_texts(texts), strict=True)
        ]

    def encode(self, values: ControlValues, text: str) -> list[int]:
        """Return the ids of a prompt and of the text behind it, without blanks in between.

        Raise ConfigError for attributes that the model was not trained on.
        """
        given = values.given
        for attribute in given:
            if attribute not in self.attributes:
                raise ConfigError(
                    f"control.{attribute} = {keys.show(given[attribute])}, and the model was "
                    f"trained on {keys.join_words(self.attributes, 'and')}: leave it out"
                )
        ids: list[int] = []
        if genre := given.pop("genre", None):
            name = keys.check_choice("control.genre", genre, list(self.genres))
            ids += self.soft_ids[self.genres.index(name), : values.soft_prompts].tolist()
        for attribute, value in given.items():
            ids += self.encode_values(attribute, [value])[0]
        text = text.lstrip() if ids else text
        (text_ids,) = self.encode_texts([text], has_prompt=bool(ids))
        return [*self.start_ids, *ids, *text_ids]
