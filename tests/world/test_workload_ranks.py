"""The workload of slices and of parts of a pipeline on real ranks: work, and what they hold."""

from __future__ import annotations

from typing import Any

import pytest
from layouts import SIGMOID, sparing
from test_workload_messages import COLUMN_LAYOUTS, CUT_LAYOUTS, VISITS, cut_job, possible
from torch import Tensor

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import Work, workload
from moesaic.facts.workload.holdings import held, is_first
from moesaic.facts.workload.kept import activations
from moesaic.facts.workload.parameters import rank_size
from moesaic.models.initial import InitialSource
from moesaic.models.pieces import SLICES, is_sliced
from moesaic.testing.blocks import Watched, watch
from moesaic.testing.flops import flops
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

WIDE = {
    "vocab": 332, "hidden": 96, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 72, "layers": 2,
}  # fmt: skip
"""Large enough for what is an estimate (indices, counts, routers' small tensors) to be little."""
LATENT = {"width": 20, "rotary": 6, "value": 12, "queries": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"model": WIDE},
    "mixtral": {"model": {**WIDE, "family": "mixtral", "kv_heads": 2}},
    "qwen3_moe": {"model": {**WIDE, "family": "qwen3_moe", "renormalise": True}},
    "dense": {"model": {**WIDE, "family": "llama", "experts": 0, "top_k": 0}},
    "deepseek_v3": {
        "model": {**WIDE, **SIGMOID["model"], "dense_ffn": 100, "shared": 2, "latent": LATENT}
    },
    "deepseek_v3, queries from the stream": {
        "model": {
            **WIDE, **SIGMOID["model"], "layers": 2, "dense_ffn": 100,
            "latent": {**LATENT, "queries": None, "value": 24},
        }
    },
}  # fmt: skip
CUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}), (4, {"tp": 2, "ep": 2}), (2, {"tp": 2, "etp": 2}), (2, {"ep": 2, **VISITS}),
    (4, {"ep": 4, "hosts": 2, **VISITS}), (2, {"ep": 2, "chunks": 3}),
    (4, {"ep": 4, "hosts": 2, "chunks": 2, **VISITS}),
    (2, {"ep": 2, "local": "first"}), (4, {"ep": 4, "hosts": 2, "local": "first", **VISITS}),
    (2, {"ep": 2, "chunks": 2, "local": "first"}),
]  # fmt: skip
CASES = [
    (size, layout, name, precision, recompute)
    for at, name in enumerate(FAMILIES)
    for number, (size, layout) in enumerate(CUTS)
    for precision, recompute in (("fp32", False), ("bf16", False), ("bf16", True), ("fp64", True))
    if recompute == bool((number + at) % 2) or precision == "bf16"
    if number < 2 or FAMILIES[name]["model"].get("experts", 8)
]


def seen(world: World, job: Job) -> Watched:
    return watch(job, lay_out(job.layout, job.model, world.size), world)


