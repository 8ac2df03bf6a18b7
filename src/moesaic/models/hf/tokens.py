"""Special tokens: which ids config.json should name, out of the tokenizer files beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesaic.base.errors import DataError

ROLES = ("bos_token", "eos_token", "pad_token")


def special_token_ids(directory: Path) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, as far as the tokenizer files name them."""
    settings = _read(directory / "tokenizer_config.json")
    tokenizer = _read(directory / "tokenizer.json")
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    found = {}
    for role in ROLES:
        token = settings.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        number = ids.get(text)
        if number is None and isinstance(vocabulary, dict):
            number = vocabulary.get(text)
        if isinstance(number, int):
            found[f"{role}_id"] = number
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON ({error}): restore or remove it") from None
    return content if isinstance(content, dict) else {}
