"""The expert bank: a layer's experts in one arena of equally strided slots, outside FSDP.

Home slots own parameters; their gradient is one tensor of the arena's shape. `acquire` begins a
layer's forward pass and returns the slots, `release` ends it. Every home expert is always in place,
so neither has anything to do yet; backward reads the arena after `release`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moesaic.nn.grouped import arena_views


class Bank(nn.Module):
    """The home slots of one layer on this rank."""

    def __init__(self, experts: Sequence[int], hidden: int, ffn: int) -> None:
        super().__init__()
        self.experts = list(experts)
        self.hidden, self.ffn = hidden, ffn
        self.arena = nn.Parameter(torch.empty(len(self.experts), 3 * ffn * hidden))

    def acquire(self) -> Tensor:
        """The arena, with every home expert in its slot, to be used until `release`."""
        return self.arena

    def release(self) -> None:
        """Forward is through with the slots; backward may not be."""

    def matrices(self, arena: Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """(expert, gate | up | down, view) of all of `arena`, a tensor of the arena's shape."""
        gate_up, down = arena_views(arena, self.ffn, self.hidden)
        for slot, expert in enumerate(self.experts):
            yield expert, "gate", gate_up[slot, : self.ffn]
            yield expert, "up", gate_up[slot, self.ffn :]
            yield expert, "down", down[slot]
