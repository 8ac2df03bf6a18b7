"""Places of a bank that holds fewer experts in memory than the rank owns.

The state of each expert is four blocks of equal size: parameters, two moments and the gradient. A
cache, which the banks of all layers share, holds some of them in memory and the others on a drive.
A block returns to any place with the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moesaic.facts.expert_blocks import BlockKind, wave_size
from moesaic.kernels.norms import block_norms
from moesaic.store.cache import BlockCache


class Places:
    """State of the experts of one bank. A slot is an owned expert's index in its bank."""

    memory: Tensor
    """All places of the cache, [places, parameters of an expert]."""

    def __init__(
        self, cache: BlockCache, first_block: int, num_slots: int, width: int, dtype: torch.dtype
    ) -> None:
        """Name the blocks of `num_slots` experts from `first_block` on, each of `width` numbers."""
        self.num_slots, self._cache, self._first_block = num_slots, cache, first_block
        self.memory = torch.from_numpy(cache.memory).view(dtype)[:, :width]
        self.leased = Counter[int]()
        """Leases that name each slot, from forward through backward."""
        self.touched = set[int]()
        """Slots that have a gradient."""
        self.num_updates = 0
        """Updates of the bank's experts so far."""
        self.num_applied = [0] * num_slots
        """Updates that each expert has; it skips those for which it has no gradient."""
        self.apply_skipped: Callable[[int], None] | None = None
        """The optimizer's function that applies the updates which an expert has skipped."""
        self._norms: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of places of the cache."""
        return self.memory.shape[0]

    @property
    def wave_size(self) -> int:
        """Experts that a pass computes at once. The other places are for reading ahead."""
        return wave_size(len(self))

    def block(self, slot: int, kind: BlockKind = BlockKind.PARAMETERS) -> int:
        """Return the number of a block; blocks of one kind are neighbours on the drive."""
        return self._first_block + kind * self.num_slots + slot

    def is_in_memory(self, slot: int, kind: BlockKind = BlockKind.PARAMETERS) -> bool:
        """Return whether a block has a place now."""
        return self._cache.is_in_memory(self.block(slot, kind))

    @contextmanager
    def hold(self, slots: Sequence[int]) -> Iterator[dict[int, int]]:
        """Load the parameters of `slots`, and yield the place of each; they stay until the end."""
        for slot in slots:
            self._catch_up(slot)
        with self._cache.hold([self.block(slot) for slot in slots]) as places:
            yield {slot: places[self.block(slot)] for slot in slots}

    @contextmanager
    def hold_blocks(self, slot: int, kinds: Iterable[BlockKind]) -> Iterator[list[Tensor]]:
        """Load some blocks of one expert, and yield them to be written."""
        blocks = [self.block(slot, kind) for kind in kinds]
        with self._cache.hold(blocks) as places:
            yield [self.memory[places[block]] for block in blocks]
            for block in blocks:
                self._cache.mark_dirty(block)

    @contextmanager
    def borrow(self, slot: int, kind: BlockKind = BlockKind.PARAMETERS) -> Iterator[Tensor]:
        """Yield a block, in one dimension, to read or to write."""
        self._catch_up(slot)
        block = self.block(slot, kind)
        with self._cache.hold([block]) as places:
            before = self._cache.checksum(block)
            try:
                yield self.memory[places[block]]
            finally:
                if self._cache.checksum(block) != before:
                    self._cache.mark_dirty(block)

    @contextmanager
    def hold_gradients(self, slots: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Load the gradients of `slots`, and yield them to be written by slot. Those of slots that
        were not `touched` before have no values yet."""
        if not slots:
            yield {}
            return
        blocks = {slot: self.block(slot, BlockKind.GRADIENT) for slot in slots}
        with self._cache.hold(list(blocks.values()), overwrites=True) as places:
            yield {slot: self.memory[places[block]] for slot, block in blocks.items()}
            for block in blocks.values():
                self._cache.mark_dirty(block)
        self.touched.update(slots)

    @torch.no_grad()
    def add_gradient(self, slot: int, gradient: Tensor) -> None:
        """Add to the gradient of one expert."""
        with self.hold_gradients([slot]) as targets:
            if slot in self.touched:
                targets[slot] += gradient
            else:
                targets[slot].copy_(gradient)

    def keep_norm(self, slot: int, gradient: Tensor) -> None:
        """Count the gradient of one expert in the next `pop_norms`, though it is dropped before."""
        self._norms[slot] = block_norms([gradient])

    def keep_norms(self) -> None:
        """Compute the norms of all gradients while they are likely in memory, for `pop_norms`."""
        for slot in sorted(self.touched):
            self._norms[slot] = self._norm(slot)

    def drop_gradient(self, slot: int) -> None:
        """Remove the gradient of one expert."""
        self.touched.remove(slot)
        self._cache.discard(self.block(slot, BlockKind.GRADIENT))

    def pop_norms(self) -> Tensor:
        """Return the norms of the gradients' parts, expert by expert, as `block_norms` does."""
        norms = [
            self._norms[slot] if slot in self._norms else self._norm(slot)
            for slot in range(self.num_slots)
        ]
        self._norms.clear()
        return torch.cat(norms)

    def _norm(self, slot: int) -> Tensor:
        if slot not in self.touched:
            return block_norms([torch.zeros_like(self.memory[0])])
        with self._cache.hold([self.block(slot, BlockKind.GRADIENT)]) as places:
            (place,) = places.values()
            return block_norms([self.memory[place]])

    def close(self) -> None:
        """Let go of the cache's memory and of the optimizer."""
        self.memory, self.apply_skipped = self.memory.new_empty(0, self.memory.shape[1]), None

    def is_behind(self, slot: int) -> bool:
        """Return whether an expert has skipped updates."""
        return self.num_applied[slot] < self.num_updates

    def _catch_up(self, slot: int) -> None:
        if self.is_behind(slot):
            assert self.apply_skipped is not None
            self.apply_skipped(slot)
