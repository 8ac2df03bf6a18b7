"""State of one micro-batch on its way through the blocks of a model.

The context hands down positions, attention metadata, and counters for randomness. It collects
auxiliary losses and counts of tokens by expert. These are keyed by layer, so that a layer
recomputed under activation checkpointing reports once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moesaic.facts.balance import BalanceDecision
from moesaic.facts.job.model import RopeScaling
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.experts.replicas import Replicas
from moesaic.nn.rope import attention_factor, frequencies


class Cache(Protocol):
    """Cache of attention for earlier positions: keys and values, or a latent of both."""

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new positions of one layer, and return all of them.

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


@dataclass(frozen=True)
class LayerFacts:
    """Report of one MoE layer for one micro-batch."""

    balance_loss: Tensor
    """This rank's share of the load-balance loss; the shares of all ranks add up. With gradient."""
    z_loss: Tensor
    """This rank's share of the z-loss. With gradient."""
    requested: Tensor
    """Assignments per expert over all ranks before drops, [experts]; on the host, or on the device
    if the host has not waited."""
    counts: Tensor
    """Assignments of each rank to each expert after drops, [ranks, experts]; on host or device
    alike."""
    num_dropped: int
    """Assignments dropped by capacity, over all ranks."""
    dedup_counts: Tensor | None
    """Deduplicated tokens of each rank for each EP rank, then for each host, [ranks, destinations];
    on the host. None without deduplication."""
    num_replay_mismatches: int
    """This rank's assignments in which a replayed choice differs from the router's own."""
    balance_decision: BalanceDecision | None = None
    """Replicas and rerouted rows; None without balancing."""


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


class Context:
    """Context of one micro-batch.

    It is no dataclass on purpose: FSDP copies dataclasses among a module's inputs, with their
    dictionaries, and layer reports would be lost.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary
        self.token_slice = slice(None)
        """Tokens of the micro-batch that this rank has, as a range over samples in order."""
        self.attention: AttentionMetadata | None = None
        """Keys that each query attends to; None: causal."""
        self.training = False
        self.seed = 0
        self.step = 0
        self.samples: Tensor | None = None
        """Global sample index of each row, [batch]."""
        self.positions: Tensor | None = None
        """Position of each token in its sample, [sequence]; with `samples` it identifies a token.
        """
        self.targets: Tensor | None = None
        """Tokens to predict, [batch, sequence], -100 for none; if set, the head returns a loss."""
        self.loss_scale = 1.0
        """Factor on the summed loss: one over the global number of targets, times the fp16 loss
        scale."""
        self.cache: Cache | None = None
        self.replay: dict[int, Tensor] | None = None
        """Recorded choices by layer, [tokens, choices], encoded as in `choices`; empty: none."""
        self.keep_choices = False
        """True if MoE layers record their choices in `choices`."""
        self.choices: dict[int, Tensor] = {}
        """Chosen experts by layer, [tokens, choices]; -1 - e where the router dropped expert e."""
        self.replicas: dict[int, Replicas | None] = {}
        """Replicas in transfer to this rank by layer, until the layer takes them."""
        self.layer_facts: dict[int, LayerFacts] = {}
        """Report of each MoE layer."""
