"""Workload against a real run: FLOPs, bytes moved and bytes saved, block by block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.checkpoint.staging import Staging
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.facts.workload import (
    count_parameters,
    memory,
    parameters,
    workload,
)
from moesaic.facts.workload.blocks import BlockBuilder
from moesaic.facts.workload.loads import expert_counts
from moesaic.kernels import device as devices
from moesaic.models.init import InitialSource
from moesaic.nn.experts import tiles
from moesaic.testing.blocks import BlockTrace, check_work, trace_blocks
from moesaic.testing.jobs import RandomSamples
from moesaic.train.assemble import assemble

SMALL = {
    "vocab": 331, "hidden": 48, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 72,
}  # fmt: skip
FAMILIES = ["tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek"]
SMALL_LATENT = {
    "kv_heads": 6, "dense_ffn": 100, "shared_experts": 2,
    "latent": {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "v_head_dim": 12, "q_lora_rank": 28},
}  # fmt: skip


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable oneDNN, with which recomputation does not stop before a layer's last matmul."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: False)


def make_job(name: str, **changes: Any) -> Job:
    """Return a job with `changes` by table__key (data__sequence=33); keys without a table change
    the model."""
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


def one_rank_plan(job: Job) -> Plan:
    return plan_from_layout(job.layout, job.model, 1)


def trace_one_rank(job: Job) -> BlockTrace:
    return trace_blocks(job, one_rank_plan(job), World.solo())


LATENT: list[dict[str, Any]] = [
    {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "v_head_dim": 12},
    {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "v_head_dim": 24, "q_lora_rank": 28},
]
SHAPES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES),
    *((name, {"train__precision": "bf16", "train__recompute": True}) for name in FAMILIES),
    ("tiny-olmoe", {"data__packing": "stream"}),
    ("tiny-olmoe", {"clip_qkv": 0.1}),
    ("tiny-mixtral", {"train__precision": "fp64", "kv_heads": 6, "layers": 3}),
    ("tiny-mixtral", {"window": 63}),
    ("tiny-qwen3", {"window": 63, "data__packing": "stream"}),
    ("tiny-qwen3", {"train__precision": "bf16"}),
    ("tiny-deepseek", {"train__precision": "bf16", "data__packing": "stream"}),
    ("tiny-dense", {"train__batch": 64, "data__sequence": 24, "layers": 1}),  # two loss chunks
    *(("tiny-deepseek", {"latent": latent, "train__precision": precision})
      for latent in LATENT for precision in ("fp32", "bf16")),
]  # fmt: skip
LORA: list[tuple[str, dict[str, Any]]] = [
    ("tiny-olmoe", {}),
    ("tiny-olmoe", {"targets": ["experts"]}),
    ("tiny-mixtral", {"targets": ["experts"], "router": "train"}),
    ("tiny-qwen3", {"router": "train", "rank": 3}),
    ("tiny-dense", {"targets": ["ffn"]}),
    ("tiny-deepseek", {"targets": ["attention", "experts", "ffn", "shared"]}),
    ("tiny-deepseek", {"targets": ["shared"]}),
    ("tiny-olmoe", {"method": "full"}),
]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(("name", "changes"), SHAPES, ids=str)
def test_blocks_match_torch(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts run in one chunk, as each further chunk starts more kernels."""
    monkeypatch.setattr(tiles, "_RANGE_BYTES", 1 << 30)
    shape = {"data__sequence": 64, "train__batch": 4, "hidden": 192}
    job = make_job(name, **{**shape, **changes})
    blocks = workload(job, one_rank_plan(job))
    check_work(trace_one_rank(job), blocks, saved=not job.train.recompute)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(("name", "finetune"), LORA, ids=str)
