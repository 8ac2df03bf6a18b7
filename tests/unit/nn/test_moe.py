"""MoE layer against a loop over tokens and their experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.nn.attention import FeedForward
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.moe import MoE
from moesaic.nn.router import NO_EXPERT, Router, SigmoidRouter

HIDDEN, FFN = 12, 10


def make(experts: int, top_k: int, capacity: float | None = None, **router: Any) -> MoE:
    return make_layer(Router(0, HIDDEN, experts, top_k, **router), capacity)


def make_layer(
    router: Router | SigmoidRouter, capacity: float | None = None, shared: FeedForward | None = None
) -> MoE:
    layer = MoE(
        router,
        ExpertBank(range(router.num_experts), HIDDEN, FFN),
        Dispatcher(router.num_experts, DispatchGroups(), capacity),
        shared,
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def make_inputs(batch: int = 0, sequence: int = 0, training: bool = True, **more: Any) -> Inputs:
    if batch:
        more |= {"samples": torch.arange(batch), "positions": torch.arange(sequence)}
    return Inputs(Rotary(torch.empty(0), torch.empty(0)), training=training, **more)


def oracle(layer: MoE, x: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    views = {(e, part): view for e, part, view in layer.bank.matrices(layer.bank.arena)}
    rows = []
    for token, experts, weights in zip(x.reshape(-1, HIDDEN), experts_TK, weights_TK, strict=True):
        total = torch.zeros(HIDDEN, dtype=x.dtype)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            if expert == NO_EXPERT:
                continue
            gate, up, down = (views[expert, part] for part in ("gate", "up", "down"))
            total = total + weight * (down @ (F.silu(gate @ token) * (up @ token)))
        if layer.shared is not None:
            gate, up, down = (getattr(layer.shared, part).weight for part in ("gate", "up", "down"))
            total = total + down @ (F.silu(gate @ token) * (up @ token))
        rows.append(total)
    return torch.stack(rows).view(x.shape) if rows else x * 0


def check_against_oracle(layer: MoE, x: Tensor, inputs: Inputs) -> None:
    x = x.requires_grad_()
    cotangent = torch.randn_like(x)
    actual, _ = layer(x, inputs)
    routing = layer.router(x.reshape(-1, HIDDEN), inputs)
    counts = layer.dispatcher.count(routing.experts_TK, training=inputs.training)
    expected = oracle(layer, x, counts.experts_TK, routing.weights_TK)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, *layer.parameters()]
    actual_grads = torch.autograd.grad(actual, leaves, cotangent, allow_unused=True)
    expected_grads = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True)
    for a, b, parameter in zip(actual_grads, expected_grads, leaves, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zero if a is None else a, zero if b is None else b, rtol=1e-11, atol=1e-11
        )


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 17), experts=st.integers(1, 9), top_k=st.integers(1, 9),
    renormalise=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_softmax_router_equals_loop(
    tokens: int, experts: int, top_k: int, renormalise: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = make(experts, min(top_k, experts), renormalise=renormalise)
    check_against_oracle(layer, torch.randn(1, tokens, HIDDEN).double(), make_inputs())


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.floats(0.1, 2.0), kind=st.sampled_from(["top-k", "switch", "gshard"]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_capacity_equals_loop(capacity: float, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    top_k = {"top-k": 3, "switch": 1, "gshard": 2}[kind]
    layer = make(4, top_k, capacity, kind=kind)
    check_against_oracle(layer, torch.randn(2, 9, HIDDEN).double(), make_inputs(2, 9))


def test_drops_are_counted_and_first_tokens_stay() -> None:
    layer = make(2, 1, capacity=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[1] = 1.0
    x = torch.rand(1, 8, HIDDEN).double()
    y, report = layer(x, make_inputs())
    assert (report.requested.tolist(), report.kept.tolist()) == ([0, 8], [0, 4])
    assert report.counts.tolist() == [[0, 4]]
    assert bool((y[0, :4] != 0).any(dim=1).all())
    assert not bool(y[0, 4:].any())


def test_nothing_is_dropped_outside_training() -> None:
    layer = make(2, 1, capacity=0.1)
    _, report = layer(torch.rand(1, 8, HIDDEN).double(), make_inputs(training=False))
    assert report.kept is report.requested
    assert int(report.counts.sum()) == 8


def test_first_choices_precede_second_choices() -> None:
    dispatcher = Dispatcher(2, DispatchGroups(), capacity=0.5)
    choices = torch.tensor([[0, 1], [1, 0], [1, 0]])
    counts = dispatcher.count(choices, training=True)
    # Capacity is ceil(0.5 * 3 * 2 / 2) = 2. Expert 0 keeps one first choice, then one second.
    assert counts.experts_TK.tolist() == [[0, NO_EXPERT], [1, 0], [1, NO_EXPERT]]
    assert counts.requested_KE.tolist() == [[1, 2], [2, 1]]
    assert counts.counts_RE.tolist() == [[2, 2]]


def test_balanced_router_is_even() -> None:
    layer = make(6, 2, kind="balanced")
    inputs = make_inputs(2, 9)
    _, report = layer(torch.randn(2, 9, HIDDEN).double(), inputs)
    assert report.counts.tolist() == [[6] * 6]
    assert len({tuple(row) for row in layer.router(
        torch.randn(18, HIDDEN).double(), inputs).experts_TK.tolist()}) > 1  # fmt: skip


def test_second_expert_is_kept_by_weight() -> None:
    layer = make(2, 2, capacity=9.0, kind="gshard")
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = math.log(4.0)  # probabilities 0.8 and 0.2
    x = torch.zeros(64, 64, HIDDEN).double()
    x[..., 0] = 1.0
    _, report = layer(x, make_inputs(64, 64))
    kept_fraction = int(report.counts[0, 1]) / 4096
    assert kept_fraction == pytest.approx(2 * 0.2, abs=0.03)
    _, second = layer(x, make_inputs(64, 64))
    assert torch.equal(second.counts, report.counts)


def test_balance_and_z_loss_equal_their_definitions() -> None:
    layer = make(5, 2)
    x = torch.randn(1, 30, HIDDEN).double()
    _, report = layer(x, make_inputs())
    scores = x[0] @ layer.router.weight.T
    p = scores.softmax(-1)
    chosen = F.one_hot(p.topk(2).indices, 5).sum(1).double()
    balance = 5 * ((chosen.sum(0) / chosen.sum()) * p.mean(0)).sum()
    found = AuxLoss([report], None).losses()
    torch.testing.assert_close(found, (balance, scores.logsumexp(-1).square().mean()))


def test_gradients_of_auxiliary_losses_equal_autograd() -> None:
    layers = [make(5, 2), make(5, 2, kind="gshard")]
    reports, expected, x = [], torch.zeros((), dtype=torch.float64), torch.randn(1, 30, HIDDEN)
    for layer in layers:
        _, report = layer(x.double(), make_inputs(1, 30))
        reports.append(report)
        p = (scores := x[0].double() @ layer.router.weight.T).softmax(-1)
        fraction = report.balanced / report.balanced.sum()
        expected = expected + 0.3 * 5 * (fraction * p.mean(0)).sum()
        expected = expected + 0.7 * scores.logsumexp(-1).square().mean()
    assert int(reports[1].balanced.sum()) == 30
    weights = [layer.router.weight for layer in layers]
    root = torch.ones((), dtype=torch.float64, requires_grad=True)
    attached = AuxLoss(reports, None).attach(root, 0.3, 0.7)
    assert attached == 1.0
    found = torch.autograd.grad(attached, [root, *weights])
    assert found[0] == 1.0
    torch.testing.assert_close(found[1:], torch.autograd.grad(expected, weights))


def test_noise_depends_on_the_token_and_only_in_training() -> None:
    layer = make(8, 1, kind="switch", noise=0.5)
    x = torch.randn(6, HIDDEN).double()
    noisy_scores = layer.router(x, make_inputs(2, 3)).scores_TE
    clean_scores = layer.router(x, make_inputs(2, 3, training=False)).scores_TE
    ratio = noisy_scores / clean_scores
    assert bool(((ratio > 0.5) & (ratio < 1.5)).all())
    assert ratio.unique().numel() == ratio.numel()
    assert torch.equal(noisy_scores, layer.router(x, make_inputs(2, 3)).scores_TE)


def test_replay_uses_recorded_experts_and_counts_mismatches() -> None:
    layer = make(4, 2)
    x = torch.randn(1, 6, HIDDEN).double()
    _, kept = layer(x, make_inputs(keep=frozenset({"router_choices"})))
    own = kept.router_choices
    for choices, mismatches in ((own, 0), (own.flip(1), 0), ((own + 1) % 4, None)):
        y, report = layer(x, make_inputs(routing_replay={0: choices}))
        weights = (x[0] @ layer.router.weight.T).softmax(-1).gather(1, choices)
        torch.testing.assert_close(y, oracle(layer, x, choices, weights))
        if mismatches is None:
            assert report.num_replay_mismatches > 0
        else:
            assert report.num_replay_mismatches == mismatches


def test_huge_capacity_drops_nothing() -> None:
    layer = make(4, 2, capacity=1e300)
    _, report = layer(torch.randn(1, 6, HIDDEN).double(), make_inputs())
    assert torch.equal(report.kept, report.requested)
