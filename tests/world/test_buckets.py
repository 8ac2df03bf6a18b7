"""Gradients in buckets against one sum a parameter when all is over: the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import SIGMOID, put_together, worst_element
from torch import Tensor, nn

from moesaic.dist.buckets import GradientBuckets, ReducedParameter
from moesaic.dist.collectives import all_reduce_buckets_
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.workload.collectives import ALIGNMENT_BYTES, split_into_buckets
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values

SHAPES: list[tuple[int, ...]] = [
    (3,),
    (64,),
    (5, 7),
    (1,),
    (32, 2),
    (0, 4),
    (130,),
    (2, 3, 5),
    (64,),
]
WIDE, NARROW = torch.float64, torch.float32


def test_tensors_share_messages_that_are_full() -> None:
    def laid(sizes: list[int], most: int) -> list[tuple[list[int], tuple[int, ...], int]]:
        return [
            (list(one.members), one.offsets, one.num_bytes)
            for one in split_into_buckets(sizes, most)
        ]

    assert laid([256, 256], 512) == [([0, 1], (0, 256), 512)]  # To the byte.
    assert laid([256, 257], 512) == [([0], (0,), 256), ([1], (0,), 257)]
    assert laid([1, 256], 512) == [([0, 1], (0, 256), 512)]  # What lies between counts.
    assert laid([1, 257], 512) == [([0], (0,), 1), ([1], (0,), 257)]
    assert laid([8, 1000, 8, 8], 512) == [
        ([0], (0,), 8), ([1], (0,), 1000), ([2, 3], (0, 256), 264),
    ]  # fmt: skip
    assert laid([0, 0, 8], 512) == [([0, 1, 2], (0, 0, 0), 8)]
    assert laid([], 512) == []


def parameters(dtypes: Sequence[torch.dtype], odd: bool) -> list[nn.Parameter]:
    shapes = SHAPES if odd else [(32,), (64,), (96,), (32,)]
    return [
        nn.Parameter(torch.zeros(shape, dtype=dtypes[at % len(dtypes)]))
        for at, shape in enumerate(shapes)
    ]


def losses(world: World, some: Sequence[nn.Parameter], silent: Sequence[int], times: int) -> Any:
    """Losses of micro-batches; on rank 1 nothing reaches parameters that are `silent`, on no rank
    the last of them."""
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(times):
        total = torch.zeros((), dtype=WIDE)
        for at, parameter in enumerate(some):
            factors = torch.randn(parameter.shape, dtype=WIDE, generator=draw)
            if at in silent and (world.rank or at == silent[-1]):
                continue
            total = total + (parameter.to(WIDE) * factors).sum()
        yield total


@dataclass(frozen=True)
class Case:
    dtypes: list[torch.dtype]
    odd: bool
    silent: list[int]
    times: int
    most: int


def summed(
    world: World, cases: Sequence[Case]
) -> list[tuple[list[Tensor], list[Tensor], int, list[int]]]:
    """Of each case gradients in buckets, those that are summed one by one, how many messages had
    left when backward was over, and where in their buckets gradients begin."""
    return [summed_once(world, case) for case in cases]


def summed_once(world: World, case: Case) -> tuple[list[Tensor], list[Tensor], int, list[int]]:
    found, plain = parameters(case.dtypes, case.odd), parameters(case.dtypes, case.odd)
    sums = [ReducedParameter(one, world.group) for one in reversed(found)]
    buckets = GradientBuckets(sums, overlaps_backward=True, max_bytes=case.most)
    for number, loss in enumerate(losses(world, found, case.silent, case.times)):
        if number == case.times - 1:
            buckets.expect_last_backward()
        loss.backward()
    left = sum(bucket._work is not None for bucket in buckets.buckets)
    buckets.finish()
    for loss in losses(world, plain, case.silent, case.times):
        loss.backward()
    for one in plain:
        one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        dist.all_reduce(one.grad)
    grads = [one.grad for one in found if one.grad is not None]
    places = [grad.storage_offset() * grad.itemsize for grad in grads]
    buckets.close()
    expected = [one.grad for one in plain if one.grad is not None]
    return [grad.clone() for grad in grads], expected, left, places


@pytest.mark.parametrize("dtypes", [[WIDE], [NARROW, WIDE]], ids=["alike", "mixed"])
@pytest.mark.parametrize("odd", [False, True])
def test_sums_are_those_of_single_messages(
    ranks: RankPool, dtypes: list[torch.dtype], odd: bool
) -> None:
    """Bit for bit: two ranks have but one order."""
    silences: list[list[int]] = [[], [2], [0, 2, 1]]
    cases = [
        Case(dtypes, odd, silent, times, most)
        for silent, times, most in product(silences, (1, 3), (1, 512, 768, 1 << 20))
    ]
    for results in ranks.run(2, summed, cases):
        for case, (found, expected, left, places) in zip(cases, results, strict=True):
            assert len(found) == len(expected) == (len(SHAPES) if odd else 4)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), case
            assert not any(place % ALIGNMENT_BYTES for place in places)
            assert any(places) or case.most < 768
            assert not any(places) or case.most > 1
            assert left or case.silent


def test_who_is_alone_has_no_buckets() -> None:
    alone = nn.Parameter(torch.ones(3))
    buckets = GradientBuckets([ReducedParameter(alone, None)], overlaps_backward=True)
    assert not buckets.buckets
    assert not alone._post_accumulate_grad_hooks
    buckets.expect_last_backward()
    (2 * alone).sum().backward()
    grad = alone.grad
    buckets.finish()
    assert alone.grad is grad


class OneByOne:
    """A sum a parameter, when all is over; in place of a run's buckets."""

    def __init__(self, of: GradientBuckets) -> None:
        self._sums = [(one, b.group) for b in of.buckets for one in b.parameters]
        of.close()

    def expect_last_backward(self) -> None:
        pass

    close = expect_last_backward

    def finish(self) -> None:
        for parameter, group in self._sums:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def gradients(world: World, job: Job, plain: bool) -> list[Any]:
    """Pieces of the gradient of a second step, after an update by that of the first."""
    run = start_run(job, world)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    patched: Any = all_reduce_buckets_
    if plain:
        run.part.buckets = OneByOne(run.part.buckets)  # type: ignore[assignment]

        def patched(tensors: list[Tensor], group: Any) -> None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    with mock.patch("moesaic.train.parts.all_reduce_buckets_", patched):
        run.step(samples)
        run.compute_gradients(samples)
    found = [
        (piece.key, piece.shape, piece.offset, live_values(piece).clone().numpy())
        for item in run.part.trainable
        for piece in item.tensor_shards("gradient", item.grad, world.rank)
    ]
    run.close()
    return found


