"""Overlap of chunked dispatch with experts, in simulated time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from slow_timeline import simulate_events

from moesaic.facts.workload import EXPERTS, RESULTS, TOKENS
from moesaic.policy.cost.chunk_overlap import interleave_chunks
from moesaic.policy.cost.event import Event

RANKS = 2
GROUPS = [[0, 1]]


def event(name: str, seconds: float, *, is_collective: bool = False) -> Event:
    each = np.full(RANKS, seconds)
    return Event(name, "forward", "layers.0.moe", each, GROUPS if is_collective else ())


def block(chunks: int, compute_s: float, exchange_s: float) -> list[Event]:
    """Return two seconds of work, a chunked expert layer, and one second of work."""
    ops = [event("dispatch", 2.0)]
    ops += [event(EXPERTS, compute_s / chunks)] * chunks
    ops += [event("combine", 1.0)]
    each = exchange_s / chunks
    collectives = [event("counts", 0.25, is_collective=True)]
    collectives += [event(TOKENS, each, is_collective=True)] * chunks
    collectives += [event(RESULTS, each, is_collective=True)] * chunks
    collectives += [event("reduce-scatter expert results", 0.5, is_collective=True)]
    return [*interleave_chunks(ops, collectives, (chunks, 1), lambda _: True)]


AROUND_S = 2.0 + 1.0 + 0.25 + 0.5


@pytest.mark.parametrize("chunks", [1, 2, 4, 16])
@pytest.mark.parametrize(("compute_s", "exchange_s"), [(8.0, 2.0), (8.0, 4.0), (8.0, 1.0)])
def test_only_the_first_and_the_last_exchange_are_exposed(
    chunks: int, compute_s: float, exchange_s: float
) -> None:
    """Tokens and results each take less than half the time of experts."""
    found = simulate_events(block(chunks, compute_s, exchange_s), RANKS)
    exposed_s = 2 * exchange_s / chunks
    assert found.step_s == pytest.approx(AROUND_S + compute_s + exposed_s)
    assert sum(found.overlapped_s(0)) == pytest.approx(2 * exchange_s + exposed_s)


def with_local(chunks: int, local: float, remote: float, exchange_s: float) -> float:
    """Return the seconds of an expert layer with local tokens in `chunks` + 1 parts."""
    ops = [event(EXPERTS, local), *[event(EXPERTS, remote), event(EXPERTS, local)] * chunks]
    collectives = [event(TOKENS, exchange_s, is_collective=True)] * chunks
    collectives += [event(RESULTS, exchange_s, is_collective=True)] * chunks
    return simulate_events(
        [*interleave_chunks(ops, collectives, (chunks, 1), lambda _: True, local_first=True)], RANKS
    ).step_s


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize(("local", "remote"), [(3.0, 1.0), (2.0, 2.0), (1.0, 4.0)])
def test_local_tokens_overlap_the_first_and_the_last_exchange(
    chunks: int, local: float, remote: float
) -> None:
    found = with_local(chunks, local, remote, min(local, remote))
    assert found == pytest.approx((chunks + 1) * local + chunks * remote)


def test_one_chunk_exposes_what_exceeds_local_computing() -> None:
    assert with_local(1, local=2.0, remote=5.0, exchange_s=3.0) == pytest.approx(9.0 + 2 * 1.0)


@pytest.mark.parametrize("chunks", [2, 4, 16])
def test_slow_links_overlap_experts(chunks: int) -> None:
    """Only experts before the first results can be sent are exposed."""
    found = simulate_events(block(chunks, 2.0, 8.0), RANKS).step_s
    assert AROUND_S + 16.0 <= found <= AROUND_S + 16.0 + 2 * 2.0 / chunks + 1e-9


def test_one_chunk_takes_as_long_as_no_overlap() -> None:
    plain = [event(name, 1.0) for name in ("dispatch", EXPERTS, "combine")]
    collectives = [event(name, 1.0, is_collective=True) for name in ("counts", TOKENS, RESULTS)]
    cut = [*interleave_chunks(plain, collectives, (1, 1), lambda _: True)]
    assert (
        simulate_events(cut, RANKS).step_s
        == simulate_events([*plain, *collectives], RANKS).step_s
        == 6.0
    )


@pytest.mark.parametrize("chunks", [2, 4])
def test_of_two_exchange_steps_the_one_between_hosts_overlaps(chunks: int) -> None:
    """Tokens cross hosts first; results cross hosts last."""
    across, within = 1.0, 0.25
    ops = [event(EXPERTS, 8.0 / chunks)] * chunks
    there = [
        event(TOKENS, across, is_collective=True),
        event(TOKENS, within, is_collective=True),
    ] * chunks
    back = [
        event(RESULTS, within, is_collective=True),
        event(RESULTS, across, is_collective=True),
    ] * chunks
    found = [*interleave_chunks(ops, there + back, (chunks, 2), lambda _: True)]
    overlapped = [one for one in found if one.launches]
    assert len(overlapped) == 2 * chunks
    assert {float(one.seconds[0]) for one in overlapped} == {across}
    exposed_s = 2 * across + 2 * chunks * within
    assert simulate_events(found, RANKS).step_s == pytest.approx(8.0 + exposed_s)


def test_collectives_that_block_ranks_do_not_overlap() -> None:
    overlaps: Callable[[Event], bool] = lambda _: False  # noqa: E731
    ops = [event(EXPERTS, 2.0)] * 4
    collectives = [event(name, 1.0, is_collective=True) for name in [TOKENS] * 4 + [RESULTS] * 4]
    found = [*interleave_chunks(ops, collectives, (4, 1), overlaps)]
    assert not any(one.launches for one in found)
    assert simulate_events(found, RANKS).step_s == 16.0


def test_recomputed_experts_are_chunked_too() -> None:
    """Backward with recomputation: forward first, then both exchanges in reverse."""
    ops = [event(EXPERTS, 1.0)] * 2 + [event("combine", 1.0)] + [event(EXPERTS, 2.0)] * 2
    names = [TOKENS] * 2 + [RESULTS] * 2 + [RESULTS] * 2 + [TOKENS] * 2
    collectives = [event(name, 0.5, is_collective=True) for name in names]
    found = [*interleave_chunks(ops, collectives, (2, 1), lambda _: True)]
    order = [
        one.name for one in found if one.launches or (one.name != EXPERTS and not one.waits_for)
    ]
    ahead, back = [TOKENS, TOKENS, RESULTS, RESULTS], [RESULTS, RESULTS, TOKENS, TOKENS]
    assert order == [*ahead, "combine", *back]
    assert simulate_events(found, RANKS).step_s == pytest.approx(7.0 + 4 * 0.5)


def test_missing_input_gradients_have_no_exchange() -> None:
    """Tokens of the first trainable layer have no gradients."""
    ops = [event(EXPERTS, 2.0)] * 2
    collectives = [event(RESULTS, 1.0, is_collective=True)] * 2
    found = [*interleave_chunks(ops, collectives, (2, 1), lambda _: True)]
    assert [one.name for one in found if one.launches] == [RESULTS, RESULTS]
    assert simulate_events(found, RANKS).step_s == pytest.approx(5.0)
