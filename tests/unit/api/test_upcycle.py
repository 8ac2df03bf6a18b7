"""Dense models whose feed-forward layers become experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import moesaic

SIZES = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(hidden_size=16, intermediate_size=24, **SIZES),
    "qwen3": transformers.Qwen3Config(
        hidden_size=16, intermediate_size=24, head_dim=8, num_key_value_heads=2, **SIZES
    ),
    "gpt2": transformers.GPT2Config(vocab_size=61, n_layer=2, n_head=2, n_embd=16),
    "gpt_neox": transformers.GPTNeoXConfig(hidden_size=16, intermediate_size=24, **SIZES),
    "phi": transformers.PhiConfig(hidden_size=16, intermediate_size=24, **SIZES),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_the_dense_model(name: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]).eval()
    for parameter in model.parameters():  # Biases start as zeros.
        nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(61, (2, 9))
    expected = model(tokens).logits
    assert moesaic.upcycle(model, experts=4, top_k=2) is model
    with pytest.raises(moesaic.ConfigError, match=r"is already upcycled: it has 2 moesaic\.MoE"):
        moesaic.upcycle(model)
    layers = [one for one in model.modules() if isinstance(one, moesaic.MoE)]
    assert len(layers) == 2
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_an_upcycled_model_learns() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["gpt2"]).train()
    moesaic.upcycle(model, experts=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens, losses = torch.randint(61, (4, 12)), []
    for _ in range(30):
        loss = model(tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        (loss + moesaic.aux_loss(model)).backward()
        moesaic.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1
    state = next(one for one in model.modules() if isinstance(one, moesaic.MoE)).state_dict()
    first, second = (state[f"experts.{expert}.up_proj.weight"] for expert in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU()])
@pytest.mark.parametrize("bias", [False, True])
def test_sequential_networks(activation: nn.Module, bias: bool) -> None:
    layers = nn.Linear(8, 12, bias=bias), activation, nn.Linear(12, 8, bias=bias)
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(*layers, nn.Dropout(0.5)))
    x = torch.randn(5, 8)
    expected = model.eval()(x)
    moesaic.upcycle(model, experts=3, top_k=1)
    torch.testing.assert_close(model(x), expected)
    assert isinstance(model[1][1], nn.Dropout)
    assert model.train()(x).shape == x.shape


class Normed(nn.Module):
    """Network that computes more than its layers say."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.fc2(self.act(self.fc1(x))))


def test_other_networks_stay_or_are_refused() -> None:
    head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    conv = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    known = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = nn.ModuleList([head, norm, conv, known])
    moesaic.upcycle(model, experts=2, top_k=1)
    assert list(model)[:3] == [head, norm, conv]
    assert isinstance(model[3], moesaic.MoE)
    opt = transformers.OPTConfig(
        vocab_size=61, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=16,
    )  # fmt: skip
    for unknown in (transformers.AutoModelForCausalLM.from_config(opt), nn.LSTM(4, 4)):
        with pytest.raises(moesaic.ConfigError, match="contains no feed-forward layer"):
            moesaic.upcycle(unknown)
    with pytest.raises(moesaic.ConfigError, match="computes more than"):
        moesaic.upcycle(nn.Sequential(Normed()))


def test_a_model_without_experts_has_no_auxiliary_loss() -> None:
    with pytest.raises(moesaic.ConfigError, match="Linear has no moesaic"):
        moesaic.aux_loss(nn.Linear(4, 4))
