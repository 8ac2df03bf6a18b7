from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesaic.base.errors import DataError
from moesaic.train.data.sources import TextSource, find_text
from moesaic.train.data.text import read_text

DOCUMENTS = ["first", "zwéite\r\n\nZeile", "third \U0001f408"]


def find(
    path: Path | str, kind: str = "auto", text_key: str = "text", split: str = "train"
) -> TextSource:
    return find_text("data.path", str(path), kind, text_key, split)


def documents(path: Path | str, *arguments: str, **named: str) -> list[str]:
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = set(cache.glob("*")) if cache.exists() else set()
    found = list(read_text(find(path, *arguments, **named), _CACHE[0]))
    assert (set(cache.glob("*")) if cache.exists() else set()) == before
    return found


_CACHE: list[Path] = []


@pytest.fixture(autouse=True)
def _offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Refuse network access and count attempts, because `datasets` would swallow an error."""
    lookups: list[object] = []

    def refuse(host: object, *_: object, **__: object) -> None:
        lookups.append(host)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    _CACHE[:] = [tmp_path_factory.mktemp("datasets")]
    yield
    assert lookups == []


def write_lines(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path: Path, column: object, name: str = "text") -> Path:
    table = pa.table({"id": list(range(len(column))), name: column})  # type: ignore[arg-type]
    pq.write_table(table, path, row_group_size=2)
    return path


def test_text_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in zip(("a.txt", "b.TXT", "sub/a.txt"), DOCUMENTS, strict=True):
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "README").write_text("no document")
    (tmp_path / ".hidden.txt").write_text("no document")
    assert documents(tmp_path) == DOCUMENTS
    assert documents(tmp_path / "a.txt") == DOCUMENTS[:1]
    assert documents(tmp_path / "**" / "*.txt") == [DOCUMENTS[0], DOCUMENTS[2]]
    assert documents(tmp_path / "README", "text") == ["no document"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf \ttext\r\n\n")
    assert documents(tmp_path / "a.txt") == [" \ttext\r\n\n"]


def test_json_lines(tmp_path: Path) -> None:
    """Other columns may differ between lines."""
    records: list[object] = [
        {"text": DOCUMENTS[0], "meta": 1},
        {"meta": {"a": []}, "text": DOCUMENTS[1]},
        {"text": None},
        {"text": ""},
        {"text": DOCUMENTS[2], "meta": "s"},
    ]
    write_lines(tmp_path / "a[1].jsonl", records)
    assert documents(tmp_path / "a[1].jsonl") == DOCUMENTS
    (tmp_path / "b.ndjson").write_text('\ufeff{"text": "x\\u2028y"}\n\n{"text": "z"}')
    assert documents(tmp_path) == [*DOCUMENTS, "x\u2028y", "z"]


def test_compressed(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:20]) + gzip.compress(lines[20:]))
    with pa.CompressedOutputStream(str(tmp_path / "b.jsonl.zst"), "zstd") as stream:
        stream.write(lines)
    assert documents(tmp_path, text_key="body") == DOCUMENTS * 2


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array([*DOCUMENTS[:2], None, "", DOCUMENTS[2]], pa.string()).cast(kind)
    write_parquet(tmp_path / "a.parquet", column)
    assert documents(tmp_path / "a.parquet") == DOCUMENTS


def test_saved_dataset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3, 4], "text": [*DOCUMENTS, None]})
    rows.save_to_disk(str(tmp_path / "one"))
    both = datasets.DatasetDict({"train": rows.select([0, 1]), "validation": rows.select([2])})
    both.save_to_disk(str(tmp_path / "both"))
    capfd.readouterr()
    assert documents(tmp_path / "one") == DOCUMENTS
    assert documents(tmp_path / "one", "dataset") == DOCUMENTS
    assert documents(tmp_path / "both") == DOCUMENTS[:2]
    assert documents(tmp_path / "both", split="validation") == DOCUMENTS[2:]
    assert capfd.readouterr() == ("", "")


def test_dataset_repository(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Read a directory as downloaded from the hub, with splits by file name or by its card."""
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", DOCUMENTS[:1])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", DOCUMENTS[1:2])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", DOCUMENTS[2:])
    assert documents(tmp_path, "dataset") == DOCUMENTS[:2]
    assert documents(tmp_path, "dataset", split="test") == DOCUMENTS[2:]
    assert documents(tmp_path, "parquet") == [DOCUMENTS[2], *DOCUMENTS[:2]]
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
    (tmp_path / "README.md").write_text(card + "    path: data/test-*\n---\nA card.\n")
    assert documents(tmp_path) == DOCUMENTS[2:]
    assert capfd.readouterr() == ("", "")


