from __future__ import annotations

import math

import pytest

from moesaic.base.config import parse
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan
from moesaic.facts.workload import count_parameters, memory, parameters


def model(name: str, **changes: object) -> ModelConfig:
    return parse(ModelConfig, {**PRESETS[name], **changes}, "preset")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("deepseek-v3", 671_026_419_200, 37_552_297_472),
    ],
)
def test_published_models_have_their_published_sizes(name: str, total: int, active: int) -> None:
    counts = count_parameters(model(name))
    assert (counts.total, counts.active) == (total, active)


def test_dense_and_expert_layers_have_their_parameters() -> None:
    shapes = {p.name: p.shape for p in parameters(model("tiny-deepseek"))}
    for layer in range(4):
        prefix = f"layers.{layer}."
        names = {name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
        ffn_names = {name for name in names if name.startswith(("ffn.", "moe."))}
        if layer == 0:
            assert ffn_names == {f"ffn.{matrix}.weight" for matrix in ("gate", "up", "down")}
            assert shapes[f"{prefix}ffn.gate.weight"] == (384, 128)
        else:
            assert len(ffn_names) == 1 + 1 + 16 * 3 + 3
            assert shapes[f"{prefix}moe.router.bias"] == (16,)
            assert shapes[f"{prefix}moe.shared.down.weight"] == (128, 64)


def test_dense_model_is_all_active_and_tied_model_has_no_head() -> None:
    plain, tied = (
        count_parameters(model("tiny-dense")),
        count_parameters(model("tiny-dense", tied=True)),
    )
    assert plain.total == plain.active
    assert plain.total - tied.total == 320 * 128


def test_parameter_names_are_unique_and_in_block_order() -> None:
    all_parameters = list(parameters(model("tiny-olmoe")))
    names = [parameter.name for parameter in all_parameters]
    assert len(set(names)) == len(names)
    assert (names[0], names[-1]) == ("embed.weight", "head.weight")
    layers = [parameter.layer for parameter in all_parameters if parameter.layer is not None]
    assert layers == sorted(layers)
    assert (
        sum(math.prod(parameter.shape) for parameter in all_parameters)
        == count_parameters(model("tiny-olmoe")).total
    )


def job(**train: object) -> Job:
    raw = {
        "model": PRESETS["tiny-olmoe"], "data": {"path": "x", "sequence": 64},
        "train": {"steps": 1, "batch": 8, **train},
    }  # fmt: skip
    return parse(Job, raw, "job")


def test_memory_of_a_rank() -> None:
    size = count_parameters(model("tiny-olmoe")).total
    one_rank = memory(job(), Plan(ranks=1, ep=1, dp_shard=1, experts=16))
    assert one_rank.parameters_bytes == 4 * size
    assert one_rank.moments_bytes == 8 * size
    assert one_rank.staging_bytes == 12 * size
    assert one_rank.gathered_bytes == 0
    assert one_rank.peak_bytes == sum(one_rank.by_kind().values())
    on_gpu = memory(job(), Plan(ranks=1, ep=1, dp_shard=1, experts=16), on_cpu=False)
    assert one_rank.peak_bytes - on_gpu.peak_bytes == pytest.approx(12 * size, rel=0.01)

    sharded = memory(job(), Plan(ranks=4, ep=4, dp_shard=4, experts=16))
    assert 4 * size / 4 <= sharded.parameters_bytes < 4 * size / 4 + 16
    assert sharded.staging_bytes == pytest.approx(3 * sharded.parameters_bytes)
    assert sharded.gathered_bytes > 0


def test_micro_batches_recompute_and_bf16_save_activations() -> None:
    plan = Plan(ranks=1, ep=1, dp_shard=1, experts=16)
    baseline = memory(job(), plan).peak_bytes
    assert memory(job(micro_batches=8), plan).peak_bytes < baseline
    assert memory(job(recompute=True), plan).peak_bytes < baseline
    assert memory(job(precision="bf16"), plan).peak_bytes < baseline
    assert memory(job(precision="fp64"), plan).peak_bytes > baseline
    assert (
        memory(job(precision="fp64"), plan).parameters_bytes
        == 8 * count_parameters(job().model).total
    )


def test_blocking_checkpoint_needs_no_staging_copy() -> None:
    raw = job().model_dump(by_alias=True, exclude_none=True)
    blocking = parse(Job, {**raw, "checkpoint": {"asynchronous": False}}, "job")
    assert memory(blocking, Plan(ranks=1, ep=1, dp_shard=1, experts=16)).staging_bytes == 0
