from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.base.config import parse
from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job import DataConfig
from moesaic.train.data.batch import PackedSamples, Samples
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.sources import find_sources
from moesaic.train.data.text_data import TextData, select_held_out

NUM = 200


def write(path: Path, num: int = NUM, first: int = 0) -> Path:
    """Write documents that contain their number, each exactly eight tokens with its end."""
    lines = [json.dumps({"text": f"<{number:05}>"}) for number in range(first, first + num)]
    path.write_text("\n".join(lines))
    return path


def configure(tmp_path: Path, **changes: Any) -> DataConfig:
    raw = {
        "path": str(tmp_path / "a.jsonl"), "sequence": 8, "packing": "stream",
        "cache": str(tmp_path / "cache"),
    }  # fmt: skip
    return parse(DataConfig, raw | changes, "test")


def open_data(tmp_path: Path, seed: int = 0, **changes: Any) -> TextData:
    return TextData.open(configure(tmp_path, **changes), seed, World.solo())


def numbers(samples: Samples | None) -> list[int]:
    """Return the numbers of documents in whole samples, in text order."""
    assert samples is not None
    batch = samples.batch(range(len(samples)), shuffled=False)
    return [int(bytes(row[1:6].tolist())) for row in batch.inputs]


def test_training_and_validation_partition_the_documents(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    data = open_data(tmp_path, validation_share=0.25)
    train, held = numbers(data.train), numbers(data.validation)
    # The last document of a stream has no next token, so its sample is incomplete.
    assert not set(train) & set(held)
    assert len(set(range(NUM)) - set(train) - set(held)) == 2
    assert train == sorted(train)
    assert held == sorted(held)
    assert 25 < len(held) < 75
    assert numbers(open_data(tmp_path, validation_share=0.25).validation) == held
    assert numbers(open_data(tmp_path, seed=1, validation_share=0.25).validation) != held


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_the_end_of_a_single_text_is_held_out(tmp_path: Path, packing: str) -> None:
    """Both parts together are the text, in its order."""
    text = "".join(chr(33 + number % 90) for number in range(400))
    (tmp_path / "one.txt").write_text(text)
    keys = {"path": str(tmp_path / "one.txt"), "cache": str(tmp_path / "cache"), "sequence": 8}
    config = parse(DataConfig, {**keys, "validation_share": 0.25, "packing": packing}, "data")
    log: list[str] = []
    data = TextData.open(config, 0, World.solo(), log.append)
    assert log[-1] == (
        "data.validation_share = 0.25: the text has 1 document, so its last 100 of 401 tokens are "
        "held out"
    )
    held = data.validation
    assert held is not None
    parts = [
        samples.batch(range(len(samples)), shuffled=False).inputs.flatten().tolist()
        for samples in (data.train, held)
    ]
    assert bytes(parts[0]).decode() == text[: len(parts[0])]
    assert bytes(parts[1]).decode() == text[301 : 301 + len(parts[1])]
    assert [len(part) for part in parts] == [37 * 8, 12 * 8]
    short = config.model_copy(update={"validation_share": 0.01})
    with pytest.raises(DataError, match=r"0\.01 \(the last 4 of 401 tokens\) gives 4 tokens, but"):
        TextData.open(short, 0, World.solo())


def test_a_larger_share_or_text_keeps_held_out_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = select_held_out(5000, 3, 0.1), select_held_out(6000, 3, 0.3)
    assert (small <= large[:5000]).all()
    assert abs(small.mean() - 0.1) < 0.02
    assert abs(large.mean() - 0.3) < 0.03
    monkeypatch.setattr("moesaic.train.data.text_data._CHUNK", 64)
    assert (select_held_out(5000, 3, 0.1) == small).all()


def test_validation_text_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "held").mkdir()
    write(tmp_path / "held" / "b.jsonl", 9, first=500)
    data = open_data(tmp_path, validation_path=str(tmp_path / "held"))
    assert numbers(data.train) == list(range(NUM - 1))
    assert numbers(data.validation) == list(range(500, 508))
    assert open_data(tmp_path).validation is None


