"""Places of a bank that holds fewer experts in memory than the rank owns.

The other experts' parameters wait on the host. An expert returns to any free place with the same
bits. The least recently used expert leaves, one that no lease names if possible, and never one in
use. Gradients of touched experts live here, because the arena holds no row for an evicted expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moesaic.base.errors import ConfigError


class Places(nn.Module):
    """Memory of some of a bank's experts. A slot is an owned expert's index in its bank."""

    memory: Tensor
    """Parameters of the experts in memory, [places, parameters of an expert]."""

    def __init__(self, num_places: int, num_slots: int, width: int) -> None:
        super().__init__()
        if num_places < 1:
            raise ConfigError(f"places = {num_places} holds no expert: give at least 1")
        self.num_slots = num_slots
        self.register_buffer("memory", torch.empty(num_places, width), persistent=False)
        self.leased = Counter[int]()
        """Leases that name each slot, from forward through backward."""
        self._place_of_slot: dict[int, int] = {}
        """Place of each expert in memory, least recently used first."""
        self._evicted: dict[int, Tensor] = {}
        self._num_holds = Counter[int]()
        self._gradients: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of places."""
        return self.memory.shape[0]

    def is_in_memory(self, slot: int) -> bool:
        """Return whether the expert of `slot` has a place now."""
        return slot in self._place_of_slot

    @contextmanager
    def hold(self, slots: Iterable[int]) -> Iterator[dict[int, int]]:
        """Load the experts of `slots`, and yield the place of each; they stay until the end."""
        slots = tuple(slots)
        self._num_holds.update(slots)
        try:
            yield {slot: self._load(slot) for slot in slots}
        finally:
            self._num_holds.subtract(slots)

    @contextmanager
    def borrow(self, slot: int) -> Iterator[Tensor]:
        """Yield the parameters of one expert, in one dimension, to read or to write."""
        with self.hold([slot]) as places:
            yield self.memory[places[slot]]

    @torch.no_grad()
    def _load(self, slot: int) -> int:
        """Return the place of an expert after it has been read, if it was evicted."""
        place = self._place_of_slot.pop(slot, None)
        if place is None:
            place = self._find_place()
            if slot in self._evicted:
                self.memory[place].copy_(self._evicted.pop(slot))
        self._place_of_slot[slot] = place
        return place

    def _find_place(self) -> int:
        """Return a free place; evict an expert if there is none."""
        if len(self._place_of_slot) < len(self):
            return len(self._place_of_slot)
        idle = [slot for slot in self._place_of_slot if not self._num_holds[slot]]
        if not idle:
            raise RuntimeError(f"all {len(self)} places are in use: hold fewer experts at once")
        victim = min(idle, key=lambda slot: self.leased[slot] > 0)
        place = self._place_of_slot.pop(victim)
        self._evicted[victim] = self.memory[place].to("cpu", copy=True)
        return place

    def gradient(self, slot: int) -> Tensor:
        """Return the gradient of one expert, writable in place; zeros if backward has not reached
        it."""
        if slot not in self._gradients:
            self._gradients[slot] = torch.zeros_like(self.memory[0])
        return self._gradients[slot]

    def add_gradient(self, slot: int, gradient: Tensor) -> None:
        """Add to the gradient of one expert; the caller gives `gradient` away."""
        if slot in self._gradients:
            self._gradients[slot] += gradient
        else:
            self._gradients[slot] = gradient

    def clear_gradients(self) -> None:
        """Remove all gradients."""
        self._gradients.clear()
