"""Continuous batching: the requests of one forward pass, and the tokens of each.

Decoding requests come first, with one token each. Prompt tokens fill the rest of the pass, in the
order of admission. Requests are admitted in the order of the queue, as soon as the cache has pages
for all of their tokens. If a decoding request needs a page and none is free, the request admitted
last is preempted.

A request admitted earlier is never preempted for a later one, and none overtakes another in the
queue. The first request therefore always advances, and no request starves.
"""

from __future__ import annotations

from typing import NamedTuple


class RunningRequest(NamedTuple):
    """A request with pages in the cache."""

    id: int
    num_tokens: int
    """Tokens of the prompt, and those generated."""
    num_computed: int
    """Leading tokens whose keys and values are in the cache."""
    num_pages: int
    """Pages that the request holds."""


class WaitingRequest(NamedTuple):
    """A request without pages."""

    id: int
    num_tokens: int
    """Tokens of the prompt, and those generated before a preemption."""
    num_found: int
    """Leading tokens that the prefix cache holds."""


class BatchingFacts(NamedTuple):
    """State of the engine before a pass."""

    running: tuple[RunningRequest, ...]
    """Requests in the order of admission."""
    waiting: tuple[WaitingRequest, ...]
    """First requests of the queue, in its order; as many as may be admitted."""
    num_pages: int
    """Pages of the cache over all requests."""
    page_tokens: int
    """Tokens of a page."""
    tokens_per_pass: int
    """Tokens that a pass computes at most, beside those of decoding requests."""
    max_running: int
    """Requests with pages at most."""


class TokenShare(NamedTuple):
    """Tokens of one request in a pass."""

    id: int
    num_tokens: int


class BatchingDecision(NamedTuple):
    """Requests of one pass."""

    preempted: tuple[int, ...]
    """Running requests that lose their pages and return to the head of the queue, the one admitted
    last first."""
    admitted: tuple[int, ...]
    """Waiting requests that get pages for all of their tokens, in the order of the queue."""
    shares: tuple[TokenShare, ...]
    """Requests of the pass, with the tokens of each; those that decode come first."""


def plan_pass(facts: BatchingFacts) -> BatchingDecision:
    """Return the requests of the next pass."""
    kept, preempted, num_free = _grow(facts)
    shares, prompts = list[TokenShare](), list[tuple[int, int]]()
    for request in kept:
        rest = request.num_tokens - request.num_computed
        if rest == 1:
            shares.append(TokenShare(request.id, 1))
        else:
            prompts.append((request.id, rest))
    budget = facts.tokens_per_pass - len(shares)
    for id_, rest in prompts:
        if budget > 0:
            shares.append(TokenShare(id_, min(rest, budget)))
            budget -= shares[-1].num_tokens
    admitted = list[int]()
    # A preempted request is the head of the queue, and has just lost its pages.
    for waiting in () if preempted else facts.waiting:
        needed = count_pages(waiting.num_tokens, facts.page_tokens)
        is_full = len(kept) + len(admitted) >= facts.max_running
        if is_full or budget <= 0 or needed > num_free:
            break
        num_free -= needed
        admitted.append(waiting.id)
        shares.append(TokenShare(waiting.id, min(waiting.num_tokens - waiting.num_found, budget)))
        budget -= shares[-1].num_tokens
    return BatchingDecision(preempted, tuple(admitted), tuple(shares))


def _grow(facts: BatchingFacts) -> tuple[list[RunningRequest], tuple[int, ...], int]:
    """Return the requests that keep running, those preempted, and the pages that remain free."""
    running, preempted = list(facts.running), list[int]()
    num_free = facts.num_pages - sum(request.num_pages for request in running)
    index = 0
    while index < len(running):
        request = running[index]
        needed = count_pages(request.num_computed + 1, facts.page_tokens) - request.num_pages
        if needed <= num_free:
            num_free -= max(needed, 0)
            index += 1
        else:
            last = running.pop()
            preempted.append(last.id)
            num_free += last.num_pages
    return running, tuple(preempted), num_free


def count_pages(num_tokens: int, page_tokens: int) -> int:
    """Return the pages that hold `num_tokens`."""
    return -(-num_tokens // page_tokens)
