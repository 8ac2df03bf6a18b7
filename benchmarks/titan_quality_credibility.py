"""Part `credibility`: a head that tells written from generated text, on sources of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks import titan_quality_distill as distill
from benchmarks import titan_quality_runs as runs
from benchmarks import titan_quality_text as text
from moesaic import Engine
from moesaic.api.adversarial import build_pairs
from moesaic.serve.adversarial import draw_prefix, split_sentences

STEPS, LR = 600, 1e-3
"""Steps and learning rate of a head, which trains its whole model."""
LIMIT = 120
"""Tokens of an original or a generated text."""
PAIRS = {"unseen": 600, "head": 4200, "judge": 4200}
"""Paragraphs that give pairs, by use. All are of sources of their own."""
SHARES = {"unseen": distill.VALIDATION_SHARE, "head": 0.5, "judge": 1.0}
"""Upper end of the hashes of a use's sources; the generator has not learned the first ones."""
PROMPTS, CANDIDATES, NEW_TOKENS = 120, 8, 40


class Pairs(NamedTuple):
    """Texts with label 1 (original) and 0 (generated)."""

    texts: list[str]
    labels: list[int]

    @classmethod
    def read(cls, path: Path) -> Pairs:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if row["text"] is not None]  # The others were dropped.
        return cls([row["text"] for row in rows], [row["label"] for row in rows])


def write_paragraphs(directory: Path) -> dict[str, list[str]]:
    """Write each use's paragraphs to `directory`, and return them."""
    found = (*text.help_topics(), *text.docstrings(), *text.manuals("158"))
    whole = [
        one for one in found
        if one.text.isascii() and 80 <= len(one.text) <= 320 and len(split_sentences(one.text)) > 1
    ]  # fmt: skip
    uses: dict[str, list[str]] = {name: [] for name in SHARES}
    for one in text.thin(whole, len(whole), lambda one: one.text):
        at = text.share(one.source)
        use = next(name for name, end in SHARES.items() if at < end)
        if len(uses[use]) < PAIRS[use]:
            uses[use].append(one.text)
    for use, rows in uses.items():
        text.write_lines(directory / f"{use}.jsonl", ({"text": one} for one in rows))
    return uses


def train_head(base: Path, directory: Path, use: str) -> Path:
    """Return the run of a classifier that learned from the pairs of a use."""
    tables = distill.job(base, 0, STEPS, {"from": str(base / "teacher")})
    tables["data"] = {
        "path": str(directory / f"{use}-pairs.jsonl"), "format": "labelled",
        "sequence": distill.SEQUENCE, "tokenizer": str(base / "tokenizer"), "end_token": text.END,
        "cache": str(directory / "cache"),
    }  # fmt: skip
    tables["train"] = {"steps": STEPS, "batch": distill.BATCH}
    tables["optimizer"] = {"lr": LR}
    tables["credibility"] = {"weight": 1.0, "text": 0.2}
    run, minutes = runs.train(directory / f"{use}-run", tables)
    print(f"  {use}: a head in {minutes:.1f} minutes", flush=True)
    return run.directory


def make_pairs(generator: Path, directory: Path) -> tuple[dict[str, Pairs], list[float]]:
    """Return the pairs of each use, and the generator's mean log-likelihood of the unseen texts."""
    pairs = {}
    with Engine(generator, device="cpu") as engine:
        for use in PAIRS:
            target = directory / f"{use}-pairs.jsonl"
            counts = build_pairs(engine, directory / f"{use}.jsonl", target, max_tokens=LIMIT)
            print(f"  {use}: {counts}", flush=True)
            pairs[use] = Pairs.read(target)
        scores = engine.score([("", one) for one in pairs["unseen"].texts])
    return pairs, [float(np.mean(one.logprobs)) for one in scores]