@pytest.mark.parametrize(("precision", "recompute"), [("fp32", False), ("bf16", True)])
def test_frozen_parameters_have_no_gradients(
    name: str, finetune: dict[str, Any], precision: str, recompute: bool
) -> None:
    changes = {f"finetune__{key}": value for key, value in ({"method": "lora"} | finetune).items()}
    job = make_job(
        name, train__precision=precision, train__recompute=recompute, data__sequence=64,
        train__batch=4, hidden=192, **changes,
    )  # fmt: skip
    check_work(trace_one_rank(job), workload(job, one_rank_plan(job)), saved=False)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_memory_matches_a_run(name: str, tied: bool, micro_batches: int) -> None:
    job = make_job(name, tied=tied, train__micro_batches=micro_batches)
    plan = one_rank_plan(job)
    run = assemble(job, plan, World.solo(), InitialSource(0, 0.1))
    rank_memory = memory(job, plan)
    num_bytes = sum(item.local.nbytes for item in run.part.trainable)
    biases = sum(router.bias.nbytes for _, router in run.part.model.sigmoid_routers())
    assert (
        rank_memory.parameters_bytes == num_bytes + biases == 4 * count_parameters(job.model).total
    )
    moments = sum(t.nbytes for pair in run.part.optimizer.moments.values() for t in pair)
    assert rank_memory.moments_bytes == moments
    run.step(RandomSamples(job.model.vocab, job.data.sequence))
    if micro_batches == 1:
        assert rank_memory.gradients_bytes == num_bytes
    else:
        added = max((bank.arena.nbytes for _, bank in run.part.model.expert_banks()), default=0)
        assert rank_memory.gradients_bytes == num_bytes + added
    staging = Staging(0, torch.device("cpu"), 1 << 30)
    shards = run.state().shards
    staged = sum(part.num_bytes for part in staging.plan_files(shards).files)
    assert rank_memory.staging_bytes == staged
    assert rank_memory.peak_bytes <= rank_memory.total_bytes


def test_tied_weight_is_stored_and_updated_once() -> None:
    for name in FAMILIES:
        sizes = {}
        for tied in (False, True):
            job = make_job(name, tied=tied, train__clip=0.0)
            names = [parameter.name for parameter in parameters(job.model)]
            assert len(set(names)) == len(names)
            updated = sum(
                op.moved_bytes for block in workload(job, one_rank_plan(job))
                for op in block.update.ops
                if op.name == "adamw"
            )  # fmt: skip
            num_trainable = sum(p.size for p in parameters(job.model) if p.kind != "bias")
            assert updated == 7 * 4 * num_trainable
            sizes[tied] = updated
        assert sizes[False] - sizes[True] == 7 * 4 * SMALL["vocab"] * SMALL["hidden"]


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
@pytest.mark.parametrize(("ranks", "ep", "dp_shard"), [(4, 2, 2), (4, 4, 1), (6, 2, 3), (4, 1, 4)])
def test_ranks_store_and_update_every_replica(
    name: str, ranks: int, ep: int, dp_shard: int
) -> None:
    job = make_job(name, layout__ep=ep, layout__dp_shard=dp_shard, train__batch=12, hidden=36)
    plan = plan_from_layout(job.layout, job.model, ranks)
    all_parameters = list(parameters(job.model))
    experts = sum(p.size for p in all_parameters if p.kind == "expert")
    dense = sum(p.size for p in all_parameters if p.is_dense)
    biases = sum(p.size for p in all_parameters if p.kind == "bias")
    assert dense + experts + biases == count_parameters(job.model).total
    memories = [memory(job, plan, rank) for rank in range(ranks)]
    assert sum(m.moments_bytes for m in memories) == 8 * (
        dense * ranks // dp_shard + experts * ranks // ep
    )
    assert sum(m.staging_bytes for m in memories) == 12 * (dense + experts) + 4 * biases
    normed = sum(
        op.moved_bytes for rank in range(ranks) for block in workload(job, plan, rank)
        for op in block.update.ops if op.name == "norm"
    )  # fmt: skip
    assert normed >= 4 * (dense + experts)
    assert normed == pytest.approx(4 * (dense + experts), rel=0.02)  # except for padding


