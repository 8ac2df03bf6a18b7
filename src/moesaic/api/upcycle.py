"""`moesaic.upcycle`: dense feed-forward layers become experts that start from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moesaic.api.arguments import explains_arguments
from moesaic.api.expert_group import ExpertGroup
from moesaic.api.moe import MoE
from moesaic.base.errors import ConfigError
from moesaic.nn.experts.mlp import ACTIVATIONS, ActivationName

_LINEAR_PAIRS = (("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"), ("fc1", "fc2"))
"""Names of the two layers in feed-forward networks of Hugging Face models."""


_ACTIVATION_TYPES = {
    "GELU", "GELUActivation", "GELUTanh", "NewGELUActivation", "ReLU", "SiLU", "SiLUActivation",
}  # fmt: skip
"""Types of activations in torch and `transformers`."""


class _DenseFFN(NamedTuple):
    """Feed-forward network: its parameters by name, each [out, in] or [out]."""

    activation: Literal["swiglu"] | ActivationName
    parameters: dict[str, Tensor]
    dropout: float


@explains_arguments
def upcycle(
    model: nn.Module,
    experts: int = 8,
    top_k: int = 2,
    *,
    group: dist.ProcessGroup | DeviceMesh | ExpertGroup | None = None,
    balance_loss: float = 0.01,
    z_loss: float = 0.0,
) -> nn.Module:
    """Replace the feed-forward layers of `model` by MoE layers, in place, and return it.

    Every expert starts as a copy of its layer, so that the model computes the same as before.
    Supported are the networks of Llama, Mistral, Qwen, GPT-2, GPT-NeoX and Phi as `transformers`
    has them, and `nn.Sequential(Linear, activation, Linear)`, with a `Dropout` or without.

    Args:
        model: a dense model.
        experts: experts of each layer.
        top_k: experts that compute each token. With one, only the balance loss trains the router,
            because the weight of a single expert is 1.
        group: see `MoE`.
        balance_loss: see `MoE`.
        z_loss: see `MoE`.
    """
    if group is not None and not isinstance(group, ExpertGroup):
        group = ExpertGroup(group)
    found = list(_dense_ffns(model))
    upcycled = sum(isinstance(one, MoE) for one in model.modules())
    if not found and upcycled:
        raise ConfigError(
            f"{type(model).__name__} is already upcycled: it has {upcycled} moesaic.MoE layers, "
            "and no dense feed-forward layer"
        )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} contains no feed-forward layer of a known kind (Llama, "
            "Mistral, Qwen, GPT-2, GPT-NeoX, Phi, or nn.Sequential(Linear, activation, Linear) "
            "inside a model): build its layers with moesaic.MoE"
        )
    for parent, name, dense in found:
        up = dense.parameters["up.weight"]
        layer = MoE(
            up.shape[1], up.shape[0], experts, top_k, group=group, activation=dense.activation,
            bias="up.bias" in dense.parameters, balance_loss=balance_loss, z_loss=z_loss,
            device=up.device, dtype=up.dtype,
        )  # fmt: skip
        with torch.no_grad():
            for key, parameter in layer.experts.named_parameters():
                _, matrix, kind = key.split(".")
                parameter.copy_(dense.parameters[f"{matrix.removesuffix('_proj')}.{kind}"])
        replacement = nn.Sequential(layer, nn.Dropout(dense.dropout)) if dense.dropout else layer
        _check_equal(getattr(parent, name), replacement, f"{type(parent).__name__}.{name}")
        setattr(parent, name, replacement.train(parent.training))
    return model


@torch.no_grad()
def _check_equal(dense: nn.Module, layer: nn.Module, name: str) -> None:
    """Raise unless `layer` computes what `dense` does."""
    weight = next(dense.parameters())
    if weight.is_meta:
        return
    was_training = dense.training
    width = next(one.hidden for one in layer.modules() if isinstance(one, MoE))
    x = torch.randn(4, width, device=weight.device, dtype=weight.dtype)
    expected, found = dense.eval()(x), layer.eval()(x)
    dense.train(was_training)
    tolerance = 1e-5 if weight.dtype.itemsize >= 4 else 2e-2
    if expected.shape != found.shape or not torch.allclose(
        expected, found, rtol=tolerance, atol=tolerance
    ):
        raise ConfigError(
            f"{name} computes more than its two or three linear layers say: build the model's "
            "layers with moesaic.MoE"
        )


def aux_loss(model: nn.Module) -> Tensor:
    """Return the sum of `MoE.aux_loss` over all layers of `model`, to be added to its loss."""
    layers = [one for one in model.modules() if isinstance(one, MoE)]
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no moesaic.MoE layer")
    return torch.stack([layer.aux_loss for layer in layers]).sum()


def _dense_ffns(model: nn.Module) -> Iterator[tuple[nn.Module, str, _DenseFFN]]:
    """Yield (parent, name in the parent, network) for every dense feed-forward layer."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            dense = _read_gated(child) or _read_pair(child) or _read_sequential(child)
            if dense is not None:
                yield parent, name, dense


