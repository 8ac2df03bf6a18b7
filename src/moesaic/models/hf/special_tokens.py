"""Special token ids for config.json and generation_config.json, from tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.base.errors import ConfigError
from moesaic.models.tokenizer import TOKENIZER_FILE, read_json_object, special_tokens

EOS_KEY = "eos_token_id"
"""Key of the end tokens: an id, or a list of ids."""
START_KEY = "bos_token_id"
"""Key of the token that starts a text."""
TOKEN_ID_KEYS = (START_KEY, EOS_KEY, "pad_token_id")
GENERATION_CONFIG_NAME = "generation_config.json"


def special_token_ids(directory: Path) -> dict[str, Any]:
    """Return those of bos_token_id, eos_token_id and pad_token_id that the tokenizer files name."""
    tokenizer = read_json_object(directory / TOKENIZER_FILE)
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    texts = special_tokens(directory)
    found = {key: ids.get(texts.get(key.removesuffix("_id"))) for key in TOKEN_ID_KEYS}
    return {key: number for key, number in found.items() if number is not None}


def token_ids(value: Any, key: str, origin: str) -> list[int]:
    """Return the ids under `key`, which may be absent, one id, or a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ConfigError(
            f"{origin}: {key} = {json.dumps(value)} is no token id: give a whole number, or "
            "remove the key"
        )
    return ids


def update_special_tokens(
    settings: Mapping[str, Any], ids: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    """Return `settings` with its special tokens replaced by `ids`, and always with an end token.

    Further end tokens stay if the settings have the first end token of `ids`: then they are of that
    tokenizer.
    """
    result = dict(settings)
    for key, new_value in ids.items():
        if key == EOS_KEY:
            current = token_ids(settings.get(key), key, origin)
            first, *others = token_ids(new_value, key, origin)
            ends = [*(current if first in current else [first])]
            ends += [one for one in others if one not in ends]
            if ends != current:
                result[key] = ends if len(ends) > 1 else first
        elif settings.get(key) not in (None, new_value):
            result[key] = new_value
    return result


def update_generation_config(path: Path, data: bytes, ids: Mapping[str, Any]) -> bytes:
    """Return `data`, the generation file at `path`, with `ids`; unchanged if no id differs."""
    if not ids:
        return data
    settings = read_json_object(path)
    result = update_special_tokens(settings, ids, f"'{path}'")
    if result == settings:
        return data
    return (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode()
