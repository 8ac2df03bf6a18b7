"""Texts behind prompts: against a text-by-text reference, their dropout, and errors."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, DataError
from moesaic.dist.world import World
from moesaic.facts.job import ControlConfig, ControlValues, DataConfig
from moesaic.kernels.randomness import uniform
from moesaic.models.control import ControlPrompts, prompt_text
from moesaic.testing.jobs import tiny_job
from moesaic.train.data.batch import Batch, Samples, split_documents
from moesaic.train.data.control import KeywordFinder
from moesaic.train.data.text_data import TextData

SEED = 5
GENRES = ["docs", "law"]
RECORDS: list[dict[str, Any]] = [
    {
        "text": "word " * (index % 5) + f"text {index}", "kind": GENRES[index % 2],
        "subject": ["lists", None, "files"][index % 3], "mood": "neutral",
        "words": ["one", "two"][: index % 3],
    }
    for index in range(30)
]  # fmt: skip
CONTROL = {
    "genres": GENRES, "genre": "kind", "topic": "subject", "keywords": "words",
    "sentiment": "mood", "length": "tokens",
}  # fmt: skip
Document = tuple[list[int], list[bool]]
"""Tokens, and true for those that are targets."""


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def open_data(path: Path, control: dict[str, Any], seed: int = SEED, **changes: Any) -> TextData:
    data = {"path": str(path), "sequence": 200, "cache": str(path.parent / "cache"), **changes}
    config = parse(ControlConfig, control, "test")
    return TextData.open(parse(DataConfig, data, "test"), seed, World.solo(), control=config)


def documents(batch: Batch) -> list[list[Document]]:
    """Return the documents of each sample, without the repetitions that fill it."""
    return [
        [one for one in split_documents(batch, row) if any(one[1])]
        for row in range(len(batch.samples))
    ]


def draw(epoch: int, text: int, number: int) -> float:
    return float(uniform(SEED, "prompt", epoch, torch.tensor(text), torch.tensor(number)))


def expected(record: dict[str, Any], epoch: int, text: int, data: TextData) -> Document:
    """Return a text with what is left of its prompt in an epoch, by the layout as a string."""
    values: dict[str, Any] = {}
    if draw(epoch, text, 0) > 0.5:
        every = {
            "genre": record["kind"], "topic": record["subject"], "keywords": record["words"],
            "sentiment": record["mood"], "length": len(record["text"]),
        }  # fmt: skip
        values = {
            name: value
            for number, (name, value) in enumerate(every.items(), start=1)
            if value and draw(epoch, text, number) > 0.5
        }
        values["soft_prompts"] = int(draw(epoch, text, 6) * 65)
    prompt = data.tokenizer.encode(prompt_text(ControlValues(**values)))
    tokens = [*record["text"].encode(), data.tokenizer.end_id]
    mask = [False] * len(prompt) + [True] * len(tokens)
    return [*prompt, *tokens], [False, *mask[1:]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of `RECORDS`."""
    return write(tmp_path_factory.mktemp("control") / "a.jsonl", RECORDS)


def test_samples_equal_the_reference(path: Path) -> None:
    data = open_data(path, CONTROL)
    found = [one for sample in documents(data.train.batch(range(60))) for one in sample]
    for epoch in range(3):
        wanted = sorted(expected(one, epoch, i, data) for i, one in enumerate(RECORDS))
        here, found = found[: len(RECORDS)], found[len(RECORDS) :]
        assert sorted(here) == wanted
        if epoch == 0:  # Samples are nearly full.
            assert len(data.train) <= math.ceil(1.15 * sum(len(one[0]) for one in wanted) / 200)


