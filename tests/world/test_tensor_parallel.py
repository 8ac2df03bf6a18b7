"""Tensor parallelism gives the same results, alone and with every other axis."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from layouts import SIGMOID, assert_same, outcome, worst_tensor
from table import reference
from test_workload_messages import CollectiveRecorder
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moesaic.dist.state import PARAMETER, TensorShard, is_dtensor
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.models.lm import Embedding
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.loss import _local_targets, head_loss
from moesaic.nn.tensor_parallel import TensorParallel
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.assemble import LMRun

STEPS = 3


def test_bf16_stays_close_to_fp64(ranks: RankPool) -> None:
    tables = {"model": {"vocab": 60}, "routing": {"router": "balanced"}}
    one = outcome(ranks, 1, tiny_job(**tables), 1)
    tables |= {"layout": {"tp": 2, "ep": 2}, "train": {"precision": "bf16"}}
    half = outcome(ranks, 2, tiny_job(**tables), 1)
    assert 0 < worst_tensor(half.gradients, one.gradients) < 0.06


def test_latent_attention_without_a_query_rank(ranks: RankPool) -> None:
    """`test_table.py` covers models with a low-rank query projection."""
    latent = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
    model = {**SIGMOID["model"], "vocab": 60, "layers": 4, "shared_experts": 2, "latent": latent}
    tables = {**SIGMOID, "model": model, "train": {"micro_batches": 4}}
    one = outcome(ranks, 1, tiny_job(**tables), STEPS)
    for size, layout in ((2, {"tp": 2}), (8, {"tp": 2, "pp": 2, "dp_shard": 2, "ep": 2, "etp": 2})):
        assert_same(outcome(ranks, size, tiny_job(**tables, layout=layout), STEPS), one)


def test_routing_records_do_not_depend_on_tp(ranks: RankPool, tmp_path: Path) -> None:
    tables = {"model": {"vocab": 60}, "train": {"micro_batches": 2}}
    single, sharded = tiny_job(**tables), tiny_job(**tables, layout={"tp": 2, "ep": 2})
    one = outcome(ranks, 1, single, STEPS, record=str(tmp_path / "one"))
    several = outcome(ranks, 4, sharded, STEPS, record=str(tmp_path / "several"))
    assert_same(several, one)
    for size, job, record in ((4, sharded, "one"), (1, single, "several")):
        again = outcome(ranks, size, job, STEPS, replay=str(tmp_path / record))
        assert_same(again, one)
        assert not any(step["num_replay_mismatches"] for step in again.steps)


def tp_of(world: World) -> TensorParallel:
    return TensorParallel(world.rank, world.size, world.group)


def embed(world: World, ids: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the embeddings, and the gradient of its vocabulary shard."""
    tp = tp_of(world)
    embedding = Embedding(*weight.shape, tp).double()
    embedding.weight.data = weight[tp.shard_slice(len(weight))].clone()
    unused = Rotary(ids, ids)
    found, _ = embedding(ids, Inputs(unused))
    found.backward(upstream.flatten(0, 1)[tp.shard_slice(ids.numel())][None])
    assert embedding.weight.grad is not None
    return found.detach()[0], embedding.weight.grad