def credibility(rounds: int) -> Iterator[measure.Row]:
    """Train a head and a judge from the teacher; compare them on unseen sources."""
    del rounds  # Texts are fixed.
    base = distill.teacher_directory()
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home)
        uses = write_paragraphs(directory)
        pairs, likelihood = make_pairs(base / "teacher", directory)
        head, judge = (train_head(base, directory, use) for use in ("head", "judge"))
        with Engine(head, device="cpu") as engine:
            own = engine.credibility(pairs["unseen"].texts)
            candidates = best_of(engine, uses["unseen"])
        ngrams = runs.ngram_classifier(*pairs["head"])
        known = ngrams.predict_proba(pairs["unseen"].texts)[:, 1]
        yield from auc_rows(pairs["unseen"].labels, own, likelihood, known)
        with Engine(judge, device="cpu") as engine:
            judged = engine.credibility([one for row in candidates for one in row])
            by_judge = runs.auc(pairs["unseen"].labels, engine.credibility(pairs["unseen"].texts))
        yield win_row("another head", np.reshape(judged, (-1, CANDIDATES)), by_judge, ">= 0.6")
        other = runs.ngram_classifier(*pairs["judge"])
        votes = other.predict_proba([one for row in candidates for one in row])[:, 1]
        by_ngrams = runs.auc(
            pairs["unseen"].labels, other.predict_proba(pairs["unseen"].texts)[:, 1]
        )
        yield win_row("character n-grams", votes.reshape(-1, CANDIDATES), by_ngrams, "")


def best_of(engine: Engine, paragraphs: Sequence[str]) -> list[list[str]]:
    """Return the texts of each prompt, the most credible one first."""
    prefixes = [draw_prefix(one, 1, index) for index, one in enumerate(paragraphs)]
    prompts = [one for one in prefixes if one is not None][:PROMPTS]
    found = engine.generate(
        prompts, best_of=CANDIDATES, n=CANDIDATES, rank="credibility", max_tokens=NEW_TOKENS,
        seed=7, stop=["\n\n"],
    )  # fmt: skip
    texts = [f"{one.prompt}{one.text}".strip() for one in found]
    return [texts[at : at + CANDIDATES] for at in range(0, len(texts), CANDIDATES)]


def auc_rows(
    labels: Sequence[int], own: Sequence[float], likelihood: Sequence[float], ngrams: Any
) -> Iterator[measure.Row]:
    """Yield the head's AUC, and what it is above two simpler judges."""
    truth, scores = np.array(labels), np.array(own)
    size = len(labels) // 2

    def of(values: Any, draw: Any = None) -> float:
        """Return an AUC, over a sample of pairs; their texts are beside each other."""
        at = slice(None) if draw is None else np.concatenate((2 * draw, 2 * draw + 1))
        return runs.auc(truth[at], np.asarray(values)[at])

    yield measure.row(
        "credibility: AUC on unseen sources", of(scores), "AUC", bar=">= 0.9", repeats=size,
        against="0.5 is chance", interval=runs.interval(lambda draw: of(scores, draw), size),
    )  # fmt: skip
    sign = 1.0 if of(likelihood) > 0.5 else -1.0
    others = {
        "the generator's own mean log-likelihood": sign * np.array(likelihood),
        "a classifier of character n-grams on the same pairs": ngrams,
    }
    for name, values in others.items():
        yield measure.row(
            f"credibility: AUC above that of {name}", of(scores) - of(values), "AUC",
            bar=">= 0", against=f"its AUC {of(values):.3f}", repeats=size,
            interval=runs.interval(
                lambda draw, values=values: of(scores, draw) - of(values, draw), size, 500
            ),
        )  # fmt: skip


def win_row(judge: str, scores: Any, quality: float, bar: str) -> measure.Row:
    """Return how often a judge prefers the first text of a row to a random one of the others."""
    rest = scores[:, 1:]
    wins = ((scores[:, :1] > rest) + 0.5 * (scores[:, :1] == rest)).mean(1)
    return measure.row(
        f"credibility: best of {CANDIDATES} preferred to a random one, by {judge}",
        float(wins.mean()), "share", bar=bar, repeats=len(scores),
        against=f"the other texts of the prompt; the judge learned from pairs of other sources, "
        f"its AUC {quality:.3f}",
        interval=runs.interval(lambda draw: float(wins[draw].mean()), len(scores)),
    )  # fmt: skip


PARTS = {"credibility": credibility}
