"""A crew of threads: each computes alone, all items are done once, errors come through."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moesaic.dist import threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def the_crew() -> threads.Crew:
    found = threads.crew()
    if found is None:
        pytest.skip("this build of torch has no OpenMP to be told of threads")
    return found


def test_every_item_is_done_once_and_by_threads_that_are_alone() -> None:
    done: list[tuple[int, int, bool]] = []
    crew, meeting = the_crew(), threading.Barrier(2, timeout=30)

    def work(item: int) -> None:
        if item < 2:
            meeting.wait()  # Only both threads get past it.
        done.append((item, torch.get_num_threads(), torch.is_grad_enabled()))

    crew.each(work, range(20))
    assert sorted(done) == [(item, 1, False) for item in range(20)]
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()


def test_the_caller_takes_its_part() -> None:
    crew, meeting = the_crew(), threading.Barrier(2, timeout=30)
    done: dict[int, threading.Thread] = {}

    def work(place: int) -> None:
        meeting.wait()  # Only both threads get past it.
        done[place] = threading.current_thread()

    crew.with_caller(work)
    assert sorted(done) == [0, 1]
    assert done[1] is threading.current_thread() is not done[0]
    ended = list[int]()

    def fail(place: int) -> None:
        meeting.wait()
        if place != failing:  # The other one fails meanwhile, and is waited for.
            time.sleep(0.05)
        ended.append(place)
        if place == failing:
            raise ValueError(f"part {place}")

    for failing in (0, 1):
        ended.clear()
        with pytest.raises(ValueError, match=f"part {failing}"):
            crew.with_caller(fail)
        assert sorted(ended) == [0, 1]


def test_an_error_of_a_thread_is_raised_here_and_the_crew_goes_on() -> None:
    crew = the_crew()

    begun: list[int] = []

    def fail(item: int) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        crew.each(fail, range(100))
    assert len(begun) <= 2, "nothing is begun after an error"
    done: list[int] = []
    crew.each(done.append, range(3))
    assert sorted(done) == [0, 1, 2]


def test_results_may_be_of_inference() -> None:
    crew = the_crew()
    with torch.inference_mode():
        out = torch.zeros(4)

        def fill(item: int) -> None:
            out[item] = item

        crew.each(fill, range(4))
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_there_is_none_of_one_thread_and_none_where_a_mode_looks_on() -> None:
    the_crew()
    with FlopCounterMode(display=False):
        assert threads.crew() is None
    torch.set_num_threads(1)
    assert threads.crew() is None


def in_a_fork(results: multiprocessing.Queue[list[int]]) -> None:
    done: list[int] = []
    the_crew().each(done.append, range(3))
    results.put(sorted(done))


def test_a_fork_has_its_own() -> None:
    the_crew()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_a_fork, args=(results,))
    child.start()
    assert results.get(timeout=60) == [0, 1, 2]
    child.join(60)


def test_the_main_thread_keeps_its_threads() -> None:
    """What crews are told is theirs alone."""
    crew = the_crew()
    size: list[Tensor] = []
    crew.each(lambda item: size.append(torch.ones(300, 300) @ torch.ones(300, 300)), range(4))
    assert torch.get_num_threads() == 2
    told = torch.__config__.parallel_info()
    assert "mkl_get_max_threads" not in told or "mkl_get_max_threads() : 2" in told
    assert len(size) == 4
