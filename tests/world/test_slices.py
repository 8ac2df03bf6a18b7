"""Slices of matrices: whatever is cut, and however else the model is laid out, the same numbers."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from layouts import SIGMOID, assert_same, outcome, worst_tensor
from table import reference
from test_workload_messages import Wire
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moesaic.dist.state import PARAMETER, Piece, is_shared_out
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.models.lm import Embedding
from moesaic.nn.context import Context, Rotary
from moesaic.nn.loss import HeadLoss, _own
from moesaic.nn.slices import Slices
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.run import Run

STEPS = 3


def test_bf16_stays_close_to_fp64(ranks: Ranks) -> None:
    tables = {"model": {"vocab": 60}, "routing": {"router": "balanced"}}
    one = outcome(ranks, 1, tiny_job(**tables), 1)
    tables |= {"layout": {"tp": 2, "ep": 2}, "train": {"precision": "bf16"}}
    half = outcome(ranks, 2, tiny_job(**tables), 1)
    assert 0 < worst_tensor(half.gradients, one.gradients) < 0.06


def test_queries_of_latent_attention_may_be_of_the_whole_stream(ranks: Ranks) -> None:
    """The table has them narrowed first, as DeepSeek's larger models do."""
    latent = {"width": 10, "rotary": 4, "value": 6}
    model = {**SIGMOID["model"], "vocab": 60, "layers": 4, "shared": 2, "latent": latent}
    tables = {**SIGMOID, "model": model, "train": {"micro_batches": 4}}
    one = outcome(ranks, 1, tiny_job(**tables), STEPS)
    for size, layout in ((2, {"tp": 2}), (8, {"tp": 2, "pp": 2, "shard": 2, "ep": 2, "etp": 2})):
        assert_same(outcome(ranks, size, tiny_job(**tables, layout=layout), STEPS), one)


def test_recorded_routes_know_no_slices(ranks: Ranks, tmp_path: Path) -> None:
    tables = {"model": {"vocab": 60}, "train": {"micro_batches": 2}}
    whole, sliced = tiny_job(**tables), tiny_job(**tables, layout={"tp": 2, "ep": 2})
    one = outcome(ranks, 1, whole, STEPS, record=str(tmp_path / "one"))
    several = outcome(ranks, 4, sliced, STEPS, record=str(tmp_path / "several"))
    assert_same(several, one)
    for size, job, record in ((4, sliced, "one"), (1, whole, "several")):
        again = outcome(ranks, size, job, STEPS, replay=str(tmp_path / record))
        assert_same(again, one)
        assert not any(step["flips"] for step in again.steps)


def slices_of(world: World) -> Slices:
    return Slices(world.rank, world.size, world.everyone)