SHARDED_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (4, {"tp": 2, "dp_shard": 2}),
    (4, {"tp": 2, "ep": 4}),
    (4, {"pp": 2, "dp_shard": 2}),
    (4, {"pp": 2, "tp": 2, "ep": 2}),
    (8, {"pp": 2, "tp": 2, "ep": 2, "dp_shard": 2}),
]


def sharded_job(name: str, layout: dict[str, Any], **changes: Any) -> Job:
    """Return a job whose matrices split evenly over two TP ranks and two FSDP shards."""
    if name == "tiny-dense":
        layout = {**layout, "ep": 1}
    keys = {f"layout__{key}": value for key, value in layout.items()}
    return make_job(
        name, vocab=332, kv_heads=6 if name == "tiny-deepseek" else 2, train__batch=12, **keys,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), SHARDED_LAYOUTS, ids=str)
def test_tp_and_pp_ranks_update_every_replica(
    name: str, tied: bool, ranks: int, layout: dict[str, Any]
) -> None:
    job = sharded_job(name, layout, tied=tied)
    plan = plan_from_layout(job.layout, job.model, ranks)
    moved = {"norm": 0, "adamw": 0}
    for rank in range(ranks):
        for block in workload(job, plan, rank):
            for op in block.update.ops:
                if op.name in moved:
                    moved[op.name] += op.moved_bytes
    trainable = [p for p in parameters(job.model) if p.kind != "bias"]
    assert moved["norm"] == 4 * sum(p.size for p in trainable)
    tied_copies = 2 if tied and plan.pp > 1 else 1
    num_elements = 0
    for p in trainable:
        if p.kind == "expert":
            num_elements += p.size * plan.ranks_per_stage // plan.ep
        else:
            num_ranks = plan.dp if p.tp_dim is not None else plan.ranks_per_stage
            num_elements += (
                p.size * num_ranks // plan.dp_shard * (tied_copies if p.kind == "embedding" else 1)
            )
    assert moved["adamw"] == 7 * 4 * num_elements


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), SHARDED_LAYOUTS, ids=str)
def test_tp_and_pp_ranks_have_the_flops_of_one_rank(
    name: str, recompute: bool, ranks: int, layout: dict[str, Any]
) -> None:
    """No matmul is lost or repeated, and unsharded ones count once."""
    job = sharded_job(name, layout, train__recompute=recompute)
    plan, flops_by_block = plan_from_layout(job.layout, job.model, ranks), {}
    for rank in range(ranks):
        for block in workload(job, plan, rank):
            for direction in ("forward", "backward"):
                key = block.name, direction
                flops_by_block[key] = flops_by_block.get(key, 0) + getattr(block, direction).flops
    one = workload(job, one_rank_plan(sharded_job(name, {})))
    assert flops_by_block == {
        (block.name, direction): getattr(block, direction).flops
        for block in one for direction in ("forward", "backward")
    }  # fmt: skip


def test_rank_has_the_blocks_of_its_stages() -> None:
    job = make_job("tiny-mixtral", layers=4, layout__pp=2, layout__schedule="interleaved")
    plan = plan_from_layout(job.layout, job.model, 2)
    names = [[block.name for block in workload(job, plan, rank)] for rank in (0, 1)]
    layers = {i: [f"layers.{i}.attention", f"layers.{i}.moe"] for i in range(4)}
    assert names == [
        ["embed", *layers[0], *layers[2], "step"], [*layers[1], *layers[3], "head", "step"]
    ]  # fmt: skip


