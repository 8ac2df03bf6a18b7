"""Scoring functions of multiple-choice tasks, as sums of log-probabilities of texts.

x is the question, y a choice. ERNIE 3.0 Titan names the five functions (docs/papers.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

ScoreName = Literal["joint", "conditional", "channel", "pmi", "truth"]
SCORE_NAMES: tuple[ScoreName, ...] = get_args(ScoreName)
FORMULAS: dict[ScoreName, str] = {
    "joint": "P(x,y)", "conditional": "P(y|x)", "channel": "P(x|y)", "pmi": "P(y|x)/P(y)",
    "truth": "P(True|x,y)",
}  # fmt: skip
"""Quantity that each function ranks the choices by."""

TRUTH_QUESTION = "\nIs this answer correct?"
YES, NO = " yes", " no"
"""Answers to `TRUTH_QUESTION`; the score is the share of the first one."""


class Choice(NamedTuple):
    """One choice of a question, as texts."""

    before: str
    """Description and examples in front of the question."""
    question: str
    answer: str
    """The choice, with the delimiter in front of it."""


def score_texts(name: ScoreName, choice: Choice) -> list[tuple[str, str]]:
    """Return the contexts and continuations whose log-likelihoods a score consists of."""
    context = choice.before + choice.question
    if name == "joint":
        return [("", context + choice.answer)]
    if name == "conditional":
        return [(context, choice.answer)]
    if name == "channel":
        return [(f"{choice.before}{choice.answer.strip()}\n", choice.question)]
    if name == "pmi":
        return [(context, choice.answer), ("", choice.answer)]
    asked = context + choice.answer + TRUTH_QUESTION
    return [(asked, YES), (asked, NO)]


def combine(name: ScoreName, logprobs: Sequence[float]) -> float:
    """Return the score of a choice from the log-likelihoods of its texts."""
    first, *others = logprobs
    if name == "pmi":
        return first - others[0]
    if name == "truth":
        highest = max(logprobs)
        return first - highest - math.log(sum(math.exp(one - highest) for one in logprobs))
    return first