def test_a_text_without_a_prompt_has_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that marks the first word of a text does so, unless a prompt comes before."""
    alphabet = {c: i for i, c in enumerate("\u2581abcdefghijklmnopqrstuvwxyzA,0123456789")}
    base = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    base.add_special_tokens([AddedToken("</s>", special=True)])
    base.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", RECORDS)
    data = open_data(path, CONTROL, tokenizer=str(tmp_path))
    prompts = ControlPrompts.find(data.tokenizer)
    assert prompts is not None
    texts = [record["text"] for record in RECORDS]
    plain = {(*data.tokenizer.encode(text), data.tokenizer.end_id) for text in texts}
    behind = {(*ids, data.tokenizer.end_id) for ids in prompts.encode_texts(texts)}
    assert not plain & behind
    count = Counter[bool]()
    for sample in documents(data.train.batch(range(60))):
        for tokens, mask in sample:
            has_prompt = tokens[0] in prompts.reserved_ids
            start = mask.index(True) - (not has_prompt)
            assert tuple(tokens[start:]) in (behind if has_prompt else plain)
            count[has_prompt] += 1
    assert min(count.values()) > 20


def test_a_batch_is_the_same_in_any_company(path: Path) -> None:
    samples, fresh = (open_data(path, CONTROL).train for _ in range(2))
    whole = samples.batch(range(60))
    order = np.random.default_rng(0).permutation(60).tolist()
    for rows in (order[:7], order[7:], []):
        for one in (samples, fresh):
            part = one.batch(rows)
            for name in ("samples", "inputs", "targets", "documents", "positions"):
                assert torch.equal(getattr(part, name), getattr(whole, name)[rows])
    ordered = samples.batch(range(len(samples)), shuffled=False)
    assert ordered.inputs.shape == (len(samples), 200)
    with pytest.raises(IndexError):
        samples.batch([len(samples)], shuffled=False)
    other = open_data(path, CONTROL, seed=6)
    assert not torch.equal(other.train.batch(range(9)).inputs, whole.inputs[:9])


def test_dropout_has_its_probabilities(tmp_path: Path) -> None:
    records = [
        {**RECORDS[0], "text": f"{i:04}", "subject": "s", "words": ["w"]} for i in range(500)
    ]
    data = open_data(
        write(tmp_path / "a.jsonl", records), {**CONTROL, "genres": GENRES[:1]}, sequence=150
    )
    counts, soft, total = Counter[str](), Counter[int](), 0
    ids = {data.tokenizer.encode(tag)[0]: tag for tag in ("[t]", "[k]", "[senti]", "[w]")}
    (first, *_) = data.tokenizer.encode("[docs-0]")
    prompts = ControlPrompts.find(data.tokenizer)
    assert prompts is not None
    samples = data.train
    position = 0
    while total < 3000:
        for sample in documents(samples.batch(range(position, position + 50))):
            for tokens, mask in sample:
                prompt = [one for one, counted in zip(tokens, mask, strict=True) if not counted]
                found = [one for one in prompt if one in prompts.reserved_ids]
                num_soft = sum(one in prompts.soft_ids for one in found)
                assert found[:num_soft] == list(range(first, first + num_soft))
                counts.update(ids[one] for one in found if one in ids)
                counts["prompt"] += bool(found)
                soft[num_soft] += 1
                total += 1
        position += 50
    for tag in ("[t]", "[k]", "[senti]", "[w]"):
        check_frequency(counts[tag], total, 0.25)
    # A genre without soft prompts leaves no trace.
    check_frequency(counts["prompt"], total, 0.5 * (1 - 0.5**4 * (0.5 + 0.5 / 65)))
    check_frequency(soft[0], total, 0.75 + 0.25 / 65)
    check_frequency(sum(soft[n] for n in range(1, 33)), total, 0.25 * 32 / 65)
    check_frequency(soft[64], total, 0.25 / 65)


def check_frequency(count: int, total: int, probability: float) -> None:
    """Raise unless a count is within three standard deviations of its mean."""
    spread = math.sqrt(total * probability * (1 - probability))
    assert abs(count - total * probability) <= 3 * spread, (count, total * probability, spread)


def test_labels_come_from_columns_functions_and_built_in_labellers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("docs/a.txt", "alpha beta beta gamma"), ("law/deep/b.txt", "alpha delta")):
        (tmp_path / "texts" / name).parent.mkdir(parents=True)
        (tmp_path / "texts" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    Path("own_labels.py").write_text(
        "def mood(texts):\n    return [t[:2] or None for t in texts]\n"
    )
    control = {
        "genres": GENRES, "genre": "directory", "keywords": "tf-idf", "length": "tokens",
        "sentiment": "own_labels:mood",
    }  # fmt: skip
    data = open_data(tmp_path / "texts", control)
    found = set[str]()
    for sample in documents(data.train.batch(range(60))):
        for tokens, _ in sample:
            found.add(data.tokenizer.decode(tokens, with_special_tokens=True).split("]", 1)[-1])
    shown = " ".join(found)
    for part in (
        "[k]beta, gamma[/k]", "[k]delta[/k]", "[senti]al[/senti]", "[w]About 21 words[/w]",
        "[w]About 11 words[/w]",
    ):  # fmt: skip
        assert part in shown
    assert data.tokenizer.decode([data.tokenizer.encode("[law-0]")[0]], True) == "[law-0]"
    first = open_data(tmp_path / "texts", control).digest
    assert first == data.digest
    Path("own_labels.py").write_text("def mood(texts):\n    return ['b' for t in texts]\n")
    monkeypatch.delitem(__import__("sys").modules, "own_labels")
    assert open_data(tmp_path / "texts", control).digest != first


def test_keywords_are_frequent_in_a_text_and_rare_elsewhere() -> None:
    texts = ["the sort sort the list", "the list the file", "the court the the the clause"]
    find = KeywordFinder(texts).find
    assert find(texts[0]) == ["sort", "list"]
    assert find(texts[1]) == ["file", "list"]
    assert find(texts[2]) == ["court", "clause"]
    many = KeywordFinder(["one two six ten", "x"])
    assert many.find("one two six ten") == ["one", "two", "six"]


def test_validation_text_has_the_keywords_of_training(tmp_path: Path) -> None:
    """A single validation text, which the training text has too, and one with a new word."""
    train, other = (tmp_path / name for name in ("train.jsonl", "other.jsonl"))
    texts = ["the sort the list", "the list the file", "the court", "the list"]
    write(train, [{"text": text} for text in texts])
    write(other, [{"text": "the court the"}, {"text": "the zebra list"}])
    valid, found = tmp_path / "valid.jsonl", list[str]()
    write(valid, [{"text": texts[0]}])
    for path in (valid, other):
        data = open_data(train, {"keywords": "tf-idf"}, validation_path=str(path))
        assert data.validation is not None
        found += prompts_of(data.validation, data)
    assert sorted(found) == ["court", "sort, list", "zebra, list"]
    digest = data.digest
    write(train, [{"text": text} for text in [*texts, *["the zebra"] * 4]])
    data = open_data(train, {"keywords": "tf-idf"}, validation_path=str(other))
    assert data.validation is not None
    assert data.digest != digest
    assert sorted(prompts_of(data.validation, data)) == ["court", "list, zebra"], "a new cache"


def prompts_of(samples: Samples, data: TextData) -> set[str]:
    """Return the keywords in the prompts of several epochs."""
    found = set[str]()
    for sample in documents(samples.batch(range(40))):
        for tokens, _ in sample:
            shown = data.tokenizer.decode(tokens, with_special_tokens=True)
            if "[k]" in shown:
                found.add(shown.partition("[k]")[2].partition("[/k]")[0])
    return found


def test_parquet_has_the_samples_of_json_lines(path: Path, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    ours, same = open_data(tmp_path / "a.parquet", CONTROL), open_data(path, CONTROL)
    assert torch.equal(ours.train.batch(range(20)).inputs, same.train.batch(range(20)).inputs)


@pytest.mark.parametrize(
    ("control", "records", "words"),
    [
        ({"genres": [*GENRES, "news"]}, RECORDS, 'no text is of genre "news"'),
        ({"genres": ["docs"]}, RECORDS, r"line 2 .* gives 'law', which is not in control.genres"),
        (
            {"topic": "subjects", "keywords": "builtins:len"}, RECORDS,
            'control.topic = "subjects" is a column of no record: did you mean "subject"',
        ),
        (
            {"topic": "x"}, [{**one, "x": None} for one in RECORDS],
            'control.topic = "x" labels no text: name a',
        ),
        ({"length": "words"}, RECORDS, r"line 1 .* which is no number of tokens"),
        ({"keywords": "nothing:label"}, RECORDS, r"cannot be imported \(ModuleNotFoundError"),
        ({"topic": "math:pi"}, RECORDS, "is no function"),
        ({"topic": "builtins:len"}, RECORDS, r"fails on the texts from line 1 .*TypeError"),
        ({"topic": "builtins:set"}, RECORDS * 2, r"gives \d+ labels for 60 texts"),
        ({"genre": "directory"}, RECORDS, "needs a directory of directories"),
        (
            {}, [*RECORDS, {"text": "long " * 30}],
            r"1 of 31 texts are longer .* set data.sequence to 167, or split",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt_is_refused(
    control: dict[str, Any], records: list[Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        open_data(write(tmp_path / "a.jsonl", records), {**CONTROL, **control}, sequence=140)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"control": {}}, "names no attribute"),
        ({"control": {"mood": "x"}}, "unknown key 'control.mood'"),
        ({"control": {"genre": "kind"}}, "list the genres"),
        ({"control": {"genres": ["a"], "length": "tokens"}}, "set control.genre"),
        ({"control": {"genres": ["a", "a"], "genre": "k"}}, "twice"),
        ({"control": {"genres": ["a]"], "genre": "k"}}, "neither brackets nor blanks"),
        ({"control": {"topic": "a b:c"}}, "no module:function"),
        (
            {"control": {"topic": "x"}, "data": {"packing": "stream"}},
            'data.packing = "stream" does not work with',
        ),
        (
            {"control": {"topic": "x"}, "finetune": {"method": "lora"}},
            "would not train the embedding",
        ),
    ],
)
def test_jobs_that_contradict_themselves_are_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_job(**tables)
