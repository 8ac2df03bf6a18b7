from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from moesaic.base.errors import DataError, StoreError
from moesaic.models.tokenizer import ByteTokenizer
from moesaic.train.data import corpus as corpora
from moesaic.train.data.corpus import Corpus, open_corpus
from moesaic.train.data.sources import TextSource, find_text

TEXTS = ["alpha", "", "beta gamma", "\u00e9"]


class CountingTokenizer(ByteTokenizer):
    """Byte tokenizer that counts its calls."""

    def __init__(self, digest: str = "counting", size: int = 257) -> None:
        self.calls, self.digest, self.size = 0, digest, size

    def encode_documents(self, texts):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().encode_documents(texts)


def write(path: Path, texts: list[str] = TEXTS, key: str = "text") -> TextSource:
    path.write_text("".join(json.dumps({key: text, "other": text}) + "\n" for text in texts))
    return find_text("data.path", str(path), "auto", key, "train")


def contents(corpus: Corpus) -> list[str]:
    cuts = np.split(corpus.tokens, corpus.bounds[1:-1])
    assert all(cut[-1] == 256 and 256 not in cut[:-1] for cut in cuts)
    return [bytes(cut[:-1].tolist()).decode() for cut in cuts]


def entries(cache: Path) -> list[str]:
    return sorted(path.suffix or "corpus" for path in cache.iterdir())


def test_documents_in_order_each_with_its_end(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path / "a.jsonl"), ByteTokenizer(), tmp_path / "cache")
    assert contents(corpus) == ["alpha", "beta gamma", "\u00e9"]
    assert corpus.num_documents == 3
    assert corpus.bounds.tolist() == [0, 6, 17, 20]
    assert (corpus.tokens.dtype, corpus.bounds.dtype) == (np.uint16, np.int64)


@pytest.mark.parametrize(("size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_width_of_tokens(tmp_path: Path, size: int, dtype: type) -> None:
    tokenizer = CountingTokenizer(size=size)
    corpus = open_corpus(write(tmp_path / "a.jsonl"), tokenizer, tmp_path / "cache")
    assert corpus.tokens.dtype == dtype
    assert contents(corpus) == ["alpha", "beta gamma", "\u00e9"]


def test_batch_size_does_not_change_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {number}" * (number % 7 + 1) for number in range(100)]
    source, progress = write(tmp_path / "a.jsonl", texts), []
    whole = open_corpus(source, CountingTokenizer(), tmp_path / "one")
    monkeypatch.setattr(corpora, "BATCH_CHARACTERS", 50)
    tokenizer = CountingTokenizer()
    parts = open_corpus(source, tokenizer, tmp_path / "two", lambda *done: progress.append(done))
    assert tokenizer.calls == len(progress) > 10
    assert progress[-1] == (100, len(whole.tokens))
    assert contents(parts) == contents(whole) == texts
    assert parts.digest == whole.digest


def test_cache_is_used_until_anything_differs(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    tokenizer = CountingTokenizer()
    source = write(path)
    before = open_corpus(source, tokenizer, cache)
    again = open_corpus(source, tokenizer, cache)
    assert (again.digest, contents(again)) == (before.digest, contents(before))
    assert (tokenizer.calls, entries(cache)) == (1, ["corpus"])
    status = path.stat()

    write(path, ["alphA", *TEXTS[1:]])
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed = open_corpus(source, tokenizer, cache)
    assert contents(changed)[0] == "alphA"
    assert changed.digest != before.digest

    other = find_text("data.path", str(path), "auto", "other", "train")
    open_corpus(other, tokenizer, cache)
    (tmp_path / "b.jsonl").write_bytes(path.read_bytes())
    open_corpus(find_text("data.path", str(tmp_path), "jsonl", "text", "train"), tokenizer, cache)
    assert tokenizer.calls == 4
    another = CountingTokenizer("another")
    open_corpus(source, another, cache)
    assert another.calls == 1


def test_partial_corpora_of_killed_writers_are_replaced(tmp_path: Path) -> None:
    source, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    tokenizer = CountingTokenizer()
    open_corpus(source, tokenizer, cache)
    (whole,) = (path for path in cache.iterdir() if path.is_dir())
    whole.rename(whole.with_name(f"{whole.name}.partial"))
    (cache / "0123.partial").mkdir()
    (cache / "0123.partial" / "tokens.bin").write_bytes(b"half")
    assert contents(open_corpus(source, tokenizer, cache)) == ["alpha", "beta gamma", "\u00e9"]
    assert tokenizer.calls == 2
    assert ".partial" not in entries(cache)


def test_partial_corpora_of_running_writers_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "0123.partial").mkdir(parents=True)
    with (cache / "0123.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open_corpus(write(tmp_path / "a.jsonl"), ByteTokenizer(), cache)
    assert (cache / "0123.partial").is_dir()


def test_two_writers_make_one_corpus(tmp_path: Path) -> None:
    source, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    tokenizer = CountingTokenizer()
    started, go = threading.Event(), threading.Event()

    def hold(*_: int) -> None:
        started.set()
        go.wait(20)

    found: list[Corpus] = []
    waited: list[tuple[int, int]] = []

    def wait(*done: int) -> None:
        waited.append(done)  # type: ignore[arg-type]
        go.set()

    first = threading.Thread(
        target=lambda: found.append(open_corpus(source, tokenizer, cache, hold))
    )
    first.start()
    assert started.wait(20)
    found.append(open_corpus(source, tokenizer, cache, wait))
    first.join()
    assert tokenizer.calls == 1
    assert waited
    assert waited[0] == (0, 0)
    assert contents(found[0]) == contents(found[1])


def test_an_error_in_the_text_leaves_nothing(tmp_path: Path) -> None:
    source, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{broken")
    with pytest.raises(DataError, match=r"line 5 of .*a\.jsonl' is not JSON"):
        open_corpus(source, ByteTokenizer(), cache)
    assert entries(cache) == []


def test_no_text_at_all(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(
        DataError,
        match=r"data\.path = '.*a\.jsonl': there is no text, every .* \(files: 1\): give",
    ):
        open_corpus(write(tmp_path / "a.jsonl", ["", ""]), ByteTokenizer(), cache)
    assert entries(cache) == []


def test_missing_files_and_unusable_caches(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"data\.cache = '.*a\.jsonl' cannot be used .*another"):
        open_corpus(source, ByteTokenizer(), tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl' cannot be read"):
        open_corpus(source, ByteTokenizer(), tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens.bin", "bounds.bin", "corpus.json"])
def test_a_damaged_cache_is_named(tmp_path: Path, name: str) -> None:
    source, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    open_corpus(source, ByteTokenizer(), cache)
    (file,) = cache.glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StoreError, match=rf"'{file.parent}' is damaged .*: remove it"):
        open_corpus(source, ByteTokenizer(), cache)