@pytest.mark.parametrize("samples", [3, 0])
def test_vocabulary_shards_equal_the_whole_embedding(ranks: RankPool, samples: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    ids, upstream = torch.randint(10, (samples, 4)), torch.randn(samples, 4, 5).double()
    expected = F.embedding(ids, weight)
    expected.backward(upstream)
    found = ranks.run(2, embed, ids, weight.detach(), upstream)
    assert torch.equal(torch.cat([tokens for tokens, _ in found]), expected.flatten(0, 1))
    assert torch.equal(torch.cat([grad for _, grad in found]), weight.grad)


def head(world: World, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return this rank's terms of the loss and of the token gradient, and its weight gradient."""
    tp = tp_of(world)
    x, own = x.requires_grad_(), weight[tp.shard_slice(len(weight))].requires_grad_()
    loss, _ = head_loss(x, own, targets, 0.25, tp)
    (2 * loss).backward()
    assert x.grad is not None
    assert own.grad is not None
    return loss.detach(), x.grad, own.grad


@pytest.mark.parametrize("tokens", [1500, 0])
def test_vocabulary_shards_equal_the_whole_loss(ranks: RankPool, tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 5).double(), torch.randn(12, 5).double()
    targets = torch.randint(12, (tokens,))
    targets[::7] = -100
    found = ranks.run(4, head, x, weight, targets)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = 0.25 * F.cross_entropy(x @ weight.T, targets, reduction="sum")
    (2 * loss).backward()
    assert x.grad is not None
    assert weight.grad is not None
    losses, token_grads, weight_grads = zip(*found, strict=True)
    torch.testing.assert_close(sum(losses), loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(token_grads), x.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat(weight_grads), weight.grad, rtol=1e-9, atol=1e-12)


def test_token_ids_outside_the_vocabulary_raise() -> None:
    """The rank with the last vocabulary shard raises IndexError, as without TP."""
    last, first = (TensorParallel(index, 2, cast(Group, object())) for index in (1, 0))
    with pytest.raises(IndexError):
        Embedding(10, 5, last)(torch.tensor([[3, 10]]), Inputs(Rotary(*[torch.empty(0)] * 2)))
    present = torch.ones(3, dtype=torch.bool)
    targets = torch.tensor([9, 12, 3])
    assert _local_targets(targets, present, 5, last)[1].flatten().tolist() == [4, 7, 0]
    assert _local_targets(targets, present, 5, first)[0].tolist() == [False, False, True]


def parameter_shards(world: World, job: Job) -> tuple[list[TensorShard], dict[str, torch.Size]]:
    """Return this rank's parameter shards, and the global shapes of its dense parameters."""
    run = assembled(world, job)
    found = [
        shard.with_tensor(live_values(shard).clone())
        for shard in run.state().shards
        if shard.kind == PARAMETER
    ]
    shapes = {one.name: one.parameter.shape for one in run.part.trainable if one.bank is None}
    run.close()
    return found, shapes


def assembled(world: World, job: Job) -> LMRun:
    return start_run(job, world)


@pytest.mark.parametrize(
    ("name", "etp", "dp_shard"),
    [
        pytest.param(name, *sizes, marks=[pytest.mark.soak] * ((at - turn) % 4 > 0))
        for turn, name in enumerate(["tiny-dense", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek"])
        for at, sizes in enumerate([(1, 1), (2, 1), (1, 2), (2, 4)])
    ],
)
def test_tp_shards_are_slices_of_the_whole(
    ranks: RankPool, name: str, etp: int, dp_shard: int
) -> None:
    """DTensor has the global shapes; shards have the right offsets, and replicas are equal."""
    row = reference(name)
    ((wholes, _),) = ranks.run(1, parameter_shards, row.job)
    whole = {shard.name: live_values(shard) for shard in wholes}
    size, etp = 2 * max(dp_shard, 2), etp if row.job.model.experts else 1
    sharded = row._replace(ranks=size, tp=2, etp=etp, dp_shard=dp_shard).job
    owned: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    covered = dict.fromkeys(whole, 0)
    for rank, (found, shapes) in enumerate(ranks.run(size, parameter_shards, sharded)):
        assert shapes == {key: whole[key].shape for key in shapes}
        for shard in found:
            extents = zip(shard.offset, live_values(shard).shape, strict=True)
            box = tuple(slice(first, first + extent) for first, extent in extents)
            assert shard.shape == whole[shard.name].shape
            assert torch.equal(live_values(shard), whole[shard.name][box])
            if live_values(shard).numel():
                assert rank in shard.owners
                assert owned.setdefault((shard.name, shard.offset), shard.owners) == shard.owners
                covered[shard.name] += live_values(shard).numel() if rank == shard.owners[0] else 0
    assert covered == {key: tensor.numel() for key, tensor in whole.items()}


def full_tensors(world: World, job: Job) -> dict[str, Tensor]:
    run = assembled(world, job)
    known = {one.name: one.parameter.detach() for one in run.part.trainable if one.bank is None}
    whole = {name: t.full_tensor() if is_dtensor(t) else t for name, t in known.items()}
    world.barrier()  # A rank that leaves early breaks the connections of others.
    run.close()
    return whole


def num_meshes(world: World) -> int:
    """Return the number of device meshes in this process."""
    del world
    gc.unfreeze()
    gc.collect()
    # `isinstance` fails on a proxy whose object is gone, so check the type.
    return sum(issubclass(type(one), DeviceMesh) for one in gc.get_objects())


def test_full_tensors_equal_the_whole_parameters(ranks: RankPool) -> None:
    """Worlds of the same ranks follow one another: torch must not reuse or keep their meshes."""
    row = reference("tiny-olmoe")
    ((wholes, _),) = ranks.run(1, parameter_shards, row.job)
    whole = {shard.name: live_values(shard) for shard in wholes}
    for tp, dp_shard in ((2, 2), (2, 1), (2, 2), (1, 4)):
        job = row._replace(ranks=4, tp=tp, dp_shard=dp_shard).job
        for known in ranks.run(4, full_tensors, job):
            assert known
            assert all(torch.equal(one, whole[key]) for key, one in known.items())
    assert ranks.run(4, num_meshes) == [0] * 4


def count_collectives(world: World, job: Job) -> tuple[Counter[str], float, int]:
    """Return the collectives of a step, and loss and targets of a validation after it."""
    run = start_run(job, world)
    samples, recorder = RandomSamples(job.model.vocab, job.data.sequence), CollectiveRecorder()
    with recorder.recording():
        run.step(samples)
    loss, targets, _ = run.validate(samples, 5)
    run.close()
    return Counter(operation for operation, *_ in recorder.sent), loss, targets


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-olmoe"])
def test_collectives_of_a_step(ranks: RankPool, name: str) -> None:
    ((_, loss, targets),) = ranks.run(1, count_collectives, reference(name).job)
    job = reference(name)._replace(ranks=2, tp=2).job
    layers, micro_batches = job.model.layers, job.train.micro_batches
    # Attention and dense FFNs all-gather and reduce-scatter sequence shards, both ways.
    blocks = layers if job.model.experts else 2 * layers
    gathers = reduces = 2 * blocks + 2  # The embedding and the head add one each.
    gathers += 1  # Sums of the head.
    sums = 0
    if job.model.experts:
        gathers += layers  # Choices by expert, for capacity.
        sums = 4 * layers + 1  # Mean squares of queries and keys; token counts by expert.
    # Targets, replicated gradients, expert gradients, the norm, and logged figures.
    once = 4 + bool(job.model.experts)
    for sent, *found in ranks.run(2, count_collectives, job):
        assert sent == {
            "all_gather": micro_batches * gathers, "reduce_scatter": micro_batches * reduces,
            "all_reduce": micro_batches * sums + once,
        }  # fmt: skip
        assert found == pytest.approx([loss, targets], rel=1e-9)