@given(
    rows=st.integers(1, 9), tp=st.sampled_from([1, 2, 4]), replicas=st.integers(1, 3),
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
)  # fmt: skip
def test_each_tp_rank_assigns_its_sequence_shard(
    rows: int, tp: int, replicas: int, weights: list[int]
) -> None:
    job = make_job("tiny-mixtral", train__batch=rows)
    span = tp * replicas
    plan = Plan(ranks=2 * span, ep=1, dp_shard=1, tp=tp, pp=2, experts=8)
    counts = expert_counts(job, plan, weights)
    samples = [len(plan.sample_range(rank, rows)) for rank in range(span)]
    choices_per_sample = job.data.sequence * job.model.top_k
    assert counts.shape == (span, 8)
    assert counts.sum(axis=1).tolist() == [num * choices_per_sample // tp for num in samples]


def totals(job: Job, ranks: int) -> tuple[int, int, int]:
    """Return FLOPs, bytes of matmuls and elementwise kernels, and bytes of collectives."""
    plan = plan_from_layout(job.layout, job.model, ranks)
    works = [
        work for rank in range(ranks) for block in workload(job, plan, rank)
        for work in (block.forward, block.backward, block.update)
    ]  # fmt: skip
    width = {"fp64": 8, "fp32": 4, "bf16": 2}
    factors = sum(p.elements * width[op.dtype] for w in works for op in w.ops for p in op.matmuls)
    sent_bytes = sum(message.num_bytes for work in works for message in work.collectives)
    return sum(w.flops for w in works), factors + sum(w.moved_bytes for w in works), sent_bytes


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
    larger=st.sampled_from(["batch", "sequence", "layers", "experts"]),
)
def test_larger_sizes_mean_more_work(
    name: str, precision: str, recompute: bool, batch: int, sequence: int, layers: int,
    experts: int, layout: tuple[int, int, int], tp: int, larger: str,
) -> None:  # fmt: skip
    ranks, ep, dp_shard = layout
    ranks, sparse = ranks * tp, name != "tiny-dense"
    sequence *= tp
    sizes = {"batch": batch, "sequence": sequence, "layers": layers, "experts": experts * ep}
    both = []
    for step in (0, 1):
        steps = {"experts": ep, "sequence": tp}
        now = {**sizes, larger: sizes[larger] + step * steps.get(larger, 1)}
        changes = {"experts": now["experts"], "layout__ep": ep} if sparse else {}
        changes |= {"layout__tp": tp, "vocab": 332}
        if name == "tiny-deepseek":
            changes |= {"expert_groups": 1, "top_expert_groups": 1}
        job = make_job(
            name, layers=now["layers"], data__sequence=now["sequence"], train__batch=now["batch"],
            train__precision=precision, train__recompute=recompute, layout__dp_shard=dp_shard,
            **changes,
        )  # fmt: skip
        both.append(totals(job, ranks))
    assert all(after >= before for before, after in zip(*both, strict=True))
    if larger != "experts":
        assert both[1][0] > both[0][0]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), layout=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]))
def test_dispatch_preserves_tokens(data: st.DataObject, layout: tuple[int, int]) -> None:
    ranks, ep = layout
    name = data.draw(st.sampled_from(["tiny-mixtral", "tiny-deepseek"]))
    job = make_job(
        name, experts=8, layers=3, layout__ep=ep, train__batch=data.draw(st.integers(1, 9))
    )
    sparse = job.model.expert_layers
    plan = plan_from_layout(job.layout, job.model, ranks)
    load = st.lists(st.integers(0, 200), min_size=8, max_size=8).filter(any)
    loads = data.draw(st.none() | st.lists(load, min_size=len(sparse), max_size=len(sparse)))
    blocks = [workload(job, plan, rank, loads) for rank in range(ranks)]
    for index, layer in enumerate(sparse):
        works = [next(b for b in one if b.name == f"layers.{layer}.moe").forward for one in blocks]
        rows = sum(
            product.rows * product.count for work in works for op in work.ops
            if op.name == "experts" for product in op.matmuls
        )  # fmt: skip
        assigned = job.train.batch * job.data.sequence * job.model.top_k
        assert rows == 2 * assigned
        if ranks == 1:
            (counts,) = expert_counts(job, plan, None if loads is None else loads[index])
            matmuls = next(op for op in works[0].ops if op.name == "experts").matmuls
            assert {product.rows for product in matmuls} == set(counts[counts > 0].tolist())
        for name in ("tokens", "results"):
            messages_by_rank = {}
            for rank, work in enumerate(works):
                for message in work.collectives:
                    if message.name == name:
                        messages_by_rank[rank] = message
            for rank, message in messages_by_rank.items():
                for peer, num_bytes in zip(message.ranks, message.send_bytes, strict=True):
                    assert (
                        messages_by_rank[peer].receive_bytes[message.ranks.index(rank)] == num_bytes
                    )


