"""What the blocks of a model share while one micro-batch passes through them.

The context carries facts down (positions, masks, counters for randomness) and takes facts up
(auxiliary losses, counts of tokens by expert). What goes up is keyed by layer, so that a layer that
is computed twice, as under activation checkpointing, says it once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moesaic.facts.balance import Balance
from moesaic.facts.job.model import RopeScaling
from moesaic.nn.guests import Guests
from moesaic.nn.rope import frequencies, sharpness


class Cache(Protocol):
    """What attention remembers of earlier positions: keys and values, or what stands for both."""

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new positions of one layer and return all of them.

        Each tensor is [batch, heads, positions, channels].
        """


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of a micro-batch's positions, [batch, 1, sequence, head_dim / 2]."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def at(
        cls,
        positions: Tensor,
        head_dim: int,
        theta: float,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> Rotary:
        """Rotary angles at `positions`, computed in fp32 or better."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        places, factor = positions[:, None, :, None].to(wide), sharpness(scaling)
        angles = places * frequencies(head_dim, theta, scaling, places)
        return cls((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


@dataclass(frozen=True)
class LayerFacts:
    """What one expert layer reports of one micro-batch."""

    balance: Tensor
    """This rank's share of the load-balance loss; shares add up to the loss. Carries gradient."""
    z: Tensor
    """This rank's share of the z-loss. Carries gradient."""
    asked: Tensor
    """Assignments to each expert over all ranks before drops, [experts]; on the host, or on the
    device if nothing has waited for it."""
    counts: Tensor
    """Tokens sent to each expert by each rank after drops, [ranks, experts]; likewise."""
    dropped: int
    """Assignments dropped for want of capacity, over all ranks."""
    visits: Tensor | None
    """Tokens of each rank that stop at each rank of its group, and at each host, where they travel
    once; on the host."""
    flips: int
    """This rank's assignments in which a replayed choice differs from the router's own."""
    spread: Balance | None = None
    """Which experts had copies, and who computed what; None: nobody was asked."""


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What matrix products take in each precision that is not as wide as the parameters."""


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A stretch in which matrix products take `precision`; parameters keep what they are in."""
    if precision not in NARROW:
        return nullcontext()
    # Every weight is cast once a pass; the cache would only keep what layers have let go.
    return torch.autocast(device.type, NARROW[precision], cache_enabled=False)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products take here: autocast's where it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Context:
    """One micro-batch on its way through the blocks.

    Not a dataclass on purpose: FSDP rebuilds dataclasses among a module's inputs, dictionaries and
    all, and what layers report would be lost in the copy.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary
        self.run = slice(None)
        """Which of the micro-batch's tokens, sample after sample, the stream has on this rank."""
        self.mask: Tensor | None = None
        """Which keys each query sees, bool, broadcastable to [batch, heads, queries, keys]; None:
        causal."""
        self.training = False
        self.seed = 0
        self.step = 0
        self.samples: Tensor | None = None
        """Global sample index of each row, [batch]."""
        self.positions: Tensor | None = None
        """Place of each token in its sample, [sequence]; with `samples` it names any token."""
        self.targets: Tensor | None = None
        """Tokens to predict, [batch, sequence], -100 where none; the head then returns a loss."""
        self.loss_scale = 1.0
        """Factor on the summed loss: one over the global number of targets, times fp16's scale."""
        self.cache: Cache | None = None
        self.replay: dict[int, Tensor] | None = None
        """Recorded choices by layer, [tokens, choices], as in `choices`; empty: none."""
        self.keep_choices = False
        """Whether expert layers leave their choices in `choices`."""
        self.choices: dict[int, Tensor] = {}
        """Experts chosen by layer, [tokens, choices]; -1 - e where e was chosen and given up."""
        self.guests: dict[int, Guests | None] = {}
        """Experts that are on their way to this rank, by layer, until that comes."""
        self.layers: dict[int, LayerFacts] = {}
        """What each expert layer reports."""
