"""Part `control`: whether generated texts have the length, genre and keywords asked for."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks import titan_quality_runs as runs
from benchmarks import titan_quality_text as text
from moesaic import Engine
from moesaic.api.generation import Generation
from moesaic.base.config import parse
from moesaic.serve.adversarial import split_sentences
from moesaic.serve.config import SamplingConfig
from moesaic.train.data.control import KeywordFinder

GENRES = ("help", "licence", "manual", "source")
SHORTEST, LONGEST = 8, 60
"""Tokens of a text."""
WORD = re.compile(r"[^\W\d_]{3,}")
"""Words that may be keywords, as in `moesaic.train.data.control`."""
TEXTS_PER_GENRE = 6000
WORDS = 1024
VOCAB = WORDS + 8 + 64 * len(GENRES)
HELD_OUT = 0.4
"""Share of the texts, which train the classifier and give the keywords to ask for."""
REQUESTS = 200
STEPS, BATCH, SEQUENCE = 3000, 16, 192
MODEL = {
    "preset": "tiny-dense", "vocab": VOCAB, "hidden": 160, "layers": 3, "heads": 5, "kv_heads": 5,
    "head_dim": 32, "ffn": 448,
}  # fmt: skip


class Texts(NamedTuple):
    """Short texts: those that the model learns, and those of other sources."""

    learned: list[text.Passage]
    held_out: list[text.Passage]


def pieces(found: Iterable[text.Passage]) -> Iterator[text.Passage]:
    """Yield statements of source, and one to three sentences in a row of prose."""
    for one in found:
        genre = "help" if one.genre == "docstring" else one.genre
        parts = [one.text] if genre == "source" else split_sentences(one.text)
        start = 0
        while start < len(parts):
            count = 1 + int(3 * text.share(f"{one.text}{start}"))
            part = "".join(parts[start : start + count]).rstrip()
            start += count
            if part.isascii() and re.search(r"[A-Za-z]{3}", part):
                yield text.Passage(genre, one.source, part)


def make_texts(directory: Path) -> Texts:
    """Return the texts, and write the tokenizer and those to learn to `directory`."""
    found: dict[str, list[text.Passage]] = {}
    for source in (
        (*text.help_topics(), *text.docstrings()),
        text.licences(),
        text.manuals("8"),
        text.code(),
    ):
        rows = text.thin(pieces(source), 3 * TEXTS_PER_GENRE, lambda one: one.text)
        if not rows:
            raise SystemExit("the theme titan-quality reads Debian's licences and manual pages")
        found[rows[0].genre] = rows
    every = [one.text for rows in found.values() for one in rows[:TEXTS_PER_GENRE]]
    tokenizer = text.make_tokenizer(every, WORDS, directory / "tokenizer")
    kept = []
    for rows in found.values():
        counts = [len(one.ids) for one in tokenizer.encode_batch([row.text for row in rows])]
        short = [r for r, n in zip(rows, counts, strict=True) if SHORTEST <= n <= LONGEST]
        kept += short[:TEXTS_PER_GENRE]
    texts = Texts(*split(kept, HELD_OUT, seed=1))
    text.write_lines(
        directory / "texts.jsonl", ({"text": one.text, "genre": one.genre} for one in texts.learned)
    )
    return texts


def split(
    found: Iterable[text.Passage], share: float, seed: int
) -> tuple[list[text.Passage], list[text.Passage]]:
    """Return most of the texts, and a share of them chosen by a hash."""
    parts: tuple[list[text.Passage], list[text.Passage]] = ([], [])
    for one in found:
        parts[text.share(one.text, seed) < share].append(one)
    return parts


def job(directory: Path, seed: int) -> dict[str, Any]:
    """Return the job of the model."""
    return {
        "seed": seed, "model": MODEL,
        "data": {
            "path": str(directory / "texts.jsonl"), "tokenizer": str(directory / "tokenizer"),
            "end_token": text.END, "sequence": SEQUENCE, "cache": str(directory / "cache"),
        },
        "control": {
            "genres": list(GENRES), "genre": "genre", "keywords": "tf-idf", "length": "tokens",
        },
        "train": {"steps": STEPS, "batch": BATCH},
        "optimizer": {"lr": 3e-3}, "schedule": {"kind": "cosine", "warmup": 50},
    }  # fmt: skip


def ask(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[Generation]:
    """Return a text for each request, with a seed of its own."""
    found = [
        one
        for seed, control in enumerate(requests)
        for one in engine.requests(
            "", parse(SamplingConfig, {"control": control, "seed": seed, "max_tokens": 120}, "ask")
        )
    ]
    for one, _ in engine.run(found):
        if one.error is not None:
            raise one.error
    return [one.result() for one in found]


def control(rounds: int) -> Iterator[measure.Row]:
    """Train on texts behind prompts, and ask for lengths, genres and keywords."""
    del rounds  # Requests are fixed.
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home)
        texts = make_texts(directory)
        run, minutes = runs.train(directory / "run", job(directory, 0))
        print(f"  trained in {minutes:.1f} minutes", flush=True)
        with Engine(run.directory, device="cpu") as engine:
            yield from length_rows(engine)
            genres = [GENRES[index % len(GENRES)] for index in range(REQUESTS)]
            answers = ask(engine, [{"genre": one} for one in genres])
            plain = [one.text for one in answers]
            yield from genre_rows(genres, plain, texts.held_out)
            yield from keyword_rows(engine, plain, texts)


def length_rows(engine: Engine) -> Iterator[measure.Row]:
    """Yield the correlation of lengths asked for and lengths of the texts."""
    asked = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, REQUESTS)
    answers = ask(engine, [{"length": int(length)} for length in asked])
    real = np.array([len(one.tokens) - (one.finish_reason == "stop") for one in answers])
    error = float(np.median(np.abs(real - asked)))
    yield measure.row(
        "control: correlation of length asked and real", correlation(asked, real), "correlation",
        bar=">= 0.8", repeats=REQUESTS,
        against=f"lengths of {SHORTEST} to {LONGEST} tokens; median error {error:g} tokens",
        interval=runs.interval(lambda draw: correlation(asked[draw], real[draw]), REQUESTS),
    )  # fmt: skip


def correlation(first: Any, second: Any) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def genre_rows(
    asked: Sequence[str], answers: Sequence[str], known: Sequence[text.Passage]
) -> Iterator[measure.Row]:
    """Yield the share of texts that a classifier finds to be of the genre asked for."""
    fit, test = split(known, 0.2, seed=2)
    classifier = runs.ngram_classifier([o.text for o in fit], [o.genre for o in fit])
    found = classifier.predict(list(answers))
    follows = np.array([one == want for one, want in zip(found, asked, strict=True)])
    shares = ", ".join(
        f"{genre} {follows[[want == genre for want in asked]].mean():.2f}" for genre in GENRES
    )
    yield measure.row(
        "control: texts of the genre asked for", float(follows.mean()), "share", bar=">= 0.9",
        against=f"classifier of character n-grams, chance 0.25; {shares}", repeats=REQUESTS,
        interval=runs.interval(lambda draw: float(follows[draw].mean()), REQUESTS),
    )  # fmt: skip
    is_right = classifier.predict([one.text for one in test]) == [one.genre for one in test]
    per_genre = [
        np.mean([ok for ok, one in zip(is_right, test, strict=True) if one.genre == genre])
        for genre in GENRES
    ]
    yield measure.row(
        "control: written texts whose genre the classifier finds", float(np.mean(per_genre)),
        "share", bar="", against="other texts of the same sources, mean over genres: "
        + ", ".join(f"{g} {s:.2f}" for g, s in zip(GENRES, per_genre, strict=True)),
        repeats=len(test),
    )  # fmt: skip


def keyword_rows(engine: Engine, plain: Sequence[str], texts: Texts) -> Iterator[measure.Row]:
    """Yield how much more often keywords appear that were asked for."""
    finder = KeywordFinder(one.text for part in texts for one in part)
    learned = Counter(word for one in texts.learned for word in set(WORD.findall(one.text)))
    asked = [
        words
        for one in sorted(texts.held_out, key=lambda one: text.share(one.text, 3))
        if len(words := [word for word in finder.find(one.text) if learned[word] >= 5]) == 3
    ][:REQUESTS]
    answers = ask(engine, [{"keywords": words} for words in asked])
    hits = np.array([count(words, one.text) for words, one in zip(asked, answers, strict=True)])
    others = np.array([np.mean([count(words, one) for one in plain]) for words in asked])
    yield measure.row(
        "control: keywords asked for over the same words unasked",
        float(hits.mean() / others.mean()), "ratio", bar=">= 3", repeats=REQUESTS,
        against=f"{REQUESTS} texts with a genre alone; asked for, {hits.mean() / 3:.3f} of the "
        f"words are in the text, unasked {others.mean() / 3:.4f}",
        interval=runs.interval(
            lambda draw: float(hits[draw].mean() / others[draw].mean()), REQUESTS
        ),
    )  # fmt: skip


def count(words: Sequence[str], answer: str) -> int:
    """Return how many of the words a text has."""
    return len(set(words) & set(WORD.findall(answer)))


PARTS = {"control": control}
