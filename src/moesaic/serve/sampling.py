"""Choice of the next token of each request in a pass.

A draw depends on the seed, the choice and the position of its request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moesaic.kernels.randomness import uniform
from moesaic.serve.requests import GenerationRequest, TokenEvent


class SequenceState(Protocol):
    """A request in progress."""

    @property
    def request(self) -> GenerationRequest:
        """The request as it was submitted."""

    @property
    def generated(self) -> Sequence[int]:
        """Tokens generated so far."""


@torch.inference_mode()
def choose_tokens(logits: Tensor, sequences: Sequence[SequenceState]) -> list[TokenEvent]:
    """Return the next token of each sequence, with log-probabilities if its request asks.

    Args:
        logits: [sequences, vocab].
        sequences: the sequence of each row.
    """
    likeliest = logits.argmax(dim=-1).tolist()
    events = list[TokenEvent]()
    for row, token, sequence in zip(logits, likeliest, sequences, strict=True):
        if sequence.request.sampling.temperature != 0.0:
            token = _sample(row, sequence)
        number = sequence.request.top_logprobs
        if number is None:
            events.append(TokenEvent(token, None, ()))
            continue
        logprobs = row.double().log_softmax(dim=-1)
        best = logprobs.topk(number)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        events.append(TokenEvent(token, float(logprobs[token]), top))
    return events


def _sample(logits: Tensor, sequence: SequenceState) -> int:
    request, sampling = sequence.request, sequence.request.sampling
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    is_beyond = before >= sampling.top_p
    is_beyond[0] = False
    cumulated = ordered.masked_fill(is_beyond, 0.0).cumsum(dim=-1)
    position = torch.tensor([len(request.prompt) + len(sequence.generated)])
    choice = torch.tensor([request.choice])
    draw = uniform(sampling.seed, "next token", 0, choice, position).to(cumulated.device)
    index = torch.searchsorted(cumulated, draw * cumulated[-1])
    return int(ids[index.clamp(max=len(ids) - 1)])
