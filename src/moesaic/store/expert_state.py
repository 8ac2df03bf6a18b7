"""Experts of a layer in a cache: parameters alone, or with moments and gradients in training.

`nn.experts.places` computes with them; the replay of a memory budget makes the same accesses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from moesaic.facts.expert_blocks import BlockKind
from moesaic.store.cache import BlockCache


class CachedExperts:
    """Experts of one layer in a cache. A slot is an owned expert's index among them."""

    def __init__(self, cache: BlockCache, first_block: int, num_slots: int) -> None:
        """Name the blocks of `num_slots` experts from `first_block` on."""
        self.num_slots, self._cache, self._first_block = num_slots, cache, first_block

    def block(self, slot: int, kind: BlockKind = BlockKind.PARAMETERS) -> int:
        """Return the number of a block; blocks of one kind are neighbours on the drive."""
        return self._first_block + kind * self.num_slots + slot


class ExpertState(CachedExperts):
    """State of the experts of one layer in training: four blocks of equal size for each."""

    def __init__(self, cache: BlockCache, first_block: int, num_slots: int) -> None:
        """Name the blocks of `num_slots` experts from `first_block` on."""
        super().__init__(cache, first_block, num_slots)
        self.touched = set[int]()
        """Slots that have a gradient."""
        self.num_updates = 0
        """Updates of the layer's experts so far."""
        self.num_applied = [0] * num_slots
        """Updates that each expert has; it skips those for which it has no gradient."""
        self.apply_skipped: Callable[[int], None] | None = None
        """The optimizer's function that applies the updates which an expert has skipped."""

    def is_behind(self, slot: int) -> bool:
        """Return whether an expert has skipped updates."""
        return self.num_applied[slot] < self.num_updates

    def catch_up(self, slot: int) -> None:
        """Apply the updates that an expert has skipped."""
        if self.is_behind(slot):
            assert self.apply_skipped is not None
            self.apply_skipped(slot)

    @contextmanager
    def hold(self, slots: Sequence[int]) -> Iterator[dict[int, int]]:
        """Load the parameters of `slots`, and yield the place of each; they stay until the end."""
        for slot in slots:
            self.catch_up(slot)
        with self._cache.hold([self.block(slot) for slot in slots]) as places:
            yield {slot: places[self.block(slot)] for slot in slots}

    @contextmanager
    def hold_gradient(self, slot: int) -> Iterator[int]:
        """Load the gradient of one expert, and yield its place."""
        block = self.block(slot, BlockKind.GRADIENT)
        with self._cache.hold([block]) as places:
            yield places[block]

    @contextmanager
    def change(self, blocks: Sequence[int], *, overwrites: bool = False) -> Iterator[list[int]]:
        """Load some blocks, and yield their places, which are written; with `overwrites`, all of
        those that come without a read."""
        with self._cache.hold(blocks, overwrites=overwrites) as places:
            yield [places[block] for block in blocks]
            for block in blocks:
                self._cache.mark_dirty(block)

    @contextmanager
    def change_gradients(self, slots: Sequence[int]) -> Iterator[list[int]]:
        """Load the gradients of `slots`, and yield their places, which are written. Those of slots
        that were not `touched` before have no values yet."""
        blocks = [self.block(slot, BlockKind.GRADIENT) for slot in slots]
        with self.change(blocks, overwrites=True) as places:
            yield places
        self.touched.update(slots)

    @contextmanager
    def change_kinds(self, slot: int, kinds: Iterable[BlockKind]) -> Iterator[list[int]]:
        """Load some blocks of one expert, and yield their places, which are written."""
        with self.change([self.block(slot, kind) for kind in kinds]) as places:
            yield places

    @contextmanager
    def update(self, slot: int) -> Iterator[list[int]]:
        """Load all blocks of an expert for its update, and yield their places; then drop the
        gradient."""
        with self.change_kinds(slot, BlockKind) as places:
            yield places
        self.drop_gradient(slot)
        self.num_applied[slot] = self.num_updates

    def drop_gradient(self, slot: int) -> None:
        """Remove the gradient of one expert."""
        self.touched.remove(slot)
        self._cache.discard(self.block(slot, BlockKind.GRADIENT))
