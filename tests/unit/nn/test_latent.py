"""Latent attention against one head, one query, one key at a time, and against transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from moesaic.facts.job.model import Latent, RopeScaling
from moesaic.nn.context import Context, Rotary
from moesaic.nn.latent import NORM_EPSILON, LatentAttention

HIDDEN, HEADS, HEAD_DIM = 24, 3, 10
LATENTS = [
    Latent(width=7, rotary=4, value=6),
    Latent(width=7, rotary=4, value=6, queries=9),
    Latent(width=7, rotary=4, value=10, queries=9),
    Latent(width=7, rotary=4, value=13),
]
YARN = RopeScaling(kind="yarn", factor=40, original_positions=16, mscale=1.0, mscale_all=0.7)


def make(latent: Latent, scaling: RopeScaling | None = None) -> LatentAttention:
    layer = LatentAttention(0, HIDDEN, HEADS, HEAD_DIM, latent, scaling)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def make_context(batch: int, sequence: int, mask: Tensor | None = None) -> Context:
    positions = torch.arange(sequence).expand(batch, -1)
    context = Context(Rotary.at(positions, LATENTS[0].rotary, 100.0, torch.float64))
    context.mask = mask
    return context


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + NORM_EPSILON).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    out = []
    for pair in range(len(x) // 2):
        angle = position * 100.0 ** (-2 * pair / len(x))
        a, b = x[2 * pair], x[2 * pair + 1]
        out += [
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        ]
    return torch.stack(out)


def oracle(layer: LatentAttention, x: Tensor, mask: Tensor) -> Tensor:
    """`mask` [batch, queries, keys]."""
    weight = dict(layer.named_parameters())
    straight = HEAD_DIM - layer.rotary

    def queries(token: Tensor) -> Tensor:
        if "q.weight" in weight:
            return weight["q.weight"] @ token
        narrow = norm(weight["q_down.weight"] @ token, weight["q_norm.weight"])
        return weight["q_up.weight"] @ narrow

    def result(row: Tensor, place: int, seen: Tensor) -> Tensor:
        out = []
        for head in range(HEADS):
            q = queries(row[place])[head * HEAD_DIM :][:HEAD_DIM]
            scores, values = [], []
            for position in seen.nonzero().flatten().tolist():
                down = weight["kv_down.weight"] @ row[position]
                narrow = norm(down[: layer.width], weight["kv_norm.weight"])
                size = straight + layer.value
                up = (weight["kv_up.weight"] @ narrow)[head * size :][:size]
                score = q[:straight] @ up[:straight]
                score = score + turned(q[straight:], place) @ turned(down[layer.width :], position)
                scores.append(score * layer.scale)
                values.append(up[straight:])
            out.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        return weight["o.weight"] @ torch.cat(out)

    return torch.stack([
        torch.stack([result(row, place, seen[place]) for place in range(len(row))])
        for row, seen in zip(x, mask, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("latent", LATENTS, ids=str)
def test_each_head_query_and_key_in_turn(latent: Latent, masked: bool) -> None:
    layer = make(latent).double()
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    if masked:
        mask[1, 4:, :3] = False
    context = make_context(2, 6, mask[:, None] if masked else None)
    cotangent = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    found = []
    for out in (layer(x, context), oracle(layer, x, mask)):
        grads = torch.autograd.grad(out, [x, *layer.parameters()], cotangent)
        found.append([out, *grads])
    for ours, slow in zip(*found, strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-9, atol=1e-9)


def test_no_tokens_give_zeros_for_gradients() -> None:
    layer = make(LATENTS[1]).double()
    layer(torch.zeros(0, 6, HIDDEN, dtype=torch.float64), make_context(0, 6)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


THEIRS = {
    "q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj",
    "o": "o_proj",
}  # fmt: skip


def theirs(latent: Latent, scaling: RopeScaling | None) -> tuple[Any, Any]:
    """Their layer and what turns its channels."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    if scaling is not None:
        parameters |= {
            "rope_type": "yarn", "factor": scaling.factor, "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all,
            "original_max_position_embeddings": scaling.original_positions,
        }  # fmt: skip
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        kv_lora_rank=latent.width, q_lora_rank=latent.queries, v_head_dim=latent.value,
        qk_rope_head_dim=latent.rotary, qk_nope_head_dim=HEAD_DIM - latent.rotary,
        rope_parameters=parameters, max_position_embeddings=640, rms_norm_eps=0.1,
        attn_implementation="eager",
    )  # fmt: skip
    return DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("latent", LATENTS, ids=str)
def test_transformers_has_the_same(latent: Latent, scaling: RopeScaling | None) -> None:
    ours, (peer, rotary) = make(latent, scaling), theirs(latent, scaling)
    renamed = {
        f"{THEIRS[name.removesuffix('.weight')]}.weight": p for name, p in ours.named_parameters()
    }
    peer.load_state_dict(renamed)
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    positions = torch.arange(9).expand(2, -1)
    context = Context(Rotary.at(positions, latent.rotary, 100.0, torch.float32, scaling))
    hidden = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    cotangent = torch.randn(2, 9, HIDDEN)
    mine = ours(x, context)
    other = peer(x, rotary(x, positions), hidden)[0]
    expected = torch.autograd.grad(other, [x, *peer.parameters()], cotangent)
    found = torch.autograd.grad(mine, [x, *ours.parameters()], cotangent)
    by_name = dict(zip(["x", *(n for n, _ in peer.named_parameters())], expected, strict=True))
    pairs = [(mine, other), *((g, by_name[n]) for n, g in zip(["x", *renamed], found, strict=True))]
    for a, b in pairs:
        assert (a - b).norm() <= 1e-5 * b.norm()


class Remembered:
    """What one layer has been told so far."""

    def __init__(self) -> None:
        self.seen = torch.empty(0)

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """One tensor, of one head."""
        (part,) = new
        assert layer == 0
        self.seen = torch.cat((self.seen, part), 2) if self.seen.numel() else part
        return (self.seen,)


@pytest.mark.parametrize("parts", [[5, 1, 1], [4, 3], [1] * 7], ids=str)
@pytest.mark.parametrize("latent", LATENTS, ids=str)
def test_a_cache_of_narrow_vectors_changes_nothing(latent: Latent, parts: list[int]) -> None:
    layer = make(latent, YARN).double()
    x = torch.randn(2, 7, HIDDEN, dtype=torch.float64)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    mask[1, :, 2:, :2] = False  # as of a shorter prompt, which has padding in front
    whole = layer(x, make_context(2, 7, mask))
    cache, found, start = Remembered(), [], 0
    for size in parts:
        end = start + size
        context = make_context(2, 7, mask[:, :, start:end, :end])
        rotary = context.rotary
        context.rotary = Rotary(rotary.cosine[:, :, start:end], rotary.sine[:, :, start:end])
        context.cache = cache
        found.append(layer(x[:, start:end], context))
        start = end
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)
    assert cache.seen.shape == (2, 1, 7, latent.width + latent.rotary)
