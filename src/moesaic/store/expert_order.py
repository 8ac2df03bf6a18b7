"""Coming accesses to expert state, told to the cache as the passes of a step begin.

Training and the replay of a memory budget share it, so both read ahead alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesaic.facts.expert_blocks import ExpertBlocks, Order, Pass
from moesaic.store.cache import BlockCache
from moesaic.store.expert_state import ExpertState


class ExpertOrder:
    """Order in which a rank's passes through the layers access its expert state."""

    def __init__(
        self, cache: BlockCache, blocks: ExpertBlocks, states: Mapping[int, ExpertState]
    ) -> None:
        """Begin without expectations.

        Args:
            cache: cache of the expert state.
            blocks: the blocks of expert state.
            states: state of the experts of each layer.
        """
        self._cache, self._blocks, self._states = cache, blocks, states
        self._used = {layer: list(range(number)) for layer, number in blocks.experts.items()}
        """Slots that each layer used in its last pass; at first all."""
        self._is_last_group = True
        self._segments = list[tuple[Pass, int]]()
        """Passes and layers of the expected accesses."""

    def begin_group(self, *, is_last: bool) -> None:
        """Begin the passes of a group of micro-batches, the `is_last` or not of a step."""
        self._is_last_group = is_last
        self._expect(self._blocks.group_order(self._used, self._behind(), is_last_group=is_last))

    def begin_validation(self) -> None:
        """Begin the forward passes of a validation batch."""
        self._expect(self._blocks.validation_order(self._used, self._behind()))

    def begin_forward(self, layer: int) -> None:
        """Begin the forward passes of a layer, with or without experts."""
        self._cache.expect_from(
            next(
                number
                for number, (kind, other) in enumerate(self._segments)
                if kind is not Pass.FORWARD or other >= layer
            )
        )

    def begin_backward(self, layer: int, slots: Sequence[int] | None) -> None:
        """Begin the backward passes of a layer, which use `slots` if it has experts."""
        start = next(
            number
            for number, (kind, other) in enumerate(self._segments)
            if kind is not Pass.FORWARD and (kind is not Pass.BACKWARD or other <= layer)
        )
        changes = Order()
        if slots is not None and slots != self._used[layer]:
            self._used[layer] = list(slots)
            changes = self._blocks.later_order(layer, slots, is_last_group=self._is_last_group)
        numbers = {segment: number for number, segment in enumerate(self._segments)}
        self._cache.expect_from(start, {numbers[key]: one for key, one in changes.items()})

    def begin_update(self) -> None:
        """Begin the update of all layers."""
        self._expect(
            {
                (Pass.UPDATE, layer): self._blocks.update_order(layer, slots)
                for layer, slots in self._used.items()
            }
        )

    def _behind(self) -> dict[int, set[int]]:
        return {
            layer: {slot for slot in slots if self._states[layer].is_behind(slot)}
            for layer, slots in self._used.items()
        }

    def _expect(self, order: Order) -> None:
        self._segments = list(order)
        self._cache.expect(*order.values())
