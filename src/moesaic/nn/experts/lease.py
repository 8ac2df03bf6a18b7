"""Lease: use of a bank's experts by one forward pass, from forward through backward.

A lease holds places only while a pass computes. In between, its experts may be evicted; backward
gets them back with the same bits. Experts that exceed the places are computed in waves, one group
after the other. The gradients of the pass go to the lease, which adds them where gradients live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from moesaic.dist.all_to_all import AsyncAllToAll
from moesaic.dist.clock import Clock
from moesaic.facts.job.train import MatmulBackend
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.places import Places, StatePlaces
from moesaic.nn.experts.tiles import (
    Matrices,
    SlotRange,
    for_each_arena,
    for_each_range,
    memory_bound_range,
    single_slot_ranges,
    split_slots,
)


class Lease:
    """Use of a bank with every expert in memory, over one or several calls in a forward pass.

    The first backward writes the gradient of every slot, later ones add to it, and the last one
    returns it.
    """

    def __init__(
        self,
        arena: Tensor,
        ffn: int,
        num_calls: int = 1,
        replicas: Tensor | None = None,
        all_to_alls: Sequence[AsyncAllToAll] = (),
        clock: Clock | None = None,
    ) -> None:
        """Use the experts of `arena`, which have `ffn` channels.

        Args:
            arena: parameters of the own experts.
            ffn: FFN channels of an expert.
            num_calls: calls in the pass.
            replicas: parameters of replicas of other ranks' experts.
            all_to_alls: transfers of replicas, in the order of their slots. The replicas' gradients
                return through them and are added in `SendReplicas.backward`.
            clock: records the time of the experts.
        """
        self.arena, self.ffn, self.clock = arena, ffn, clock
        self.backend: MatmulBackend = "torch"
        self._version, self._num_owned = arena._version, len(arena)
        self._replicas, self._all_to_alls = replicas, all_to_alls
        self._num_calls, self._num_forward, self._num_backward = num_calls, 0, 0
        self._are_replicas_received = False

    def release(self) -> None:
        """End the lease: nothing follows that needs its experts."""

    def end_call(self) -> None:
        """End the backward of one call; the last one releases the lease."""

    def matrices(self) -> tuple[Matrices, Matrices]:
        """Return the gate-up and down matrices of own experts, then of replicas. Ranges find theirs
        in them."""
        if self.arena._version != self._version:
            raise RuntimeError("experts changed between forward and backward: update them after it")
        return self._views(self._arenas())

    def _arenas(self) -> list[Tensor]:
        return [self.arena] if self._replicas is None else [self.arena, self._replicas]

    def _views(self, arenas: Sequence[Tensor]) -> tuple[Matrices, Matrices]:
        gate_up, down = zip(*(arena_views(arena, self.ffn) for arena in arenas), strict=True)
        return gate_up, down

    def split(
        self, tokens: Tensor, permutation: Permutation, *, is_forward: bool = False
    ) -> list[SlotRange]:
        """Return the ranges of slots that suit forward and backward, or forward alone."""
        if self._replicas is not None:  # `counts` is padded to the most replicas of any rank.
            num_slots = self._num_owned + len(self._replicas)
            permutation = permutation._replace(counts=permutation.counts[:num_slots])
        if is_forward and self.backend == "torch":
            _, down = self.matrices()
            one_range = memory_bound_range(tokens, permutation.counts, down, self._num_owned)
            if one_range is not None:
                return [one_range]
        return split_slots(tokens, permutation, self.ffn, self._num_owned, self.backend)

    def for_each(
        self,
        ranges: list[SlotRange],
        compute: Callable[[int], None],
        between: Callable[[], None] | None = None,
        *,
        replicas_first: bool = False,
    ) -> None:
        """Call `compute` with the index of each range, `between` between experts and replicas."""
        for_each_arena(ranges, compute, between, replicas_first=replicas_first)

    def finish_forward(self, *, replicas_have_rows: bool) -> None:
        """Wait for replicas before a forward call computes them.

        The wait happens when they have rows, or in the last call. It must happen in any case: send
        buffers are held until then. Recomputation may also skip what follows the last call.
        """
        self._num_forward += 1
        due = replicas_have_rows or self._num_forward == self._num_calls
        if due and not self._are_replicas_received:
            self._are_replicas_received = True
            for transfer in self._all_to_alls:
                transfer.wait()

    def start_backward(self) -> None:
        """Prepare for the gradients of one more call."""
        if not self._num_backward:
            dtype = self.arena.dtype  # Replicas may have a narrower dtype.
            self._grads = [torch.empty_like(arena, dtype=dtype) for arena in self._arenas()]
            self._grad_gate_up, self._grad_down = self._views(self._grads)
        self._num_backward += 1

    def add_down(self, slot_range: SlotRange, grad: Tensor, rows: Tensor) -> None:
        """Add the gradient of the range's down matrices."""
        _, down = self._gradient_views(slot_range)
        slot_range.wgrad(grad, rows, down, accumulate=self._num_backward > 1)

    def add_gate_up(self, slot_range: SlotRange, grad: Tensor, rows: Tensor) -> None:
        """Add the gradient of the range's gate and up matrices."""
        gate_up, _ = self._gradient_views(slot_range)
        slot_range.wgrad(grad, rows, gate_up, accumulate=self._num_backward > 1)

    def _gradient_views(self, slot_range: SlotRange) -> tuple[Tensor, Tensor]:
        """Return the gradients of the range's gate-up and down matrices."""
        arena, slots = slot_range.arena, slot_range.slots
        return self._grad_gate_up[arena][slots], self._grad_down[arena][slots]

    def send_replica_gradients(self) -> None:
        """Start to send the replicas' gradients after the last call, in reverse: the owner awaits
        them so."""
        if not self._all_to_alls or self._num_backward < self._num_calls:
            return
        last = len(self._grads[1])
        for transfer in reversed(self._all_to_alls):
            transfer.start_backward(self._grads[1][last - transfer.num_received : last])
            last -= transfer.num_received

    def finish_backward(self) -> Tensor | None:
        """Return the arena's gradient after the last call, and let go of it and of replicas; None
        before."""
        if self._num_backward < self._num_calls:
            return None
        grad_arena, self._num_backward = self._grads[0], 0
        del self._grads, self._grad_gate_up, self._grad_down
        self._replicas = None
        return grad_arena


