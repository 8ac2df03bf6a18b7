"""Each block returns the by-products that inputs name."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.facts.job.model import ModelConfig
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.inputs import ByProduct, Inputs
from moesaic.nn.reports import BlockReport, Reports, moe_reports
from moesaic.testing.jobs import tiny_job

TOKENS = torch.arange(14).view(2, 7)
ALL: frozenset[ByProduct] = frozenset(
    {"hidden_states", "queries_and_keys", "router_logits", "router_choices"}
)


def make_model(config: ModelConfig | None = None) -> LanguageModel:
    model = LanguageModel(config or tiny_job().model)
    InitialSource(0, 0.1).fill(tensor_shards(model))
    return model


def make_inputs(model: LanguageModel) -> Inputs:
    return Inputs(model.rotary(torch.arange(7)[None]), training=True)


def run(model: LanguageModel, *, keep: frozenset[ByProduct]) -> tuple[Tensor, Reports]:
    result: tuple[Tensor, Reports] = model(TOKENS, replace(make_inputs(model), keep=keep))
    return result


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_return_what_inputs_name(recompute: bool) -> None:
    model = make_model()
    for layer in model.decoder_layers():
        layer.recompute = recompute
    config = model.config
    plain_logits, plain = run(model, keep=frozenset())
    logits, reports = run(model, keep=ALL)
    assert torch.equal(plain_logits, logits)
    assert list(reports) == list(plain) == model.block_names
    assert reports["embed"] == reports["head"] == BlockReport()
    x = model.embed(TOKENS, make_inputs(model))[0]
    for index in model.layer_indices:
        block, bare = reports[f"layers.{index}"], plain[f"layers.{index}"]
        x = model.layers[index](x, make_inputs(model))[0]
        assert block.hidden_states is not None
        assert torch.equal(block.hidden_states, x)
        assert block.attention is not None
        assert block.attention.queries is not None
        assert block.attention.keys is not None
        assert block.attention.queries.shape == (2, config.heads, 7, config.head_dim)
        assert block.attention.keys.shape == (2, config.kv_heads, 7, config.head_dim)
        assert block.moe is not None
        assert block.moe.router_logits is not None
        assert block.moe.router_choices is not None
        assert block.moe.router_logits.shape == (14, config.experts)
        best = block.moe.router_logits.topk(config.top_k).indices
        assert torch.equal(block.moe.router_choices, best)
        assert bare.attention is not None
        assert bare.moe is not None
        kept = (bare.hidden_states, *bare.attention[:2], bare.moe.router_logits)
        assert (*kept, bare.moe.router_choices) == (None,) * 5
        for value in (*block.attention[:2], block.moe.router_logits, block.hidden_states):
            loss = value.square().sum()
            (grad,) = torch.autograd.grad(loss, model.embed.weight, retain_graph=True)
            assert bool(grad.any())
    assert list(moe_reports(reports.values())) == list(config.expert_layers)


def test_only_named_layers_keep_activations() -> None:
    model = make_model()
    inputs = replace(make_inputs(model), keep=ALL, keep_layers=frozenset({1}))
    _, reports = model(TOKENS, inputs)
    for index in model.layer_indices:
        block = reports[f"layers.{index}"]
        assert block.attention is not None
        assert block.moe is not None
        assert (block.hidden_states is not None) is (index == 1)
        assert (block.attention.queries is not None) is (index == 1)
        assert block.moe.router_choices is not None


def test_head_without_projection_returns_its_normed_input() -> None:
    model = make_model()
    normed, reports = model(TOKENS, replace(make_inputs(model), targets=TOKENS, project=False))
    logits, _ = model(TOKENS, make_inputs(model))
    torch.testing.assert_close(normed @ model.head.weight.T, logits)
    assert reports["head"] == BlockReport()


def test_detached_reports_keep_no_graph() -> None:
    model = make_model()
    loss, reports = run(model, keep=ALL)
    moe = reports["layers.0"].moe
    assert moe is not None
    graph, detached = weakref.ref(moe.probability_sum), moe.detach()
    assert torch.equal(detached.z_sum, moe.z_sum)
    assert not any(one.requires_grad for one in detached if isinstance(one, Tensor))
    del loss, reports, moe
    gc.collect()
    assert graph() is None
