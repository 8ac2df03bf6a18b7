"""Inputs of a model's blocks for one micro-batch: positions, attention metadata, and randomness."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from moesaic.facts.job.distill import Divergence
from moesaic.facts.job.model import RopeScaling
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.rope import attention_factor, frequencies

ByProduct = Literal[
    "hidden_states", "label_logits", "queries_and_keys", "router_logits", "router_choices"
]  # fmt: skip
"""Tensor of a block that its report carries if `Inputs.keep` names it."""


class Cache(Protocol):
    """Cache of attention for earlier positions: keys and values, or a latent of both."""

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Write new positions of one layer, and return all that `AttentionMetadata` refers to.

        Each tensor is [batch, heads, positions, channels].
        """


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of a micro-batch's positions, [batch, 1, sequence, head_dim / 2]."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def at_positions(
        cls,
        positions: Tensor,
        head_dim: int,
        theta: float,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> Rotary:
        """Return the rotary angles at `positions`, computed in fp32 or wider."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        positions, factor = positions[:, None, :, None].to(dtype), attention_factor(scaling)
        angles = positions * frequencies(head_dim, theta, scaling, positions)
        return cls((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Matmul dtype of each precision narrower than the parameters."""


def autocast_to(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return an autocast context with matmuls in `precision`; parameters keep their dtype."""
    if precision not in LOW_PRECISION:
        return nullcontext()
    # Weights are cast once per pass, so the autocast cache would only hold memory.
    return torch.autocast(device.type, LOW_PRECISION[precision], cache_enabled=False)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the matmul dtype here: autocast's where it is on, else that of `x`."""
    device_type = x.device.type
    return (
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    )


@dataclass(frozen=True, eq=False)
class HeadFollower:
    """Student whose logits and losses the head of another model computes, chunk by chunk of tokens.

    The factors already hold the loss weight, one over the global number of targets, and the scale.
    """

    hidden: Tensor
    """Normed input of the student's projection, [tokens, hidden]. With gradient."""
    weight: Tensor
    """Student's projection onto the vocabulary, [vocab, hidden]. With gradient."""
    text: float
    """Factor on the cross-entropy, summed over tokens with a target."""
    logits: float
    """Factor on the divergence, summed over tokens with a target."""
    divergence: Divergence = "forward"
    temperature: float = 1.0
    """Divisor of both models' logits in the divergence, which has no other factor for it."""
    teacher: int = -1
    """Index of an earlier follower; -1: the model whose head runs."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of all blocks for one micro-batch; each block returns its results in a report.

    FSDP may copy a dataclass among the inputs of a module.
    """

    rotary: Rotary
    token_slice: slice = field(default_factory=lambda: slice(None))
    """Tokens of the micro-batch that this rank has, as a range over samples in order."""
    attention: AttentionMetadata | None = None
    """Keys that each query attends to; None: causal."""
    training: bool = False
    seed: int = 0
    step: int = 0
    samples: Tensor | None = None
    """Global sample index of each row, [batch]."""
    positions: Tensor | None = None
    """Position of each token in its sample, [sequence]; with `samples` it identifies a token."""
    targets: Tensor | None = None
    """Tokens to predict, [batch, sequence], -100 for none; if set, the head returns a loss."""
    loss_scale: float = 1.0
    """Factor on the summed loss: one over the global number of targets, times the fp16 loss
    scale."""
    cache: Cache | None = None
    routing_replay: Mapping[int, Tensor] | None = None
    """Recorded choices by layer, [tokens, choices], encoded as in a report; empty: none."""
    keep: frozenset[ByProduct] = frozenset()
    """By-products that blocks return in their reports."""
    keep_layers: frozenset[int] | None = None
    """Layers that keep hidden states, queries and keys; None: all. Routers keep theirs in all."""
    project: bool = True
    """False: the head returns its normed input, [batch, sequence, hidden], whatever the targets."""
    followers: tuple[HeadFollower, ...] = ()
    """Students whose losses the head returns in its report; they need `targets`."""

    def keeps(self, product: ByProduct, layer: int) -> bool:
        """Return whether a layer keeps its hidden states, or its queries and keys."""
        return product in self.keep and (self.keep_layers is None or layer in self.keep_layers)
