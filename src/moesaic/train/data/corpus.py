"""Token cache: text tokenised once, then memory-mapped by every rank and run.

A corpus is a directory of the cache: `tokens.bin` (all documents, concatenated), `bounds.bin`
(start of each, and the end) and `corpus.json` (metadata). Conversations also have `loss_mask.bin`,
their loss mask; texts behind prompts have `segments.bin`, the lengths of their prompts; labelled
texts have `labels.bin`. The directory's name is a hash of the files, their sizes and times, the
tokenizer, and the column, chat template or labellers. It is written under another name and renamed
when complete; a lock serialises writers on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import DataError, StoreError
from moesaic.models.tokenizer import Tokenizer
from moesaic.train.data.cache_directory import write_once
from moesaic.train.data.sources import TextSource, fingerprint
from moesaic.train.data.text import read_text

FORMAT = 3
DEFAULT_CACHE = "~/.cache/moesaic/tokens"

T = TypeVar("T")
Extra = Literal["loss_mask", "segments", "labels"]
"""Fields of `Corpus` that documents have besides tokens, of one kind or another."""
ProgressCallback = Callable[[int, int], None]
"""Callback that receives the documents and tokens done so far, repeatedly."""

BATCH_CHARACTERS = 1 << 22
"""Characters of the texts that are encoded together."""
_FILES = ("tokens.bin", "bounds.bin")


class EncodedDocuments(NamedTuple):
    """Documents as tokens."""

    tokens: NDArray[Any]
    """Token ids of all documents, concatenated."""
    lengths: NDArray[np.int64]
    """Tokens per document."""
    extra: NDArray[Any] | None = None
    """Values of the encoder's `extra`; None for text."""