class PlacesLease(Lease):
    """Use of a bank with fewer places than experts. Only experts with tokens are loaded.

    Each range is one slot, in the place that its expert has at the time. Experts in memory compute
    while others are read. The arena has no rows and stands for the experts in the graph.
    """

    def __init__(
        self,
        arena: Tensor,
        ffn: int,
        places: Places,
        num_calls: int = 1,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(arena, ffn, num_calls, clock=clock)
        self._places, self._num_owned = places, places.num_slots
        self._slots: set[int] = set()
        self._num_ended = 0

    def name(self, slots: Iterable[int]) -> None:
        """Add the experts of `slots` to those that this pass uses."""
        new = set(slots) - self._slots
        self._slots |= new
        self._places.leased.update(new)

    def release(self) -> None:
        """End the use of all named experts."""
        self._places.leased.subtract(self._slots)
        self._slots.clear()

    def end_call(self) -> None:
        """End the backward of one call; the last one releases the lease."""
        self._num_ended += 1
        if self._num_ended == self._num_calls:
            self._num_ended = 0
            self.release()

    def __del__(self) -> None:
        """Release a lease whose graph ends without backward, as in recomputation."""
        self.release()

    def matrices(self) -> tuple[Matrices, Matrices]:
        """Return the gate-up and down matrices of all places."""
        return self._views([self._places.memory])

    def split(
        self, tokens: Tensor, permutation: Permutation, *, is_forward: bool = False
    ) -> list[SlotRange]:
        """Return the touched slots as ranges, and name their experts."""
        permutation = permutation._replace(counts=permutation.counts.cpu())
        ranges = super().split(tokens, permutation, is_forward=is_forward)
        result = single_slot_ranges(ranges)
        self.name(slot for one in result for slot in one.slot_indices)
        return result

    def for_each(
        self,
        ranges: list[SlotRange],
        compute: Callable[[int], None],
        between: Callable[[], None] | None = None,
        *,
        replicas_first: bool = False,
    ) -> None:
        """Call `compute` with the index of each range, in waves that fit the places."""
        del between, replicas_first  # There are no replicas.
        index_of_slot = {
            slot: index for index, one in enumerate(ranges) for slot in one.slot_indices
        }
        if not index_of_slot:  # One range without rows.
            ranges[0] = replace(ranges[0], places=slice(0, 0))
            compute(0)
        for slots in self._places.waves(list(index_of_slot)):
            with self._places.request(slots) as place_of_slot, self._hold_gradients(slots):
                for slot, place in place_of_slot.items():
                    index = index_of_slot[slot]
                    ranges[index] = replace(ranges[index], places=slice(place, place + 1))
                for there in self._places.arrivals(slots):
                    for_each_range(ranges, compute, [index_of_slot[slot] for slot in there])

    def _hold_gradients(self, slots: Sequence[int]) -> AbstractContextManager[object]:
        """Hold the gradients of `slots` while they compute, if the pass writes them in place."""
        del slots
        return nullcontext()


class StateLease(PlacesLease):
    """Use of a bank in training with fewer places than experts; `StatePlaces` has the gradients."""

    def __init__(
        self,
        arena: Tensor,
        ffn: int,
        places: StatePlaces,
        num_calls: int = 1,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(arena, ffn, places, num_calls, clock)
        self._state = places
        self._grad_rows: dict[int, Tensor] = {}
        """Gradients of this pass by slot, [1, parameters of an expert]."""
        self._targets: dict[int, Tensor] = {}
        """Gradients of all passes by slot, while a wave computes; empty if the pass has several
        calls."""

    @contextmanager
    def _hold_gradients(self, slots: Sequence[int]) -> Iterator[None]:
        in_place = slots if self._num_backward == self._num_calls == 1 else []
        with self._state.hold_gradients(in_place) as self._targets:
            yield

    def start_backward(self) -> None:
        """Prepare for the gradients of one more call."""
        self._num_backward += 1

    def add_gate_up(self, slot_range: SlotRange, grad: Tensor, rows: Tensor) -> None:
        """Add the gradient of the range's gate and up matrices, the last ones of its slot."""
        super().add_gate_up(slot_range, grad, rows)
        for slot in slot_range.slot_indices:
            if slot in self._targets and slot in self._grad_rows:
                self._targets[slot] += self._grad_rows.pop(slot)[0]

    def _gradient_views(self, slot_range: SlotRange) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate-up and down of the range, which has one slot or none."""
        memory, slots = self._state.memory, slot_range.slot_indices
        if not slots:
            return arena_views(memory[:0], self.ffn)
        slot = slots[0]
        if slot in self._targets and slot not in self._state.touched:
            return arena_views(self._targets[slot][None], self.ffn)
        if slot not in self._grad_rows:
            make = torch.empty_like if self._num_backward == 1 else torch.zeros_like
            self._grad_rows[slot] = make(memory[:1], memory_format=torch.contiguous_format)
        return arena_views(self._grad_rows[slot], self.ffn)

    def finish_backward(self) -> Tensor | None:
        """Add the gradients where they live after the last call, and return the empty arena's."""
        if self._num_backward < self._num_calls:
            return None
        for slot, row in sorted(self._grad_rows.items()):
            self._state.add_gradient(slot, row[0])
        self._grad_rows, self._num_backward = {}, 0
        return torch.empty_like(self.arena)


def arena_views(arena: Tensor, ffn: int) -> tuple[Tensor, Tensor]:
    """Return views of an arena: gate and up [slots, 2 * ffn, hidden], and down [slots, hidden,
    ffn]."""
    slots, hidden = arena.shape[0], arena.shape[1] // (3 * ffn)
    gate_up, down = arena.split((2 * ffn * hidden, ffn * hidden), dim=1)
    return gate_up.view(slots, 2 * ffn, hidden), down.view(slots, hidden, ffn)