def _read_gated(module: nn.Module) -> _DenseFFN | None:
    """Return the network of Llama and its like: down(silu(gate(x)) * up(x))."""
    if _activation_name(getattr(module, "act_fn", None)) != "silu":
        return None
    weights = dict[str, Tensor]()
    for key in ("gate", "up", "down"):
        found = _linear_parameters(getattr(module, f"{key}_proj", None))
        if set(found) != {"weight"}:
            return None
        weights[f"{key}.weight"] = found["weight"]
    return _DenseFFN("swiglu", weights, 0.0)


def _read_pair(module: nn.Module) -> _DenseFFN | None:
    """Return a network of two named layers: down(activation(up(x)))."""
    children = dict(module.named_children())
    dropout = children.pop("dropout", None)
    activation = children.pop("act", None) or children.pop("activation_fn", None)
    for up, down in _LINEAR_PAIRS:
        if set(children) == {up, down}:
            rate = dropout.p if isinstance(dropout, nn.Dropout) else 0.0
            return _two_layers(children[up], activation, children[down], rate)
    return None


def _read_sequential(module: nn.Module) -> _DenseFFN | None:
    """Return the network of `nn.Sequential(Linear, activation, Linear)`."""
    if type(module) is not nn.Sequential:
        return None
    layers = [one for one in module if not isinstance(one, nn.Dropout)]
    if len(layers) != 3:
        return None
    rate = max((one.p for one in module if isinstance(one, nn.Dropout)), default=0.0)
    return _two_layers(layers[0], layers[1], layers[2], rate)


def _two_layers(
    up: nn.Module, activation: object, down: nn.Module, dropout: float
) -> _DenseFFN | None:
    name = _activation_name(activation)
    parameters = {
        f"{key}.{kind}": value
        for key, layer in (("up", up), ("down", down))
        for kind, value in _linear_parameters(layer).items()
    }
    if name is None or not {"up.weight", "down.weight"} <= set(parameters):
        return None
    if ("up.bias" in parameters) != ("down.bias" in parameters):
        return None
    if parameters["up.weight"].shape != parameters["down.weight"].T.shape:
        return None
    return _DenseFFN(name, parameters, dropout)


def _linear_parameters(layer: object) -> dict[str, Tensor]:
    """Return weight [out, in] and bias of a linear layer; nothing for other modules."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    is_transposed = type(layer).__name__ == "Conv1D"  # GPT-2 of transformers.
    if not isinstance(weight, Tensor) or not (isinstance(layer, nn.Linear) or is_transposed):
        return {}
    found = {"weight": weight.T if is_transposed else weight}
    return found if bias is None else {**found, "bias": bias}


def _activation_name(activation: object) -> ActivationName | None:
    """Return the name of an activation, found by what it computes; None for another one."""
    if type(activation).__name__ not in _ACTIVATION_TYPES or not callable(activation):
        return None
    x = torch.linspace(-4.0, 4.0, 33)
    y = activation(x)
    found = (name for name, known in ACTIVATIONS.items() if torch.allclose(y, known(x), atol=1e-6))
    return next(found, None)
