"""Files of conversations, their tokens and loss masks, and those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from moesaic.base.config import parse
from moesaic.facts.job import DataConfig
from moesaic.models.tokenizer import open_tokenizer
from moesaic.train.data.chat import ChatEncoder
from moesaic.train.data.sources import find_text

Record = dict[str, Any]
Rows = list[tuple[list[int], list[int]]]
"""Token ids and loss mask of each conversation."""


def configure(path: Path, **changes: Any) -> DataConfig:
    """Return the data section for the conversations at `path`, with the tokenizer beside them."""
    raw = {
        "path": str(path), "format": "chat", "sequence": 64,
        "tokenizer": str(path.parent / "tok"), "cache": str(path.parent / "cache"),
    }  # fmt: skip
    return parse(DataConfig, raw | changes, "test")


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ours(path: Path, **changes: Any) -> Rows:
    config = configure(path, **changes)
    chat = ChatEncoder(config, open_tokenizer(config.tokenizer))
    (found,) = chat.encode(find_text("data.path", str(path), "chat", "text", "train"))
    assert found.extra is not None
    cuts = np.cumsum(found.lengths)[:-1]
    parts = zip(np.split(found.tokens, cuts), np.split(found.extra, cuts), strict=True)
    return [(ids.tolist(), counted.astype(int).tolist()) for ids, counted in parts]


def without_nulls(messages: list[Record]) -> list[Record]:
    """Return `messages` for transformers, which ignores null fields only from 5.24 on."""
    return [{key: value for key, value in one.items() if value is not None} for one in messages]


def theirs(directory: Path, records: list[Record]) -> Rows:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = [
        tokenizer.apply_chat_template(
            without_nulls(record["messages"]), tools=record.get("tools"), return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for record in records
    ]  # fmt: skip
    return [(row["input_ids"], row["assistant_masks"]) for row in rows]
