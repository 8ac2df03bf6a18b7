"""The workload against the real thing: what torch counts, moves and keeps, block by block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist import device as devices
from moesaic.dist.checkpoint.staging import Staging
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan, lay_out
from moesaic.facts.workload import (
    Block,
    Work,
    blocks,
    count,
    memory,
    ops,
    parameters,
    workload,
)
from moesaic.facts.workload.kept import activations
from moesaic.facts.workload.loads import expert_counts
from moesaic.models.initial import InitialSource
from moesaic.nn import norm, shares
from moesaic.testing.blocks import Watched, watch
from moesaic.testing.flops import flops
from moesaic.testing.jobs import RandomSamples
from moesaic.train.assemble import assemble
from moesaic.train.objectives import lm

SMALL = {
    "vocab": 331, "hidden": 48, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 72,
}  # fmt: skip
FAMILIES = ["tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek"]
SMALL_LATENT = {
    "kv_heads": 6, "dense_ffn": 100, "shared": 2,
    "latent": {"width": 20, "rotary": 6, "value": 12, "queries": 28},
}  # fmt: skip


@pytest.fixture
def multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed again stops before a layer's last product, but not where oneDNN does it."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: False)


def make_job(name: str, **changes: Any) -> Job:
    """`changes` by table__key: model__tied=True; without a table: of the model."""
    raw: dict[str, dict[str, Any]] = {
        "model": {**PRESETS[name], **SMALL, **(SMALL_LATENT if name == "tiny-deepseek" else {})},
        "data": {"path": "x", "sequence": 20},
        "train": {"steps": 1, "batch": 3},
    }  # fmt: skip
    for key, value in changes.items():
        table, _, inner = key.rpartition("__")
        raw.setdefault(table or "model", {})[inner] = value
    if raw["model"]["layers"] == 1:
        raw["model"]["dense_layers"] = 0
    return parse(Job, raw, "job")


def alone(job: Job) -> Plan:
    return lay_out(job.layout, job.model, 1)


def watched_alone(job: Job) -> Watched:
    return watch(job, alone(job), World.solo())


def by_layer(blocks: list[Block], way: str) -> Iterator[tuple[str, list[Work]]]:
    """Works by the model's own blocks: a layer's attention and feed-forward network together."""
    gathered: dict[str, list[Work]] = {}
    for block in blocks:
        if block.name != "step":
            name = ".".join(block.name.split(".")[:2])
            gathered.setdefault(name, []).append(getattr(block, way))
    yield from gathered.items()


LATENT: list[dict[str, Any]] = [
    {"width": 20, "rotary": 6, "value": 12},
    {"width": 20, "rotary": 6, "value": 12, "queries": 28},
    {"width": 20, "rotary": 6, "value": 16},
    {"width": 20, "rotary": 6, "value": 24, "queries": 28},
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": True, "data__packing": "stream"},
    {"train__recompute": True},
    {"train__precision": "bf16"},
    {"train__precision": "bf16", "train__recompute": True, "kv_heads": 6},
    {"train__precision": "fp64", "kv_heads": 6, "layers": 3},
    {"data__sequence": 33, "train__batch": 2, "hidden": 40, "vocab": 257, "ffn": 56},
    {"train__batch": 64, "data__sequence": 24, "hidden": 16, "layers": 1},  # two chunks of logits
]


@pytest.mark.usefixtures("multiplied_by_torch")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("changes", SHAPES, ids=lambda c: " ".join(map(str, c)) or "plain")
def test_flops_are_those_that_torch_counts(name: str, changes: dict[str, Any]) -> None:
    job = make_job(name, **changes)
    watched, blocks = watched_alone(job), workload(job, alone(job))
    for way in ("forward", "backward"):
        seen = getattr(watched, way)
        predicted = {key: sum(w.flops for w in works) for key, works in by_layer(blocks, way)}
        assert predicted == {key: flops(one) for key, one in seen.items()}, way


LORA: list[tuple[str, dict[str, Any]]] = [
    ("tiny-olmoe", {}),
    ("tiny-olmoe", {"targets": ["attention"]}),
    ("tiny-olmoe", {"targets": ["experts"]}),
    ("tiny-mixtral", {"targets": ["experts"], "router": "train"}),
    ("tiny-qwen3", {"router": "train", "rank": 3}),
    ("tiny-dense", {"targets": ["attention", "ffn"]}),
    ("tiny-dense", {"targets": ["ffn"]}),
    ("tiny-deepseek", {"targets": ["attention", "experts", "ffn", "shared"]}),
    ("tiny-deepseek", {"targets": ["shared"]}),
    ("tiny-deepseek", {"targets": ["experts"], "router": "train"}),
    ("tiny-olmoe", {"method": "full"}),
    ("tiny-deepseek", {"method": "full", "router": "train"}),
]


@pytest.mark.usefixtures("multiplied_by_torch")
@pytest.mark.parametrize(("name", "finetune"), LORA, ids=str)
@pytest.mark.parametrize(("precision", "recompute"), [("fp32", False), ("bf16", True)])
def test_what_does_not_learn_has_no_gradient(
    name: str, finetune: dict[str, Any], precision: str, recompute: bool
) -> None:
    """And adapters have; flops exactly, passes and kernels nearly, messages of none are left."""
    changes = {f"finetune__{key}": value for key, value in ({"method": "lora"} | finetune).items()}
    job = make_job(name, train__precision=precision, train__recompute=recompute, **changes)
    watched, blocks = watched_alone(job), workload(job, alone(job))
    for way in ("forward", "backward"):
        seen = getattr(watched, way)
        predicted = {key: sum(w.flops for w in works) for key, works in by_layer(blocks, way)}
        assert predicted == {key: flops(one) for key, one in seen.items()}, way
        for key, works in by_layer(blocks, way):
            moved, calls = sum(w.moved_bytes for w in works), sum(w.calls for w in works)
            assert moved == pytest.approx(seen[key].moved_bytes, rel=0.03), (way, key)
            assert calls == pytest.approx(seen[key].calls, rel=0.08), (way, key)


def make_latent(latent: dict[str, Any], **changes: Any) -> Job:
    """Latent attention over experts that are chosen and laid out as Mixtral's are."""
    return make_job(
        "tiny-mixtral", family="deepseek_v3", latent=latent, **{"kv_heads": 6, **changes}
    )


