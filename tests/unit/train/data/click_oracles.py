"""Slow, obvious versions of click data: parsers of files, keys, samples of the stream."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.train.data.clicks import ClickBatch

GOLDEN, WORDS = 0x9E3779B97F4A7C15, 1 << 64


@dataclass(frozen=True)
class Sample:
    label: int
    weight: float
    dense: list[float]
    slots: list[list[int]]
    user: int | None
    day: int


def mix(word: int) -> int:
    word %= WORDS
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORDS
    return word ^ (word >> 31)


def signed(word: int) -> int:
    return word - WORDS if word >= WORDS // 2 else word


def key(slot: int, value: int | str) -> int:
    """Return the key of an id of a slot."""
    slot_word = mix((slot + 1) * GOLDEN)
    if isinstance(value, int):
        return signed(mix(value % WORDS ^ slot_word))
    data = value.encode()
    word = slot_word ^ (len(data) * GOLDEN % WORDS)
    whole = len(data) // 8 * 8
    for start in range(0, whole, 8):
        word = mix(word ^ int.from_bytes(data[start : start + 8], "little"))
    return signed(mix(word ^ int.from_bytes(data[whole:], "little")))


def scale(value: float, log_dense: bool) -> float:
    return math.copysign(math.log1p(abs(value)), value) if log_dense else value


def parse_line(line: str, day: int, log_dense: bool) -> Sample | None:
    """Return the sample of a line of Criteo TSV, or None if it is malformed."""
    fields = line.split("\t")
    if len(fields) != 40 or fields[0] not in ("0", "1"):
        return None
    if not all(re.fullmatch(r"([+-]?[0-9]+)?", text) for text in fields[1:14]):
        return None
    dense = [scale(float(text or 0), log_dense) for text in fields[1:14]]
    slots = [[key(slot, text)] if text else [] for slot, text in enumerate(fields[14:])]
    return Sample(int(fields[0]), 1.0, dense, slots, None, day)


def parse_criteo(
    files: Sequence[Path], log_dense: bool = True
) -> tuple[list[Sample], list[tuple[Path, int]]]:
    """Return the samples of Criteo TSV, and file and number of malformed lines."""
    samples, bad = [], []
    for day, file in enumerate(files):
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        for number, line in enumerate(text.splitlines(), 1):
            sample = parse_line(line, day, log_dense)
            samples += [] if sample is None else [sample]
            bad += [(file, number)] if sample is None else []
    return samples, bad


def parse_row(row: dict[str, Any], config: Any, day: int) -> Sample:
    """Return the sample of a Parquet row."""
    slots = []
    for slot, name in enumerate(config.slots):
        value = row[name]
        ids = value if isinstance(value, list) else [value]
        slots.append([key(slot, one) for one in ids if one not in (None, "")])
    user = None
    if config.user is not None:
        value = row[config.user]
        user = 0 if value in (None, "") else key(len(config.slots), value)
    values = [row[name] for name in config.dense]
    dense = [0.0 if value is None or math.isnan(value) else value for value in values]
    weight = 1.0 if config.weight is None or row[config.weight] is None else row[config.weight]
    dense = [scale(value, config.log_dense) for value in dense]
    return Sample(int(row[config.label]), weight, dense, slots, user, day)


def unpack(batch: ClickBatch, num_slots: int) -> list[Sample]:
    """Return the samples of a batch one by one."""
    size = len(batch)
    assert batch.offsets[0] == 0
    assert len(batch.offsets) == num_slots * size + 1
    assert batch.offsets[-1] == len(batch.keys)
    return [
        Sample(
            int(batch.labels[b]), float(batch.weights[b]), batch.dense[b].tolist(),
            [
                batch.keys[batch.offsets[s * size + b] : batch.offsets[s * size + b + 1]].tolist()
                for s in range(num_slots)
            ],
            None if batch.users is None else int(batch.users[b]), int(batch.days[b]),
        )
        for b in range(size)
    ]  # fmt: skip
