"""Flat parameters, laid out like their gradient buckets, against one tensor per parameter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from layouts import SIGMOID, put_together
from test_buckets import AGAIN, LORA, TIED

from moesaic.dist.buckets import GradientBuckets
from moesaic.dist.state import is_dtensor
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import workload
from moesaic.facts.workload.collectives import ALIGNMENT_BYTES
from moesaic.models.lm import LanguageModel
from moesaic.models.state import LocalParam, local_params
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.assemble import LMRun
from moesaic.train.optim import FlatParams

LANES = 16
"""Most fp32 numbers in a CPU vector."""
TP_SIZES = {"vocab": 60, "kv_heads": 4}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"train": {"precision": "bf16", "clip": 0.01}}),
    (2, {"train": {"precision": "fp64"}, "optimizer": {"weight_decay": 0.0}}),
    (2, {"model": {"hidden": 30, "vocab": 53, "heads": 3, "kv_heads": 3}, **AGAIN}),
    (2, {"model": TIED}),
    (2, {"optimizer": {"moments": "bf16"}}),
    (2, {"optimizer": {"moments": "8bit"}, "layout": {"ep": 2}}),
    (2, {**SIGMOID, "layout": {"ep": 2, "dispatch": "dedup", "chunks": 2}}),
    (2, {"layout": {"embedding": "columns"}, "model": {"vocab": 60}}),
    (2, {"finetune": LORA, **AGAIN}),
    (4, {"layout": {"tp": 2, "ep": 2}, "model": TP_SIZES}),
    (4, {"layout": {"tp": 2, "dp_shard": 2}, "model": TP_SIZES}),
    (4, {"layout": {"pp": 2, "ep": 2}, "model": {**TIED, "family": "olmoe", "experts": 4,
         "top_k": 2}, "train": {"micro_batches": 4}}),
]  # fmt: skip


def started(world: World, job: Job) -> tuple[LMRun, RandomSamples]:
    run = start_run(job, world)
    return run, RandomSamples(job.model.vocab, job.data.sequence)


def without_flat_params() -> AbstractContextManager[Any]:
    """Keep one tensor per parameter."""
    return mock.patch.object(GradientBuckets, "flatten_parameters", return_value={})


def trained(world: World, job: Job, is_flat: bool) -> tuple[list[Any], int]:
    """Return the state after three steps, and the number of flat tensors of several parameters."""
    with nullcontext() if is_flat else without_flat_params():
        run, samples = started(world, job)
        several = sum(len(one.params) > 1 for one in run.part.flat_params)
        for _ in range(3):
            run.step(samples)
    found = [
        (shard.key, shard.shape, shard.offset, live_values(shard).clone().double().numpy())
        for shard in run.state().shards
    ]
    run.close()
    return found, several


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flat_updates_equal_single_tensor_updates(
    ranks: RankPool, case: tuple[int, dict[str, Any]]
) -> None:
    """Bit-identical if every tensor fills whole CPU vectors; a tail uses scalar instructions."""
    size, tables = case
    job = tiny_job(**{"routing": {"router": "balanced"}, "train": {"clip": 0.1}, **tables})
    flat, single = (ranks.run(size, trained, job, is_flat) for is_flat in (True, False))
    assert all(several for _, several in flat) == (job.layout.dp_shard == 1)
    assert not any(several for _, several in single)
    found, expected = (put_together([state for state, _ in one]) for one in (flat, single))
    assert found.keys() == expected.keys()
    if all(values.size % LANES == 0 for values in expected.values()):
        assert all((found[key] == expected[key]).all() for key in found)
    for key in found:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-9, atol=1e-15)


def layout_errors(world: World, job: Job) -> list[str]:
    """Return errors in the memory layout of parameters, gradients and moments."""
    run, samples = started(world, job)
    run.compute_gradients(samples)
    wrong = [
        error
        for one in run.part.flat_params
        if len(one.params) > 1
        for error in flat_params_errors(run, one)
    ]
    several = {
        item.name for one in run.part.flat_params if len(one.params) > 1 for item in one.params
    }
    norms = {item.name for item in run.part.trainable if item.name.endswith("_norm.weight")}
    if job.layout.dp_shard == 1:  # FSDP keeps sharded parameters in memory of its own.
        wrong += [f"{name} is not in flat memory" for name in norms - several]
    blocks = [one.block for one in run.part.flat_params]
    if len({*blocks}) != 1 + sum(one != other for one, other in pairwise(blocks)):
        wrong.append("flat tensors are not ordered by block")  # Blocks are updated one by one.
    before = {shard.key: shard.version for shard in run.state().shards}
    run.part.optimizer.update_block(run.part.flat_params, world.rank, 1, lr=0.1, clip=0.5)
    wrong += [
        f"{shard.key} was not counted"
        for shard in run.state().shards
        if shard.version <= before[shard.key]
    ]
    run.close()
    return wrong


def flat_params_errors(run: LMRun, one: FlatParams) -> Iterator[str]:
    """Yield errors of one flat tensor."""
    grads = one.grads()
    name = one.params[0].name
    memory = {item.grad.untyped_storage().data_ptr() for item in one.params}
    if memory != {grads.untyped_storage().data_ptr()}:
        yield f"gradients of {name} are copied"
    for item, grad in one.split(grads):
        if not torch.equal(grad, item.grad) or grad.data_ptr() != item.grad.data_ptr():
            yield f"the gradient of {item.name} is in other memory"
    for item, values in one.split(one.values):
        if values.data_ptr() != item.local.data_ptr():
            yield f"{item.name} is in other memory"
        if values.data_ptr() % ALIGNMENT_BYTES != one.values.data_ptr() % ALIGNMENT_BYTES:
            yield f"{item.name} is not aligned"
    moments = [run.part.optimizer.moments[item.name] for item in one.params]
    for both in zip(*moments, strict=True):
        if len({tensor.untyped_storage().data_ptr() for tensor in both}) != 1:
            yield f"moments of {name} are not in one tensor"
    if len({item.has_weight_decay for item in one.params}) != 1:
        yield f"{name} shares memory with parameters of other weight decay"


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"ep": 2, "dp_shard": 4}], ids=str
)
def test_memory_layout_of_flat_params(ranks: RankPool, layout: dict[str, Any]) -> None:
    """An update also advances the version of each parameter, on which overlapped saves rely."""
    job = tiny_job(layout=layout, model=TP_SIZES, train={"batch": 8, "micro_batches": 4})
    assert not any(ranks.run(4, layout_errors, job))


def updates_by_gradient_memory(world: World, job: Job) -> list[torch.Tensor]:
    """Return updates with gradients in their buckets, one of them copied, and all copied."""
    found = []
    for num_copied in (0, 1, None):
        run, samples = started(world, job)
        run.compute_gradients(samples)
        flat = next(one for one in run.part.flat_params if len(one.params) > 2)
        for item in flat.params[:num_copied]:
            assert not is_dtensor(item.parameter)
            item.parameter.grad = item.grad.clone()
        run.part.optimizer.update_block(run.part.flat_params, world.rank, 1, lr=0.1, clip=0.5)
        found.append(torch.cat([item.local.flatten().clone() for item in run.part.trainable]))
        run.close()
    return found


def test_gradients_may_be_in_other_memory(ranks: RankPool) -> None:
    for first, *others in ranks.run(2, updates_by_gradient_memory, tiny_job()):
        assert all(torch.equal(first, other) for other in others)


def test_predicted_number_of_updated_tensors() -> None:
    """On several ranks a block has one tensor of matrices, one of norms, and its experts."""
    job = tiny_job()
    by_ranks = []
    for size in (1, 2):
        blocks = workload(job, plan_from_layout(job.layout, job.model, size))
        calls = {
            block.name: sum(op.num_kernels for op in block.update.ops if op.name == "adamw")
            for block in blocks
        }
        by_ranks.append(calls)
    single, several = by_ranks
    for layer in ("layers.0", "layers.1"):
        assert several[f"{layer}.attention"] + several[f"{layer}.moe"] == 2 + job.model.experts
    assert several["embed"] == single["embed"] == 1
    assert single["layers.0.attention"] == 7


def num_leaked(world: World, job: Job) -> int:
    """Return the number of parameters that survive a start that runs out of memory for moments."""
    made = list[Any]()

    def raise_memory_error(values: torch.Tensor) -> None:
        raise MemoryError

    def record_params(model: LanguageModel, *args: Any) -> list[LocalParam]:
        found = local_params(model, *args)
        made.extend(weakref.ref(item.parameter) for item in found)
        return found

    where = "moesaic.train"
    with (
        mock.patch(f"{where}.optim.zero_moments", raise_memory_error),
        mock.patch(f"{where}.assemble.local_params", record_params),
        pytest.raises(MemoryError),
    ):  # fmt: skip
        started(world, job)
    gc.collect()
    assert made
    return sum(one() is not None for one in made)


def test_a_failed_start_leaks_no_parameters(ranks: RankPool) -> None:
    assert ranks.run(2, num_leaked, tiny_job()) == [0, 0]
