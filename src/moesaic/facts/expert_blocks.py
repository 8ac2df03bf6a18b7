"""Blocks of expert state, and the order in which a step uses them.

A rank's expert has four blocks of equal size: parameters, two moments and the gradient. The order
is that of a step that goes block by block through the model (`train.micro_batches`). Training tells
it to the cache, which reads ahead; replay follows it without a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


class Pass(IntEnum):
    """Kind of a pass through a layer, in the order of a step."""

    FORWARD = 0
    BACKWARD = 1
    """Backward, and the early update or the norm of the gradients."""
    UPDATE = 2
    """Update after all layers."""
    NEXT_FORWARD = 3
    """Forward of the next group of micro-batches, by what is known of it."""


Order = dict[tuple[Pass, int], list[int]]
"""Blocks that each pass through each layer accesses, in order."""


def waves(items: Sequence[int], num_places: int) -> Iterator[Sequence[int]]:
    """Yield the experts that a pass computes at once, given the blocks that fit in memory. The
    other blocks are read ahead meanwhile."""
    size = max(num_places // MIN_BLOCKS, 1)
    for first in range(0, len(items), size):
        yield items[first : first + size]


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

    def group_order(
        self, used: Used, behind: Mapping[int, Collection[int]], *, is_last_group: bool
    ) -> Order:
        """Return the accesses from the forward passes of a group of micro-batches to the next
        forward passes.

        Args:
            used: slots with tokens, by layer.
            behind: slots by layer that have skipped updates, which need their whole state.
            is_last_group: an update follows the passes of this group of micro-batches.
        """
        order, later = Order(), Order()
        for layer, slots in used.items():
            order[Pass.FORWARD, layer] = list(self._forward(layer, slots, behind[layer]))
            later |= self.later_order(layer, slots, is_last_group=is_last_group)

        def place(key: tuple[Pass, int]) -> tuple[int, int]:
            kind, layer = key
            return kind, -layer if kind is Pass.BACKWARD else layer

        return order | {key: later[key] for key in sorted(later, key=place)}

    def later_order(self, layer: int, slots: Sequence[int], *, is_last_group: bool) -> Order:
        """Return the accesses of one layer that follow its forward passes over `slots`."""
        backward = list(self._backward(layer, slots))
        order = {(Pass.BACKWARD, layer): backward}
        if is_last_group and self.updates_early:
            backward += self.update_order(layer, slots)
        elif is_last_group:  # For the norm.
            backward += [self.block(layer, slot, BlockKind.GRADIENT) for slot in slots]
            order[Pass.UPDATE, layer] = self.update_order(layer, slots)
        order[Pass.NEXT_FORWARD, layer] = list(self._forward(layer, slots))
        return order

    def validation_order(self, used: Used, behind: Mapping[int, Collection[int]]) -> Order:
        """Return the accesses of a validation batch and of the next forward passes."""
        order, later, one = Order(), Order(), replace(self, num_micro_batches=1)
        for layer, slots in used.items():
            order[Pass.FORWARD, layer] = list(one._forward(layer, slots, behind[layer]))
            later[Pass.NEXT_FORWARD, layer] = list(self._forward(layer, slots))
        return order | later

    def update_order(self, layer: int, slots: Sequence[int]) -> list[int]:
        """Return the accesses of an update of one layer."""
        return [self.block(layer, slot, kind) for slot in slots for kind in BlockKind]

    def _forward(
        self, layer: int, slots: Sequence[int], behind: Collection[int] = ()
    ) -> Iterator[int]:
        for slot in slots:
            if slot in behind:
                yield from (self.block(layer, slot, kind) for kind in STATE)
        parameters = [self.block(layer, slot, BlockKind.PARAMETERS) for slot in slots]
        for _ in range(self.num_micro_batches):
            yield from parameters

    def _backward(self, layer: int, slots: Sequence[int]) -> Iterator[int]:
        parameters = [self.block(layer, slot, BlockKind.PARAMETERS) for slot in slots]
        gradients = [self.block(layer, slot, BlockKind.GRADIENT) for slot in slots]
        for _ in range(self.num_micro_batches):
            if self.recomputes:
                yield from parameters
            for pair in zip(parameters, gradients, strict=True):
                yield from pair