@pytest.mark.parametrize("latent", LATENT, ids=str)
@pytest.mark.parametrize(
    ("precision", "packing", "recompute"),
    [
        ("fp32", "documents", False), ("bf16", "stream", False), ("bf16", "documents", True),
        ("fp64", "stream", True),
    ],
)  # fmt: skip
def test_latent_attention(
    latent: dict[str, Any], precision: str, packing: str, recompute: bool
) -> None:
    """Flops and kept bytes exactly, bytes that passes move and kernels as near as elsewhere."""
    job = make_latent(
        latent, train__precision=precision, train__recompute=recompute, data__packing=packing,
        data__sequence=64, train__batch=4, hidden=96, ffn=16,
    )  # fmt: skip
    watched, blocks = watched_alone(job), workload(job, alone(job))
    for way in ("forward", "backward"):
        seen = getattr(watched, way)["layers.0"]
        works = dict(by_layer(blocks, way))["layers.0"]
        assert sum(w.flops for w in works) == flops(seen), way
        moved, calls = sum(w.moved_bytes for w in works), sum(w.calls for w in works)
        assert moved == pytest.approx(seen.moved_bytes, rel=0.005), way
        assert calls == pytest.approx(seen.calls, rel=0.02), way
    kept = activations(job, alone(job), 0)["layers.0"]
    if recompute:
        kept = 4 * 64 * 96 * (8 if precision == "fp64" else 4)
    assert watched.kept["layers.0"] == kept