def test_packing_and_seed_reach_the_samples(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    stream, documents = open_data(tmp_path), open_data(tmp_path, packing="documents")
    other = open_data(tmp_path, seed=1)
    indices = range(50)
    assert (stream.train.batch(indices).targets != -100).all()
    assert ((documents.train.batch(indices).targets == -100).sum(1) == 1).all()
    inputs = stream.train.batch(indices).inputs
    assert (inputs == documents.train.batch(indices).inputs).all()
    assert (inputs != other.train.batch(indices).inputs).any()


def test_digest_covers_what_determines_samples(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    base = open_data(tmp_path).digest
    assert open_data(tmp_path, cache=str(tmp_path / "elsewhere")).digest == base
    changes: list[dict[str, Any]] = [
        {"seed": 1}, {"sequence": 9}, {"packing": "documents"}, {"validation_share": 0.5},
        {"validation_path": str(tmp_path / "a.jsonl")},
    ]  # fmt: skip
    digests = {open_data(tmp_path, **change).digest for change in changes}
    write(tmp_path / "a.jsonl", first=1)
    digests.add(open_data(tmp_path).digest)
    assert len(digests | {base}) == len(changes) + 2


def test_progress_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl")
    monkeypatch.setattr("moesaic.train.data.rank_zero_first._MESSAGE_S", -1.0)
    log: list[str] = []
    TextData.open(configure(tmp_path), 0, World.solo(), log.append)
    assert log == [f"tokenising '{tmp_path}/a.jsonl': 200 documents, 1,600 tokens"]
    TextData.open(configure(tmp_path), 0, World.solo(), log.append)
    assert len(log) == 1


def test_too_little_text(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 2)
    message = (
        r"data\.path = '.*' gives 16 tokens, but one sample takes data\.sequence \+ 1 = 17: give"
    )
    with pytest.raises(DataError, match=message):
        open_data(tmp_path, sequence=16)
    assert len(open_data(tmp_path, sequence=15).train) == 1
    write(tmp_path / "a.jsonl", 100)
    held = int(select_held_out(100, 0, 0.02).sum())
    with pytest.raises(
        DataError, match=rf"data\.validation_share = 0\.02 \({held} of 100 documents\) gives"
    ):
        open_data(tmp_path, validation_share=0.02, sequence=8 * held)
    with pytest.raises(DataError, match=r"data\.path = '.*' without \d+ of its 100 documents"):
        open_data(tmp_path, validation_share=0.999)
    write(tmp_path / "b.jsonl", 1)
    with pytest.raises(DataError, match=r"data\.validation_path = '.*b\.jsonl' gives 8 tokens"):
        open_data(tmp_path, validation_path=str(tmp_path / "b.jsonl"))


def test_sources_are_found_without_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not JSON")
    find_sources(configure(tmp_path))
    with pytest.raises(DataError, match=r"data\.validation_path = 'none' does not exist"):
        find_sources(configure(tmp_path, validation_path="none"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe' is neither a file nor a directory: give"):
        find_sources(configure(tmp_path, path=str(tmp_path / "pipe")))
    (tmp_path / "pipe").unlink()
    with pytest.raises(DataError, match=r"data\.path = 'none' does not exist"):
        open_data(tmp_path, path="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_far_samples_of_a_million_documents() -> None:
    bounds = np.arange(0, 10_000_001, 10)
    corpus = Corpus(np.zeros(10_000_000, np.uint16), bounds, "")
    held_out = select_held_out(1_000_000, 0, 0.5)
    samples = PackedSamples(corpus, held_out, 64, "documents", 0)
    batch = samples.batch(range(10**12, 10**12 + 8))
    assert batch.inputs.shape == (8, 64)
