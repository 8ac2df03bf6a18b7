"""Networks of recommenders against slow formulas, and their first values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dist.state import TensorShard
from moesaic.facts.job import CtrJob, RecommenderConfig
from moesaic.models.init import InitialSource
from moesaic.models.recommender import Recommender, network_params

SLOTS, DENSE, DIM, BATCH = 3, 2, 4, 5
CONFIGS: dict[str, dict[str, Any]] = {
    "ctr-dnn": {},
    "dlrm": {"dense_hidden": [6]},
    "dcn-v2": {"cross_layers": 2},
}


def shards_of(network: Recommender) -> list[TensorShard]:
    return [shard for one in network_params(network, [0]) for shard in one.parameter_shards(0)]


def make_network(family: str) -> Recommender:
    config = RecommenderConfig(family=family, dim=DIM, hidden=[8, 7], **CONFIGS[family])
    network = Recommender(config, SLOTS, DENSE, dtype=torch.float64)
    InitialSource(5, None).fill(shards_of(network))
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):  # Their first values are zero, which hides mistakes.
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return network


def apply_stack(values: dict[str, Tensor], name: str, x: list[float]) -> list[float]:
    """Apply a stack of layers with loops; ReLU after each."""
    layer = 0
    while f"{name}.{layer}.weight" in values:
        weight, bias = values[f"{name}.{layer}.weight"], values[f"{name}.{layer}.bias"]
        x = [
            max(0.0, sum(float(w) * one for w, one in zip(row, x, strict=True)) + float(b))
            for row, b in zip(weight, bias, strict=True)
        ]
        layer += 1
    return x


def slow_logit(
    family: str, values: dict[str, Tensor], rows: list[list[float]], dense: list[float]
) -> float:
    flat = [number for row in rows for number in row] + dense
    if family == "dlrm":
        own = apply_stack(values, "dense", dense)
        features, dots = [own, *rows], list[float]()
        for first in range(len(features)):
            for second in range(first):
                pairs = zip(features[first], features[second], strict=True)
                dots.append(sum(a * b for a, b in pairs))
        hidden = apply_stack(values, "deep", [*own, *dots])
    else:
        hidden = apply_stack(values, "deep", flat)
    if family == "dcn-v2":
        x0 = torch.tensor(flat, dtype=torch.float64)
        x = x0
        for layer in range(2):
            x = x0 * (values[f"cross.{layer}.weight"] @ x + values[f"cross.{layer}.bias"]) + x
        hidden = [*x.tolist(), *hidden]
    weight = values["output.0.weight"][0].tolist()
    return sum(w * one for w, one in zip(weight, hidden, strict=True)) + float(
        values["output.0.bias"]
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_networks_equal_slow_formulas(family: str) -> None:
    network = make_network(family)
    values = {name: one.detach() for name, one in network.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    pooled = torch.randn(BATCH, SLOTS, DIM, dtype=torch.float64, generator=generator)
    dense = torch.randn(BATCH, DENSE, dtype=torch.float64, generator=generator)
    expected = [
        slow_logit(family, values, rows, one)
        for rows, one in zip(pooled.tolist(), dense.tolist(), strict=True)
    ]
    assert network(pooled, dense).tolist() == pytest.approx(expected, rel=1e-12)
    assert network(pooled[:0], dense[:0]).shape == (0,)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_job_counts_the_parameters(family: str) -> None:
    job = CtrJob.model_validate(
        {
            "kind": "ctr",
            "model": {"family": family, "dim": DIM, "hidden": [8, 7], **CONFIGS[family]},
            "data": {"stream": {"slots": SLOTS, "dense": DENSE}},
            "train": {"steps": 1, "batch": 1},
        }
    )
    network = make_network(family)
    assert job.num_network_parameters == sum(one.numel() for one in network.parameters())


def test_first_values_depend_on_seed_and_name_alone() -> None:
    shapes = [("deep.0.weight", (600, 400)), ("deep.0.bias", (600,)), ("deep.1.weight", (64, 600))]
    first, again = (
        [
            TensorShard.of_tensor("parameter", name, shape, (0,) * len(shape), torch.empty(shape),
                                  (0,))
            for name, shape in order
        ]
        for order in (shapes, shapes[::-1])
    )  # fmt: skip
    for shards in (first, again):
        InitialSource(7, None).fill(shards)
    found = {shard.name: shard.lender for shard in first}
    for shard in again:
        assert torch.equal(shard.lender, found[shard.name])
    assert not found["deep.0.bias"].any()
    assert float(found["deep.0.weight"].std()) == pytest.approx((2 / 1000) ** 0.5, rel=0.02)
    assert float(found["deep.1.weight"].std()) == pytest.approx((2 / 664) ** 0.5, rel=0.02)
