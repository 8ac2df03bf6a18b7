"""Text as token ids on disk: tokenised once, then mapped into memory by every rank and run.

A corpus is a directory of the cache: `tokens.bin` (all documents, one after another), `bounds.bin`
(where each begins, and the end), `corpus.json` (what they are). Its name is a hash of the files,
their sizes and times, the tokenizer and the column. It is written under another name and renamed
when whole; a lock keeps two writers of one machine apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import DataError, StoreError
from moesaic.base.lock import Held, leave, locked
from moesaic.base.tensorfile import sync_directory
from moesaic.models.tokenizer import Tokenizer
from moesaic.train.data.text import TextSource, fingerprint, read_text

FORMAT = 1
DEFAULT_CACHE = "~/.cache/moesaic/tokens"

Beat = Callable[[int, int], None]
"""Told of (documents, tokens) done so far, again and again."""

_BATCH_CHARACTERS = 1 << 22
_POLL_S = 0.1
_PARTIAL, _LOCK = ".partial", ".lock"


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, mapped from disk."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    """Document d is `tokens[bounds[d]:bounds[d + 1]]`; its last token is the end token."""
    digest: str
    """Hash of tokens and bounds."""

    @property
    def num_documents(self) -> int:
        """Documents with text in them."""
        return len(self.bounds) - 1


def open_corpus(
    source: TextSource, tokenizer: Tokenizer, cache: Path, beat: Beat = lambda *_: None
) -> Corpus:
    """The tokens of `source`: from the cache, or made and left there."""

    def wait(_holder: str) -> None:
        beat(0, 0)
        time.sleep(_POLL_S)

    try:
        name = _name(source, tokenizer)
        if not (cache / name).is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"{name}{_LOCK}", wait):
                if not (cache / name).is_dir():
                    _build(source, tokenizer, cache, name, beat)
        return _open(cache / name)
    except DataError as error:
        raise DataError(f"{source.key} = '{source.path}': {error}") from None
    except OSError as error:
        raise DataError(
            f"data.cache = '{cache}' cannot be used ({error}): make room there, or set data.cache "
            "to another directory"
        ) from None


def _name(source: TextSource, tokenizer: Tokenizer) -> str:
    lines = [f"format {FORMAT}", tokenizer.digest, *fingerprint(source)]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def _build(source: TextSource, tokenizer: Tokenizer, cache: Path, name: str, beat: Beat) -> None:
    _sweep(cache)
    partial = cache / f"{name}{_PARTIAL}"
    # Under the lock, what stands here was left by a killed writer.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        documents = read_text(source, cache / "datasets")
        facts = {
            "format": FORMAT,
            "path": source.path,
            **_write(partial, documents, tokenizer, beat),
        }
        if not facts["documents"]:
            raise DataError(
                f"there is no text, every document of {len(source.files)} files is empty: give "
                "others"
            )
        with (partial / "corpus.json").open("w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(partial)
        os.replace(partial, cache / name)
        sync_directory(cache)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove what killed writers of other corpora left: partial ones whose lock is free."""
    for partial in cache.glob(f"*{_PARTIAL}"):
        with suppress(Held), locked(partial.with_suffix(_LOCK), leave):
            shutil.rmtree(partial, ignore_errors=True)


def _write(
    directory: Path, documents: Iterable[str], tokenizer: Tokenizer, beat: Beat
) -> dict[str, Any]:
    """Write tokens and bounds as they come; memory holds one batch of documents."""
    kind = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    hashes = (hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16))
    num_documents = num_tokens = 0
    with (
        (directory / "tokens.bin").open("wb") as tokens,
        (directory / "bounds.bin").open("wb") as bounds,
    ):
        _append(bounds, hashes[1], np.zeros(1, "<i8"))
        for texts in _batches(documents):
            ids, lengths = tokenizer.encode_documents(texts)
            _append(tokens, hashes[0], ids.astype(kind))
            _append(bounds, hashes[1], (num_tokens + np.cumsum(lengths)).astype("<i8"))
            num_documents += len(texts)
            num_tokens += len(ids)
            beat(num_documents, num_tokens)
        for file in (tokens, bounds):
            file.flush()
            os.fsync(file.fileno())
    digest = hashes[0].hexdigest() + hashes[1].hexdigest()
    return {"documents": num_documents, "tokens": num_tokens, "dtype": kind.str, "digest": digest}


def _append(file: BinaryIO, digest: Any, values: NDArray[Any]) -> None:
    data = values.data
    file.write(data)
    digest.update(data)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open(place: Path) -> Corpus:
    try:
        facts = json.loads((place / "corpus.json").read_text(encoding="utf-8"))
        tokens = np.memmap(place / "tokens.bin", np.dtype(facts["dtype"]), "r")
        bounds = np.memmap(place / "bounds.bin", np.dtype("<i8"), "r")
        whole = len(tokens) == facts["tokens"] and len(bounds) == facts["documents"] + 1
        digest = str(facts["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(_damaged(place, str(error))) from None
    if not whole:
        raise StoreError(_damaged(place, "files shorter or longer than they were written"))
    # A plain array over the same pages: every slice of a memmap object costs Python time.
    return Corpus(np.asarray(tokens), np.asarray(bounds), digest)


def _damaged(place: Path, reason: str) -> str:
    return f"tokenised text in '{place}' is damaged ({reason}): remove it, and it is made anew"
