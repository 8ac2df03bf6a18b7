"""Ranking of several texts of one prompt, so that the worst can be dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.facts.job.credibility import LABELS
from moesaic.serve.config import MAX_CHOICES


class Ranking(NamedTuple):
    """How the texts of a prompt are ranked."""

    best_of: int
    """Texts of each prompt to generate and rank."""
    by: str
    """Score. credibility: the probability of the class "original" by the model's classifier.
    likelihood: the mean log-probability of the text's tokens."""


def check_ranking(best_of: int | None, rank: str | None, n: int, labels: int) -> Ranking:
    """Return the ranking of the best `n` texts by a model whose classifier has `labels` classes."""
    by = keys.check_choice("rank", rank or "likelihood", ["credibility", "likelihood"])
    if best_of is None:
        raise ConfigError(
            f'rank = "{by}" ranks several texts: set best_of to their number, such as 8'
        )
    if not n <= best_of <= MAX_CHOICES:
        raise ConfigError(
            f"best_of = {best_of}: give a number of texts from n = {n} to {MAX_CHOICES}"
        )
    if by == "credibility" and labels != len(LABELS):
        raise ConfigError(
            'rank = "credibility" needs a model with a classifier of original and generated texts: '
            "train one with [credibility] in a job, or rank by likelihood"
        )
    return Ranking(best_of, by)


def likelihood(logprobs: Sequence[float]) -> float:
    """Return the mean log-probability of a text's tokens; minus infinity for no tokens."""
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf


def best_of_each(scores: Sequence[float], best_of: int, n: int) -> list[int]:
    """Return the indices of the `n` highest of each `best_of` scores in a row, the best first;
    equal ones in order."""
    return [
        index
        for start in range(0, len(scores), best_of)
        for index in sorted(range(start, start + best_of), key=lambda at: -scores[at])[:n]
    ]
