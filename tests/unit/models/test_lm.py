"""Language model: logical names, initial values, and effects of the options."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moesaic.base.config import parse
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan
from moesaic.facts.workload import block_specs, count_parameters, parameters
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.inputs import Inputs
from moesaic.nn.reports import moe_reports
from moesaic.testing.states import live_values

SMALL = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 8, "vocab": 19}
LATENT = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 2, "v_head_dim": 3}


def small(name: str, **changes: object) -> ModelConfig:
    latent = {"kv_heads": 4, "latent": LATENT} if "latent" in PRESETS[name] else {}
    preset = {**PRESETS[name], **SMALL, **latent, **changes}
    return parse(ModelConfig, preset, name)


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    model = LanguageModel(config).double()
    InitialSource(seed, 0.3).fill(tensor_shards(model))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", ["tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek"]
)
def test_module_has_the_parameters_of_its_spec(name: str, tied: bool) -> None:
    config = small(name, tied=tied)
    model = LanguageModel(config)
    shapes = {shard.name: shard.size for shard in tensor_shards(model)}
    assert shapes == {p.name: p.shape for p in parameters(config)}
    specs = block_specs(config, Plan(ranks=1, ep=1, dp_shard=1, experts=config.experts))
    assert shapes == {p.name: p.shape for spec in specs for p in spec.parameters}
    assert [spec.model_block for spec in specs if spec.kind != "attention"] == [
        name for name, _ in model.blocks()
    ]


@pytest.mark.parametrize("queries", [None, 5])
def test_latent_attention_shapes(queries: int | None) -> None:
    config = small("tiny-deepseek", latent={**LATENT, "q_lora_rank": queries})
    found = {
        p.name.removeprefix("layers.1.attention.").removesuffix(".weight"): p.shape
        for p in parameters(config) if p.name.startswith("layers.1.attention.")
    }  # fmt: skip
    query_shapes = {"q": (16, 16)}
    if queries is not None:
        query_shapes = {"q_down": (5, 16), "q_norm": (5,), "q_up": (16, 5)}
    assert found == {
        **query_shapes, "kv_down": (6 + 2, 16), "kv_norm": (6,), "kv_up": (4 * (2 + 3), 6),
        "o": (16, 4 * 3),
    }  # fmt: skip


def test_parameter_counts_of_published_models() -> None:
    olmoe = count_parameters(parse(ModelConfig, PRESETS["olmoe-1b-7b"], "preset"))
    assert (round(olmoe.total / 1e9, 2), round(olmoe.active / 1e9, 2)) == (6.92, 1.28)
    mixtral = count_parameters(parse(ModelConfig, PRESETS["mixtral-8x7b"], "preset"))
    assert (round(mixtral.total / 1e9, 1), round(mixtral.active / 1e9, 1)) == (46.7, 12.9)


def test_ranks_hold_disjoint_experts() -> None:
    config = small("tiny-mixtral")
    plan = Plan(ranks=2, ep=2, dp_shard=1, experts=8)
    names = []
    for rank in range(2):
        with torch.device("meta"):
            groups = DispatchGroups(rank, None, None, (0, 1))
            specs = block_specs(config, plan, rank)
            model = LanguageModel(config, specs, plan=plan, ranks=groups)
        mine = {p.name for p in tensor_shards(model, plan, rank) if ".experts." in p.name}
        names.append(mine)
    assert not names[0] & names[1]
    assert names[0] | names[1] == {p.name for p in parameters(config) if p.kind == "expert"}


def test_initial_values_depend_on_the_name_alone() -> None:
    model = build(small("tiny-olmoe"), seed=5)
    for shard in tensor_shards(model):
        if len(shard.shape) == 1:
            assert bool((live_values(shard) == 1).all())
            continue
        rows = shard.shape[0]
        part = torch.empty(rows - rows // 2, *shard.shape[1:], dtype=torch.float64)
        offset = (rows // 2,) + (0,) * (len(shard.shape) - 1)
        half = TensorShard.of_tensor(PARAMETER, shard.name, shard.shape, offset, part, (0,))
        columns = torch.empty(rows, 2, dtype=torch.float64)
        inner = TensorShard.of_tensor(PARAMETER, shard.name, shard.shape, (0, 1), columns, (0,))
        InitialSource(5, 0.3).fill([half, inner])
        assert torch.equal(part, live_values(shard)[rows // 2 :])
        assert torch.equal(columns, live_values(shard)[:, 1:3])
    spread = torch.cat([live_values(p).flatten() for p in tensor_shards(model) if len(p.shape) > 1])
    assert float(spread.std()) == pytest.approx(0.3, rel=0.05)


def test_attention_stays_inside_documents() -> None:
    model = build(small("tiny-olmoe"))
    tokens = torch.randint(19, (1, 10))
    documents = torch.tensor([[0] * 4 + [1] * 6])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    attention = AttentionMetadata.packed(documents)
    together, _ = model(tokens, Inputs(model.rotary(positions), attention=attention))
    alone = [
        model(part, Inputs(model.rotary(torch.arange(part.shape[1])[None])))[0]
        for part in (tokens[:, :4], tokens[:, 4:])
    ]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))


def test_recompute_is_bitwise_equal() -> None:
    gradients = []
    for recompute in (False, True):
        model = build(small("tiny-mixtral"))
        for layer in model.layers:
            layer.recompute = recompute
        tokens = torch.arange(14).view(2, 7)
        inputs = Inputs(model.rotary(torch.arange(7)[None]), training=True)
        logits, reports = model(tokens, inputs)
        moes = list(moe_reports(reports.values()).values())
        AuxLoss(moes, None).attach(logits.square().mean(), 1.0, 1.0).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
def test_bf16_autocast_is_close_to_fp32(name: str) -> None:
    config = small(name, hidden=64, ffn=64, head_dim=16)
    model = LanguageModel(config)
    InitialSource(0, 0.1).fill(tensor_shards(model))
    tokens = torch.randint(19, (2, 24))
    outputs = []
    recorded: dict[int, torch.Tensor] = {}
    for on in (False, True):
        inputs = Inputs(
            model.rotary(torch.arange(24)[None]), routing_replay=recorded or None,
            keep=frozenset({"router_choices"}),
        )  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            logits, reports = model(tokens, inputs)
        outputs.append(logits.float().detach())
        for layer, report in moe_reports(reports.values()).items():
            assert report.router_choices is not None
            recorded[layer] = report.router_choices
    assert 0 < float((outputs[1] - outputs[0]).norm() / outputs[0].norm()) < 0.02


def test_clip_qkv_clamps() -> None:
    free, clipped = (build(small("tiny-olmoe", clip_qkv=c)) for c in (None, 0.05))
    inputs = Inputs(free.rotary(torch.arange(6)[None]))
    tokens = torch.arange(6)[None]
    assert not torch.allclose(free(tokens, inputs)[0], clipped(tokens, inputs)[0])
    wide = build(small("tiny-olmoe", clip_qkv=1e6))
    assert torch.equal(free(tokens, inputs)[0], wide(tokens, inputs)[0])


def test_recomputed_graph_is_freed() -> None:
    """Backward computes each layer again; the recomputed graph must be freed afterwards."""
    model = build(small("tiny-mixtral"))
    second: list[weakref.ref[torch.Tensor]] = []
    for layer in model.decoder_layers():
        layer.recompute = True
        assert layer.moe is not None
        layer.moe.router.register_forward_hook(
            lambda _m, _i, routing: second.append(weakref.ref(routing.scores_TE))
        )
    inputs = Inputs(model.rotary(torch.arange(7)[None]))
    logits, reports = model(torch.arange(14).view(2, 7), inputs)
    moes, first = list(moe_reports(reports.values()).values()), len(second)
    AuxLoss(moes, None).attach(logits.square().mean(), 1.0, 1.0).backward()
    assert len(second) > first
    gc.collect()
    assert all(ref() is None for ref in second[first:])
