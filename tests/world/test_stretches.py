"""Parameters updated side by side, as their gradients lie in buckets, against one tensor each."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from layouts import SIGMOID, put_together
from test_buckets import AGAIN, LORA, TIED

from moesaic.dist.buckets import Buckets
from moesaic.dist.state import is_shared_out
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import workload
from moesaic.facts.workload.messages import ALIGNMENT, together
from moesaic.facts.workload.sizes import BUCKET_BYTES
from moesaic.models.initial import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import Held, held
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.optim import Stretch
from moesaic.train.run import Run

LANES = 16
"""Numbers of fp32 that a processor takes at once, or fewer."""
SLICED = {"vocab": 60, "kv_heads": 4}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"train": {"precision": "bf16", "clip": 0.01}}),
    (2, {"train": {"precision": "fp64"}, "optimizer": {"weight_decay": 0.0}}),
    (2, {"model": {"hidden": 30, "vocab": 53, "heads": 3, "kv_heads": 3}, **AGAIN}),
    (2, {"model": TIED}),
    (2, {"optimizer": {"moments": "bf16"}}),
    (2, {"optimizer": {"moments": "8bit"}, "layout": {"ep": 2}}),
    (2, {**SIGMOID, "layout": {"ep": 2, "dispatch": "visits", "chunks": 2}}),
    (2, {"layout": {"embedding": "columns"}, "model": {"vocab": 60}}),
    (2, {"finetune": LORA, **AGAIN}),
    (4, {"layout": {"tp": 2, "ep": 2}, "model": SLICED}),
    (4, {"layout": {"tp": 2, "shard": 2}, "model": SLICED}),
    (4, {"layout": {"pp": 2, "ep": 2}, "model": {**TIED, "family": "olmoe", "experts": 4,
         "top_k": 2}, "train": {"micro_batches": 4}}),
]  # fmt: skip


def started(world: World, job: Job) -> tuple[Run, RandomSamples]:
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    return run, RandomSamples(job.model.vocab, job.data.sequence)


def apart() -> AbstractContextManager[Any]:
    """Parameters stay where they have been made."""
    return mock.patch.object(Buckets, "settle", return_value={})


def trained(world: World, job: Job, side_by_side: bool) -> tuple[list[Any], int]:
    """All state after three steps, and how many stretches have several parameters."""
    with nullcontext() if side_by_side else apart():
        run, samples = started(world, job)
        several = sum(len(one.items) > 1 for one in run.updated)
        for _ in range(3):
            run.step(samples)
    found = [
        (piece.key, piece.shape, piece.offset, piece.tensor.clone().double().numpy())
        for piece in run.state().pieces
    ]
    run.close()
    return found, several


@pytest.mark.parametrize("case", CASES, ids=str)
def test_side_by_side_is_what_single_tensors_are(
    ranks: Ranks, case: tuple[int, dict[str, Any]]
) -> None:
    """Bit for bit, unless a tensor's last numbers are no whole vector of the processor's: by itself
    it has them done one by one, in other instructions, and the next step has others for it."""
    size, tables = case
    job = tiny_job(**{"routing": {"router": "balanced"}, "train": {"clip": 0.1}, **tables})
    flat, single = (ranks.run(size, trained, job, kind) for kind in (True, False))
    assert all(several for _, several in flat) == (job.layout.shard == 1)
    assert not any(several for _, several in single)
    found, expected = (put_together([state for state, _ in one]) for one in (flat, single))
    assert found.keys() == expected.keys()
    if all(values.size % LANES == 0 for values in expected.values()):
        assert all((found[key] == expected[key]).all() for key in found)
    for key in found:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-9, atol=1e-15)


def lies(world: World, job: Job) -> list[str]:
    """What is wrong with how parameters, gradients and moments lie, in a step."""
    run, samples = started(world, job)
    run.gradients(samples)
    wrong = [words for one in run.updated if len(one.items) > 1 for words in faults(run, one)]
    several = {item.name for one in run.updated if len(one.items) > 1 for item in one.items}
    norms = {item.name for item in run.holdings if item.name.endswith("_norm.weight")}
    if job.layout.shard == 1:  # Or torch has them, in memory of its own.
        wrong += [f"{name} lies alone" for name in norms - several]
    before = {piece.key: piece.tensor._version for piece in run.state().pieces}
    run.optimizer.apply(run.updated, world.rank, 1, lr=0.1, clip=0.5)
    wrong += [
        f"{piece.key} was not counted"
        for piece in run.state().pieces
        if piece.tensor._version <= before[piece.key]
    ]
    run.close()
    return wrong


def faults(run: Run, one: Stretch) -> Iterator[str]:
    """What is wrong with one stretch."""
    grads = one.grads()
    name = one.items[0].name
    memory = {item.grad.untyped_storage().data_ptr() for item in one.items}
    if memory != {grads.untyped_storage().data_ptr()}:
        yield f"gradients of {name} are copied"
    for item, grad in one.parts(grads):
        if not torch.equal(grad, item.grad) or grad.data_ptr() != item.grad.data_ptr():
            yield f"the gradient of {item.name} is elsewhere"
    for item, values in one.parts(one.values):
        if values.data_ptr() != item.local.data_ptr():
            yield f"{item.name} is elsewhere"
        if values.data_ptr() % ALIGNMENT != one.values.data_ptr() % ALIGNMENT:
            yield f"{item.name} is not aligned"
    moments = [run.optimizer.moments[item.name] for item in one.items]
    for both in zip(*moments, strict=True):
        if len({tensor.untyped_storage().data_ptr() for tensor in both}) != 1:
            yield f"moments of {name} lie apart"
    if len({item.decays for item in one.items}) != 1:
        yield f"{name} is with what is unlike it"


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"pp": 2}, {"shard": 2}, {"ep": 2, "shard": 4}], ids=str
)
def test_a_block_lies_in_a_few_stretches(ranks: Ranks, layout: dict[str, Any]) -> None:
    """Values, gradients and moments, each in memory of their own; and an update that is written
    to it counts for each parameter, as a save that copies meanwhile goes by that."""
    job = tiny_job(layout=layout, model=SLICED, train={"batch": 8, "micro_batches": 4})
    assert not any(ranks.run(4, lies, job))


def elsewhere(world: World, job: Job) -> list[torch.Tensor]:
    """Whether updates are alike, with gradients where buckets have them, copied away, in part
    elsewhere, and in another order of the same memory."""
    found = []
    for kind in range(4):
        run, samples = started(world, job)
        run.gradients(samples)
        stretch = next(one for one in run.updated if len(one.items) > 2)
        items = [item.parameter for item in stretch.items]
        assert not any(map(is_shared_out, items))
        if kind == 1:
            for one in items:
                assert one.grad is not None
                one.grad = one.grad.clone()
        elif kind == 2:
            assert items[1].grad is not None
            items[1].grad = items[1].grad.clone()
        elif kind == 3:
            like = [one for one in items if one.shape == items[0].shape]
            assert len(like) > 1
            first, other = like[0].grad, like[1].grad
            assert first is not None
            assert other is not None
            kept = first.clone()
            first.copy_(other)
            other.copy_(kept)
            like[0].grad, like[1].grad = other, first
        run.optimizer.apply(run.updated, world.rank, 1, lr=0.1, clip=0.5)
        found.append(torch.cat([item.local.flatten().clone() for item in run.holdings]))
        run.close()
    return found


def test_gradients_may_lie_elsewhere(ranks: Ranks) -> None:
    for first, *others in ranks.run(2, elsewhere, tiny_job()):
        assert all(torch.equal(first, other) for other in others)


def moved_away(world: World, job: Job) -> str:
    """What an update says of a parameter that somebody has given other memory."""
    run, samples = started(world, job)
    run.gradients(samples)
    stretch = next(one for one in run.updated if len(one.items) > 2)
    parameter = stretch.items[1].parameter
    parameter.data = parameter.data.clone()
    with pytest.raises(AssertionError) as caught:
        run.optimizer.apply(run.updated, world.rank, 1, lr=0.1, clip=0.5)
    assert stretch.items[1].name in str(caught.value)
    run.close()
    return str(caught.value)


def test_who_leaves_is_not_forgotten(ranks: Ranks) -> None:
    for words in ranks.run(2, moved_away, tiny_job()):
        assert "has left the memory that it shares" in words


def test_fewer_tensors_are_foretold_to_be_updated() -> None:
    """On several ranks matrices of a block are one, and so are norms, beside its arena."""
    job = tiny_job()
    by_ranks = []
    for size in (1, 2):
        blocks = workload(job, lay_out(job.layout, job.model, size))
        calls = {
            block.name: sum(op.calls for op in block.update.ops if op.name == "adamw")
            for block in blocks
        }
        by_ranks.append(calls)
    alone, several = by_ranks
    for layer in ("layers.0", "layers.1"):
        assert several[f"{layer}.attention"] + several[f"{layer}.moe"] == 3
    assert several["embed"] == alone["embed"] == 1
    assert alone["layers.0.attention"] == 7


def called(world: World, job: Job, most: int) -> tuple[int, int]:
    """Tensors that AdamW is given in a step, and those that are foretold, with buckets of so many
    bytes."""
    with mock.patch.object(Buckets.__init__, "__kwdefaults__", {"early": True, "most": most}):
        run, samples = started(world, job)
    given = [0]
    update = run.optimizer.update

    def counting(values: Any, *args: Any, **more: Any) -> None:
        given[0] += len(values)
        update(values, *args, **more)

    with mock.patch.object(run.optimizer, "update", counting):
        run.step(samples)
    run.close()
    with mock.patch("moesaic.facts.workload.sums.together", partial(together, most=most)):
        blocks = workload(job, run.plan, world.rank)
    ops = [op for block in blocks for op in block.update.ops]
    return given[0], sum(op.calls for op in ops if op.name == "adamw")


@pytest.mark.parametrize("most", [BUCKET_BYTES, 1 << 14, 256])
@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, {}), (2, {}), (2, {"embedding": "columns"}), (2, {"shard": 2}), (4, {"tp": 2})],
    ids=str,
)
def test_as_many_tensors_are_updated_as_foretold(
    ranks: Ranks, size: int, layout: dict[str, Any], most: int
) -> None:
    """However blocks lie in buckets; in those of a number, all by themselves."""
    job = tiny_job(layout=layout, model=SLICED)
    for given, foretold in ranks.run(size, called, job, most):
        assert given == foretold


def left_alive(world: World, job: Job) -> int:
    """Parameters that are still there when there was no room for moments."""
    made = list[Any]()

    def refuses(values: torch.Tensor) -> None:
        raise MemoryError

    def noting(model: LanguageModel, *args: Any) -> list[Held]:
        found = held(model, *args)
        made.extend(weakref.ref(item.parameter) for item in found)
        return found

    where = "moesaic.train"
    with (
        mock.patch(f"{where}.optim.zeros", refuses), mock.patch(f"{where}.assemble.held", noting),
        pytest.raises(MemoryError),
    ):  # fmt: skip
        started(world, job)
    gc.collect()
    assert made
    return sum(one() is not None for one in made)


def test_a_start_that_fails_leaves_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, left_alive, tiny_job()) == [0, 0]


def test_stretches_follow_each_other_by_block(ranks: Ranks) -> None:
    """So that a block can be updated when its gradients are there."""
    blocks = ranks.run(2, blocks_of, tiny_job())[0]
    assert len({*blocks}) == 1 + sum(one != other for one, other in pairwise(blocks))


def blocks_of(world: World, job: Job) -> list[str]:
    run, _ = started(world, job)
    found = [one.block for one in run.updated]
    run.close()
    return found
