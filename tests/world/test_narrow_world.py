"""Narrow moments over ranks: state is laid out and resumed like any other, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import put_together, worst_element

from moesaic.dist.checkpoint import Checkpoint, Saver
from moesaic.dist.state import PARAMETER, Piece
from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2 x 2, sharded": (4, {"ep": 2, "shard": "all"}),
    "sharded": (2, {"shard": 2}),
}
SIZES = {"hidden": 136, "ffn": 20, "heads": 4, "kv_heads": 2, "head_dim": 8, "init_std": 0.1}


def bits(piece: Piece) -> Any:
    """A piece as numpy can hold it."""
    tensor = piece.tensor.clone()
    values = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return piece.key, piece.shape, piece.offset, values.numpy()


def go(
    world: World, layout: dict[str, Any], tables: dict[str, Any], counts: tuple[int, int],
    resume: str | None, save: str | None,
) -> Any:  # fmt: skip
    """Some steps, a save, more steps; the state at the start and at the end."""
    job = tiny_job(**{**tables, "layout": layout, "model": {**SIZES, **tables.get("model", {})}})
    plan = lay_out(job.layout, job.model, world.size)
    source: Any = InitialSource(job.seed, job.model.init_std)
    counters = None
    if resume is not None:
        source = Checkpoint.open(Path(resume))
        counters = source.counters
    run = assemble(job, plan, world, source, counters)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    first = [bits(piece) for piece in run.state().pieces]
    told = [run.step(samples) for _ in range(counts[0])]
    if save is not None:
        saver = Saver(Path(save), world, 1, asynchronous=False)
        saver.save(run.state(), run.counters["step"], {})
        saver.wait()
    told += [run.step(samples) for _ in range(counts[1])]
    last, end = [bits(piece) for piece in run.state().pieces], dict(run.counters)
    run.close()
    return first, last, [(one.loss, one.skipped) for one in told], end


def whole(results: list[Any], which: int) -> dict[str, Any]:
    return put_together([result[which] for result in results])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_any_layout_goes_on_from_any_other(ranks: Ranks, tmp_path: Path, moments: str) -> None:
    """In fp64 sums differ by less than rounding sees, so that every code is the same."""
    tables = {"optimizer": {"moments": moments, "lr": 0.01}, "train": {"micro_batches": 2}}
    straight = ranks.run(1, go, {}, tables, (2, 2), None, str(tmp_path / "one"))
    expected, losses = whole(straight, 1), [loss for loss, _ in straight[0][2]]
    narrow = [key for key in expected if not key.startswith(PARAMETER)]
    kinds = {"bf16": {"float64", "int16"}, "8bit": {"float64", "float32", "int8", "uint8"}}
    assert {str(expected[key].dtype) for key in narrow} == kinds[moments]
    starts: list[dict[str, Any]] = []
    pairs = [("one", "ep2 x 2, sharded"), ("ep2", "sharded"), ("sharded", "ep2"),
             ("ep2 x 2, sharded", "one")]  # fmt: skip
    for before, after in pairs:
        (size, layout), place = LAYOUTS[before], tmp_path / before.replace(" ", "-")
        if before != "one":
            ran = ranks.run(size, go, layout, tables, (2, 0), None, str(place))
            starts.append(whole(ran, 1))
        checkpoint = str(place / "step-00000002")
        size, layout = LAYOUTS[after]
        rest = ranks.run(size, go, layout, tables, (2, 0), checkpoint, None)
        if before != "one":
            assert same(whole(rest, 0), starts[-1]), "a checkpoint fills any layout bit by bit"
        assert [loss for loss, _ in rest[0][2]] == pytest.approx(losses[2:], rel=1e-9)
        assert_alike(whole(rest, 1), expected)


@pytest.mark.parametrize("moments", [pytest.param("bf16", marks=pytest.mark.soak), "8bit"])
def test_slices_stages_and_columns_go_on_from_one_another(
    ranks: Ranks, tmp_path: Path, moments: str
) -> None:
    """With a tied head, round in a ring."""
    tables = {
        "optimizer": {"moments": moments, "lr": 0.01}, "train": {"micro_batches": 2},
        "model": {
            "family": "qwen3_moe", "tied": True, "vocab": 60, "head_dim": 64, "layers": 2,
            "ffn": 256, "hidden": 256,
        },
    }  # fmt: skip
    expected = whole(ranks.run(1, go, {}, tables, (2, 2), None, str(tmp_path / "one")), 1)
    ring: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2, "etp": 2}), (2, {"pp": 2}), (4, {"pp": 2, "embedding": "columns"}),
        (4, {"tp": 2, "shard": 2, "ep": 2}),
    ]  # fmt: skip
    for at, (size, layout) in enumerate(ring):
        ran = ranks.run(size, go, layout, tables, (2, 0), None, str(tmp_path / str(at)))
        checkpoint = str(tmp_path / str(at) / "step-00000002")
        size, layout = ring[(at + 1) % len(ring)]
        rest = ranks.run(size, go, layout, tables, (2, 0), checkpoint, None)
        assert same(whole(rest, 0), whole(ran, 1))
        assert_alike(whole(rest, 1), expected)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_moments_of_columns_are_those_of_a_whole_table(
    ranks: Ranks, tmp_path: Path, moments: str
) -> None:
    """Blocks of eight bits are of whole rows' columns, and draws of places in the table."""
    tables = {
        "model": {"hidden": 256, "layers": 1},
        "optimizer": {"moments": moments, "lr": 0.01}, "train": {"micro_batches": 2},
    }  # fmt: skip
    expected = whole(ranks.run(1, go, {}, tables, (2, 2), None, str(tmp_path / "one")), 1)
    columns = {"embedding": "columns"}
    start = ranks.run(2, go, columns, tables, (2, 0), None, str(tmp_path / "columns"))
    for size, layout, at in ((2, columns, "one"), (1, {}, "columns"), (2, columns, "columns")):
        checkpoint = str(tmp_path / at / "step-00000002")
        rest = ranks.run(size, go, layout, tables, (2, 0), checkpoint, None)
        if at == "columns":
            assert same(whole(rest, 0), whole(start, 1))
        assert_alike(whole(rest, 1), expected)


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every code the same, every number all but the same."""
    assert found.keys() == expected.keys()
    exact = [key for key in found if str(found[key].dtype).startswith(("int", "uint"))]
    assert all(np.array_equal(found[key], expected[key]) for key in exact)
    real = found.keys() - set(exact)
    apart = ({k: values[k].astype(float) for k in real if values[k].dtype == np.float64}
             for values in (found, expected))  # fmt: skip
    assert worst_element(*apart) < 1e-9
    for key in real:
        assert np.allclose(found[key], expected[key], rtol=1e-6, atol=0)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
@pytest.mark.parametrize("finetune", [{}, {"finetune": {"method": "lora", "rank": 3}}])
def test_slices_have_the_moments_of_what_they_cut(
    ranks: Ranks, moments: str, finetune: dict[str, Any]
) -> None:
    """The output of attention, and its A, are cut between blocks of 128 columns."""
    tables = {
        "optimizer": {"moments": moments, "lr": 0.01}, "train": {"micro_batches": 2},
        "model": {"vocab": 60, "head_dim": 64}, **finetune,
    }  # fmt: skip
    expected = whole(ranks.run(1, go, {}, tables, (3, 0), None, None), 1)
    for size, layout in ((2, {"tp": 2}), (4, {"tp": 2, "ep": 2, "shard": 2})):
        found = ranks.run(size, go, layout, tables, (3, 0), None, None)
        assert_alike(whole(found, 1), expected)


@pytest.mark.parametrize("name", ["one", "ep2 x 2, sharded"])
@pytest.mark.parametrize(
    "tables",
    [
        {"train": {"precision": "fp16"}},
        {"optimizer": {"moments": "8bit"}},
        {"optimizer": {"moments": "bf16"}},
    ],
    ids=["fp16", "8bit", "bf16"],
)
def test_going_on_is_as_never_having_stopped(
    ranks: Ranks, tmp_path: Path, name: str, tables: dict[str, Any]
) -> None:
    size, layout = LAYOUTS[name]
    tables = {"train": {"precision": "fp32", **tables.get("train", {})},
              "optimizer": tables.get("optimizer", {})}  # fmt: skip
    straight = ranks.run(size, go, layout, tables, (3, 3), None, str(tmp_path))
    rest = ranks.run(size, go, layout, tables, (3, 0), str(tmp_path / "step-00000003"), None)
    assert straight[0][2][3:] == rest[0][2]
    assert straight[0][3] == rest[0][3]
    assert same(whole(straight, 1), whole(rest, 1))
