"""Latent attention against a loop over heads, queries, and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moesaic.facts.job.model import LatentConfig, RopeScaling
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.latent_attention import NORM_EPSILON, LatentAttention

HIDDEN, HEADS, HEAD_DIM = 24, 3, 10
LATENTS = [
    LatentConfig(kv_lora_rank=7, qk_rope_head_dim=4, v_head_dim=6),
    LatentConfig(kv_lora_rank=7, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=9),
    LatentConfig(kv_lora_rank=7, qk_rope_head_dim=4, v_head_dim=10, q_lora_rank=9),
    LatentConfig(kv_lora_rank=7, qk_rope_head_dim=4, v_head_dim=13),
]
YARN = RopeScaling(
    kind="yarn", factor=40, original_max_positions=16, mscale=1.0, mscale_all_dim=0.7
)


def make(latent: LatentConfig, scaling: RopeScaling | None = None) -> LatentAttention:
    layer = LatentAttention(0, HIDDEN, HEADS, HEAD_DIM, latent, scaling)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def make_inputs(batch: int, sequence: int, attention: AttentionMetadata | None = None) -> Inputs:
    positions = torch.arange(sequence).expand(batch, -1)
    rotary = Rotary.at_positions(positions, LATENTS[0].qk_rope_head_dim, 100.0, torch.float64)
    return Inputs(rotary, attention=attention)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + NORM_EPSILON).sqrt() * weight


def rotate(x: Tensor, key_position: int) -> Tensor:
    out = []
    for pair in range(len(x) // 2):
        angle = key_position * 100.0 ** (-2 * pair / len(x))
        a, b = x[2 * pair], x[2 * pair + 1]
        out += [
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        ]
    return torch.stack(out)


def oracle(layer: LatentAttention, x: Tensor, mask: Tensor) -> Tensor:
    """Compute with loops; `mask` is [batch, queries, keys]."""
    weight = dict(layer.named_parameters())
    nope_dim = HEAD_DIM - layer.rope_dim

    def queries(token: Tensor) -> Tensor:
        if "q.weight" in weight:
            return weight["q.weight"] @ token
        latent_vector = norm(weight["q_down.weight"] @ token, weight["q_norm.weight"])
        return weight["q_up.weight"] @ latent_vector

    def result(row: Tensor, position: int, visible: Tensor) -> Tensor:
        out = []
        for head in range(HEADS):
            q = queries(row[position])[head * HEAD_DIM :][:HEAD_DIM]
            scores, values = [], []
            for key_position in visible.nonzero().flatten().tolist():
                kv_latent = weight["kv_down.weight"] @ row[key_position]
                latent_vector = norm(kv_latent[: layer.latent_dim], weight["kv_norm.weight"])
                size = nope_dim + layer.value_dim
                kv = (weight["kv_up.weight"] @ latent_vector)[head * size :][:size]
                score = q[:nope_dim] @ kv[:nope_dim]
                score = score + rotate(q[nope_dim:], position) @ rotate(
                    kv_latent[layer.latent_dim :], key_position
                )
                scores.append(score * layer.scale)
                values.append(kv[nope_dim:])
            out.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        return weight["o.weight"] @ torch.cat(out)

    return torch.stack([
        torch.stack([result(row, position, visible[position]) for position in range(len(row))])
        for row, visible in zip(x, mask, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("latent", LATENTS, ids=str)
def test_equals_loop_over_heads_queries_and_keys(latent: LatentConfig, packed: bool) -> None:
    layer = make(latent).double()
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    metadata = None
    if packed:
        mask[1, 3:, :3] = False
        metadata = AttentionMetadata.packed(torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]]))
    inputs = make_inputs(2, 6, metadata)
    cotangent = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    actual = []
    for out in (layer(x, inputs)[0], oracle(layer, x, mask)):
        grads = torch.autograd.grad(out, [x, *layer.parameters()], cotangent)
        actual.append([out, *grads])
    for ours, expected in zip(*actual, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_no_tokens_give_zero_gradients() -> None:
    layer = make(LATENTS[1]).double()
    layer(torch.zeros(0, 6, HIDDEN, dtype=torch.float64), make_inputs(0, 6))[0].sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


class ConcatCache:
    """Cache of one layer."""

    def __init__(self) -> None:
        self.entries = torch.empty(0)

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append one tensor with one head."""
        (part,) = new
        assert layer == 0
        self.entries = torch.cat((self.entries, part), 2) if self.entries.numel() else part
        return (self.entries,)


@pytest.mark.parametrize("chunk_sizes", [[5, 1, 1], [4, 3], [1] * 7], ids=str)
@pytest.mark.parametrize("latent", LATENTS, ids=str)
def test_latent_cache_equals_full_attention(latent: LatentConfig, chunk_sizes: list[int]) -> None:
    layer = make(latent, YARN).double()
    x = torch.randn(1, 7, HIDDEN, dtype=torch.float64)
    whole, _ = layer(x, make_inputs(1, 7))
    cache, actual, start = ConcatCache(), [], 0
    for size in chunk_sizes:
        end = start + size
        rotary = make_inputs(1, 7).rotary
        rotary = Rotary(rotary.cosine[:, :, start:end], rotary.sine[:, :, start:end])
        attention = AttentionMetadata.causal(1, size, end)
        inputs = Inputs(rotary, attention=attention, cache=cache)
        actual.append(layer(x[:, start:end], inputs)[0])
        start = end
    torch.testing.assert_close(torch.cat(actual, 1), whole, rtol=1e-9, atol=1e-9)
    assert cache.entries.shape == (1, 1, 7, latent.kv_lora_rank + latent.qk_rope_head_dim)
