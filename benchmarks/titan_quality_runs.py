"""Runs, classifiers and intervals that the parts of the theme `titan-quality` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, t
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from moesaic import Job, Run
from moesaic.base.events import RUN_LOG, read_events

Array = NDArray[np.float64]


def train(out: Path, tables: dict[str, Any]) -> tuple[Run, float]:
    """Return a finished run of a job on one rank, and its minutes."""
    fixed = {
        "train": {"device": "cpu"}, "log": {"tensorboard": False},
        "checkpoint": {"asynchronous": False},
    }  # fmt: skip
    merged = {**tables, **{name: {**tables.get(name, {}), **more} for name, more in fixed.items()}}
    began = time.perf_counter()
    run = Job.load(merged).train(out=out, output=None)
    return run, (time.perf_counter() - began) / 60


def last_figures(run: Run) -> dict[str, float]:
    """Return the figures of the last validation of a run."""
    found = [one for one in read_events(run.directory / RUN_LOG) if one["event"] == "validation"]
    return dict(found[-1])


def ngram_classifier(texts: Sequence[str], labels: Sequence[Any], longest: int = 4) -> Any:
    """Return a linear classifier of texts by their n-grams of 1 to `longest` characters."""
    counts = TfidfVectorizer(analyzer="char", ngram_range=(1, longest), min_df=2, sublinear_tf=True)
    linear = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000)
    return make_pipeline(counts, linear).fit(texts, labels)


def interval(
    statistic: Callable[[NDArray[np.int64]], float], size: int, resamples: int = 2000
) -> tuple[float, float]:
    """Return the 95% bootstrap interval of a statistic of the indices of a sample."""
    draws = np.random.default_rng(0).integers(size, size=(resamples, size))
    low, high = np.percentile([statistic(draw) for draw in draws], (2.5, 97.5))
    return float(low), float(high)


def t_interval(values: Array) -> tuple[float, float]:
    """Return the 95% interval of the mean of a few values, by Student's t."""
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - half), float(values.mean() + half)


def auc(labels: Sequence[int], scores: Sequence[float]) -> float:
    """Return the probability that a text with label 1 scores above one with label 0."""
    positive = np.asarray(labels) == 1
    count = int(positive.sum())
    above = rankdata(scores)[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(labels) - count)))
