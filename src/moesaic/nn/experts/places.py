"""Places of a bank that holds fewer experts in memory than the rank owns.

A cache, which the banks of all layers share, holds some experts in memory and the others on a
drive. An expert returns to any place with the same bits. `Places` have parameters only, which do
not change. `StatePlaces` have the state of training: parameters, two moments and the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moesaic.facts.expert_blocks import BlockKind, waves
from moesaic.kernels.norms import block_norms, zero_norms
from moesaic.store.cache import BlockCache
from moesaic.store.expert_state import CachedExperts, ExpertState


class Places(CachedExperts):
    """Parameters of the experts of one bank, as tensors."""

    memory: Tensor
    """All places of the cache, [places, parameters of an expert]."""

    def __init__(
        self, cache: BlockCache, first_block: int, num_slots: int, width: int, dtype: torch.dtype
    ) -> None:
        """Name the blocks of `num_slots` experts from `first_block` on, each of `width` numbers."""
        super().__init__(cache, first_block, num_slots)
        self.memory = torch.from_numpy(cache.memory).view(dtype)[:, :width]
        self.leased = Counter[int]()
        """Leases that name each slot, from forward through backward."""
        self.segment: int | None = None
        """Number of this bank's segment in the accesses that the cache expects; None: it expects
        none."""

    def __len__(self) -> int:
        """Return the number of places of the cache."""
        return self.memory.shape[0]

    def waves(self, slots: Sequence[int]) -> list[Sequence[int]]:
        """Return `slots` in the groups that a pass holds at once.

        If they exceed the places, those in memory come first, before they are evicted, and the
        cache reads ahead for the next group."""
        if len(slots) <= len(self):
            if self.segment is not None:
                blocks = [self.block(slot) for slot in slots]
                self._cache.expect_from(self.segment, {self.segment: blocks})
            return [slots]
        in_memory, _ = self._cache.contents()
        order = sorted(slots, key=lambda slot: self.block(slot) not in in_memory)
        self._cache.expect([self.block(slot) for slot in order])
        size = max(len(self) // 2, 1)
        return [order[first : first + size] for first in range(0, len(order), size)]

    @contextmanager
    def request(self, slots: Sequence[int]) -> Iterator[dict[int, int]]:
        """Start to load the parameters of `slots`, and yield the place of each; they stay until the
        end."""
        with self._cache.request([self.block(slot) for slot in slots]) as places:
            yield {slot: places[self.block(slot)] for slot in slots}

    def arrivals(self, slots: Sequence[int]) -> Iterator[list[int]]:
        """Yield requested `slots` in groups, each as soon as its parameters are in memory."""
        left = {self.block(slot): slot for slot in slots}
        while left:
            yield [left.pop(block) for block in sorted(self._cache.wait_for_any(left))]

    @contextmanager
    def borrow(
        self, slot: int, kind: BlockKind = BlockKind.PARAMETERS, *, writes: bool = False
    ) -> Iterator[Tensor]:
        """Yield a block, in one dimension, to read."""
        assert not writes, "inference does not change experts"
        block = self.block(slot, kind)
        with self._cache.hold([block]) as places:
            yield self.memory[places[block]]

    def close(self) -> None:
        """Let go of the cache's memory."""
        self.memory = self.memory.new_empty(0, self.memory.shape[1])


class StatePlaces(Places, ExpertState):
    """State of the experts of one bank in training, as tensors."""

    def __init__(
        self, cache: BlockCache, first_block: int, num_slots: int, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__(cache, first_block, num_slots, width, dtype)
        self._norms: dict[int, Tensor] = {}

    def waves(self, slots: Sequence[int]) -> list[Sequence[int]]:
        """Return `slots` in the groups that a pass holds at once. The other places are for reading
        ahead."""
        return list(waves(slots, len(self)))

    @contextmanager
    def request(self, slots: Sequence[int]) -> Iterator[dict[int, int]]:
        """Start to load the parameters of `slots`, with all updates, and yield the place of each;
        they stay until the end."""
        for slot in slots:
            self.catch_up(slot)
        with super().request(slots) as places:
            yield places

    @contextmanager
    def hold_blocks(self, slot: int, kinds: Iterable[BlockKind]) -> Iterator[list[Tensor]]:
        """Load some blocks of one expert, and yield them to be written."""
        with self.change_kinds(slot, kinds) as places:
            yield [self.memory[place] for place in places]

    @contextmanager
    def borrow(
        self, slot: int, kind: BlockKind = BlockKind.PARAMETERS, *, writes: bool = False
    ) -> Iterator[Tensor]:
        """Yield a block, in one dimension, to read or to write."""
        self.catch_up(slot)
        block = self.block(slot, kind)
        with self._cache.hold([block]) as places:
            try:
                yield self.memory[places[block]]
            finally:
                if writes and not self._cache.is_blank(block):
                    self._cache.mark_dirty(block)

    @contextmanager
    def hold_gradients(self, slots: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Load the gradients of `slots`, and yield them to be written by slot. Those of slots that
        were not `touched` before have no values yet."""
        if not slots:
            yield {}
            return
        with self.change_gradients(slots) as places:
            yield {slot: self.memory[place] for slot, place in zip(slots, places, strict=True)}

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

    def pop_norms(self) -> Tensor:
        """Return the norms of the gradients' parts, expert by expert, as `block_norms` does."""
        norms, untouched = self._norms, zero_norms(self.memory[0])
        self._norms = {}
        for slot in sorted(self.touched - norms.keys()):
            norms[slot] = self._norm(slot)
        return torch.cat([norms.get(slot, untouched) for slot in range(self.num_slots)])

    def _norm(self, slot: int) -> Tensor:
        with self.hold_gradient(slot) as place:
            return block_norms([self.memory[place]])

    def close(self) -> None:
        """Let go of the cache's memory and of the optimizer."""
        super().close()
        self.apply_skipped = None
