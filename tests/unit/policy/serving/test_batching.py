"""The batching policy in a simulated engine: order, limits, growth, preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.policy.serving.batching import (
    BatchingDecision,
    BatchingFacts,
    RunningRequest,
    TokenShare,
    WaitingRequest,
    count_pages,
    plan_pass,
)


@dataclass
class Simulated:
    id: int
    prompt: int
    max_tokens: int
    arrival: int
    computed: int = 0
    generated: int = 0
    pages: int = 0
    found: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def is_done(self) -> bool:
        return self.generated == self.max_tokens


def facts(
    running: list[Simulated], waiting: list[Simulated], limits: tuple[int, int, int, int]
) -> BatchingFacts:
    return BatchingFacts(
        tuple(RunningRequest(r.id, r.tokens, r.computed, r.pages) for r in running),
        tuple(WaitingRequest(r.id, r.tokens, min(r.found, r.tokens - 1)) for r in waiting),
        *limits,
    )


def check(decision: BatchingDecision, given_facts: BatchingFacts) -> None:
    """Check one decision against the facts."""
    running = [r.id for r in given_facts.running]
    assert list(decision.preempted) == running[::-1][: len(decision.preempted)]
    kept = [r for r in given_facts.running if r.id not in decision.preempted]
    waiting = given_facts.waiting[: len(decision.admitted)]
    assert decision.admitted == tuple(r.id for r in waiting)
    assert len(kept) + len(waiting) <= given_facts.max_running
    shares = dict(decision.shares)
    assert len(shares) == len(decision.shares)
    decoding = [r.id for r in kept if r.num_tokens - r.num_computed == 1]
    assert decision.shares[: len(decoding)] == tuple(TokenShare(id_, 1) for id_ in decoding)
    assert sum(shares.values()) <= max(given_facts.tokens_per_pass, len(decoding))
    rests = {r.id: r.num_tokens - r.num_computed for r in kept}
    rests |= {r.id: r.num_tokens - r.num_found for r in waiting}
    assert all(0 < number <= rests[id_] for id_, number in shares.items())
    assert set(decision.admitted) <= shares.keys()
    # Prompts advance in order: only the last one of a pass is incomplete, and none is left out.
    prompts = [id_ for id_ in rests if id_ not in decoding]
    partial = [id_ for id_ in prompts if shares.get(id_, 0) < rests[id_]]
    assert all(id_ not in shares for id_ in partial[1:])
    if partial:
        assert sum(shares.values()) == given_facts.tokens_per_pass
    pages = sum(
        max(r.num_pages, count_pages(r.num_computed + shares.get(r.id, 0), given_facts.page_tokens))
        for r in kept
    ) + sum(count_pages(r.num_tokens, given_facts.page_tokens) for r in waiting)
    assert pages <= given_facts.num_pages


REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=9
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.integers(1, 5), st.integers(0, 9), st.integers(0, 4), st.integers(0, 4))
def test_all_requests_end_in_order(
    sizes: list[tuple[int, int, int]], max_running: int, more: int, spare: int, found: int
) -> None:
    """The cache may be as small as the largest request."""
    page_tokens, budget = 4, max_running + more
    num_pages = max(count_pages(p + m - 1, page_tokens) for p, m, _ in sizes) + spare
    limits = (num_pages, page_tokens, budget, max_running)
    coming = deque(
        sorted(
            (Simulated(i, p, m, at, found=found) for i, (p, m, at) in enumerate(sizes)),
            key=lambda r: (r.arrival, r.id),
        )
    )
    order = [r.id for r in coming]
    waiting, running, admitted = deque[Simulated](), list[Simulated](), list[int]()
    # Every token, at worst computed again for each page that an earlier request needs.
    most = 40 + sum(p + m for p, m, _ in sizes) * (len(sizes) + 1)
    now = 0
    while coming or waiting or running:
        assert now < most
        while coming and coming[0].arrival <= now:
            waiting.append(coming.popleft())
        now += 1
        state = facts(running, list(waiting)[:max_running], limits)
        decision = plan_pass(state)
        check(decision, state)
        assert decision.shares or not (running or waiting)
        for id_ in decision.preempted:
            request = running.pop()
            assert request.id == id_
            request.computed = request.pages = 0
            waiting.appendleft(request)
        for id_ in decision.admitted:
            request = waiting.popleft()
            assert request.id == id_
            request.computed = min(request.found, request.tokens - 1)
            request.pages = count_pages(request.tokens, page_tokens)
            running.append(request)
            if id_ not in admitted:
                admitted.append(id_)
        by_id = {r.id: r for r in running}
        for id_, number in decision.shares:
            request = by_id[id_]
            request.computed += number
            request.pages = max(request.pages, count_pages(request.computed, page_tokens))
            if request.computed == request.tokens:
                request.generated += 1
        running = [r for r in running if not r.is_done]
    assert admitted == order


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    decoding = RunningRequest(1, 20, 19, 5)
    state = BatchingFacts((decoding,), (WaitingRequest(2, 1000, 0),), 400, 4, 8, 4)
    assert plan_pass(state) == BatchingDecision((), (2,), (TokenShare(1, 1), TokenShare(2, 7)))


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    long, short = WaitingRequest(2, 50, 0), WaitingRequest(3, 1, 0)
    state = BatchingFacts((RunningRequest(1, 5, 4, 2),), (long, short), 10, 4, 8, 4)
    assert plan_pass(state).admitted == ()


def test_tokens_of_the_prefix_cache_take_no_part_of_the_pass() -> None:
    waiting = (WaitingRequest(1, 20, 16), WaitingRequest(2, 20, 0))
    decision = plan_pass(BatchingFacts((), waiting, 20, 4, 10, 4))
    assert decision.shares == (TokenShare(1, 4), TokenShare(2, 6))


def test_the_request_admitted_last_is_preempted() -> None:
    running = tuple(RunningRequest(id_, 9, 8, 2) for id_ in (1, 2, 3))
    decision = plan_pass(BatchingFacts(running, (WaitingRequest(4, 1, 0),), 7, 4, 8, 4))
    assert decision == BatchingDecision((3,), (), (TokenShare(1, 1), TokenShare(2, 1)))
    decision = plan_pass(BatchingFacts(running[:2], (), 4, 4, 8, 4))
    assert decision == BatchingDecision((2,), (), (TokenShare(1, 1),))
