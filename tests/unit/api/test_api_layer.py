"""The expert layer in a user's own model, on one rank."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moesaic


def plain_moe(layer: moesaic.MoE, x: Tensor) -> Tensor:
    """Compute the layer expert by expert, from its state dict."""
    state = layer.state_dict()
    probabilities = (x @ state["router.weight"].T).softmax(-1)
    weights, chosen = probabilities.topk(layer.router.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        gate, up, down = (
            state[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        result = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        out += (weights * (chosen == expert)).sum(-1, keepdim=True) * result
    return out


def test_output_equals_a_loop_over_experts() -> None:
    layer = moesaic.MoE(16, 24, 6, 2, dtype=torch.float64)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain_moe(layer, x))
    assert layer(x[0, 0]).shape == (16,)


def test_aux_loss_is_one_for_even_loads() -> None:
    layer = moesaic.MoE(8, 8, 4, 1, balance_loss=0.5, z_loss=0.0)
    with torch.no_grad():
        layer.router.weight.copy_(1e3 * torch.eye(4, 8))
    layer(torch.eye(4, 8))
    assert float(layer.aux_loss.detach()) == pytest.approx(0.5)
    layer.eval()
    layer(torch.eye(4, 8))
    with pytest.raises(moesaic.ConfigError, match=r"call train\(\) and then the layer first"):
        _ = layer.aux_loss
    for unused in (layer.train(), moesaic.MoE(8, 8, 4, 1)):
        with pytest.raises(moesaic.ConfigError, match="call the layer first"):
            _ = unused.aux_loss


def test_aux_loss_evens_out_loads() -> None:
    torch.manual_seed(0)
    layer = moesaic.MoE(8, 8, 4, 1, balance_loss=1.0)
    with torch.no_grad():
        layer.router.weight[0] += 0.5
    x = torch.randn(256, 8) + 1.0
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(100):
        layer(x)
        loss = layer.aux_loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 1.05 < 1.5 < losses[0]


def test_the_state_dict_has_keys_per_expert_and_loads() -> None:
    layer, other = (moesaic.MoE(8, 12, 4, 2) for _ in range(2))
    state = layer.state_dict()
    assert list(state)[:3] == [
        "router.weight", "experts.0.gate_proj.weight", "experts.0.up_proj.weight",
    ]  # fmt: skip
    assert len(state) == 1 + 4 * 3
    assert state["experts.3.down_proj.weight"].shape == (8, 12)
    for assign in (False, True):
        other.reset_parameters()
        other.load_state_dict(state, assign=assign)
        assert all(torch.equal(state[key], value) for key, value in other.state_dict().items())
    del state["experts.1.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts\.1\.up_proj\.weight"):
        other.load_state_dict(state)


def weights(layer: moesaic.MoE) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


def test_initial_values_follow_torchs_seed() -> None:
    layers = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append([moesaic.MoE(8, 8, 4, 2) for _ in range(2)])
    (first, second), (again, _) = layers
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(second))
    meta = moesaic.MoE(8, 8, 4, 2, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    meta.reset_parameters()
    assert torch.equal(weights(meta), weights(first))
    first(torch.randn(3, 8))
    assert torch.equal(weights(copy.deepcopy(first)), weights(first))
    buffer = io.BytesIO()
    torch.save(first, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(weights(loaded), weights(first))


def test_a_meta_layer_takes_over_a_state_dict() -> None:
    layer, meta = moesaic.MoE(8, 8, 4, 2), moesaic.MoE(8, 8, 4, 2, device="meta")
    meta.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(5, 8)
    assert torch.equal(meta(x), layer(x))


def test_aux_loss_raises_rather_than_lose_its_gradient() -> None:
    layer = moesaic.MoE(8, 8, 4, 2)
    with torch.no_grad():
        layer(torch.randn(5, 8))
        assert layer.aux_loss > 0
    with pytest.raises(moesaic.ConfigError, match="aux_loss has no gradient"):
        _ = layer.aux_loss
    x = torch.randn(5, 8, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.aux_loss.requires_grad


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 8, 4, 5), "top_k = 5 exceeds experts = 4"),
        ((8, 0, 4, 2), "ffn = 0 must be an integer of at least 1"),
        ((8, 8.5, 4, 2), "ffn = 8.5 must be an integer"),
    ],
)
def test_wrong_sizes(sizes: Any, said: str) -> None:
    with pytest.raises(moesaic.ConfigError, match=said):
        moesaic.MoE(*sizes)
    with pytest.raises(moesaic.ConfigError, match="capacity_factor = 0 must be above 0"):
        moesaic.MoE(8, 8, 4, 2, capacity_factor=0)
    with pytest.raises(moesaic.ConfigError, match='balance = "eplb" is not known'):
        moesaic.MoE(8, 8, 4, 2, balance="eplb")  # type: ignore[arg-type]
    for device in ("abacus", "cuda:99"):
        with pytest.raises(moesaic.ConfigError, match=f"device = '{device}' cannot be used"):
            moesaic.MoE(8, 8, 4, 2, device=device)
    with pytest.raises(moesaic.ConfigError, match="needs a group"):
        moesaic.MoE(8, 8, 4, 2, balance="quota")
    with pytest.raises(moesaic.ConfigError, match="activation = 'tanh' is not one of swiglu, "):
        moesaic.MoE(8, 8, 4, 2, activation="tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"balance_loss": -1}, "balance_loss = -1 must be a number from 0"),
        ({"z_loss": float("nan")}, "z_loss = nan must be a number from 0"),
        ({"capacity_factor": "2"}, "capacity_factor = '2' must be above 0"),
        ({"dtype": "bf16"}, r"dtype = 'bf16' is not known: give one of torch\.float64, "),
        ({"dtype": torch.int32}, r"dtype = torch\.int32 is not known: give one of"),
        ({"group": [0, 1]}, r"group = \[0, 1\] is not a process group: give one of all ranks"),
        ({"group": -100}, "group is a process group that this rank is not in"),
    ],
)
def test_wrong_options(options: Any, said: str) -> None:
    with pytest.raises(moesaic.ConfigError, match=said):
        moesaic.MoE(8, 8, 4, 2, **options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_experts", "did you mean 'experts'?"), ("topk", "did you mean 'top_k'?"),
        ("num_experts_per_tok", "did you mean 'top_k'?"), ("hidden_size", "did you mean 'hidden'?"),
        ("intermediate_size", "did you mean 'ffn'?"), ("biass", "did you mean 'bias'?"),
        ("aux_loss_coef", "did you mean 'balance_loss'?"),
        ("lr", "it has hidden, ffn, experts, top_k, group, activation, "),
    ],
)  # fmt: skip
def test_an_unknown_argument_names_the_one_that_is_meant(name: str, said: str) -> None:
    layer: Any = moesaic.MoE
    with pytest.raises(TypeError) as caught:
        layer(8, 8, **{name: 4})
    assert str(caught.value).startswith(f"MoE has no argument '{name}': {said}")
    upcycle: Any = moesaic.upcycle
    with pytest.raises(TypeError, match="upcycle has no argument 'num_experts': did you mean 'exp"):
        upcycle(torch.nn.Sequential(), num_experts=4)


def test_wrong_inputs_and_states() -> None:
    layer = moesaic.MoE(8, 8, 4, 2)
    with pytest.raises(moesaic.ConfigError, match="x has 9 channels"):
        layer(torch.randn(3, 9))
    with pytest.raises(moesaic.ConfigError, match=r"x has dtype torch\.int64"):
        layer(torch.arange(8))
    with pytest.raises(moesaic.ConfigError, match="takes the model, not its parameters"):
        moesaic.clip_grad_norm_(layer.parameters(), 1.0)  # type: ignore[arg-type]
    state = moesaic.MoE(8, 16, 4, 2).state_dict()
    with pytest.raises(moesaic.ConfigError, match=r"experts\.0\.gate_proj\.weight has shape"):
        layer.load_state_dict(state)
    state = moesaic.MoE(8, 8, 4, 2, activation="gelu").state_dict()
    said = r"have down_proj\.weight, up_proj\.weight, but those of the layer have down_proj.*, gate"
    with pytest.raises(moesaic.ConfigError, match=said):
        layer.load_state_dict(state)
    with pytest.raises(moesaic.ConfigError, match=r"the state dict has no experts\.\*, such as"):
        layer.load_state_dict({})
    assert layer.load_state_dict({}, strict=False).missing_keys
    layer.load_state_dict(moesaic.MoE(8, 8, 4, 2).state_dict())


def test_inputs_of_another_device_or_dtype() -> None:
    x = torch.randn(3, 8)
    layer = moesaic.MoE(8, 8, 4, 2)
    meta = moesaic.MoE(8, 8, 4, 2, device="meta")
    for one in (x, x.to("meta")):
        with pytest.raises(moesaic.ConfigError, match=r"on the meta device .* layer\.to_empty\("):
            meta(one)
    with pytest.raises(moesaic.ConfigError, match="x is on meta, but the layer is on cpu: move"):
        layer(x.to("meta"))
    with pytest.raises(moesaic.ConfigError, match=r"x has dtype .*64, but the layer has .*32"):
        layer(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
