"""Low-rank adapters (LoRA) of one layer's experts, in an arena beside the bank's.

A slot holds A [rank, inputs] and B [outputs, rank] for gate, up, and down. The effective matrix is
W + scale * B A, which is never formed. W is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moesaic.nn.experts.tiles import SlotRange


class Adapters(nn.Module):
    """Adapters of the experts that this rank owns."""

    def __init__(self, experts: Sequence[int], shape: AdapterShape) -> None:
        super().__init__()
        self.experts, self.shape = list(experts), shape
        width = 3 * shape.rank * (shape.hidden + shape.ffn)
        self.arena = nn.Parameter(torch.empty(len(self.experts), width))

    def matrices(self, arena: Sequence[Tensor] | Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (expert, name such as "gate.lora_a", view) for every matrix in a tensor of the
        arena's shape."""
        assert isinstance(arena, Tensor), "all adapters are in memory"
        pairs = self.shape.pairs(arena)._asdict()
        for slot, expert in enumerate(self.experts):
            for name, pair in pairs.items():
                yield expert, f"{name}.lora_a", pair.a[slot]
                yield expert, f"{name}.lora_b", pair.b[slot]

    def global_shape_and_offset(
        self, matrix: str, local_shape: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the full shape of a matrix, and the offset of this rank's part in it."""
        del matrix
        return tuple(local_shape), (0, 0)


class LoraPair(NamedTuple):
    """A and B of one matrix in every slot, [slots, rank, inputs] and [slots, outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float
    grad: LoraPair | None = None
    """Gradients to write in backward, if any."""

    def product(self, slot_range: SlotRange, rows: Tensor) -> Tensor:
        """Return scale * B A rows."""
        return slot_range.of_adapters.matmul(
            self._multiply_a(slot_range, rows), (self.b,), transposed=True
        )

    def backward(self, slot_range: SlotRange, rows: Tensor, grad_out: Tensor) -> Tensor:
        """Return the adapter's gradient of `rows`, and write those of A and B."""
        grad_narrow = slot_range.of_adapters.matmul(grad_out, (self.b,), transposed=False).mul_(
            self.scale
        )
        if self.grad is not None:
            narrow, slots = self._multiply_a(slot_range, rows), slot_range.slots
            slot_range.wgrad(grad_out, narrow, self.grad.b[slots])
            slot_range.wgrad(grad_narrow, rows, self.grad.a[slots])
        return slot_range.of_adapters.matmul(grad_narrow, (self.a,), transposed=False)

    def _multiply_a(self, slot_range: SlotRange, rows: Tensor) -> Tensor:
        return slot_range.of_adapters.matmul(rows, (self.a,), transposed=True).mul_(self.scale)


class LoraPairs(NamedTuple):
    """The pairs of gate, up, and down in every slot."""

    gate: LoraPair
    up: LoraPair
    down: LoraPair

    def add_inner(self, slot_range: SlotRange, rows: Tensor, inner: Tensor) -> None:
        """Add the products of gate and up to `inner`, in place."""
        gate, up = inner.chunk(2, dim=1)
        gate += self.gate.product(slot_range, rows)
        up += self.up.product(slot_range, rows)

    def inner_backward(self, slot_range: SlotRange, rows: Tensor, grad_inner: Tensor) -> Tensor:
        """Return the gradient of `rows` through gate and up; see `LoraPair.backward`."""
        grad_gate, grad_up = grad_inner.chunk(2, dim=1)
        grad_rows = self.gate.backward(slot_range, rows, grad_gate)
        grad_rows += self.up.backward(slot_range, rows, grad_up)
        return grad_rows


class AdapterShape(NamedTuple):
    """Sizes and scale of an adapter arena."""

    hidden: int
    ffn: int
    rank: int
    scale: float

    def pairs(self, arena: Tensor, grad_arena: Tensor | None = None) -> LoraPairs:
        """Return the pairs of each matrix as views of an arena, and of its gradient."""
        slots, start, pairs = arena.shape[0], 0, []
        inner = (self.ffn, self.hidden)
        for outputs, inputs in (inner, inner, inner[::-1]):
            sizes = (self.rank * inputs, outputs * self.rank)
            a, b = arena[:, start : start + sum(sizes)].split(sizes, dim=1)
            start += sum(sizes)
            matrices = (a.view(slots, self.rank, inputs), b.view(slots, outputs, self.rank))
            pairs.append(LoraPair(*matrices, self.scale))
        if grad_arena is not None:
            grads = self.pairs(grad_arena)
            pairs = [pair._replace(grad=one) for pair, one in zip(pairs, grads, strict=True)]
        return LoraPairs(*pairs)
