from __future__ import annotations

import math

import pytest

from moesaic.base.config import parse
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan
from moesaic.facts.workload import count, memory, parameters


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
    counts = count(model(name))
    assert (counts.total, counts.active) == (total, active)


def test_layers_that_differ_have_what_the_model_says() -> None:
    found = {p.name: p.shape for p in parameters(model("tiny-deepseek"))}
    for layer in range(4):
        at = f"layers.{layer}."
        own = {name.removeprefix(at) for name in found if name.startswith(at)}
        inner = {name for name in own if name.startswith(("ffn.", "moe."))}
        if layer == 0:
            assert inner == {f"ffn.{part}.weight" for part in ("gate", "up", "down")}
            assert found[f"{at}ffn.gate.weight"] == (384, 128)
        else:
            assert len(inner) == 1 + 1 + 16 * 3 + 3
            assert found[f"{at}moe.router.bias"] == (16,)
            assert found[f"{at}moe.shared.down.weight"] == (128, 64)


def test_a_dense_model_is_all_active_and_a_tied_one_has_no_head() -> None:
    plain, tied = count(model("tiny-dense")), count(model("tiny-dense", tied=True))
    assert plain.total == plain.active
    assert plain.total - tied.total == 320 * 128


def test_names_are_unique_and_in_the_order_of_blocks() -> None:
    found = list(parameters(model("tiny-olmoe")))
    names = [parameter.name for parameter in found]
    assert len(set(names)) == len(names)
    assert (names[0], names[-1]) == ("embed.weight", "head.weight")
    layers = [parameter.layer for parameter in found if parameter.layer is not None]
    assert layers == sorted(layers)
    assert (
        sum(math.prod(parameter.shape) for parameter in found) == count(model("tiny-olmoe")).total
    )


def job(**train: object) -> Job:
    raw = {
        "model": PRESETS["tiny-olmoe"], "data": {"path": "x", "sequence": 64},
        "train": {"steps": 1, "batch": 8, **train},
    }  # fmt: skip
    return parse(Job, raw, "job")


def test_memory_of_a_rank() -> None:
    size = count(model("tiny-olmoe")).total
    alone = memory(job(), Plan(ranks=1, ep=1, shard=1, experts=16))
    assert alone.parameters_bytes == alone.gradients_bytes == 4 * size
    assert alone.moments_bytes == 8 * size
    assert alone.staging_bytes == 12 * size
    assert alone.gathered_bytes == 0
    passing = alone.activations_bytes + alone.head_bytes
    assert alone.total_bytes == 28 * size + passing + alone.working_bytes
    assert alone.forward_bytes == passing
    assert alone.backward_bytes > passing > alone.gradients_bytes
    assert alone.peak_bytes == 24 * size + alone.backward_bytes
    elsewhere = memory(job(), Plan(ranks=1, ep=1, shard=1, experts=16), on_cpu=False)
    assert elsewhere.peak_bytes == 12 * size + alone.backward_bytes

    shared = memory(job(), Plan(ranks=4, ep=4, shard=4, experts=16))
    assert 4 * size / 4 <= shared.parameters_bytes < 4 * size / 4 + 16
    assert shared.staging_bytes == 3 * shared.parameters_bytes
    assert shared.gathered_bytes > 0
    # A quarter, and in every layer the rows that have travelled, there and back, with their order.
    sizes, rows = job().model, job().train.batch * job().data.sequence * job().model.top_k
    travelled = sizes.layers * rows * (2 * 4 * sizes.hidden + 8)
    more = 4 * shared.activations_bytes - alone.activations_bytes
    assert more == pytest.approx(travelled, rel=1e-3)


def test_choices_that_save_activations_do() -> None:
    plan = Plan(ranks=1, ep=1, shard=1, experts=16)
    plain = memory(job(), plan).activations_bytes
    assert memory(job(micro_batches=8), plan).activations_bytes < plain
    assert memory(job(recompute=True), plan).activations_bytes < plain
    assert memory(job(precision="bf16"), plan).activations_bytes < plain
    assert memory(job(precision="fp64"), plan).activations_bytes > plain
    assert memory(job(precision="fp64"), plan).parameters_bytes == 8 * count(job().model).total


def test_a_checkpoint_that_training_waits_for_needs_no_copy() -> None:
    raw = job().model_dump(by_alias=True, exclude_none=True)
    blocking = parse(Job, {**raw, "checkpoint": {"asynchronous": False}}, "job")
    assert memory(blocking, Plan(ranks=1, ep=1, shard=1, experts=16)).staging_bytes == 0