class DocumentEncoder(Protocol):
    """Encoder of documents that are more than a text."""

    extra: ClassVar[Extra]
    """Field of `Corpus` that its documents have besides tokens."""

    @property
    def digest(self) -> str:
        """Hash of everything besides files and tokenizer that determines the documents."""

    def encode(self, source: TextSource) -> Iterator[EncodedDocuments]:
        """Yield the documents of `source`, some at a time."""


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, memory-mapped."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    """Start of each document and end of the last; document d is `tokens[bounds[d]:bounds[d + 1]]`,
    and its last token is the end token."""
    digest: str
    """Hash of tokens, bounds and loss mask."""
    loss_mask: NDArray[np.bool_] | None = None
    """True for tokens that are trained, in conversations; None for others."""
    segments: NDArray[np.int32] | None = None
    """Genre of each text behind a prompt and lengths of its segments, [documents, 7]; None for
    others. See `train.data.control`."""
    labels: NDArray[np.int8] | None = None
    """Label of each text, -1 for none; None for others. See `train.data.labelled`."""

    @property
    def num_documents(self) -> int:
        """Number of documents that are not empty."""
        return len(self.bounds) - 1

    @property
    def is_plain(self) -> bool:
        """True if documents are text alone, which may be cut anywhere."""
        return self.loss_mask is None and self.segments is None and self.labels is None


def open_corpus(
    source: TextSource,
    tokenizer: Tokenizer,
    cache: Path,
    on_progress: ProgressCallback = lambda *_: None,
    encoder: DocumentEncoder | None = None,
) -> Corpus:
    """Return the tokens of `source` from the cache, after tokenising it into the cache if
    necessary.

    Args:
        source: the text.
        tokenizer: tokenizer of the text.
        cache: directory of all corpora.
        on_progress: see `ProgressCallback`.
        encoder: encoder of documents that are more than a text.
    """
    try:
        name = _cache_key(source, tokenizer, encoder)
        write_once(
            cache / name,
            lambda directory: _build(source, tokenizer, directory, on_progress, encoder),
            on_wait=lambda: on_progress(0, 0),
        )
        return _open(cache / name)
    except DataError as error:
        raise DataError(f"{source.key} = '{source.path}': {error}") from None
    except OSError as error:
        raise DataError(
            f"data.cache = '{cache}' cannot be used ({error}): make room there, or set data.cache "
            "to another directory"
        ) from None


def _cache_key(source: TextSource, tokenizer: Tokenizer, encoder: DocumentEncoder | None) -> str:
    lines = [f"format {FORMAT}", tokenizer.digest, *fingerprint(source)]
    if encoder is not None:
        lines.append(encoder.digest)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def _build(
    source: TextSource,
    tokenizer: Tokenizer,
    directory: Path,
    on_progress: ProgressCallback,
    encoder: DocumentEncoder | None,
) -> None:
    names = _FILES if encoder is None else (*_FILES, f"{encoder.extra}.bin")
    documents = encode(source, tokenizer, directory.parent, encoder)
    facts = _write(directory, documents, tokenizer.size, on_progress, names)
    facts |= {"format": FORMAT, "path": source.path, "files": names}
    if not facts["documents"]:
        raise DataError(
            f"there is no text, every document is empty (files: {len(source.files)}): give others"
        )
    with (directory / "corpus.json").open("w", encoding="utf-8") as file:
        json.dump(facts, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def encode(
    source: TextSource,
    tokenizer: Tokenizer,
    cache: Path,
    encoder: DocumentEncoder | None,
    longest: int | None = None,
) -> Iterator[EncodedDocuments]:
    """Yield the documents of `source`, some at a time; texts have at most `longest` characters."""
    if encoder is not None:
        return encoder.encode(source)
    texts = read_text(source, cache / "datasets")
    return _encode_text((text[:longest] for text in texts), tokenizer)


def _encode_text(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[EncodedDocuments]:
    for texts in split_batches(documents, len, BATCH_CHARACTERS):
        yield EncodedDocuments(*tokenizer.encode_documents(texts))


def _write(
    directory: Path,
    documents: Iterable[EncodedDocuments],
    vocab: int,
    on_progress: ProgressCallback,
    names: Sequence[str],
) -> dict[str, Any]:
    """Write the files `names` as documents arrive; return their metadata. Memory holds one batch of
    documents."""
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    hashes = [hashlib.blake2b(digest_size=16) for _ in names]
    num_documents = num_tokens = 0
    with ExitStack() as stack:
        files = [stack.enter_context((directory / name).open("wb")) for name in names]
        _append(files[1], hashes[1], np.zeros(1, "<i8"))
        for chunk in documents:
            _append(files[0], hashes[0], chunk.tokens.astype(dtype))
            _append(files[1], hashes[1], (num_tokens + np.cumsum(chunk.lengths)).astype("<i8"))
            if chunk.extra is not None:
                _append(files[2], hashes[2], np.ascontiguousarray(chunk.extra))
            num_documents += len(chunk.lengths)
            num_tokens += len(chunk.tokens)
            on_progress(num_documents, num_tokens)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    digest = "".join(one.hexdigest() for one in hashes)
    return {"documents": num_documents, "tokens": num_tokens, "dtype": dtype.str, "digest": digest}


def _append(file: BinaryIO, digest: Any, values: NDArray[Any]) -> None:
    data = values.data
    file.write(data)
    digest.update(data)


def split_batches(
    documents: Iterable[T], length: Callable[[T], int], limit: int
) -> Iterator[list[T]]:
    """Yield documents in lists whose `length`s add up to about `limit`."""
    batch: list[T] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += length(document)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open(directory: Path) -> Corpus:
    try:
        facts = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
        tokens = np.memmap(directory / "tokens.bin", np.dtype(facts["dtype"]), "r")
        bounds = np.memmap(directory / "bounds.bin", np.dtype("<i8"), "r")
        is_complete = len(tokens) == facts["tokens"] and len(bounds) == facts["documents"] + 1
        digest, loss_mask, segments, labels = str(facts["digest"]), None, None, None
        if "loss_mask.bin" in facts["files"]:
            loss_mask = np.asarray(np.memmap(directory / "loss_mask.bin", np.bool_, "r"))
            is_complete = is_complete and len(loss_mask) == len(tokens)
        if "segments.bin" in facts["files"]:
            memory = np.memmap(directory / "segments.bin", np.dtype("<i4"), "r")
            segments = np.asarray(memory).reshape(facts["documents"], -1)
        if "labels.bin" in facts["files"]:
            labels = np.asarray(np.memmap(directory / "labels.bin", np.int8, "r"))
            is_complete = is_complete and len(labels) == facts["documents"]
        if not is_complete:
            raise ValueError("files shorter or longer than they were written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"tokenised text in '{directory}' is damaged ({error}): remove it, and it is made anew"
        ) from None
    # Plain arrays over the same pages: slicing a memmap object is slow.
    return Corpus(np.asarray(tokens), np.asarray(bounds), digest, loss_mask, segments, labels)