def embed(world: World, ids: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's run of tokens, and the gradient of its words for what they all get back."""
    slices = slices_of(world)
    embedding = Embedding(*weight.shape, slices).double()
    embedding.weight.data = weight[slices.run(len(weight))].clone()
    nowhere = Rotary(ids, ids)
    found = embedding(ids, Context(nowhere))
    found.backward(upstream.flatten(0, 1)[slices.run(ids.numel())][None])
    assert embedding.weight.grad is not None
    return found.detach()[0], embedding.weight.grad


@pytest.mark.parametrize("samples", [3, 0])
def test_words_of_all_slices_make_the_embedding(ranks: Ranks, samples: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    ids, upstream = torch.randint(10, (samples, 4)), torch.randn(samples, 4, 5).double()
    expected = F.embedding(ids, weight)
    expected.backward(upstream)
    found = ranks.run(2, embed, ids, weight.detach(), upstream)
    assert torch.equal(torch.cat([rows for rows, _ in found]), expected.flatten(0, 1))
    assert torch.equal(torch.cat([grad for _, grad in found]), weight.grad)


def head(world: World, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """This rank's share of the loss and of the gradient of tokens; the gradient of its words."""
    slices = slices_of(world)
    x, own = x.requires_grad_(), weight[slices.run(len(weight))].requires_grad_()
    loss = HeadLoss.apply(x, own, targets, 0.25, slices)
    (2 * loss).backward()
    assert x.grad is not None
    assert own.grad is not None
    return loss.detach(), x.grad, own.grad


@pytest.mark.parametrize("tokens", [1500, 0])
def test_words_of_all_slices_make_the_loss(ranks: Ranks, tokens: int) -> None:
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
    shares, tokens_grads, words_grads = zip(*found, strict=True)
    torch.testing.assert_close(sum(shares), loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(tokens_grads), x.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat(words_grads), weight.grad, rtol=1e-9, atol=1e-12)


def test_what_is_no_word_of_any_slice_is_no_zero() -> None:
    """It fails on the slice that has the last words, as it does where there are no slices."""
    last, first = (Slices(index, 2, cast(Group, object())) for index in (1, 0))
    with pytest.raises(IndexError):
        Embedding(10, 5, last)(torch.tensor([[3, 10]]), Context(Rotary(*[torch.empty(0)] * 2)))
    present = torch.ones(3, dtype=torch.bool)
    targets = torch.tensor([9, 12, 3])
    assert _own(targets, present, 5, last)[1].flatten().tolist() == [4, 7, 0]
    assert _own(targets, present, 5, first)[0].tolist() == [False, False, True]


def boxes(world: World, job: Job) -> tuple[list[Piece], dict[str, torch.Size]]:
    """Parameters as this rank holds them, and shapes of those that are no experts to torch."""
    run = assembled(world, job)
    found = [
        replace(piece, tensor=piece.tensor.clone())
        for piece in run.state().pieces
        if piece.kind == PARAMETER
    ]
    shapes = {one.name: one.parameter.shape for one in run.holdings if one.bank is None}
    run.close()
    return found, shapes


def assembled(world: World, job: Job) -> Run:
    plan = lay_out(job.layout, job.model, world.size)
    return assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))


@pytest.mark.parametrize(("etp", "shard"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek"])
def test_slices_are_boxes_of_the_whole(ranks: Ranks, name: str, etp: int, shard: int) -> None:
    """Torch knows the whole shapes, and where parts lie; owners have the very same parts."""
    row = reference(name)
    ((wholes, _),) = ranks.run(1, boxes, row.job)
    whole = {piece.name: piece.tensor for piece in wholes}
    size, etp = 2 * max(shard, 2), etp if row.job.model.experts else 1
    sliced = row._replace(ranks=size, tp=2, etp=etp, shard=shard).job
    owned: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    held = dict.fromkeys(whole, 0)
    for rank, (found, shapes) in enumerate(ranks.run(size, boxes, sliced)):
        assert shapes == {key: whole[key].shape for key in shapes}
        for piece in found:
            extents = zip(piece.offset, piece.tensor.shape, strict=True)
            box = tuple(slice(first, first + extent) for first, extent in extents)
            assert piece.shape == whole[piece.name].shape
            assert torch.equal(piece.tensor, whole[piece.name][box])
            if piece.tensor.numel():
                assert rank in piece.owners
                assert owned.setdefault((piece.name, piece.offset), piece.owners) == piece.owners
                held[piece.name] += piece.tensor.numel() if rank == piece.owners[0] else 0
    assert held == {key: tensor.numel() for key, tensor in whole.items()}


def brought_together(world: World, job: Job) -> dict[str, Tensor]:
    run = assembled(world, job)
    known = {one.name: one.parameter.detach() for one in run.holdings if one.bank is None}
    whole = {name: t.full_tensor() if is_shared_out(t) else t for name, t in known.items()}
    world.barrier()  # Nobody leaves while another still connects.
    run.close()
    return whole


def meshes(world: World) -> int:
    """How many there are in this process."""
    del world
    gc.unfreeze()
    gc.collect()
    # What is asked is the type, since a proxy whose object is gone bears no `isinstance`.
    return sum(issubclass(type(one), DeviceMesh) for one in gc.get_objects())


def test_torch_brings_slices_and_shards_together(ranks: Ranks) -> None:
    """In one world after another of the same ranks, whose meshes torch would take for one; and
    when these are gone it has none."""
    row = reference("tiny-olmoe")
    ((wholes, _),) = ranks.run(1, boxes, row.job)
    whole = {piece.name: piece.tensor for piece in wholes}
    for tp, shard in ((2, 2), (2, 1), (2, 2), (1, 4)):
        job = row._replace(ranks=4, tp=tp, shard=shard).job
        for known in ranks.run(4, brought_together, job):
            assert known
            assert all(torch.equal(one, whole[key]) for key, one in known.items())
    assert ranks.run(4, meshes) == [0] * 4


def count_collectives(world: World, job: Job) -> tuple[Counter[str], float, int]:
    """Collectives of a step between the ranks; loss and targets of a validation after it."""
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples, wire = RandomSamples(job.model.vocab, job.data.sequence), Wire()
    with wire.on():
        run.step(samples)
    figures = run.validate(samples, 5)
    run.close()
    return Counter(operation for operation, *_ in wire.sent), *figures


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-olmoe"])
def test_messages_of_a_step(ranks: Ranks, name: str) -> None:
    ((_, loss, targets),) = ranks.run(1, count_collectives, reference(name).job)
    job = reference(name)._replace(ranks=2, tp=2).job
    layers, parts = job.model.layers, job.train.micro_batches
    # Attention, and dense networks, join runs and sum them, and do the opposite backward.
    blocks = layers if job.model.experts else 2 * layers
    gathers = reduces = 2 * blocks + 2  # With the embedding and the head, one way each.
    gathers += 1  # Of the head's sums.
    sums = 0
    if job.model.experts:
        gathers += layers  # Counts of tokens by expert.
        sums = 4 * layers  # Mean squares of queries and keys.
    # Targets, gradients of what is whole and of experts, their norm, the log.
    once = 4 + bool(job.model.experts)
    for sent, *found in ranks.run(2, count_collectives, job):
        assert sent == {
            "all_gather": parts * gathers, "reduce_scatter": parts * reduces,
            "all_reduce": parts * sums + once,
        }  # fmt: skip
        assert found == pytest.approx([loss, targets], rel=1e-9)
