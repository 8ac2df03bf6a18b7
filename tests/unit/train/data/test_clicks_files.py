"""Click files in the cache, against slow parsers; bad input; damaged caches."""

from __future__ import annotations

import gzip
import math
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from click_oracles import Sample, key, parse_criteo, parse_row, unpack

import moesaic
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, DataError, StoreError
from moesaic.dist.world import World
from moesaic.facts.job.clicks import CRITEO_SLOTS, ClicksConfig
from moesaic.train.data import clicks, clicks_table, clicks_text
from moesaic.train.data.clicks import ClickData, ClickSamples
from moesaic.train.data.clicks_block import MAX_DENSE


def configure(tmp_path: Path, **changes: Any) -> ClicksConfig:
    raw = {"path": str(tmp_path / "days"), "cache": str(tmp_path / "cache")}
    return parse(ClicksConfig, raw | changes, "test")


def open_data(tmp_path: Path, log: list[str] | None = None, **changes: Any) -> ClickData:
    append = None if log is None else log.append
    return ClickData.open(configure(tmp_path, **changes), 3, World.solo(), append)


def make_line(draw: random.Random) -> str:
    """Return a line with empty fields, signs, long numbers and strings of any length."""
    numbers = [
        draw.choice(["", "0", "-1", "+7", str(draw.randrange(10**6)), "123456789012345"])
        for _ in range(13)
    ]
    strings = [
        draw.choice(["", f"{draw.randrange(2**32):08x}", "x" * draw.randrange(1, 30), "Zürich"])
        for _ in range(26)
    ]
    return "\t".join([str(draw.randrange(2)), *numbers, *strings])


def write_days(tmp_path: Path) -> list[Path]:
    """Write three days in the formats that occur; return the files in the order of the days."""
    draw, directory = random.Random(1), tmp_path / "days"
    directory.mkdir()
    files = [directory / name for name in ("day_2", "day_10.gz", "day_11.tsv")]
    texts = ["".join(f"{make_line(draw)}\n" for _ in range(60)) for _ in files]
    files[0].write_text(texts[0].replace("\n", "\r\n"), newline="")
    files[1].write_bytes(b"".join(gzip.compress(part.encode()) for part in (texts[1], texts[0])))
    files[2].write_text(texts[2].rstrip("\n"))
    (directory / ".hidden").write_text("no samples")
    return files


def check_equal(samples: ClickSamples, expected: list[Sample], num_slots: int) -> None:
    found = unpack(samples.load(range(len(samples)), shuffled=False), num_slots)
    assert [(one.label, one.slots, one.user, one.day) for one in found] == [
        (one.label, one.slots, one.user, one.day) for one in expected
    ]
    assert [one.weight for one in found] == [np.float32(one.weight) for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.dense, other.dense, rtol=1e-7)


@pytest.mark.parametrize("log_dense", [True, False])
@pytest.mark.parametrize("block", [700, 1 << 20])
def test_criteo_equals_a_slow_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_dense: bool, block: int
) -> None:
    monkeypatch.setattr(clicks_text, "_BLOCK_BYTES", block)
    expected, bad = parse_criteo(write_days(tmp_path), log_dense)
    assert not bad
    assert len(expected) == 240
    data = open_data(tmp_path, log_dense=log_dense)
    check_equal(data.train, expected, CRITEO_SLOTS)
    assert data.validation is None
    assert data.train.num_days == 3


def test_malformed_lines_are_left_out_counted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clicks_text, "_BLOCK_BYTES", 2000)
    draw, file = random.Random(2), tmp_path / "days"
    lines = [make_line(draw) for _ in range(80)]
    fields = lines[70].split("\t")
    lines[3] = "1\t\ufffd"
    lines[4] = "2" + lines[4][1:]
    lines[30] = ""
    lines[50] = lines[50] + "\tmore"
    lines[70] = "\t".join([fields[0], "1.5", *fields[2:]])
    lines[71] = "\t".join([fields[0], *["9" * 60 for _ in range(13)], *fields[14:]])
    lines[72] = "01" + lines[72][1:]
    file.write_text("\n".join(lines))
    expected, bad = parse_criteo([file])
    # pyarrow gives malformed lines to a handler as text, and this one is no text.
    file.write_bytes(file.read_bytes().replace("\ufffd".encode(), b"\xff"))
    assert [number for _, number in bad] == [4, 5, 31, 51, 71, 73]
    log = list[str]()
    data = open_data(tmp_path, log, max_bad_lines=7)
    del expected[-8]  # The slow parser takes integers of any size.
    check_equal(data.train, expected, CRITEO_SLOTS)
    assert [line.partition(str(file))[2] for line in log] == [
        "': left out 7 malformed lines or rows",
        "' line 4: 2 fields instead of 40",
        "' line 5: label = '2' is not 0 or 1",
        "' line 31: label = '' is not 0 or 1",
        "' line 51: 41 fields instead of 40",
        "' line 71: I1 = '1.5' is no integer",
    ]
    again = list[str]()
    assert open_data(tmp_path, again, max_bad_lines=7).digest == data.digest
    assert again == log
    with pytest.raises(DataError, match=r"more than data\.max_bad_lines = 5 .*line 4: 2 fields"):
        open_data(tmp_path, max_bad_lines=5)


