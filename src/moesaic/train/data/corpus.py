"""Text as token ids on disk: tokenised once, then mapped into memory by every rank and run.

A corpus is a directory of the cache: `tokens.bin` (all documents, one after another), `bounds.bin`
(where each begins, and the end), `corpus.json` (what they are), and of conversations `counted.bin`
(which tokens are to be learnt). Its name is a hash of the files, their sizes and times, the
tokenizer and the column or the chat template. It is written under another name and renamed
when whole; a lock keeps two writers of one machine apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import DataError, StoreError
from moesaic.base.lock import Held, leave, locked
from moesaic.base.tensorfile import sync_directory
from moesaic.models.tokenizer import Tokenizer
from moesaic.train.data.chat import Chat, Encoded
from moesaic.train.data.text import TextSource, fingerprint, read_text

FORMAT = 1
DEFAULT_CACHE = "~/.cache/moesaic/tokens"

T = TypeVar("T")
Beat = Callable[[int, int], None]
"""Told of (documents, tokens) done so far, again and again."""

_BATCH_CHARACTERS = 1 << 22
_POLL_S = 0.1
_PARTIAL, _LOCK = ".partial", ".lock"
_FILES = ("tokens.bin", "bounds.bin", "counted.bin")


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, mapped from disk."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    """Document d is `tokens[bounds[d]:bounds[d + 1]]`; its last token is the end token."""
    digest: str
    """Hash of tokens, bounds and what counts."""
    counted: NDArray[np.bool_] | None = None
    """Of conversations: which tokens are to be learnt."""
    forms: dict[str, int] = field(default_factory=dict)
    """Of conversations: how many came in each form."""

    @property
    def num_documents(self) -> int:
        """Documents with text in them."""
        return len(self.bounds) - 1


def open_corpus(
    source: TextSource,
    tokenizer: Tokenizer,
    cache: Path,
    beat: Beat = lambda *_: None,
    chat: Chat | None = None,
) -> Corpus:
    """The tokens of `source`: from the cache, or made and left there.

    Args:
        source: the text.
        tokenizer: what makes tokens of it.
        cache: the directory of all corpora.
        beat: see `Beat`.
        chat: how to read conversations, if `source` holds them.
    """

    def wait(_holder: str) -> None:
        beat(0, 0)
        time.sleep(_POLL_S)

    try:
        name = _name(source, tokenizer, chat)
        if not (cache / name).is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"{name}{_LOCK}", wait):
                if not (cache / name).is_dir():
                    _build(source, tokenizer, cache / name, beat, chat)
        return _open(cache / name)
    except DataError as error:
        raise DataError(f"{source.key} = '{source.path}': {error}") from None
    except OSError as error:
        raise DataError(
            f"data.cache = '{cache}' cannot be used ({error}): make room there, or set data.cache "
            "to another directory"
        ) from None


def _name(source: TextSource, tokenizer: Tokenizer, chat: Chat | None) -> str:
    lines = [f"format {FORMAT}", tokenizer.digest, *fingerprint(source)]
    if chat is not None:
        lines.append(chat.digest)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def _build(
    source: TextSource, tokenizer: Tokenizer, place: Path, beat: Beat, chat: Chat | None
) -> None:
    cache = place.parent
    _sweep(cache)
    partial = cache / f"{place.name}{_PARTIAL}"
    # Under the lock, what stands here was left by a killed writer.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        forms: Counter[str] = Counter()
        if chat is None:
            parts = _encode_text(read_text(source, cache / "datasets"), tokenizer)
        else:
            parts = _encode_chat(source, chat, forms)
        names = _FILES[: 2 if chat is None else 3]
        facts = {
            "format": FORMAT,
            "path": source.path,
            **_write(partial, parts, tokenizer.size, beat, names),
        }
        if chat is not None:
            facts["forms"] = forms
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
        os.replace(partial, place)
        sync_directory(cache)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove what killed writers of other corpora left: partial ones whose lock is free."""
    for partial in cache.glob(f"*{_PARTIAL}"):
        with suppress(Held), locked(partial.with_suffix(_LOCK), leave):
            shutil.rmtree(partial, ignore_errors=True)


def _encode_text(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[Encoded]:
    for texts in _batches(documents, len, _BATCH_CHARACTERS):
        yield Encoded(*tokenizer.encode_documents(texts), None)


def _encode_chat(source: TextSource, chat: Chat, forms: Counter[str]) -> Iterator[Encoded]:
    # Where each token stands takes far more memory than its id.
    limit = _BATCH_CHARACTERS >> 4
    for talks in _batches(chat.read(source), lambda talk: len(talk.text), limit):
        forms.update(talk.form for talk in talks)
        yield chat.encode(talks)


def _write(
    directory: Path, parts: Iterable[Encoded], vocab: int, beat: Beat, names: Sequence[str]
) -> dict[str, Any]:
    """Write the files `names` as tokens come; memory holds one batch of documents."""
    kind = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    hashes = [hashlib.blake2b(digest_size=16) for _ in names]
    num_documents = num_tokens = 0
    with ExitStack() as stack:
        files = [stack.enter_context((directory / name).open("wb")) for name in names]
        _append(files[1], hashes[1], np.zeros(1, "<i8"))
        for part in parts:
            _append(files[0], hashes[0], part.tokens.astype(kind))
            _append(files[1], hashes[1], (num_tokens + np.cumsum(part.lengths)).astype("<i8"))
            if part.counted is not None:
                _append(files[2], hashes[2], part.counted)
            num_documents += len(part.lengths)
            num_tokens += len(part.tokens)
            beat(num_documents, num_tokens)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    digest = "".join(one.hexdigest() for one in hashes)
    return {"documents": num_documents, "tokens": num_tokens, "dtype": kind.str, "digest": digest}


def _append(file: BinaryIO, digest: Any, values: NDArray[Any]) -> None:
    data = values.data
    file.write(data)
    digest.update(data)


def _batches(documents: Iterable[T], length: Callable[[T], int], limit: int) -> Iterator[list[T]]:
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


def _open(place: Path) -> Corpus:
    try:
        facts = json.loads((place / "corpus.json").read_text(encoding="utf-8"))
        tokens = np.memmap(place / "tokens.bin", np.dtype(facts["dtype"]), "r")
        bounds = np.memmap(place / "bounds.bin", np.dtype("<i8"), "r")
        whole = len(tokens) == facts["tokens"] and len(bounds) == facts["documents"] + 1
        digest, forms, counted = str(facts["digest"]), facts.get("forms", {}), None
        if forms:
            counted = np.asarray(np.memmap(place / "counted.bin", np.bool_, "r"))
            whole = whole and len(counted) == len(tokens)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(_damaged(place, str(error))) from None
    if not whole:
        raise StoreError(_damaged(place, "files shorter or longer than they were written"))
    # A plain array over the same pages: every slice of a memmap object costs Python time.
    return Corpus(np.asarray(tokens), np.asarray(bounds), digest, counted, forms)


def _damaged(place: Path, reason: str) -> str:
    return f"tokenised text in '{place}' is damaged ({reason}): remove it, and it is made anew"
