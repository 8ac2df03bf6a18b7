"""Thread pool: single-threaded operations, every item once, errors raised in the caller."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic.kernels import threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pool_or_skip() -> threads.ThreadPool:
    pool = threads.thread_pool()
    if pool is None:
        pytest.skip("the thread count of this torch build cannot be set per thread")
    return pool


def test_every_item_runs_once_on_a_single_thread() -> None:
    done: list[tuple[int, int, bool]] = []
    pool, barrier = pool_or_skip(), threading.Barrier(2, timeout=30)

    def work(item: int) -> None:
        if item < 2:
            barrier.wait()  # Passes only with both threads.
        done.append((item, torch.get_num_threads(), torch.is_grad_enabled()))

    pool.run_each(work, range(20))
    assert sorted(done) == [(item, 1, False) for item in range(20)]
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()


def test_caller_takes_the_last_index() -> None:
    pool, barrier = pool_or_skip(), threading.Barrier(2, timeout=30)
    done: dict[int, threading.Thread] = {}

    def work(index: int) -> None:
        barrier.wait()  # Passes only with both threads.
        done[index] = threading.current_thread()

    pool.run_with_caller(work)
    assert sorted(done) == [0, 1]
    assert done[1] is threading.current_thread() is not done[0]
    ended = list[int]()

    def fail(index: int) -> None:
        barrier.wait()
        if index != failing:  # It must be waited for while the other one fails.
            time.sleep(0.05)
        ended.append(index)
        if index == failing:
            raise ValueError(f"part {index}")

    for failing in (0, 1):
        ended.clear()
        with pytest.raises(ValueError, match=f"part {failing}"):
            pool.run_with_caller(fail)
        assert sorted(ended) == [0, 1]


def test_error_is_raised_in_the_caller_and_the_pool_survives() -> None:
    pool = pool_or_skip()

    started: list[int] = []

    def fail(item: int) -> None:
        started.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        pool.run_each(fail, range(100))
    assert len(started) <= 2, "nothing starts after an error"
    done: list[int] = []
    pool.run_each(done.append, range(3))
    assert sorted(done) == [0, 1, 2]


def test_inference_tensors_can_be_written() -> None:
    pool = pool_or_skip()
    with torch.inference_mode():
        out = torch.zeros(4)

        def fill(item: int) -> None:
            out[item] = item

        pool.run_each(fill, range(4))
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_no_pool_for_one_thread_or_under_a_dispatch_mode() -> None:
    pool_or_skip()
    with FlopCounterMode(display=False):
        assert threads.thread_pool() is None
    torch.set_num_threads(1)
    assert threads.thread_pool() is None


def run_in_fork(results: multiprocessing.Queue[list[int]]) -> None:
    done: list[int] = []
    pool_or_skip().run_each(done.append, range(3))
    results.put(sorted(done))


def test_fork_gets_its_own_pool() -> None:
    pool_or_skip()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=run_in_fork, args=(results,))
    child.start()
    assert results.get(timeout=60) == [0, 1, 2]
    child.join(60)