def make_rows() -> dict[str, pa.Array]:
    """Return columns of all types, with missing values."""
    draw, rows = random.Random(4), 90

    def some(make: Any) -> list[Any]:
        return [None if draw.random() < 0.2 else make() for _ in range(rows)]

    def text() -> str:
        return draw.choice(["", "a", "label", "12345678", "x" * 17, "é"])

    def number() -> int:
        return draw.randrange(-(2**40), 2**40)

    def words() -> list[Any]:
        return [draw.choice([None, text()]) for _ in range(draw.randrange(4))]

    return {
        "click": pa.array([draw.randrange(2) for _ in range(rows)], pa.int8()),
        "price": pa.array([draw.choice([None, math.nan, draw.gauss(0, 9)]) for _ in range(rows)]),
        "age": pa.array(some(lambda: draw.randrange(-5, 90)), pa.int16()),
        "flag": pa.array(some(lambda: draw.random() < 0.5), pa.bool_()),
        "item": pa.array(some(number), pa.int64()),
        "huge": pa.array(some(lambda: 2**64 - 1 - draw.randrange(99)), pa.uint64()),
        "city": pa.array(some(text), pa.string()),
        "shop": pa.array(some(text), pa.large_string()).dictionary_encode(),
        "tags": pa.array(some(words), pa.list_(pa.string())),
        "seen": pa.array(some(lambda: [number() for _ in range(3)]), pa.large_list(pa.int64())),
        "pair": pa.array(some(lambda: [number(), None]), pa.list_(pa.int64(), 2)),
        "gain": pa.array(some(lambda: draw.randrange(8) / 4), pa.float32()),
        "who": pa.array(some(text), pa.string()),
    }  # fmt: skip


PARQUET = {
    "format": "parquet", "label": "click", "dense": ["price", "age", "flag"], "weight": "gain",
    "user": "who", "slots": ["item", "huge", "city", "shop", "tags", "seen", "pair"],
}  # fmt: skip


def test_ids_have_the_keys_of_training() -> None:
    for ids in (["68fd1e64", "a", "é" * 20], [0, -3, 2**40]):
        assert moesaic.hash_ids(ids, slot=2).tolist() == [key(2, value) for value in ids]
    for bad, words in (([1.5], "type double"), (["a", ""], "id 1 is missing"), ([None, 1], "id 0")):
        with pytest.raises(ConfigError, match=words):
            moesaic.hash_ids(bad)


def test_parquet_equals_a_slow_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clicks_table, "_BLOCK_ROWS", 32)
    table = pa.table(make_rows())
    (tmp_path / "days").mkdir()
    parquet.write_table(table, tmp_path / "days" / "b.parquet", row_group_size=50)
    parquet.write_table(table[40:80], tmp_path / "days" / "c.pq")
    parquet.write_table(table[:10], tmp_path / "held.parquet")
    data = open_data(tmp_path, validation_path=str(tmp_path / "held.parquet"), **PARQUET)
    config, rows = configure(tmp_path, **PARQUET), table.to_pylist()
    expected = [parse_row(row, config, 0) for row in rows]
    expected += [parse_row(row, config, 1) for row in rows[40:80]]
    check_equal(data.train, expected, 7)
    assert data.validation is not None
    check_equal(data.validation, [parse_row(row, config, 2) for row in rows[:10]], 7)
    numbered = open_data(tmp_path, **PARQUET | {"user": "item", "weight": None, "dense": []})
    config = configure(tmp_path, **PARQUET | {"user": "item", "weight": None, "dense": []})
    expected = [parse_row(row, config, 0) for row in rows]
    expected += [parse_row(row, config, 1) for row in rows[40:80]]
    check_equal(numbered.train, expected, 7)


def test_malformed_rows_are_left_out(tmp_path: Path) -> None:
    columns = make_rows()
    labels, prices, gains = (columns[name].to_pylist() for name in ("click", "price", "gain"))
    labels[2], labels[3], prices[5], prices[6], gains[8] = 2, None, float("inf"), 2 * MAX_DENSE, -1
    columns |= {"click": pa.array(labels), "price": pa.array(prices), "gain": pa.array(gains)}
    file = tmp_path / "days"
    parquet.write_table(pa.table(columns), file)
    log = list[str]()
    data = open_data(tmp_path, log, max_bad_lines=5, **PARQUET)
    config, rows = configure(tmp_path, **PARQUET), pa.table(columns).to_pylist()
    kept = [row for number, row in enumerate(rows) if number not in (2, 3, 5, 6, 8)]
    check_equal(data.train, [parse_row(row, config, 0) for row in kept], 7)
    assert [line.partition(f"{file}' ")[2] for line in log[1:]] == [
        "row 3: click = 2 is not 0 or 1",
        "row 4: click = None is not 0 or 1",
        "row 6: price = inf is infinite or too large",
        f"row 7: price = {2 * MAX_DENSE} is infinite or too large",
        "row 9: gain = -1.0 is negative or infinite",
    ]