@given(
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
    batch=st.integers(1, 9), ranks=st.sampled_from([1, 2, 4]), times=st.sampled_from([1, 3.7]),
)  # fmt: skip
def test_relative_load_splits_assignments_of_every_rank(
    weights: list[int], batch: int, ranks: int, times: float
) -> None:
    job = make_job("tiny-mixtral", train__batch=batch)
    plan, choices_per_sample = (
        plan_from_layout(job.layout, job.model, ranks),
        job.data.sequence * job.model.top_k,
    )
    counts = expert_counts(job, plan, np.array(weights) * times)
    assert counts.sum(axis=1).tolist() == [
        len(plan.sample_range(rank, batch)) * choices_per_sample for rank in range(ranks)
    ]
    assert counts.min() >= 0
    total = counts.sum(axis=0)
    assert (
        np.abs(total - batch * choices_per_sample * np.array(weights) / sum(weights)).max()
        < len(weights) / 2
    )
    assert not total[np.array(weights) == 0].any()
    ends = (
        np.array([plan.sample_range(rank, batch).stop for rank in range(ranks)])
        * choices_per_sample
    )
    in_turn = np.diff((ends[:, None] + 7 - np.arange(8)) // 8, axis=0, prepend=0)
    for even in (None, np.full(8, times)):
        assert (expert_counts(job, plan, even) == in_turn).all()


def test_invalid_load_is_rejected() -> None:
    job = make_job("tiny-mixtral")
    for load in ([0] * 8, [1] * 7 + [-1], [1] * 7 + [math.nan]):
        with pytest.raises(ConfigError, match="a load has no assignments or a negative count"):
            workload(job, one_rank_plan(job), 0, [load] * 2)
    with pytest.raises(ConfigError, match=r"shape \(7,\) does not fit 8 experts on 1 ranks: give"):
        workload(job, one_rank_plan(job), 0, [[1] * 7] * 2)


def test_document_mask_disables_causal_skipping() -> None:
    for packing, share in (("documents", 1.0), ("stream", 21 / 40)):
        blocks = workload(make_job("tiny-dense", data__packing=packing), Plan(
            ranks=1, ep=1, dp_shard=1, experts=0))  # fmt: skip
        shares = {op.causal_fraction for op in blocks[1].forward.ops if op.name == "attend"}
        assert shares == {share}


@pytest.mark.parametrize("dp_shard", [1, 2])
@pytest.mark.parametrize("finetune", [{}, {"method": "lora"}, {"router": "frozen"}])
def test_reused_blocks_equal_separately_built_blocks(
    dp_shard: int, finetune: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {f"finetune__{key}": value for key, value in finetune.items()}
    for recompute in (False, True):
        job = make_job(
            "tiny-deepseek", layers=6, dense_layers=3, dense_ffn=100, train__recompute=recompute,
            **raw,
        )  # fmt: skip
        plan = Plan(ranks=2, ep=2, dp_shard=dp_shard, experts=job.model.experts)
        reused = workload(job, plan, 1)
        with monkeypatch.context() as patch:
            patch.setattr(BlockBuilder, "_work_key", lambda _, specs: specs[0].name)
            assert reused == workload(job, plan, 1)
        names = [block.name for block in reused]
        assert names[1:13:2] == [f"layers.{layer}.attention" for layer in range(6)]
