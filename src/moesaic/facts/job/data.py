"""Settings of the training text: files, tokenizer and packing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from moesaic.base import keys
from moesaic.base.config import Section

PLANNED_SEQUENCE = 4096
"""Tokens of a sample that a plan assumes, at most, if the job does not say."""
PLANNED_STEPS = 100_000
"""Steps of the whole run that a plan assumes, at least, if the job does not say."""
_MAX_STEPS = (1 << 31) - 1
"""Largest `train.steps`."""
_WITHIN_STEPS = (("schedule", "warmup"), ("checkpoint", "every"))
"""Tables and names of the numbers of steps that fit into the whole run."""
NO_TEXT = "no text"
"""Path of the text of a job that is only planned."""
UNPLANNED_KEYS = {
    "data.path": "the training text",
    "data.sequence": "tokens per sample",
    "train.steps": "steps of the whole run",
}
"""Required keys that a plan does without, and their meaning."""


class DataConfig(Section):
    """Training and validation text, tokenizer and packing."""

    path: str
    """Training text: a file, a directory or a glob of .txt (one document per file), .jsonl or
    .parquet files, or a directory that Hugging Face `datasets` reads."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset", "chat", "labelled"] = "auto"
    """Format of `path`; auto: by file name. chat: JSON lines or Parquet with one conversation per
    line or row, where the model learns only the assistant's messages. labelled: JSON lines or
    Parquet with a `label` beside each text, 1 (original), 0 (generated) or none, for
    [credibility]."""
    split: str = "train"
    """Split of `path` to train on, if it is a dataset directory with several."""
    text_key: str = "text"
    """Column of the text (jsonl, parquet, dataset, labelled)."""
    tokenizer: str = "bytes"
    """Tokenizer: `bytes` (256 values and an end-of-document token), or the path of a tokenizer.json
    or of its directory. Unset, with `model.from`: the tokenizer of that directory."""
    system: str | None = None
    """System message of conversations that have none (chat only); unset: none."""
    end_token: str | None = None
    """Token that ends a document; unset: the tokenizer's end-of-text token."""
    sequence: int = Field(ge=2)
    """Tokens per sample."""
    packing: Literal["documents", "stream"] = "documents"
    """How documents fill samples. documents: attention and targets stay inside a document. stream:
    samples are cut from one long text, and attention sees the whole sample. With chat and labelled
    text, a sample holds whole conversations or texts."""
    validation_path: str | None = None
    """Text for validation, in the same format as `path`."""
    validation_split: str = "validation"
    """Split of `validation_path`, if it is a dataset directory with several."""
    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the documents of `path` held out for validation, chosen by a hash of their index.
    A text with too few documents for that, such as one file, holds out its end."""
    cache: str | None = None
    """Directory for tokenised text, safe to delete; unset: ~/.cache/moesaic/tokens."""

    def conflicts(self) -> Iterator[str]:
        """Yield settings that exclude each other, or that the format lacks."""
        if self.validation_path and self.validation_share:
            yield (
                f'data.validation_path = "{self.validation_path}" and data.validation_share = '
                f"{self.validation_share} exclude each other: remove one"
            )
        if self.end_token is not None and self.tokenizer == "bytes":
            yield (
                f'data.end_token = "{self.end_token}" belongs to a tokenizer file, and '
                'data.tokenizer = "bytes" has an end mark of its own: remove data.end_token'
            )
        if self.format == "chat":
            yield from self._chat_conflicts()
        if self.format == "labelled" and self.packing == "stream":
            yield (
                'data.packing = "stream" cuts one long text, and data.format = "labelled" keeps '
                "texts whole: remove data.packing"
            )
        if self.format != "chat" and self.system is not None:
            yield (
                f"data.system = {keys.show(self.system)} is for conversations, and data.format "
                f'= "{self.format}" has none: remove it, or set data.format = "chat"'
            )

    def _chat_conflicts(self) -> Iterator[str]:
        if self.tokenizer == "bytes":
            yield (
                'data.format = "chat" needs a tokenizer with a chat template, and data.tokenizer '
                '= "bytes" has none: set data.tokenizer to the directory of one'
            )
        if self.packing == "stream":
            yield (
                'data.packing = "stream" cuts one long text, and data.format = "chat" keeps '
                "conversations whole: remove data.packing"
            )


def missing_keys(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that the tables of a language model's job lack, and only training needs."""
    if raw.get("kind", "lm") != "lm":
        return ()
    tables = {"data": raw.get("data", {}), "train": raw.get("train")}
    return tuple(
        f"{table}.{name}"
        for table, name in (key.split(".") for key in UNPLANNED_KEYS)
        if isinstance(tables[table], dict) and name not in tables[table]
    )


def fill_for_plan(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a job with the keys that a plan assumes where it has none."""
    filled, model = dict(raw), raw.get("model")
    positions = model.get("max_positions") if isinstance(model, dict) else None
    length = min(positions, PLANNED_SEQUENCE) if isinstance(positions, int) else PLANNED_SEQUENCE
    steps = max(PLANNED_STEPS, *(_written_steps(raw, *key) for key in _WITHIN_STEPS))
    assumed = {"data.path": NO_TEXT, "data.sequence": length, "train.steps": steps}
    for key in missing_keys(raw):
        table, _, name = key.partition(".")
        filled[table] = {name: assumed[key], **filled.get(table, {})}
    return filled


def _written_steps(raw: Mapping[str, Any], table: str, name: str) -> int:
    """Return a number of steps that the job writes, at most the largest valid one, or 0."""
    value = raw[table].get(name) if isinstance(raw.get(table), dict) else None
    return min(value, _MAX_STEPS) if isinstance(value, int) else 0