def _raises(message: str, path: Path | str, *arguments: str, **named: str) -> None:
    with pytest.raises(DataError, match=message):
        documents(path, *arguments, **named)


def test_errors_of_paths(tmp_path: Path) -> None:
    _raises(r"data\.path = '.*none' does not exist: give", tmp_path / "none")
    _raises(r"data\.path = '.*\*\.txt' matches no file", tmp_path / "*.txt")
    _raises(r"holds no file named \*\.txt, \*\.jsonl, \*\.ndjson, \*\.parquet: give", tmp_path)
    (tmp_path / "a.txt").write_text("a")
    _raises(r"holds no file named \*\.parquet: give", tmp_path, "parquet")
    _raises(r"no directory, but data\.format = 'dataset'", tmp_path / "a.txt", "dataset")
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    _raises(r"mixes text \('a\.txt'\) and jsonl \('b\.jsonl'\): give a glob", tmp_path)
    assert documents(tmp_path, "jsonl") == ["b"]
    (tmp_path / "c.md").write_text("c")
    _raises(r"c\.md' does not say what it holds: set data\.format", tmp_path / "c.md")
    assert documents(tmp_path / "c.md", "text") == ["c"]


def test_errors_of_content(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "b"}, {"body": "b", "id": 1}])
    _raises(r"line 2 of '.*a\.jsonl' has no 'text': set data\.text_key .*\(body, id\)", lines)
    write_lines(lines, [{"text": 3}])
    _raises(r"line 1 of .*: data\.text_key = 'text' holds 3, which is no text", lines)
    talks = tmp_path / "talks.jsonl"
    talks.write_text('{"messages": [], "id": 1}\n')
    _raises(r"has no 'text', but id, messages: set data\.format = \"chat\", or data", talks)
    write_lines(lines, ["text"])
    _raises(r"line 1 of .* is not a JSON object", lines)
    lines.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    _raises(r"line 2 of .* is not JSON \(.*utf-8.*\): mend", lines)
    text = tmp_path / "a.txt"
    text.write_bytes("é".encode("latin-1"))
    _raises(r"a\.txt' is not UTF-8 text \(.* at byte 0\): convert", text)
    parquet = write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    _raises(
        r"a\.parquet' has no 'body': set data\.text_key .*\(id, text\)", parquet, text_key="body"
    )
    _raises(r"'id' holds int64, which is no text", parquet, text_key="id")
    parquet.write_bytes(parquet.read_bytes()[:-9])
    _raises(r"a\.parquet' cannot be read as Parquet: ", parquet)


def test_errors_of_datasets(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"id": [1], "text": ["a"]})
    both = datasets.DatasetDict({"one": rows, "two": rows})
    both.save_to_disk(str(tmp_path / "both"))
    _raises(r"no split 'train': set data\.split .* to one of one, two", tmp_path / "both")
    _raises(
        r"has no 'body': set data\.text_key .*\(id, text\)",
        tmp_path / "both",
        split="one",
        text_key="body",
    )
    _raises(r"'id' holds int64, which is no text", tmp_path / "both", split="one", text_key="id")
    (tmp_path / "both" / "one" / "data-00000-of-00001.arrow").write_bytes(b"broken")
    _raises(r"dataset directory '.*both' cannot be read", tmp_path / "both", split="one")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.bin").write_bytes(b"x")
    _raises(r"dataset directory '.*odd' cannot be read", tmp_path / "odd", "dataset")
    (tmp_path / "empty").mkdir()
    _raises(r"is an empty directory", tmp_path / "empty", "dataset")
