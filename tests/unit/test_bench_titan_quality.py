"""Theme `titan-quality`: text of manual pages, splits, and the classifier of n-grams."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import titan_quality_runs as runs
from benchmarks import titan_quality_text as text

PAGE = r""".\" Comment
.TH TAR 1
.SH NAME
tar \- an \fBarchiving\fR utility
.PP
The option
.BR \-x ,
or
.I "extract all" ,
doesn\(aqt stop\&.
.TP
.B \-\-list
"""


def test_a_manual_page_becomes_plain_paragraphs() -> None:
    assert list(text.roff_paragraphs(PAGE)) == [
        "tar - an archiving utility", "The option -x, or extract all , doesn't stop.", "--list",
    ]  # fmt: skip


def test_paragraphs_lose_their_common_indentation() -> None:
    assert list(text.paragraphs("\n  a\n    b\n\n \n\tc\n")) == ["a\n  b", "c"]


def test_a_hash_splits_sources_evenly() -> None:
    shares = [text.share(f"source {index}") for index in range(1000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
    assert shares != [text.share(f"source {index}", 1) for index in range(1000)]


def test_ngrams_tell_texts_apart() -> None:
    draw = np.random.default_rng(0)

    def words(letters: str) -> str:
        return " ".join("".join(draw.choice([*letters], 4)) for _ in range(8))

    texts = [words(letters) for letters in ("abcd", "cdef") for _ in range(40)]
    labels = ["first"] * 40 + ["second"] * 40
    classifier = runs.ngram_classifier(texts, labels)
    assert list(classifier.predict([words("abcd"), words("cdef")])) == ["first", "second"]


def test_auc_counts_pairs() -> None:
    labels, scores = [1, 0, 1, 0, 0], [0.9, 0.5, 0.5, 0.1, 0.7]
    # Six pairs: 0.9 is above all three, 0.5 above one and equal to one.
    assert runs.auc(labels, scores) == pytest.approx(4.5 / 6)


def test_intervals() -> None:
    low, high = runs.t_interval(np.array([1.0, 2.0, 3.0]))
    assert (low, high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    values = np.arange(400) % 2
    low, high = runs.interval(lambda draw: float(values[draw].mean()), len(values))
    assert (low, high) == pytest.approx((0.45, 0.55), abs=0.01)
