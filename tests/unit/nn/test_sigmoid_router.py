"""Sigmoid routers and shared experts against loops and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moe import FFN, HIDDEN, make_inputs, make_layer, oracle
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from moesaic.nn.attention import FeedForward
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.moe import MoE
from moesaic.nn.router import SigmoidRouter


def make(experts: int, top_k: int, shared: int = 0, **router: Any) -> MoE:
    layer = make_layer(
        SigmoidRouter(0, HIDDEN, experts, top_k, **router),
        shared=FeedForward(HIDDEN, shared * FFN) if shared else None,
    )
    torch.nn.init.normal_(layer.router.bias, std=0.3)
    return layer


def reference_route(router: SigmoidRouter, token: Tensor) -> tuple[list[int], Tensor]:
    """Return one token's experts, best first, and their weights, by sorting."""
    scores = torch.sigmoid(router.weight @ token)
    biased = (scores.detach() + router.bias).tolist()
    size = router.num_experts // router.groups
    groups = [range(first, first + size) for first in range(0, router.num_experts, size)]
    best = sorted(groups, key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
    candidates = [e for group in best[: router.top_groups] for e in group]
    chosen = sorted(candidates, key=lambda e: -biased[e])[: router.top_k]
    weights = torch.stack([scores[e] for e in chosen])
    if router.renormalise:
        weights = weights / (weights.sum() + 1e-20)
    return chosen, weights * router.scale


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9), groups=st.integers(1, 4), size=st.integers(2, 5),
    top_groups=st.integers(1, 4), top_k=st.integers(1, 6), shared=st.integers(0, 2),
    renormalise=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_layer_equals_loop(
    tokens: int, groups: int, size: int, top_groups: int, top_k: int, shared: int,
    renormalise: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    top_groups = min(top_groups, groups)
    layer = make(
        groups * size, min(top_k, top_groups * size), shared, groups=(groups, top_groups),
        renormalise=renormalise, scale=2.5,
    )  # fmt: skip
    x = torch.randn(1, tokens, HIDDEN).double().requires_grad_()
    experts, weights = zip(*(reference_route(layer.router, token) for token in x[0]), strict=True)
    fast = layer(x, make_inputs())[0]
    expected = oracle(layer, x, torch.tensor(experts), torch.stack(weights))
    torch.testing.assert_close(fast, expected, rtol=1e-12, atol=1e-12)
    cotangent, inputs = torch.randn_like(x), [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(y, inputs, cotangent) for y in (fast, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def config(**changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, n_routed_experts=16, n_shared_experts=2,
        num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        experts_implementation="eager", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (1, 1), (8, 3)])
def test_router_equals_transformers(groups: int, top_groups: int, renormalise: bool) -> None:
    torch.manual_seed(groups)
    peer = config(norm_topk_prob=renormalise)
    peer.n_group, peer.topk_group = groups, top_groups
    theirs = DeepseekV3TopkRouter(peer)
    ours = SigmoidRouter(
        0, HIDDEN, 16, 3, renormalise=renormalise, groups=(groups, top_groups), scale=2.5
    )
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.e_score_correction_bias, std=0.3)
    ours.load_state_dict(
        {"weight": theirs.weight, "bias": theirs.e_score_correction_bias}, strict=True
    )
    tokens = torch.randn(200, HIDDEN)
    routing = ours(tokens, make_inputs())
    logits, weights, experts = theirs(tokens)
    torch.testing.assert_close(routing.scores_TE, logits)
    theirs_TE = torch.zeros(200, 16).scatter(1, experts, weights)
    ours_TE = torch.zeros(200, 16).scatter(1, routing.experts_TK, routing.weights_TK)
    torch.testing.assert_close(ours_TE, theirs_TE)
    cotangent = torch.randn(200, 16)
    (a,) = torch.autograd.grad(ours_TE, ours.weight, cotangent)
    (b,) = torch.autograd.grad(theirs_TE, theirs.weight, cotangent)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=5, max_size=5), min_size=1, max_size=9))
def test_bias_moves_by_steps_towards_even_load(loads: list[list[int]]) -> None:
    router = SigmoidRouter(0, HIDDEN, 5, 2)
    expected = torch.zeros(5)
    for load in loads:
        router.update_bias(torch.tensor(load), 0.001)
        mean = math.fsum(load) / 5
        for expert, count in enumerate(load):
            expected[expert] += 0.001 if count < mean else -0.001 if count > mean else 0.0
    assert torch.equal(router.bias, expected)


def test_balance_and_z_loss_equal_their_definitions() -> None:
    layer = make(8, 2, groups=(4, 2))
    x = torch.randn(1, 30, HIDDEN).double()
    _, report = layer(x, make_inputs())
    scores = x[0] @ layer.router.weight.T
    odds = scores.sigmoid() / scores.sigmoid().sum(dim=1, keepdim=True)
    share = report.requested.double() / 60
    balance, z = AuxLoss([report], None).losses()
    torch.testing.assert_close(balance, 8 * (share * odds.mean(0)).sum())
    torch.testing.assert_close(z, scores.logsumexp(-1).square().mean())


def test_the_bias_stays_in_fp32_and_is_no_parameter() -> None:
    layer = make(8, 2)
    before = layer.router.bias.clone()
    for dtype in (torch.float64, torch.bfloat16):
        layer.to(dtype)
        assert layer.router.weight.dtype == dtype
        assert layer.router.bias.dtype == torch.float32
    assert torch.equal(layer.router.bias, before)
    assert all(name != "router.bias" for name, _ in layer.named_parameters())
