"""Low-bit moments over ranks: any layout trains and resumes with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import put_together, worst_element

from moesaic.dist.checkpoint import Checkpoint, Saver
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.dist.world import World
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.states import live_values
from moesaic.train.assemble import assemble

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2 x 2, sharded": (4, {"ep": 2, "dp_shard": "all"}),
    "sharded": (2, {"dp_shard": 2}),
}
SIZES = {"hidden": 136, "ffn": 20, "heads": 4, "kv_heads": 2, "head_dim": 8, "init_std": 0.1}


def bits(shard: TensorShard) -> Any:
    """Return a shard in a type that NumPy has."""
    tensor = live_values(shard).clone()
    values = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return shard.key, shard.shape, shard.offset, values.numpy()


def train_and_save(
    world: World, layout: dict[str, Any], tables: dict[str, Any], counts: tuple[int, int],
    resume: str | None, save: str | None,
) -> Any:  # fmt: skip
    """Train, save and train on; return the states at the start and the end, losses and counters."""
    job = tiny_job(**{**tables, "layout": layout, "model": {**SIZES, **tables.get("model", {})}})
    plan = plan_from_layout(job.layout, job.model, world.size)
    source: Any = InitialSource(job.seed, job.model.init_std)
    counters = None
    if resume is not None:
        source = Checkpoint.open(Path(resume))
        counters = source.counters
    run = assemble(job, plan, world, source, counters)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    first = [bits(shard) for shard in run.state().shards]
    facts = [run.step(samples) for _ in range(counts[0])]
    if save is not None:
        saver = Saver(Path(save), world, 1, asynchronous=False)
        saver.save(run.state(), run.counters["step"], {})
        saver.wait()
    facts += [run.step(samples) for _ in range(counts[1])]
    last, end = [bits(shard) for shard in run.state().shards], dict(run.counters)
    run.close()
    return first, last, [(one.loss, one.is_skipped) for one in facts], end


def joined(results: list[Any], which: int) -> dict[str, Any]:
    return put_together([result[which] for result in results])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_any_layout_resumes_from_any_other(ranks: RankPool, tmp_path: Path, moments: str) -> None:
    """In fp64, sums differ by less than the quantization step, so every code is equal."""
    tables = {"optimizer": {"moments": moments, "lr": 0.01}, "train": {"micro_batches": 2}}
    straight = ranks.run(1, train_and_save, {}, tables, (2, 2), None, str(tmp_path / "one"))
    expected, losses = joined(straight, 1), [loss for loss, _ in straight[0][2]]
    narrow = [key for key in expected if not key.startswith(PARAMETER)]
    kinds = {"bf16": {"float64", "int16"}, "8bit": {"float64", "float32", "int8", "uint8"}}
    assert {str(expected[key].dtype) for key in narrow} == kinds[moments]
    starts: list[dict[str, Any]] = []
    pairs = [("one", "ep2 x 2, sharded"), ("ep2", "sharded"), ("sharded", "ep2"),
             ("ep2 x 2, sharded", "one")]  # fmt: skip
    for before, after in pairs:
        (size, layout), place = LAYOUTS[before], tmp_path / before.replace(" ", "-")
        if before != "one":
            ran = ranks.run(size, train_and_save, layout, tables, (2, 0), None, str(place))
            starts.append(joined(ran, 1))
        checkpoint = str(place / "step-00000002")
        size, layout = LAYOUTS[after]
        rest = ranks.run(size, train_and_save, layout, tables, (2, 0), checkpoint, None)
        if before != "one":
            assert same(joined(rest, 0), starts[-1]), "a checkpoint fills any layout bit by bit"
        assert [loss for loss, _ in rest[0][2]] == pytest.approx(losses[2:], rel=1e-9)
        assert_alike(joined(rest, 1), expected)


def test_tp_pp_and_sharded_embeddings_resume_from_one_another(
    ranks: RankPool, tmp_path: Path
) -> None:
    """With a tied head, each layout from the previous one."""
    tables = {
        "optimizer": {"moments": "8bit", "lr": 0.01}, "train": {"micro_batches": 2},
        "model": {
            "family": "qwen3_moe", "tied": True, "vocab": 60, "head_dim": 64, "layers": 2,
            "ffn": 256, "hidden": 256,
        },
    }  # fmt: skip
    expected = joined(
        ranks.run(1, train_and_save, {}, tables, (2, 2), None, str(tmp_path / "one")), 1
    )
    ring: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2, "etp": 2}), (2, {"pp": 2}), (4, {"pp": 2, "embedding": "columns"}),
        (4, {"tp": 2, "dp_shard": 2, "ep": 2}),
    ]  # fmt: skip
    for at, (size, layout) in enumerate(ring):
        ran = ranks.run(size, train_and_save, layout, tables, (2, 0), None, str(tmp_path / str(at)))
        checkpoint = str(tmp_path / str(at) / "step-00000002")
        size, layout = ring[(at + 1) % len(ring)]
        rest = ranks.run(size, train_and_save, layout, tables, (2, 0), checkpoint, None)
        assert same(joined(rest, 0), joined(ran, 1))
        assert_alike(joined(rest, 1), expected)


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that codes are equal and numbers within rounding."""
    assert found.keys() == expected.keys()
    exact = [key for key in found if str(found[key].dtype).startswith(("int", "uint"))]
    assert all(np.array_equal(found[key], expected[key]) for key in exact)
    real = found.keys() - set(exact)
    apart = ({k: values[k].astype(float) for k in real if values[k].dtype == np.float64}
             for values in (found, expected))  # fmt: skip
    assert worst_element(*apart) < 1e-9
    for key in real:
        assert np.allclose(found[key], expected[key], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("moments", "finetune"),
    [("bf16", {}), ("8bit", {}), ("8bit", {"finetune": {"method": "lora", "rank": 3}})],
)
def test_tp_ranks_have_the_moments_of_the_whole_parameters(
    ranks: RankPool, moments: str, finetune: dict[str, Any]
) -> None:
    """TP shards the attention output and its LoRA A between blocks of 128 columns."""
    tables = {
        "optimizer": {"moments": moments, "lr": 0.01}, "train": {"micro_batches": 2},
        "model": {"vocab": 60, "head_dim": 64}, **finetune,
    }  # fmt: skip
    expected = joined(ranks.run(1, train_and_save, {}, tables, (3, 0), None, None), 1)
    for size, layout in ((2, {"tp": 2}), (4, {"tp": 2, "ep": 2, "dp_shard": 2})):
        found = ranks.run(size, train_and_save, layout, tables, (3, 0), None, None)
        assert_alike(joined(found, 1), expected)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_resume_is_bit_identical(ranks: RankPool, tmp_path: Path, moments: str) -> None:
    """With the loss scale of fp16, which a checkpoint keeps too."""
    size, layout = LAYOUTS["ep2 x 2, sharded"]
    tables = {"train": {"precision": "fp16"}, "optimizer": {"moments": moments}}
    straight = ranks.run(size, train_and_save, layout, tables, (3, 3), None, str(tmp_path))
    rest = ranks.run(
        size, train_and_save, layout, tables, (3, 0), str(tmp_path / "step-00000003"), None
    )
    assert straight[0][2][3:] == rest[0][2]
    assert straight[0][3] == rest[0][3]
    assert same(joined(straight, 1), joined(rest, 1))
