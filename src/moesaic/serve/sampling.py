"""Choice of the next token of each sequence in a pass.

A row's token depends on its own logits, request and generated tokens alone, never on other rows.
A draw is a function of (seed, choice, position). Rows with equal settings are computed together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from moesaic.kernels.randomness import uniform
from moesaic.serve.requests import GenerationRequest, SamplingParams, TokenEvent

_LIKELIEST = 1024
"""Tokens that are sorted first; a row that needs more sorts again, alone."""
_SORTED_ELEMENTS = 1 << 18
"""Elements that are sorted at once, unless a row has more; sorting takes 50 bytes for each."""


class SequenceState(Protocol):
    """A request in progress, as the choice of its next token sees it."""

    @property
    def request(self) -> GenerationRequest:
        """The request as it was submitted."""

    @property
    def generated(self) -> Sequence[int]:
        """Tokens generated so far."""


@torch.inference_mode()
def choose_tokens(
    logits: Tensor, sequences: Sequence[SequenceState], masked: Tensor | None = None
) -> list[TokenEvent]:
    """Return the next token of each sequence, with log-probabilities if its request asks.

    Args:
        logits: finite, [sequences, vocab].
        sequences: the sequence of each row.
        masked: ids that are never chosen, on the device of the logits.
    """
    candidates = logits if masked is None else logits.index_fill(1, masked, -torch.inf)
    settings = [sequence.request.sampling for sequence in sequences]
    tokens = [0] * len(sequences)
    for rows in _groups((one.temperature, one.top_p, one.top_k) for one in settings):
        members = [sequences[row] for row in rows]
        scores = _adjust(_take(candidates, rows), members)
        for row, token in zip(rows, _choose(scores, members), strict=True):
            tokens[row] = token
    events = [TokenEvent(token, None, ()) for token in tokens]
    for rows in _groups(sequence.request.top_logprobs for sequence in sequences):
        count = sequences[rows[0]].request.top_logprobs
        if count is not None:
            scored = _score(_take(logits, rows), [tokens[row] for row in rows], count)
            for row, event in zip(rows, scored, strict=True):
                events[row] = event
    return events


def _groups(settings: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of each different value."""
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, value in enumerate(settings):
        found[value].append(index)
    return list(found.values())


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _adjust(logits: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
    """Return logits with biases and penalties, in fp32 or wider if a row has any."""
    changes = [_changes(one.request.sampling, one.generated) for one in sequences]
    if not any(len(ids) for ids, _ in changes):
        return logits
    adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for row, (ids, values) in zip(adjusted, changes, strict=True):
        row.index_add_(0, ids.to(row.device), values.to(row))
    return adjusted


def _changes(sampling: SamplingParams, generated: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return tokens and the summands of their logits."""
    if not (sampling.presence_penalty or sampling.frequency_penalty):
        return sampling.bias
    changes = dict(sampling.logit_bias)
    for token, times in Counter(generated).items():
        penalty = sampling.presence_penalty + sampling.frequency_penalty * times
        changes[token] = changes.get(token, 0.0) - penalty
    values = torch.tensor(list(changes.values()), dtype=torch.float64)
    return torch.tensor(list(changes), dtype=torch.int64), values


def _choose(logits: Tensor, sequences: Sequence[SequenceState]) -> list[int]:
    """Return the tokens of rows with one temperature, top_p and top_k."""
    sampling = sequences[0].request.sampling
    if sampling.temperature == 0.0:
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    scores = logits.to(torch.float64, copy=True)
    # The difference comes first, so that no temperature overflows.
    scores -= logits.amax(dim=-1, keepdim=True)
    scores /= sampling.temperature
    draws = _draw(sequences).to(logits.device)
    chosen: list[int] = _sample(scores.softmax(dim=-1), draws, sampling).tolist()
    return chosen


def _draw(sequences: Sequence[SequenceState]) -> Tensor:
    """Return a number in (0, 1) for the next position of each sequence."""
    requests = [sequence.request for sequence in sequences]
    positions = [len(one.request.prompt) + len(one.generated) for one in sequences]
    return uniform(
        [request.sampling.seed for request in requests], "next token", 0,
        torch.tensor([request.choice for request in requests]), torch.tensor(positions),
    )  # fmt: skip


def _sample(probabilities: Tensor, draws: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the token of each row, [rows]."""
    if not sampling.top_k and sampling.top_p >= 1.0:
        return _pick(probabilities, draws)
    rows = max(_SORTED_ELEMENTS // probabilities.shape[1], 1)
    parts = zip(probabilities.split(rows), draws.split(rows), strict=True)
    return torch.cat([_sample_sorted(*part, sampling) for part in parts])


def _sample_sorted(probabilities: Tensor, draws: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the token of each row, among its likeliest ones."""
    vocab = probabilities.shape[1]
    wanted = min(sampling.top_k or vocab, vocab)
    count = min(wanted, _LIKELIEST)
    chosen, mass = _sample_likeliest(probabilities, draws, sampling, count)
    if count == wanted:
        return chosen
    needs_more = [True] * len(chosen) if sampling.top_k else (mass < sampling.top_p).tolist()
    for row in compress(range(len(chosen)), needs_more):
        one = slice(row, row + 1)
        chosen[one], _ = _sample_likeliest(probabilities[one], draws[one], sampling, wanted)
    return chosen


def _sample_likeliest(
    probabilities: Tensor, draws: Tensor, sampling: SamplingParams, count: int
) -> tuple[Tensor, Tensor]:
    """Return the token of each row, and the probability of its `count` likeliest tokens.

    `top_p` is a share of the tokens that `top_k` leaves.
    """
    kept, ids = probabilities.topk(count)
    cumulated = kept.cumsum(dim=-1)
    mass = cumulated[:, -1]
    limit = sampling.top_p * mass[:, None] if sampling.top_k else sampling.top_p
    is_beyond = cumulated - kept >= limit
    is_beyond[:, 0] = False
    index = _pick(kept.masked_fill(is_beyond, 0.0), draws)
    return ids.gather(1, index[:, None])[:, 0], mass


def _pick(weights: Tensor, draws: Tensor) -> Tensor:
    """Return the column of each row where the running sum reaches the draw's share of the total."""
    cumulated = weights.cumsum(dim=-1)
    columns = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:])
    return columns[:, 0].clamp(max=weights.shape[1] - 1)


def _score(logits: Tensor, tokens: list[int], count: int) -> list[TokenEvent]:
    """Return events with log-probabilities of the tokens and of the `count` likeliest ones."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.to(dtype).log_softmax(dim=-1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    own: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(min(count, logits.shape[1])))
    return [
        TokenEvent(token, logprob, tuple(zip(top, best, strict=True)))
        for token, logprob, top, best in zip(tokens, own, ids, values, strict=True)
    ]
