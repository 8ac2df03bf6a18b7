"""Predicted work and parameters per rank against real ranks, with TP, PP and sharded embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from layouts import SIGMOID, sparing
from test_workload_messages import COLUMN_LAYOUTS, DEDUP, SHARDED_LAYOUTS, possible, sharded_job
from torch import Tensor

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import workload
from moesaic.facts.workload.rank_params import RankParams
from moesaic.models.state import TP_DIM, is_tp_sharded
from moesaic.testing.blocks import BlockTrace, check_work, trace_blocks
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run

WIDE = {
    "vocab": 332, "hidden": 768, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 72, "layers": 2,
}  # fmt: skip
"""Sizes at which estimated terms (indices, counts, small router tensors) are negligible."""
LATENT = {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "v_head_dim": 12, "q_lora_rank": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"model": WIDE},
    "mixtral": {"model": {**WIDE, "family": "mixtral", "kv_heads": 2}},
    "qwen3_moe": {"model": {**WIDE, "family": "qwen3_moe", "renormalise": True}},
    "dense": {"model": {**WIDE, "family": "llama", "experts": 0, "top_k": 0}},
    "deepseek_v3": {
        "model": {
            **WIDE, **SIGMOID["model"], "dense_ffn": 100, "shared_experts": 2, "latent": LATENT,
        }
    },
    "deepseek_v3, no query rank": {
        "model": {
            **WIDE, **SIGMOID["model"], "layers": 2, "dense_ffn": 100,
            "latent": {**LATENT, "q_lora_rank": None, "v_head_dim": 24},
        }
    },
}  # fmt: skip
TP_AND_EP_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}), (4, {"tp": 2, "ep": 2}), (2, {"tp": 2, "etp": 2}), (2, {"ep": 2, **DEDUP}),
    (4, {"ep": 4, "dispatch_hosts": 2, **DEDUP}), (2, {"ep": 2, "chunks": 3}),
    (4, {"ep": 4, "dispatch_hosts": 2, "chunks": 2, **DEDUP}),
    (2, {"ep": 2, "overlap_local": True}),
    (4, {"ep": 4, "dispatch_hosts": 2, "overlap_local": True, **DEDUP}),
    (2, {"ep": 2, "chunks": 2, "overlap_local": True}),
]  # fmt: skip
CASES = [
    (size, layout, name, precision, recompute)
    for at, name in enumerate(FAMILIES)
    for number, (size, layout) in enumerate(TP_AND_EP_LAYOUTS)
    for precision, recompute in (("fp32", False), ("bf16", False), ("bf16", True), ("fp64", True))
    if recompute == bool((number + at) % 2) or precision == "bf16"
    if number < 2 or FAMILIES[name]["model"].get("experts", 8)
]


def traced(world: World, job: Job) -> BlockTrace:
    return trace_blocks(job, plan_from_layout(job.layout, job.model, world.size), world)


@pytest.mark.parametrize("case", sparing(CASES, 13), ids=str)
def test_work_matches_the_prediction(
    ranks: RankPool, case: tuple[int, dict[str, Any], str, str, bool]
) -> None:
    size, layout, name, precision, recompute = case
    sparse = FAMILIES[name]["model"].get("experts", 8) > 0
    job = tiny_job(
        **FAMILIES[name], layout=layout if sparse else {"tp": 2}, data={"sequence": 64},
        train={"precision": precision, "recompute": recompute, "batch": 4 * size},
    )  # fmt: skip
    plan = plan_from_layout(job.layout, job.model, size)
    # The number of deduplicated tokens is an expectation.
    saved_error = None if recompute else 0.03 if plan.dispatch == "dedup" else 0.02
    for rank, watched in enumerate(ranks.run(size, traced, job)):
        check_work(watched, workload(job, plan, rank, watched.loads), saved_error=saved_error)


@pytest.mark.parametrize(("size", "batch", "precision"), [(2, 8, "bf16"), (4, 6, "fp32")])
def test_work_of_column_sharded_embeddings_matches_the_prediction(
    ranks: RankPool, size: int, batch: int, precision: str
) -> None:
    """Ranks may have different numbers of tokens."""
    job = tiny_job(
        model=FAMILIES["dense"]["model"], layout={"embedding": "columns"}, data={"sequence": 64},
        train={"precision": precision, "batch": batch},
    )  # fmt: skip
    plan = plan_from_layout(job.layout, job.model, size)
    for rank, watched in enumerate(ranks.run(size, traced, job)):
        check_work(watched, workload(job, plan, rank))


DenseShards = dict[str, tuple[tuple[int, ...], int, bool]]
"""By name: shape on a TP rank, local elements, and whether the rank counts them in the norm."""


def local_sizes(world: World, job: Job) -> tuple[DenseShards, list[tuple[int, bool]]]:
    """Return the dense shards of a rank, and per layer the elements of its experts."""
    run = start_run(job, world)
    dense, experts = {}, []
    for item in run.part.trainable:
        first, size = item.owners[0] == world.rank, item.local.numel()
        if item.bank is None:
            dense[item.name] = (tp_local_shape(item.parameter), size, first)
        else:
            experts.append((size, first))
    run.close()
    world.barrier()  # A rank that leaves early breaks the connections of others.
    return dense, experts


def tp_local_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape on a TP rank, before FSDP shards it."""
    shape = list(parameter.shape)
    if is_tp_sharded(parameter):
        at = parameter.device_mesh.mesh_dim_names.index(TP_DIM)
        shape[parameter.placements[at].dim] //= parameter.device_mesh.size(at)
    return tuple(shape)


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    sparing(
        [
            [name, *layout]
            for name in ("olmoe", "qwen3_moe, tied", "dense, tied", "deepseek_v3")
            for layout in [*SHARDED_LAYOUTS, (4, {"ep": 2, "dp_shard": 2})]
            if possible(name, layout[1])
        ],
        9,
    )
    + [
        (name, *layout)
        for at, layout in enumerate(COLUMN_LAYOUTS)
        for name in ("dense, tied", "olmoe")[at % 2 : at % 2 + 1]
    ],
    ids=str,
)
def test_local_parameters_match_the_prediction(
    ranks: RankPool, name: str, size: int, layout: dict[str, Any]
) -> None:
    """TP dimensions, stages, shards and the owners that count in the norm."""
    job = sharded_job(name, layout)
    plan = plan_from_layout(job.layout, job.model, size)
    for rank, (dense, experts) in enumerate(ranks.run(size, local_sizes, job)):
        params = RankParams(job, plan, rank)
        assert dense == {
            p.name: (p.shape, params.unpadded_local_size(p), params.counts_in_grad_norm(p))
            for p in params.dense
        }
        own = [[p for p in one.parameters if p.expert is not None] for one in params.blocks]
        assert experts == [
            (sum(p.size for p in one), params.counts_in_grad_norm(one[0])) for one in own if one
        ]