CRITEO_LINE = "\t".join(["1"] + ["2"] * 39)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (None, {}, r"data.path = '.*days' does not exist: give a file"),
        ({}, {}, r"data.path = '.*days' holds no such file: give a file"),
        ({"a.parquet": b""}, {}, r"holds Parquet \('a.parquet'\).*set data.format = \"parquet\""),
        (b"", {}, r"data.path = '.*days': '.*days' holds no samples: remove it"),
        (b"\n", {"max_bad_lines": 1}, "holds no samples"),
        (b"9" + CRITEO_LINE[1:].encode(), {}, r"data.max_bad_lines = 0 .*label = '9' is not 0 or"),
        ({"a.gz": gzip.compress(b"1\t" * 999)[:-20]}, {}, r"a.gz' cannot be read .*: replace it"),
        (b"PAR1", {**PARQUET}, r"data.path = '.*days': '.*days' cannot be read .*: replace it"),
    ],
    ids=["absent", "directory", "parquet", "empty", "blank", "label", "cut gz", "no parquet"],
)
def test_bad_files(tmp_path: Path, content: Any, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "days"
    if isinstance(content, dict):
        path.mkdir()
        for name, data in content.items():
            (path / name).write_bytes(data)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path, **changes)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": ["item", "itme"]}, r'data.slots names "itme", .* no column.* one of click, pri'),
        ({"label": "city"}, r'data.label names "city", .* type string in .*: convert it to numb'),
        ({"dense": ["tags"]}, r'data.dense names "tags", .*convert it to numbers'),
        ({"slots": ["price"]}, r'data.slots names "price", .* type double .*strings, or lists'),
        ({"user": "tags"}, r'data.user names "tags", .*convert it to integers or strings'),
    ],
    ids=["missing", "label", "dense", "slot", "user"],
)
def test_bad_columns(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    parquet.write_table(pa.table(make_rows()), tmp_path / "days")
    with pytest.raises(DataError, match=message):
        open_data(tmp_path, **PARQUET | changes)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clicks_text, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(clicks_text, "_MAX_LINE_BYTES", 1000)
    (tmp_path / "days").write_text(f"{CRITEO_LINE}\n" + "1" * 2000)
    with pytest.raises(DataError, match=r"line 2 is longer than 64 MiB"):
        open_data(tmp_path)


def test_the_cache_is_written_once_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_days(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: open_data(tmp_path), range(2))
    assert first.digest == second.digest
    cache = tmp_path / "cache"
    assert len(list(cache.iterdir())) == 3
    part = sorted(cache.glob("*/keys.bin"))[0]
    written = part.stat().st_mtime_ns
    assert open_data(tmp_path).digest == first.digest
    assert part.stat().st_mtime_ns == written
    part.write_bytes(part.read_bytes()[:-8])
    expected, _ = parse_criteo(files)
    check_equal(open_data(tmp_path).train, expected, CRITEO_SLOTS)
    assert len(list(cache.iterdir())) == 3
    (sorted(cache.glob("*/day.json"))[1]).unlink()
    assert open_data(tmp_path).digest == first.digest
    # A new day, or another encoding, leaves the days in the cache as they are.
    (tmp_path / "days" / "day_12").write_text(CRITEO_LINE)
    assert open_data(tmp_path).digest != first.digest
    assert len(list(cache.iterdir())) == 4
    assert open_data(tmp_path, log_dense=False).digest != first.digest
    assert len(list(cache.iterdir())) == 8
    # A moved file gives the same samples.
    for file in files:
        file.rename(file.with_name(f"new_{file.name}"))
    (tmp_path / "days" / "day_12").unlink()
    assert open_data(tmp_path).digest == first.digest


def test_few_days_are_mapped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clicks, "_MAX_MAPPED", 2)
    (tmp_path / "days").mkdir()
    files = [tmp_path / "days" / f"{day}" for day in range(9)]
    for day, file in enumerate(files):
        file.write_text(f"{make_line(random.Random(day))}\n" * 3)
    data = open_data(tmp_path)
    check_equal(data.train, parse_criteo(files)[0], CRITEO_SLOTS)
    links = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    mapped = {Path(link).parent for link in links if str(tmp_path) in link}
    assert len(mapped) == 2
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(StoreError, match=r"data.cache: '.*' cannot be read .*: resume the run"):
        data.train.read(range(3), shuffled=False)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_days(tmp_path)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"data.cache = '.*cache' cannot be used .*make room"):
        open_data(tmp_path)
