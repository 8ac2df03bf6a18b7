"""Blocks of expert state, and the order in which a step uses them.

A rank's expert has four blocks of equal size: parameters, two moments and the gradient. The order
is that of a step that goes block by block through the model (`train.micro_batches`). Training tells
it to the cache, which reads ahead; replay follows it without a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate


class BlockKind(IntEnum):
    """Kind of a block of an expert's state."""

    PARAMETERS = 0
    FIRST_MOMENT = 1
    SECOND_MOMENT = 2
    GRADIENT = 3


STATE = (BlockKind.PARAMETERS, BlockKind.FIRST_MOMENT, BlockKind.SECOND_MOMENT)
"""Blocks that last from step to step."""

MIN_BLOCKS = len(BlockKind)
"""Blocks in memory that the update of one expert needs at once."""

Used = Mapping[int, Sequence[int]]
"""Slots with tokens by layer."""


def wave_size(num_places: int) -> int:
    """Return the experts that a pass computes at once, given the blocks that fit in memory. The
    other blocks are read ahead meanwhile."""
    return max(num_places // MIN_BLOCKS, 1)


def lookahead(num_places: int) -> int:
    """Return how many coming accesses the cache is told, given the blocks that fit in memory."""
    return 16 * num_places


@dataclass(frozen=True)
class ExpertBlocks:
    """Expert state of one rank. A slot is the index of an expert among the rank's own in a
    layer."""

    experts: Mapping[int, int]
    """Number of experts by layer, in forward order."""
    num_micro_batches: int
    """Micro-batches that pass through a layer together."""
    recomputes: bool
    """True if backward computes a layer again first."""
    updates_early: bool
    """True if a layer's experts are updated right behind its backward; else after all layers."""

    @property
    def num_blocks(self) -> int:
        """Number of all blocks."""
        return len(BlockKind) * sum(self.experts.values())

    @cached_property
    def first_blocks(self) -> dict[int, int]:
        """First block of each layer."""
        sizes = [len(BlockKind) * number for number in self.experts.values()]
        return dict(zip(self.experts, accumulate(sizes, initial=0), strict=False))

    def block(self, layer: int, slot: int, kind: BlockKind) -> int:
        """Return the number of a block; blocks of one layer and kind are neighbours."""
        return self.first_blocks[layer] + kind * self.experts[layer] + slot

    def forward_order(
        self, start: int, used: Used, behind: Mapping[int, Iterable[int]], is_last_group: bool
    ) -> Iterator[int]:
        """Yield the accesses from the forward passes of layer `start` on, to the next forward.

        Args:
            start: first layer.
            used: slots with tokens, by layer.
            behind: slots by layer that have skipped updates, which need their whole state.
            is_last_group: an update follows the passes of this group of micro-batches.
        """
        for layer in self.experts:
            if layer >= start:
                yield from self._forward(layer, used[layer], frozenset(behind[layer]))
        yield from self.backward_order(max(self.experts), used, is_last_group)

    def backward_order(self, start: int, used: Used, is_last_group: bool) -> Iterator[int]:
        """Yield the accesses from the backward passes of layer `start` on, to the next forward."""
        for layer in reversed(list(self.experts)):
            if layer <= start:
                yield from self._backward(layer, used[layer])
                if is_last_group:
                    yield from self._end_layer(layer, used[layer])
        if is_last_group and not self.updates_early:
            yield from self.update_order(used)
        for layer in self.experts:
            yield from self._forward(layer, used[layer], frozenset())

    def update_order(self, used: Used) -> Iterator[int]:
        """Yield the accesses of an update of the layers in `used`."""
        for layer, slots in used.items():
            for slot in slots:
                yield from (self.block(layer, slot, kind) for kind in BlockKind)

    def _forward(self, layer: int, slots: Sequence[int], behind: frozenset[int]) -> Iterator[int]:
        for slot in slots:
            if slot in behind:
                yield from (self.block(layer, slot, kind) for kind in STATE)
        for _ in range(self.num_micro_batches):
            yield from (self.block(layer, slot, BlockKind.PARAMETERS) for slot in slots)

    def _backward(self, layer: int, slots: Sequence[int]) -> Iterator[int]:
        for _ in range(self.num_micro_batches):
            if self.recomputes:
                yield from (self.block(layer, slot, BlockKind.PARAMETERS) for slot in slots)
            for slot in slots:
                yield self.block(layer, slot, BlockKind.PARAMETERS)
                yield self.block(layer, slot, BlockKind.GRADIENT)

    def _end_layer(self, layer: int, slots: Sequence[int]) -> Iterator[int]:
        if self.updates_early:
            yield from self.update_order({layer: slots})
        else:  # For the norm.
            yield from (self.block(layer, slot, BlockKind.GRADIENT) for slot in slots)
