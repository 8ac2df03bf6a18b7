"""Students behind the head of their teacher, in whole models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.base.config import parse
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel, auxiliary_layer
from moesaic.models.state import tensor_shards
from moesaic.nn.attention import Attention
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.divergence import attention_divergence
from moesaic.nn.inputs import HeadFollower, Inputs, autocast_to

SMALL = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 8, "vocab": 19}
TOKENS = torch.arange(24).view(2, 12) % 19
METADATA = AttentionMetadata.packed(torch.tensor([[0] * 12, [0] * 5 + [1] * 7]))


def build(name: str = "tiny-dense", seed: int = 0, **changes: object) -> LanguageModel:
    model = LanguageModel(parse(ModelConfig, {**PRESETS[name], **SMALL, **changes}, name))
    InitialSource(seed, 0.3).fill(tensor_shards(model))
    return model


def make_inputs(model: LanguageModel, **changes: object) -> Inputs:
    positions = torch.arange(12).repeat(2, 1)
    plain = Inputs(
        model.rotary(positions), attention=METADATA, targets=TOKENS.roll(-1, 1), loss_scale=0.1
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def follow(student: LanguageModel) -> HeadFollower:
    hidden, _ = student(TOKENS, make_inputs(student, project=False))
    return HeadFollower(hidden.flatten(0, 1), student.head.weight, text=0.1, logits=0.2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_serves_a_student(precision: str, frozen: bool) -> None:
    """The student's text loss is its own head's, and the teacher's loss is as without it."""
    teacher, student = build(), build(seed=1, hidden=8, heads=2)
    with autocast_to(precision, torch.device("cpu")):
        alone, _ = teacher(TOKENS, make_inputs(teacher))
        expected, _ = student(TOKENS, make_inputs(student))
        follower = follow(student)
        with torch.set_grad_enabled(not frozen):
            loss, reports = teacher(TOKENS, make_inputs(teacher, followers=(follower,)))
    assert torch.equal(loss, alone)
    assert loss.requires_grad is not frozen
    losses = reports["head"].follower_losses
    assert losses is not None
    torch.testing.assert_close(0.1 * losses.sums[0, 0], expected.detach(), rtol=1e-5, atol=1e-5)
    losses.loss.sum().backward()
    assert all(one.grad is not None and bool(one.grad.any()) for one in student.parameters())
    assert not any(has_grad(one) for one in teacher.parameters())


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-olmoe", "tiny-qwen3"])
def test_an_auxiliary_layer_is_the_attention_of_a_layer(name: str) -> None:
    """With the weights of an attention, it has its queries and keys."""
    model = build(name, clip_qkv=0.5 if name == "tiny-olmoe" else None)
    layer = auxiliary_layer(model.config, model.config)
    attention = model.layers[1].attention
    assert isinstance(attention, Attention)
    own = {
        "norm.weight": model.layers[1].attention_norm.weight,
        **dict(attention.named_parameters()),
    }
    layer.load_state_dict({key: own[key] for key in layer.state_dict()})
    inputs = make_inputs(model, keep=frozenset({"queries_and_keys", "hidden_states"}))
    _, reports = model(TOKENS, inputs)
    kept, hidden = reports["layers.1"].attention, reports["layers.0"].hidden_states
    assert kept is not None
    assert hidden is not None
    for first, second in zip(layer(hidden, inputs)[:2], kept[:2], strict=True):
        assert torch.equal(first, second)


def test_an_auxiliary_layer_trains_all_layers() -> None:
    """Attention of the last layer leaves its values and FFN without a gradient."""
    teacher, student = build(heads=8, kv_heads=4), build(seed=1, hidden=8, heads=2)
    layer = auxiliary_layer(student.config, teacher.config)
    for one in layer.parameters():
        torch.nn.init.normal_(one)
    keep = {"keep": frozenset({"queries_and_keys", "hidden_states"}), "keep_layers": {1}}
    target = teacher(TOKENS, make_inputs(teacher, **keep))[1]["layers.1"].attention
    hidden = student(TOKENS, make_inputs(student, **keep))[1]["layers.1"].hidden_states
    own = layer(hidden, make_inputs(student))
    attention_divergence(target, [own], METADATA, torch.ones(2, 12)).sum().backward()
    untouched = {name for name, one in student.named_parameters() if not has_grad(one)}
    assert untouched == {"head.norm.weight", "head.weight"}
    assert all(has_grad(one) for one in layer.parameters())
    assert not any(has_grad(one) for one in teacher.parameters())


def has_grad(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())
