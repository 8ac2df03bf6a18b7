"""Workload against a real run: FLOPs, bytes moved and bytes saved, block by block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
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
from moesaic.nn.experts import tiles
from moesaic.testing.blocks import BlockTrace, check_work, trace_blocks
from moesaic.testing.runs import start_run

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
    ("tiny-mixtral", {"window": 100, "data__sequence": 600}),
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
    ("tiny-olmoe", {"method": "full"}),
]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(("name", "changes"), SHAPES, ids=str)
def test_blocks_match_torch(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts run in one chunk, as each further chunk starts more kernels."""
    monkeypatch.setattr(tiles, "_RANGE_BYTES", 1 << 30)
    shape = {"data__sequence": 64, "train__batch": 4, "hidden": 768}
    job = make_job(name, **{**shape, **changes})
    blocks = workload(job, one_rank_plan(job))
    check_work(trace_one_rank(job), blocks, saved_error=None if job.train.recompute else 0.02)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("name", "finetune", "precision", "recompute"),
    [
        pytest.param(*case, *mode, marks=[pytest.mark.soak] * ((at + turn) % 2))
        for at, case in enumerate(LORA)
        for turn, mode in enumerate([("fp32", False), ("bf16", True)])
    ],
    ids=str,
)
def test_frozen_parameters_have_no_gradients(
    name: str, finetune: dict[str, Any], precision: str, recompute: bool
) -> None:
    changes = {f"finetune__{key}": value for key, value in ({"method": "lora"} | finetune).items()}
    job = make_job(
        name, train__precision=precision, train__recompute=recompute, data__sequence=64,
        train__batch=4, hidden=768, **changes,
    )  # fmt: skip
    trace = trace_one_rank(job)
    del trace.backward["layers.0"]  # It may need no gradient of its input.
    check_work(trace, workload(job, one_rank_plan(job)), saved_error=None)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_stored_bytes_match_a_run(name: str, tied: bool) -> None:
    job = make_job(name, tied=tied)
    run, rank_memory = start_run(job), memory(job, one_rank_plan(job))
    num_bytes = sum(item.local.nbytes for item in run.part.trainable)
    biases = sum(router.bias.nbytes for _, router in run.part.model.sigmoid_routers())
    assert (
        rank_memory.parameters_bytes == num_bytes + biases == 4 * count_parameters(job.model).total
    )
    moments = sum(t.nbytes for pair in run.part.optimizer.moments.values() for t in pair)
    assert rank_memory.moments_bytes == moments
    staging = Staging(0, torch.device("cpu"), 1 << 30)
    shards = run.state().shards
    staged = sum(part.num_bytes for part in staging.plan_files(shards).files)
    assert rank_memory.staging_bytes == staged


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
        <= len(weights) / 2
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


def test_attention_skips_later_keys_unless_a_window_needs_a_mask() -> None:
    for name, changes, share in (
        ("tiny-dense", {"data__packing": "documents"}, 21 / 40),
        ("tiny-dense", {"data__packing": "stream"}, 21 / 40),
        ("tiny-mixtral", {"window": 20}, 21 / 40),
        ("tiny-mixtral", {"window": 5}, 1.0),
    ):
        job = make_job(name, **changes)
        blocks = workload(job, one_rank_plan(job))
        shares = {op.causal_fraction for op in blocks[1].forward.ops if op.name == "attend"}
        assert shares == {share}
    job = make_job("tiny-mixtral", window=5)
    *_, attend = [
        op for op in workload(job, one_rank_plan(job), on_cpu=False)[1].forward.ops if op.kind
    ]
    used = attend.causal_fraction * attend.matmuls[0].rows * attend.matmuls[0].columns
    assert round(used) == 5 * 20 - 5 * 4 // 2  # A GPU skips the keys before the window.


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
