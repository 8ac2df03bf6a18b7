"""Special tokens: which ids config.json should name, and generation_config.json with it, out of the
tokenizer files beside a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.base.errors import DataError

ROLES = ("bos_token", "eos_token", "pad_token")
END = "eos_token_id"
"""The key that names ends: an id, or a list of ids."""
GENERATION_NAME = "generation_config.json"


def special_token_ids(directory: Path) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id, as far as the tokenizer files name them."""
    settings = read_object(directory / "tokenizer_config.json")
    older = read_object(directory / "special_tokens_map.json")
    tokenizer = read_object(directory / "tokenizer.json")
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    found: dict[str, Any] = {}
    for role in ROLES:
        # What ends a document the tokenizer looks for in both, and so it is here.
        for stated in (settings, older) if f"{role}_id" == END else (settings,):
            token = stated.get(role)
            text = token.get("content") if isinstance(token, dict) else token
            number = ids.get(text)
            if number is None and isinstance(vocabulary, dict):
                number = vocabulary.get(text)
            if isinstance(number, int):
                found.setdefault(f"{role}_id", number)
    return found


def as_ids(named: Any, origin: str) -> list[int]:
    """The ids that a file names under `END`: none, one, or a list."""
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise DataError(
            f"{origin}: {END} = {json.dumps(named)} is no token id: give a whole number, or remove "
            "the key"
        )
    return ids


def renamed(settings: Mapping[str, Any], ids: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """`settings` with the special tokens `ids` where it names others, and with an end in any case.

    Ends that it has beside the first of those in `ids` stay: it knows that tokenizer.
    """
    result = dict(settings)
    for key, wanted in ids.items():
        if key == END:
            named, first, *more = as_ids(settings.get(key), origin), *as_ids(wanted, origin)
            ends = [*(named if first in named else [first])]
            ends += [one for one in more if one not in ends]
            if ends != named:
                result[key] = ends if len(ends) > 1 else first
        elif settings.get(key) not in (None, wanted):
            result[key] = wanted
    return result


def rewritten(path: Path, data: bytes, ids: Mapping[str, Any]) -> bytes:
    """`data`, the generation file at `path`, `renamed`: not a byte differs if no name does."""
    if not ids:
        return data
    settings = read_object(path)
    result = renamed(settings, ids, f"'{path}'")
    if result == settings:
        return data
    return (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object at `path`; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON ({error}): restore or remove it") from None
    return content if isinstance(content, dict) else {}
