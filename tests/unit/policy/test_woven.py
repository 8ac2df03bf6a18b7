"""A step whose tokens travel in chunks, on the clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moesaic.facts.workload import EXPERTS, RESULTS, TOKENS
from moesaic.policy.cost.chunks import woven
from moesaic.policy.cost.event import Event
from moesaic.sim.timeline import run

RANKS = 2
GROUPS = [[0, 1]]


def event(name: str, seconds: float, *, said: bool = False) -> Event:
    each = np.full(RANKS, seconds)
    return Event(name, "forward", "layers.0.moe", each, GROUPS if said else ())


def block(chunks: int, compute_s: float, travel_s: float) -> list[Event]:
    """Two seconds of work, an expert layer of so many seconds in chunks, and one second of work."""
    ops = [event("dispatch", 2.0)]
    ops += [event(EXPERTS, compute_s / chunks)] * chunks
    ops += [event("combine", 1.0)]
    each = travel_s / chunks
    said = [event("counts", 0.25, said=True)]
    said += [event(TOKENS, each, said=True)] * chunks
    said += [event(RESULTS, each, said=True)] * chunks
    said += [event("sum results", 0.5, said=True)]
    return [*woven(ops, said, (chunks, 1), lambda _: True)]


AROUND_S = 2.0 + 1.0 + 0.25 + 0.5


@pytest.mark.parametrize("chunks", [1, 2, 4, 16])
@pytest.mark.parametrize(("compute_s", "travel_s"), [(8.0, 2.0), (8.0, 4.0), (8.0, 1.0)])
def test_all_but_the_first_and_the_last_chunk_travel_while_experts_compute(
    chunks: int, compute_s: float, travel_s: float
) -> None:
    """Tokens and results each take less than half of what experts do."""
    found = run(block(chunks, compute_s, travel_s), RANKS)
    shown = 2 * travel_s / chunks
    assert found.step_s == pytest.approx(AROUND_S + compute_s + shown)
    assert sum(found.beside_s(0)) == pytest.approx(2 * travel_s + shown)


def with_local(chunks: int, local: float, remote: float, travel_s: float) -> float:
    """Seconds of so many chunks and a piece more of what is local, each as long as is said."""
    ops = [event(EXPERTS, local), *[event(EXPERTS, remote), event(EXPERTS, local)] * chunks]
    said = [event(TOKENS, travel_s, said=True)] * chunks
    said += [event(RESULTS, travel_s, said=True)] * chunks
    return run([*woven(ops, said, (chunks, 1), lambda _: True, local_first=True)], RANKS).step_s


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize(("local", "remote"), [(3.0, 1.0), (2.0, 2.0), (1.0, 4.0)])
def test_what_is_local_hides_the_first_and_the_last_chunk_too(
    chunks: int, local: float, remote: float
) -> None:
    found = with_local(chunks, local, remote, min(local, remote))
    assert found == pytest.approx((chunks + 1) * local + chunks * remote)


def test_of_one_chunk_all_is_seen_that_takes_longer_than_a_piece() -> None:
    assert with_local(1, local=2.0, remote=5.0, travel_s=3.0) == pytest.approx(9.0 + 2 * 1.0)


@pytest.mark.parametrize("chunks", [2, 4, 16])
def test_where_links_are_slower_experts_are_hidden(chunks: int) -> None:
    """Of what experts compute only what comes before anything can be sent home is seen."""
    found = run(block(chunks, 2.0, 8.0), RANKS).step_s
    assert AROUND_S + 16.0 <= found <= AROUND_S + 16.0 + 2 * 2.0 / chunks + 1e-9


def test_one_chunk_takes_what_it_takes_without() -> None:
    plain = [event(name, 1.0) for name in ("dispatch", EXPERTS, "combine")]
    said = [event(name, 1.0, said=True) for name in ("counts", TOKENS, RESULTS)]
    cut = [*woven(plain, said, (1, 1), lambda _: True)]
    assert run(cut, RANKS).step_s == run([*plain, *said], RANKS).step_s == 6.0


@pytest.mark.parametrize("chunks", [2, 4])
def test_of_two_trips_the_one_between_hosts_is_beside(chunks: int) -> None:
    """Tokens cross first and then go on, results go home the other way."""
    across, within = 1.0, 0.25
    ops = [event(EXPERTS, 8.0 / chunks)] * chunks
    there = [event(TOKENS, across, said=True), event(TOKENS, within, said=True)] * chunks
    back = [event(RESULTS, within, said=True), event(RESULTS, across, said=True)] * chunks
    found = [*woven(ops, there + back, (chunks, 2), lambda _: True)]
    beside = [one for one in found if one.beside]
    assert len(beside) == 2 * chunks
    assert {float(one.seconds[0]) for one in beside} == {across}
    shown = 2 * across + 2 * chunks * within
    assert run(found, RANKS).step_s == pytest.approx(8.0 + shown)


def test_nothing_is_hidden_that_ranks_copy_themselves() -> None:
    hidden: Callable[[Event], bool] = lambda _: False  # noqa: E731
    ops = [event(EXPERTS, 2.0)] * 4
    said = [event(name, 1.0, said=True) for name in [TOKENS] * 4 + [RESULTS] * 4]
    found = [*woven(ops, said, (4, 1), hidden)]
    assert not any(one.beside for one in found)
    assert run(found, RANKS).step_s == 16.0


def test_what_is_computed_again_is_cut_as_what_follows_it() -> None:
    """Backward of a layer: its forward, and then both exchanges the other way round."""
    ops = [event(EXPERTS, 1.0)] * 2 + [event("combine", 1.0)] + [event(EXPERTS, 2.0)] * 2
    names = [TOKENS] * 2 + [RESULTS] * 2 + [RESULTS] * 2 + [TOKENS] * 2
    said = [event(name, 0.5, said=True) for name in names]
    found = [*woven(ops, said, (2, 1), lambda _: True)]
    order = [one.name for one in found if one.beside or (one.name != EXPERTS and not one.awaits)]
    ahead, back = [TOKENS, TOKENS, RESULTS, RESULTS], [RESULTS, RESULTS, TOKENS, TOKENS]
    assert order == [*ahead, "combine", *back]
    assert run(found, RANKS).step_s == pytest.approx(7.0 + 4 * 0.5)


def test_gradients_that_go_nowhere_are_not_waited_for() -> None:
    """Tokens of the first layer that learns have no gradients."""
    ops = [event(EXPERTS, 2.0)] * 2
    said = [event(RESULTS, 1.0, said=True)] * 2
    found = [*woven(ops, said, (2, 1), lambda _: True)]
    assert [one.name for one in found if one.beside] == [RESULTS, RESULTS]
    assert run(found, RANKS).step_s == pytest.approx(5.0)