def check_passes(job: Job) -> None:
    """Bytes and kernels of every block, both ways."""
    watched, blocks = watched_alone(job), workload(job, alone(job))
    for way in ("forward", "backward"):
        for key, works in by_layer(blocks, way):
            seen = getattr(watched, way)[key]
            moved, calls = sum(w.moved_bytes for w in works), sum(w.calls for w in works)
            assert moved == pytest.approx(seen.moved_bytes, rel=0.005), (way, key)
            assert calls == pytest.approx(seen.calls, rel=0.02), (way, key)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_passes_are_those_that_torch_makes(
    name: str, precision: str, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts that are one share: each share more starts four kernels, or nine, once more."""
    monkeypatch.setattr(shares, "_SHARE_BYTES", 1 << 30)
    job = make_job(
        name, train__precision=precision, data__packing=packing, data__sequence=64,
        train__batch=4, hidden=96,
    )  # fmt: skip
    check_passes(job)


def test_norms_by_blocks_start_kernels_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ops, norm):
        monkeypatch.setattr(module, "NORM_BYTES", 50 * 96 * 4)
    monkeypatch.setattr(shares, "_SHARE_BYTES", 1 << 30)
    job = make_job("tiny-qwen3", data__sequence=64, train__batch=4, hidden=96)
    check_passes(job)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("changes", SHAPES, ids=lambda c: " ".join(map(str, c)) or "plain")
def test_autograd_keeps_what_is_predicted(name: str, changes: dict[str, Any]) -> None:
    job = make_job(name, **changes)
    kept, predicted = watched_alone(job).kept, activations(job, alone(job), 0)
    expected = {key: num_bytes for key, num_bytes in predicted.items() if key != "context"}
    if job.train.recompute:  # A layer leaves its input; the rest comes back in backward.
        stored = 8 if job.train.precision == "fp64" else 4
        stream = job.train.batch * job.data.sequence * job.model.hidden * stored
        expected |= {key: stream for key in expected if key.startswith("layers.")}
    assert kept == expected


@pytest.mark.parametrize("packing", ["documents", "stream"])
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen3"])
def test_a_window_is_a_mask(name: str, packing: str) -> None:
    """Of every row where documents end, else one for all of them."""
    shape = {"data__packing": packing, "data__sequence": 64, "train__batch": 4, "hidden": 96}
    job, wide = (make_job(name, window=window, **shape) for window in (63, 64))
    watched, blocks = watched_alone(job), workload(job, alone(job))
    kept, without = activations(job, alone(job), 0), activations(wide, alone(wide), 0)
    rows = 4 if packing == "documents" else 1
    assert kept["context"] - without["context"] == (64 * 64 if packing == "stream" else 0)
    assert {key: kept[key] for key in watched.kept} == watched.kept
    for way in ("forward", "backward"):
        for key, works in by_layer(blocks, way):
            seen = getattr(watched, way)[key]
            moved, calls = sum(w.moved_bytes for w in works), sum(w.calls for w in works)
            assert sum(w.flops for w in works) == flops(seen)
            assert moved == pytest.approx(seen.moved_bytes, rel=0.005), (way, key)
            assert calls == pytest.approx(seen.calls, rel=0.02), (way, key)
    attend = next(op for op in blocks[1].forward.ops if op.name == "attend")
    assert attend.causal_share == 1.0
    plain = make_job(name, **{**shape, "data__packing": "stream"})
    bare = next(op for op in workload(plain, alone(plain))[1].forward.ops if op.name == "attend")
    assert attend.moved_bytes - bare.moved_bytes == rows * 64 * 64 * (1 + 4)


def test_a_clamp_keeps_what_it_clamps() -> None:
    job = make_job("tiny-olmoe", clip_qkv=0.1)
    watched = watched_alone(job)
    assert watched.kept["layers.0"] == activations(job, alone(job), 0)["layers.0"]
    for way in ("forward", "backward"):
        works = dict(by_layer(workload(job, alone(job)), way))["layers.0"]
        seen = getattr(watched, way)["layers.0"]
        assert sum(w.flops for w in works) == flops(seen)
        assert sum(w.moved_bytes for w in works) == pytest.approx(seen.moved_bytes, rel=0.03)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_pass_fills_the_memory_that_is_predicted(
    name: str, precision: str, recompute: bool
) -> None:
    """All blocks at once, as training runs them."""
    job = make_job(name, train__precision=precision, train__recompute=recompute)
    plan = alone(job)
    run = assemble(job, plan, World.solo(), InitialSource(0, 0.1))
    known = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    batch = RandomSamples(job.model.vocab, job.data.sequence).batch(range(job.train.batch))
    batch = replace(batch, inputs=batch.inputs.clone())
    context = lm.make_context(run.model, batch, job, 0)
    context.training = True
    assert context.mask is not None
    found: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, run.precision():
        total, losses = lm.compute(run.model, batch, context, job, 1)
    kept = activations(job, plan, 0)
    outside = kept["context"] if recompute else context.mask.nbytes  # They live in the context.
    whole = memory(job, plan).activations_bytes + kept["head"] - outside
    if recompute:  # Inputs alone; in backward those before a layer, and all of that one.
        stream = batch.inputs.numel() * job.model.hidden * 4
        most = max(index * stream + kept[f"layers.{index}"] for index in range(job.model.layers))
        whole += job.model.layers * stream - most
    assert total.isfinite()
    assert losses.loss.isfinite()
    assert sum(found.values()) == pytest.approx(whole, rel=0.001)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_a_rank_holds_is_what_a_run_has(name: str, tied: bool, micro_batches: int) -> None:
    job = make_job(name, tied=tied, train__micro_batches=micro_batches)
    plan = alone(job)
    run = assemble(job, plan, World.solo(), InitialSource(0, 0.1))
    needs = memory(job, plan)
    held = sum(item.local.nbytes for item in run.holdings)
    biases = sum(router.bias.nbytes for _, router in run.model.sigmoid_routers())
    assert needs.parameters_bytes == held + biases == 4 * count(job.model).total
    moments = sum(t.nbytes for pair in run.optimizer.moments.values() for t in pair)
    assert needs.moments_bytes == moments
    run.step(RandomSamples(job.model.vocab, job.data.sequence))
    if micro_batches == 1:
        assert needs.gradients_bytes == held
    else:
        added = max((bank.arena.nbytes for _, bank in run.model.banks()), default=0)
        assert needs.gradients_bytes == held + added
    staging = Staging(0, torch.device("cpu"), 1 << 30)
    pieces = run.state().pieces
    staged = sum(part.num_bytes for part in staging.lay_out(pieces).parts)
    assert needs.staging_bytes == staged
    assert needs.peak_bytes <= needs.total_bytes


def test_a_tied_weight_is_held_and_updated_once() -> None:
    for name in FAMILIES:
        sizes = {}
        for tied in (False, True):
            job = make_job(name, tied=tied, train__clip=0.0)
            names = [parameter.name for parameter in parameters(job.model)]
            assert len(set(names)) == len(names)
            updated = sum(
                op.moved_bytes for block in workload(job, alone(job)) for op in block.update.ops
                if op.name == "adamw"
            )  # fmt: skip
            learnt = sum(p.size for p in parameters(job.model) if p.kind != "bias")
            assert updated == 7 * 4 * learnt
            sizes[tied] = updated
        assert sizes[False] - sizes[True] == 7 * 4 * SMALL["vocab"] * SMALL["hidden"]


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
@pytest.mark.parametrize(("ranks", "ep", "shard"), [(4, 2, 2), (4, 4, 1), (6, 2, 3), (4, 1, 4)])
def test_ranks_hold_and_update_each_parameter_as_often_as_there_are_copies(
    name: str, ranks: int, ep: int, shard: int
) -> None:
    job = make_job(name, layout__ep=ep, layout__shard=shard, train__batch=12, hidden=36)
    plan = lay_out(job.layout, job.model, ranks)
    everything = list(parameters(job.model))
    experts = sum(p.size for p in everything if p.kind == "expert")
    dense = sum(p.size for p in everything if p.is_dense)
    biases = sum(p.size for p in everything if p.kind == "bias")
    assert dense + experts + biases == count(job.model).total
    held = [memory(job, plan, rank) for rank in range(ranks)]
    assert sum(m.moments_bytes for m in held) == 8 * (
        dense * ranks // shard + experts * ranks // ep
    )
    assert sum(m.staging_bytes for m in held) == 12 * (dense + experts) + 4 * biases
    normed = sum(
        op.moved_bytes for rank in range(ranks) for block in workload(job, plan, rank)
        for op in block.update.ops if op.name == "norm"
    )  # fmt: skip
    assert normed >= 4 * (dense + experts)
    assert normed == pytest.approx(4 * (dense + experts), rel=0.02)  # but for padding


CUT: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (4, {"tp": 2, "shard": 2}),
    (4, {"tp": 2, "ep": 4}),
    (4, {"pp": 2, "shard": 2}),
    (4, {"pp": 2, "tp": 2, "ep": 2}),
    (8, {"pp": 2, "tp": 2, "ep": 2, "shard": 2}),
]


def cut_job(name: str, layout: dict[str, Any], **changes: Any) -> Job:
    """A job whose every matrix two slices of two shards share out equally."""
    if name == "tiny-dense":
        layout = {**layout, "ep": 1}
    keys = {f"layout__{key}": value for key, value in layout.items()}
    return make_job(
        name, vocab=332, kv_heads=6 if name == "tiny-deepseek" else 2, train__batch=12, **keys,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), CUT, ids=str)
def test_slices_and_parts_update_each_parameter_as_often_as_there_are_copies(
    name: str, tied: bool, ranks: int, layout: dict[str, Any]
) -> None:
    job = cut_job(name, layout, tied=tied)
    plan = lay_out(job.layout, job.model, ranks)
    sums = {"norm": 0, "adamw": 0}
    for rank in range(ranks):
        for block in workload(job, plan, rank):
            for op in block.update.ops:
                if op.name in sums:
                    sums[op.name] += op.moved_bytes
    learnt = [p for p in parameters(job.model) if p.kind != "bias"]
    assert sums["norm"] == 4 * sum(p.size for p in learnt)
    ends = 2 if tied and plan.pp > 1 else 1
    copies = 0
    for p in learnt:
        if p.kind == "expert":
            copies += p.size * plan.span // plan.ep
        else:
            holders = plan.replicas if p.cut is not None else plan.span
            copies += p.size * holders // plan.shard * (ends if p.kind == "embedding" else 1)
    assert sums["adamw"] == 7 * 4 * copies


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), CUT, ids=str)
def test_slices_and_parts_do_the_products_of_one_rank(
    name: str, recompute: bool, ranks: int, layout: dict[str, Any]
) -> None:
    """No product is lost, none is done twice, and everything that is not cut is done once."""
    job = cut_job(name, layout, train__recompute=recompute)
    plan, sums = lay_out(job.layout, job.model, ranks), {}
    for rank in range(ranks):
        for block in workload(job, plan, rank):
            for way in ("forward", "backward"):
                at = block.name, way
                sums[at] = sums.get(at, 0) + getattr(block, way).flops
    one = workload(job, alone(cut_job(name, {})))
    assert sums == {
        (block.name, way): getattr(block, way).flops
        for block in one for way in ("forward", "backward")
    }  # fmt: skip


def test_a_rank_has_the_blocks_of_its_own_stages() -> None:
    job = make_job("tiny-mixtral", layers=4, layout__pp=2, layout__schedule="interleaved")
    plan = lay_out(job.layout, job.model, 2)
    names = [[block.name for block in workload(job, plan, rank)] for rank in (0, 1)]
    layers = {i: [f"layers.{i}.attention", f"layers.{i}.moe"] for i in range(4)}
    assert names == [
        ["embed", *layers[0], *layers[2], "step"], [*layers[1], *layers[3], "head", "step"]
    ]  # fmt: skip


@given(
    rows=st.integers(1, 9), tp=st.sampled_from([1, 2, 4]), replicas=st.integers(1, 3),
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
)  # fmt: skip
def test_every_slice_assigns_its_own_run_of_tokens(
    rows: int, tp: int, replicas: int, weights: list[int]
) -> None:
    job = make_job("tiny-mixtral", train__batch=rows)
    span = tp * replicas
    plan = Plan(ranks=2 * span, ep=1, shard=1, tp=tp, pp=2, experts=8)
    counts = expert_counts(job, plan, weights)
    samples = [len(plan.rows(rank, rows)) for rank in range(span)]
    each = job.data.sequence * job.model.top_k
    assert counts.shape == (span, 8)
    assert counts.sum(axis=1).tolist() == [num * each // tp for num in samples]


def totals(job: Job, ranks: int) -> tuple[int, int, int]:
    """Flops, bytes touched (a slot's gradient is zeroed, or a product's result) and bytes sent."""
    plan = lay_out(job.layout, job.model, ranks)
    works = [
        work for rank in range(ranks) for block in workload(job, plan, rank)
        for work in (block.forward, block.backward, block.update)
    ]  # fmt: skip
    width = {"fp64": 8, "fp32": 4, "bf16": 2}
    factors = sum(p.elements * width[op.type] for w in works for op in w.ops for p in op.products)
    sent = sum(message.num_bytes for work in works for message in work.messages)
    return sum(w.flops for w in works), factors + sum(w.moved_bytes for w in works), sent


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(FAMILIES),
    precision=st.sampled_from(["fp32", "bf16", "fp64"]),
    recompute=st.booleans(),
    batch=st.integers(1, 9),
    sequence=st.integers(2, 40),
    layers=st.integers(1, 3),
    experts=st.integers(4, 12),
    layout=st.sampled_from([(1, 1, 1), (2, 2, 1), (4, 2, 2)]),
    tp=st.sampled_from([1, 2]),
    more=st.sampled_from(["batch", "sequence", "layers", "experts"]),
)
def test_more_of_anything_is_more_work(
    name: str, precision: str, recompute: bool, batch: int, sequence: int, layers: int,
    experts: int, layout: tuple[int, int, int], tp: int, more: str,
) -> None:  # fmt: skip
    ranks, ep, shard = layout
    ranks, sparse = ranks * tp, name != "tiny-dense"
    sequence *= tp
    sizes = {"batch": batch, "sequence": sequence, "layers": layers, "experts": experts * ep}
    found = []
    for step in (0, 1):
        steps = {"experts": ep, "sequence": tp}
        now = {**sizes, more: sizes[more] + step * steps.get(more, 1)}
        changes = {"experts": now["experts"], "layout__ep": ep} if sparse else {}
        changes |= {"layout__tp": tp, "vocab": 332}
        if name == "tiny-deepseek":
            changes |= {"groups": 1, "top_groups": 1}
        job = make_job(
            name, layers=now["layers"], data__sequence=now["sequence"], train__batch=now["batch"],
            train__precision=precision, train__recompute=recompute, layout__shard=shard, **changes,
        )  # fmt: skip
        found.append(totals(job, ranks))
    assert all(after >= before for before, after in zip(*found, strict=True))
    if more != "experts":
        assert found[1][0] > found[0][0]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), layout=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]))
def test_tokens_are_neither_lost_nor_made(data: st.DataObject, layout: tuple[int, int]) -> None:
    ranks, ep = layout
    name = data.draw(st.sampled_from(["tiny-mixtral", "tiny-deepseek"]))
    job = make_job(
        name, experts=8, layers=3, layout__ep=ep, train__batch=data.draw(st.integers(1, 9))
    )
    sparse = job.model.expert_layers
    plan = lay_out(job.layout, job.model, ranks)
    load = st.lists(st.integers(0, 200), min_size=8, max_size=8).filter(any)
    loads = data.draw(st.none() | st.lists(load, min_size=len(sparse), max_size=len(sparse)))
    blocks = [workload(job, plan, rank, loads) for rank in range(ranks)]
    for at, layer in enumerate(sparse):
        works = [next(b for b in one if b.name == f"layers.{layer}.moe").forward for one in blocks]
        rows = sum(
            product.rows * product.count for work in works for op in work.ops
            if op.name == "experts" for product in op.products
        )  # fmt: skip
        assigned = job.train.batch * job.data.sequence * job.model.top_k
        assert rows == 2 * assigned
        if ranks == 1:
            (asked,) = expert_counts(job, plan, None if loads is None else loads[at])
            each = next(op for op in works[0].ops if op.name == "experts").products
            assert {product.rows for product in each} == set(asked[asked > 0].tolist())
        for name in ("tokens", "results"):
            sent = {}
            for rank, work in enumerate(works):
                for message in work.messages:
                    if message.name == name:
                        sent[rank] = message
            for rank, message in sent.items():
                for peer, num_bytes in zip(message.ranks, message.send, strict=True):
                    assert sent[peer].receive[message.ranks.index(rank)] == num_bytes


@given(
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
    batch=st.integers(1, 9), ranks=st.sampled_from([1, 2, 4]), times=st.sampled_from([1, 3.7]),
)  # fmt: skip
def test_loads_are_shares_of_what_every_rank_assigns(
    weights: list[int], batch: int, ranks: int, times: float
) -> None:
    job = make_job("tiny-mixtral", train__batch=batch)
    plan, each = lay_out(job.layout, job.model, ranks), job.data.sequence * job.model.top_k
    counts = expert_counts(job, plan, np.array(weights) * times)
    assert counts.sum(axis=1).tolist() == [
        len(plan.rows(rank, batch)) * each for rank in range(ranks)
    ]
    assert counts.min() >= 0
    total = counts.sum(axis=0)
    assert np.abs(total - batch * each * np.array(weights) / sum(weights)).max() < len(weights) / 2
    assert not total[np.array(weights) == 0].any()
    ends = np.array([plan.rows(rank, batch).stop for rank in range(ranks)]) * each
    in_turn = np.diff((ends[:, None] + 7 - np.arange(8)) // 8, axis=0, prepend=0)
    for even in (None, np.full(8, times)):
        assert (expert_counts(job, plan, even) == in_turn).all()


def test_a_load_that_does_not_fit_is_refused() -> None:
    job = make_job("tiny-mixtral")
    for load in ([0] * 8, [1] * 7 + [-1], [1] * 7 + [math.nan]):
        with pytest.raises(ConfigError, match="a load of no assignments, or of less than none"):
            workload(job, alone(job), 0, [load] * 2)
    with pytest.raises(ConfigError, match=r"shape \(7,\) does not fit 8 experts on 1 ranks: give"):
        workload(job, alone(job), 0, [[1] * 7] * 2)


def test_attention_that_ends_at_documents_skips_nothing() -> None:
    for packing, share in (("documents", 1.0), ("stream", 21 / 40)):
        blocks = workload(make_job("tiny-dense", data__packing=packing), Plan(
            ranks=1, ep=1, shard=1, experts=0))  # fmt: skip
        shares = {op.causal_share for op in blocks[1].forward.ops if op.name == "attend"}
        assert shares == {share}


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("finetune", [{}, {"method": "lora"}, {"router": "frozen"}])
@pytest.mark.parametrize("targets", [["experts"], ["ffn", "shared"]])
@pytest.mark.parametrize("loaded", [False, True])
def test_layers_that_are_alike_are_what_each_of_them_is(
    shard: int, finetune: dict[str, Any], targets: list[str], loaded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where a dense layer is as wide as a number that means yes."""
    if finetune.get("method") == "lora":
        finetune = {**finetune, "targets": targets}
    for dense_ffn, recompute in itertools.product((1, 100), (False, True)):
        raw = {f"finetune__{key}": value for key, value in finetune.items()}
        job = make_job(
            "tiny-deepseek", layers=6, dense_layers=3, **raw, dense_ffn=dense_ffn,
            train__recompute=recompute,
        )  # fmt: skip
        plan = Plan(ranks=2, ep=2, shard=shard, experts=job.model.experts)
        draw = np.random.default_rng(0)
        loads = [draw.integers(1, 9, job.model.experts) for _ in range(3)] if loaded else None
        found = workload(job, plan, 1, loads)
        with monkeypatch.context() as patch:
            patch.setattr(blocks._Making, "kind", lambda making, name: name)
            assert found == workload(job, plan, 1, loads)
        names = [block.name for block in found]
        assert names[1:13:2] == [f"layers.{layer}.attention" for layer in range(6)]
        assert names[2:13:2] == [
            *(f"layers.{n}.ffn" for n in range(3)),
            *(f"layers.{n}.moe" for n in range(3, 6)),
        ]
