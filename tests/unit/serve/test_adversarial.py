"""Pairs of original and generated text: sentences, prefixes, the limit, and files of pairs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic import ConfigError, Engine
from moesaic.api.adversarial import PairCounts, build_pairs
from moesaic.base.errors import DataError
from moesaic.models.tokenizer import ByteTokenizer
from moesaic.serve.adversarial import (
    draw_prefix,
    drop_cut_sentence,
    limit_text,
    split_paragraphs,
    split_sentences,
)
from moesaic.testing.served import write_chat_model
from moesaic.train.data.sources import find_text
from moesaic.train.data.text import read_labelled

FIVE = "One is here. Is two? Three! Four stays; so be it. Five ends."
TEXT = "A heading\n\nFirst it is. Then more. The end.\n \nOnly one here.\n\nIt is. So."


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (FIVE, ["One is here. ", "Is two? ", "Three! ", "Four stays; so be it. ", "Five ends."]),
        ('He said "Go." Then he left', ['He said "Go." ', "Then he left"]),
        ("See e.g. this one. Pi is 3.14 here.", ["See e.g. this one. ", "Pi is 3.14 here."]),
        ("By J. Smith. So be it...  Yes", ["By J. Smith. ", "So be it...  ", "Yes"]),
        ("\u4f60\u597d\u3002\u518d\u89c1\uff01", ["\u4f60\u597d\u3002", "\u518d\u89c1\uff01"]),
        ("Wait?!\nNo line\nbreak. End", ["Wait?!\n", "No line\nbreak. ", "End"]),
        ("", []),
    ],
)
def test_sentences_end_at_stops_before_capitals(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.text(alphabet='aB .!?\n"\u3002', max_size=40))
def test_sentences_join_to_the_text(text: str) -> None:
    assert "".join(split_sentences(text)) == text


def test_blank_lines_separate_paragraphs() -> None:
    assert list(split_paragraphs(TEXT)) == [
        "A heading", "First it is. Then more. The end.", "Only one here.", "It is. So.",
    ]  # fmt: skip


def test_a_prefix_has_one_to_three_sentences_and_leaves_one() -> None:
    """The number of sentences is uniform, and depends on seed and index alone."""
    prefixes = [draw_prefix(FIVE, 3, index) for index in range(300)]
    assert prefixes == [draw_prefix(FIVE, 3, index) for index in range(300)]
    counts = Counter(prefixes)
    assert counts.keys() == {
        "One is here.", "One is here. Is two?", "One is here. Is two? Three!"
    }  # fmt: skip
    assert all(abs(count - 100) < 3 * (300 * 2 / 9) ** 0.5 for count in counts.values())
    assert draw_prefix(FIVE, 4, 0) in counts
    assert {draw_prefix("One. Two.", 0, index) for index in range(9)} == {"One."}
    assert draw_prefix("One sentence. ", 0, 0) is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One is. Two is cut he", "One is."),
        ("One is. Two is whole.  ", "One is. Two is whole."),
        ('One is. He said "Go."', 'One is. He said "Go."'),
        ("Nothing complete", ""),
        ("One is. By J.", "One is."),
    ],
)
def test_a_sentence_that_the_limit_cut_is_dropped(text: str, kept: str) -> None:
    assert drop_cut_sentence(text) == kept


def test_an_original_obeys_the_limit_too() -> None:
    tokenizer = ByteTokenizer()
    assert limit_text(FIVE, tokenizer, len(FIVE)) == FIVE
    assert limit_text(FIVE, tokenizer, len(FIVE) - 1) == FIVE[:-11]
    assert limit_text(FIVE, tokenizer, 12) == "One is here."
    assert limit_text("\u00e9. \u00e9", tokenizer, 5) == "\u00e9."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = write_chat_model(tmp_path_factory.mktemp("pairs") / "model")
    return Engine(directory, device="cpu")


SETTINGS: dict[str, Any] = {
    "max_tokens": 64, "temperature": 3.0, "logit_bias": dict.fromkeys((32, 46, 66, 257), 12.0),
}  # fmt: skip
"""Settings with which an untrained model ends many of its texts early."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book"
    paragraphs = [f"The {name} is here. It was found. Now it stays. So be it." for name in "ABCDEF"]
    path.write_text("\n\n".join(["Heading", *paragraphs]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(engine: Engine, text: Path) -> Path:
    """File of pairs of the whole text."""
    path = text.with_name("whole.jsonl")
    build_pairs(engine, text, path, **SETTINGS)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_pairs_share_a_prefix_and_keep_to_the_limit(
    engine: Engine, text: Path, tmp_path: Path
) -> None:
    out, seen = tmp_path / "pairs.jsonl", list[PairCounts]()
    settings = {**SETTINGS, "max_tokens": 48}
    counts = build_pairs(engine, text, out, on_progress=seen.append, **settings)
    rows = [row for row in read(out) if row["text"] is not None]
    assert len(rows) == 2 * counts.pairs > 0
    assert counts.pairs + counts.dropped == counts.total == 6
    assert seen[-1].pairs == counts.pairs
    assert counts.tokens > 0
    tokenizer = engine.prompts.tokenizer
    for original, generated in zip(rows[::2], rows[1::2], strict=True):
        assert (original["label"], generated["label"]) == (1, 0)
        assert original["source"] == generated["source"]
        paragraph = text.read_text().split("\n\n")[int(original["source"].rpartition(":")[2]) - 1]
        assert paragraph.startswith(original["text"])
        prefix = draw_prefix(paragraph, 0, int(original["source"].rpartition(":")[2]) - 1)
        assert prefix is not None
        assert generated["text"].startswith(prefix)
        assert len(generated["text"]) > len(prefix)
        for row in (original, generated):
            assert "\n\n" not in row["text"]
            assert len(tokenizer.encode(row["text"])) <= 48


@pytest.mark.parametrize("place", ["within an original", "within a generated text"])
def test_a_file_that_was_cut_off_is_continued(
    engine: Engine, text: Path, whole: Path, tmp_path: Path, place: str
) -> None:
    out, lines = tmp_path / "pairs.jsonl", whole.read_bytes().splitlines(keepends=True)
    labels = [row["label"] for row in read(whole)]
    number = labels.index(1) + (2 if place == "within an original" else 3)
    assert labels[number] == (place == "within an original")
    out.write_bytes(b"".join(lines[:number]) + lines[number][:20])
    counts = build_pairs(engine, text, out, **SETTINGS)
    assert out.read_bytes() == whole.read_bytes()
    assert counts.present == 1
    assert counts.pairs == labels.count(0) - 1 > 1
    assert counts.dropped == labels.count(None)


def test_a_dropped_paragraph_is_not_continued_again(
    engine: Engine, text: Path, tmp_path: Path
) -> None:
    """It leaves a line that training skips, and counts as dropped in later calls too."""
    out, settings = tmp_path / "pairs.jsonl", {"max_tokens": 48, "temperature": 3.0}
    first = build_pairs(engine, text, out, **settings)
    rows, content = read(out), out.read_bytes()
    empty = [row["source"] for row in rows if row["text"] is None]
    assert 0 < len(empty) <= first.dropped
    assert first.tokens > 0
    again = build_pairs(engine, text, out, **settings)
    assert again == first._replace(pairs=0, present=first.pairs, tokens=0)
    assert out.read_bytes() == content
    out.write_bytes(content[:-9])
    build_pairs(engine, text, out, **settings)
    assert out.read_bytes() == content
    source = find_text("data.path", str(out), "labelled", "text", "train")
    written = [(row["text"], row["label"]) for row in rows if row["text"] is not None]
    assert list(read_labelled(source)) == written


def test_a_file_is_not_continued_with_other_settings_or_text(
    engine: Engine, text: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pairs.jsonl"
    out.write_bytes(whole.read_bytes())
    with pytest.raises(ConfigError, match="made by another model or with other settings"):
        build_pairs(engine, text, out, **{**SETTINGS, "temperature": 0.3})
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes())
    with pytest.raises(ConfigError, match="which is not in input"):
        build_pairs(engine, other, out, **SETTINGS)
    assert out.read_bytes() == whole.read_bytes()


def test_other_seeds_give_other_texts(
    engine: Engine, text: Path, whole: Path, tmp_path: Path
) -> None:
    build_pairs(engine, text, tmp_path / "pairs.jsonl", seed=1, **SETTINGS)
    generated = [row["text"] for row in read(tmp_path / "pairs.jsonl") if row["label"] == 0]
    assert generated
    assert not {*generated} & {row["text"] for row in read(whole)}


def test_mistakes_are_found_before_a_token_is_generated(
    engine: Engine, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pairs.jsonl"
    with pytest.raises(ConfigError, match="max_tokens = 300 is more than the model's 256 posi"):
        build_pairs(engine, text, out, max_tokens=300)
    with pytest.raises(ConfigError, match="n = 2: a paragraph has one continuation, remove n"):
        build_pairs(engine, text, out, n=2)
    with pytest.raises(DataError, match="does not exist"):
        build_pairs(engine, text.with_name("none"), out, max_tokens=64)
    assert not out.exists()
    short = tmp_path / "short.txt"
    short.write_text("One sentence.\n\nAnother one.")
    with pytest.raises(ConfigError, match="has no paragraph of two sentences or more"):
        build_pairs(engine, short, out, max_tokens=64)
    out.write_text('{"custom_id": "an answer"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of output .* is no text with a label"):
        build_pairs(engine, text, out, max_tokens=64)
    assert out.read_text() == '{"custom_id": "an answer"}\n'
