"""Where text comes from and how it becomes samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moesaic.base import keys
from moesaic.base.config import Section


class DataConfig(Section):
    """Training and validation text, tokenizer and packing."""

    path: str
    """A file, a directory or a glob: text (.txt, one document a file), .jsonl, .parquet, or a
    directory that Hugging Face `datasets` reads."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset", "chat"] = "auto"
    """What `path` holds; auto goes by the file names. chat: JSON lines or Parquet, a conversation a
    line or row, of which a model learns what the assistant says."""
    split: str = "train"
    """Split of `path` to train on, where a dataset directory has several."""
    text_key: str = "text"
    """Column that holds the text (jsonl, parquet, dataset)."""
    tokenizer: str = "bytes"
    """`bytes` (256 values and an end-of-document mark), or the path of a tokenizer.json or of the
    directory that holds it; unset, with `model.from`: the one that lies there."""
    system: str | None = None
    """Of chat: what conversations begin with that have no system message of their own; unset:
    nothing."""
    end_token: str | None = None
    """Token that ends a document; unset: the tokenizer's own end-of-text mark."""
    sequence: int = Field(ge=2)
    """Tokens of one sample."""
    packing: Literal["documents", "stream"] = "documents"
    """documents: attention and targets stay inside a document. stream: samples are cut from one
    long text, attention sees the whole sample. Of chat, a sample holds whole conversations."""
    validation_path: str | None = None
    """Text held out for validation, in the same format."""
    validation_split: str = "validation"
    """Split of `validation_path`, where that is a dataset directory with several."""
    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the documents of `path` held out for validation, picked by a hash of their index."""
    cache: str | None = None
    """Directory for tokenised text, safe to delete; unset: ~/.cache/moesaic/tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.validation_path and self.validation_share:
            raise ValueError(
                f'data.validation_path = "{self.validation_path}" and data.validation_share = '
                f"{self.validation_share} exclude each other: remove one"
            )
        if self.end_token is not None and self.tokenizer == "bytes":
            raise ValueError(
                f'data.end_token = "{self.end_token}" belongs to a tokenizer file, and '
                'data.tokenizer = "bytes" has an end mark of its own: remove data.end_token'
            )
        if self.format == "chat":
            self._check_chat()
        elif self.system is not None:
            raise ValueError(
                f"data.system = {keys.show(self.system)} belongs to conversations, and data.format "
                f'= "{self.format}" has none: remove it, or set data.format = "chat"'
            )
        return self

    def _check_chat(self) -> None:
        if self.tokenizer == "bytes":
            raise ValueError(
                'data.format = "chat" needs a tokenizer with a chat template, and data.tokenizer '
                '= "bytes" has none: set data.tokenizer to the directory of one'
            )
        if self.packing == "stream":
            raise ValueError(
                'data.packing = "stream" cuts one long text, and data.format = "chat" keeps '
                "conversations whole: remove data.packing"
            )