TIED = {"family": "llama", "experts": 0, "top_k": 0, "tied": True, "vocab": 60}
LORA = {"method": "lora", "rank": 4}
AGAIN = {"train": {"recompute": True, "micro_batches": 2}}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"train": {"micro_batches": 4}}),
    (2, {"model": TIED}),
    (2, {"model": TIED, **AGAIN}),
    (2, {"model": {"hidden": 30, "vocab": 53, "heads": 3, "kv_heads": 3}, **AGAIN}),
    (2, {"train": {"batch": 1}}),
    (2, {"train": {"batch": 2, "micro_batches": 2}, "layout": {"ep": 2}}),
    (2, {"finetune": LORA}),
    (2, {"finetune": {**LORA, "targets": ["experts"], "router": "train"}, **AGAIN}),
    (2, {**SIGMOID, "layout": {"ep": 2, "dispatch": "dedup", "chunks": 2}}),
    (2, {"layout": {"tp": 2}, "model": {"vocab": 60, "kv_heads": 4}, **AGAIN}),
    (2, {"layout": {"pp": 2, "schedule": "zero-bubble"}, "train": {"micro_batches": 4}}),
    (2, {"layout": {"pp": 2}, "model": TIED, "train": {"micro_batches": 4}}),
    (4, {"layout": {"tp": 2, "dp_shard": 2}, "model": {"vocab": 60, "kv_heads": 4}, **AGAIN}),
    (4, {"layout": {"ep": 2}, "train": {"batch": 6, "micro_batches": 2}}),
    (4, {"layout": {"pp": 2, "tp": 2}, "model": {"vocab": 60, "kv_heads": 4},
         "train": {"micro_batches": 4}}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_has_the_gradients_of_single_messages(
    ranks: RankPool, case: tuple[int, dict[str, Any]]
) -> None:
    size, tables = case
    job = tiny_job(**{"routing": {"router": "balanced"}, **tables})
    found, expected = (
        put_together(ranks.run(size, gradients, job, plain)) for plain in (False, True)
    )
    if size == 2:
        assert found.keys() == expected.keys()
        assert all((found[key] == expected[key]).all() for key in found)
    else:  # In a bucket another rank may begin with an element.
        assert worst_element(found, expected) < 1e-9