@pytest.mark.parametrize("case", sparing(CASES, 9), ids=str)
def test_slices_do_what_is_predicted(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, str, bool]
) -> None:
    """Flops exactly, bytes that passes move and kernels as near as on one rank."""
    size, layout, name, precision, recompute = case
    sparse = FAMILIES[name]["model"].get("experts", 8) > 0
    job = tiny_job(
        **FAMILIES[name], layout=layout if sparse else {"tp": 2}, data={"sequence": 64},
        train={"precision": precision, "recompute": recompute, "batch": 4 * size},
    )  # fmt: skip
    plan = lay_out(job.layout, job.model, size)
    for rank, watched in enumerate(ranks.run(size, seen, job)):
        blocks = workload(job, plan, rank, watched.loads)
        for way in ("forward", "backward"):
            for block, found in getattr(watched, way).items():
                works: list[Work] = [
                    getattr(one, way) for one in blocks if f"{one.name}.".startswith(f"{block}.")
                ]
                at = (rank, way, block)
                assert sum(work.flops for work in works) == flops(found), at
                moved = sum(work.moved_bytes for work in works)
                assert moved == pytest.approx(found.moved_bytes, rel=0.005), at
                calls = sum(work.calls for work in works)
                assert calls == pytest.approx(found.calls, rel=0.02), at


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "batch"), [(2, 8), (4, 6)])
def test_columns_do_what_is_predicted(
    ranks: Ranks, size: int, batch: int, precision: str, tied: bool
) -> None:
    """Lookups for all ranks, which may have unlike numbers of tokens, and a tied head's table."""
    model = {**FAMILIES["dense"]["model"], "tied": tied}
    job = tiny_job(
        model=model, layout={"embedding": "columns"}, data={"sequence": 64},
        train={"precision": precision, "batch": batch},
    )  # fmt: skip
    plan = lay_out(job.layout, job.model, size)
    for rank, watched in enumerate(ranks.run(size, seen, job)):
        blocks = {block.name: block for block in workload(job, plan, rank)}
        kept = activations(job, plan, rank)
        for name in ("embed", "head"):
            for way in ("forward", "backward"):
                found, work = getattr(watched, way)[name], getattr(blocks[name], way)
                assert work.flops == flops(found), (rank, way, name)
                # By itself the embedding adds nothing to what the head has left.
                beside = tied and (way, name) == ("backward", "embed")
                added = 3 * beside * model["vocab"] * model["hidden"] // size * 4
                moved = work.moved_bytes - added
                assert moved == pytest.approx(found.moved_bytes, rel=0.005), (way, name)
                calls = work.calls - beside
                assert calls == pytest.approx(found.calls, abs=1), (way, name)
            assert watched.kept[name] == kept[name]


Holding = dict[str, tuple[tuple[int, ...], int, bool]]
"""By name the shape on a slice, elements on the rank, and whether it counts them in the norm."""


def holding(world: World, job: Job) -> tuple[Holding, list[tuple[int, bool]]]:
    """What a rank holds, and of its experts all elements of a layer."""
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    dense, experts = {}, []
    for item in run.holdings:
        first, size = item.owners[0] == world.rank, item.local.numel()
        if item.bank is None:
            dense[item.name] = (on_a_slice(item.parameter), size, first)
        else:
            experts.append((size, first))
    run.close()
    world.barrier()  # Nobody leaves while another still connects: nothing else is sent here.
    return dense, experts


def on_a_slice(parameter: Tensor) -> tuple[int, ...]:
    """The shape of what a slice has, whoever shares it out further."""
    shape = list(parameter.shape)
    if is_sliced(parameter):
        at = parameter.device_mesh.mesh_dim_names.index(SLICES)
        shape[parameter.placements[at].dim] //= parameter.device_mesh.size(at)
    return tuple(shape)


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    sparing(
        [
            [name, *layout]
            for name in ("olmoe", "qwen3_moe, tied", "dense, tied", "deepseek_v3")
            for layout in [*CUT_LAYOUTS, (4, {"ep": 2, "shard": 2})]
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
def test_ranks_hold_what_is_predicted(
    ranks: Ranks, name: str, size: int, layout: dict[str, Any]
) -> None:
    """Which dimension of which matrix is cut, stages and shards, and who comes first."""
    job = cut_job(name, layout)
    plan = lay_out(job.layout, job.model, size)
    for rank, (dense, experts) in enumerate(ranks.run(size, holding, job)):
        everything, replica = held(job.model, plan, rank), plan.replica(rank)
        expected = {
            p.name: (p.shape, rank_size(p, plan.shard, replica), is_first(p, plan, rank))
            for p in everything if p.is_dense
        }  # fmt: skip
        assert dense == expected
        own = [p for p in everything if p.expert is not None]
        layers = sorted({p.layer for p in own if p.layer is not None})
        assert experts == [
            (sum(p.size for p in own if p.layer == layer), is_first(own[0], plan, rank))
            for layer in layers
        ]
