"""Scores of continuations: log-probabilities of given tokens, from the hidden states of a pass.

Logits exist for a few positions at a time, so a long text needs no [tokens, vocab] tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.base.errors import StoreError
from moesaic.serve.requests import FinishEvent, GenerationRequest, TokenScores

_LOGIT_ELEMENTS = 1 << 22
"""Logits that are computed at once where memory has no limit."""

Project = Callable[[Tensor], Tensor]
"""Function from hidden states [rows, hidden] to logits [rows, vocab]."""


class _Target(NamedTuple):
    """A token to score."""

    row: int
    """Row of the pass that predicts the token."""
    token: int
    found: list[tuple[float, bool]]
    """List that takes the token's log-probability, and whether it is the most likely one."""


class ContinuationScores:
    """Scores of the continuations of one request, which arrive pass by pass."""

    def __init__(self, request: GenerationRequest) -> None:
        self._length, self._continuations = len(request.prompt), request.continuations
        self._found: list[list[tuple[float, bool]]] = [[] for _ in self._continuations]

    def targets(self, positions: range, first_row: int) -> Iterator[_Target]:
        """Yield the tokens that follow `positions` of the prompt, the first one in `first_row`."""
        for continuation, found in zip(self._continuations, self._found, strict=True):
            start = self._length - len(continuation)
            for position in range(max(positions.start, start), positions.stop):
                row = first_row + position - positions.start
                yield _Target(row, continuation[position - start], found)

    def finish(self) -> FinishEvent:
        """Return the last event of the request."""
        scores = tuple(
            TokenScores(tuple(logprob for logprob, _ in found), all(best for _, best in found))
            for found in self._found
        )
        if all(math.isfinite(logprob) for one in scores for logprob in one.logprobs):
            return FinishEvent("length", scores=scores)
        error = StoreError(
            "the continuation cannot be scored, as the model's scores are not finite: its weights "
            "are damaged or its training diverged; use an earlier checkpoint, or precision = fp32 "
            "if the weights are sound"
        )
        return FinishEvent("error", error)


def rows_at_once(vocab: int, max_running: int, *, is_limited: bool) -> int:
    """Return the positions whose logits are computed at once.

    A memory budget counts on those of `max_running` positions.
    """
    return max_running if is_limited else max(max_running, _LOGIT_ELEMENTS // vocab)


def score_targets(
    project: Project, hidden: Tensor, targets: Iterable[_Target], num_rows: int
) -> None:
    """Score tokens from hidden states [tokens, hidden], at most `num_rows` rows at a time."""
    by_row = sorted(targets, key=lambda target: target.row)
    rows = [(row, list(group)) for row, group in groupby(by_row, key=lambda target: target.row)]
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows]
        index = torch.tensor([row for row, _ in part], device=hidden.device)
        logits = project(hidden if len(part) == len(hidden) else hidden[index])
        _score_rows(logits, [group for _, group in part])


def _score_rows(logits: Tensor, groups: Sequence[Sequence[_Target]]) -> None:
    """Score the tokens of each row of logits, [rows, vocab]."""
    pairs = [(row, target.token) for row, group in enumerate(groups) for target in group]
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs: list[float] = (wide[rows, tokens] - wide.logsumexp(dim=-1)[rows]).tolist()
    is_best: list[bool] = (logits.argmax(dim=-1)[rows] == tokens).tolist()
    flat = (target for group in groups for target in group)
    for target, logprob, best in zip(flat, logprobs, is_best, strict=True):
        target.found.append((logprob, best))
