"""Low-rank adapters (LoRA) of one layer's experts, in an arena beside the bank's.

A slot holds A [rank, inputs] and B [outputs, rank] for gate, up, and down. The effective matrix is
W + scale * B A, which is never formed. W is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.grouped import (
    RowWeights,
    swiglu,
    swiglu_backward,
    swiglu_parts,
)
from moesaic.nn.experts.lease import Lease
from moesaic.nn.experts.tiles import PermutedRows, RangeResults, SlotRange, TokenResults
from moesaic.nn.split_backward import forbid_double_backward, needs_grad


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
        pairs = dict(zip(("gate", "up", "down"), self.shape.pairs(arena), strict=True))
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

    def add(self, slot_range: SlotRange, rows: Tensor, out: Tensor) -> None:
        """Add scale * B A rows to `out`."""
        out += slot_range.of_adapters.matmul(
            self._multiply_a(slot_range, rows), (self.b,), transposed=True
        )

    def backward(
        self, slot_range: SlotRange, rows: Tensor, grad: Tensor, grads: LoraPair | None
    ) -> Tensor:
        """Return the adapter's gradient of `rows`, given `grad`, the gradient of its output.

        The gradients of A and B are written to `grads`, if given.
        """
        grad_narrow = slot_range.of_adapters.matmul(grad, (self.b,), transposed=False).mul_(
            self.scale
        )
        if grads is not None:
            slot_range.wgrad(grad, self._multiply_a(slot_range, rows), grads.b[slot_range.slots])
            slot_range.wgrad(grad_narrow, rows, grads.a[slot_range.slots])
        return slot_range.of_adapters.matmul(grad_narrow, (self.a,), transposed=False)

    def _multiply_a(self, slot_range: SlotRange, rows: Tensor) -> Tensor:
        return slot_range.of_adapters.matmul(rows, (self.a,), transposed=True).mul_(self.scale)


class AdapterShape(NamedTuple):
    """Sizes and scale of an adapter arena."""

    hidden: int
    ffn: int
    rank: int
    scale: float

    def pairs(self, arena: Tensor) -> tuple[LoraPair, LoraPair, LoraPair]:
        """Return the gate, up, and down pairs as views of an arena."""
        slots, start, pairs = arena.shape[0], 0, []
        inner = (self.ffn, self.hidden)
        for outputs, inputs in (inner, inner, inner[::-1]):
            sizes = (self.rank * inputs, outputs * self.rank)
            a, b = arena[:, start : start + sum(sizes)].split(sizes, dim=1)
            start += sum(sizes)
            matrices = (a.view(slots, self.rank, inputs), b.view(slots, outputs, self.rank))
            pairs.append(LoraPair(*matrices, self.scale))
        gate, up, down = pairs
        return gate, up, down


class AdaptedExperts(torch.autograd.Function):
    """`GatedExperts` with an adapter beside each matrix; the bank's arena gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        adapters: Tensor,
        weights_NK: Tensor | None,
        shape: AdapterShape,
        lease: Lease,
        *permutation: Tensor | None,
    ) -> Tensor:
        """Compute in the dtype of `tokens`; `permutation` is an unpacked `Permutation`."""
        perm = Permutation.from_tensors(permutation)
        gate_pair, up_pair, down_pair = shape.pairs(adapters)
        gate_up, down = lease.matrices()
        ranges = lease.split(tokens, perm)
        inners = RangeResults(ranges, tokens, 2 * shape.ffn)
        results = TokenResults(ranges, tokens, perm)
        token_rows = PermutedRows(tokens, perm, lease.backend)

        def compute(index: int) -> None:
            slot_range, rows = ranges[index], token_rows[ranges[index]]
            inner = inners.matmul(slot_range, rows, gate_up, transposed=True)
            gate, up = inner.chunk(2, dim=1)
            gate_pair.add(slot_range, rows, gate)
            up_pair.add(slot_range, rows, up)
            del rows
            activated = swiglu(inner)
            result = slot_range.matmul(
                activated, down, transposed=True, out=results.output_view(slot_range)
            )
            down_pair.add(slot_range, activated, result)
            results.store(slot_range, result)

        lease.for_each(ranges, compute)
        ctx.save_for_backward(tokens, adapters, weights_NK, inners.tensor, *permutation)
        ctx.shape, ctx.lease = shape, lease
        return results.unpermute(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of tokens and weights, and of adapters.

        Split backward requests one group, then the other.
        """
        forbid_double_backward()
        tokens, adapters, weights_NK, inners, *permutation = ctx.saved_tensors
        shape, lease, perm = ctx.shape, ctx.lease, Permutation.from_tensors(permutation)
        needs_tokens, needs_adapters = needs_grad(ctx, 0), needs_grad(ctx, 1)
        needs_tokens |= weights_NK is not None and needs_grad(ctx, 2)
        grad_adapters = torch.zeros_like(adapters) if needs_adapters else None
        gate_pair, up_pair, down_pair = shape.pairs(adapters)
        grad_gate_pair, grad_up_pair, grad_down_pair = (
            (None, None, None) if grad_adapters is None else shape.pairs(grad_adapters)
        )
        gate_up, down = lease.matrices()
        ranges = lease.split(tokens, perm)
        token_rows = PermutedRows(tokens, perm, lease.backend)
        grad_rows = PermutedRows(grads[0], perm, lease.backend)
        row_weights = RowWeights(weights_NK, perm)
        grad_tokens = TokenResults(ranges, tokens, perm) if needs_tokens else None

        def compute(index: int) -> None:
            slot_range = ranges[index]
            inner, grad = inners[slot_range.rows], grad_rows[slot_range]
            silu, activated = swiglu_parts(inner)
            weighted = row_weights.scaled(slot_range, activated)
            grad_activated = slot_range.matmul(grad, down, transposed=False)
            grad_activated += down_pair.backward(slot_range, weighted, grad, grad_down_pair)
            del weighted, grad
            row_weights.backward(slot_range, grad_activated, activated)
            grad_inner = swiglu_backward(inner, silu, grad_activated)
            del silu, activated, grad_activated
            rows, (grad_gate, grad_up) = token_rows[slot_range], grad_inner.chunk(2, dim=1)
            grad_adapted = gate_pair.backward(slot_range, rows, grad_gate, grad_gate_pair)
            grad_adapted += up_pair.backward(slot_range, rows, grad_up, grad_up_pair)
            if grad_tokens is not None:
                out = grad_tokens.output_view(slot_range)
                result = slot_range.matmul(grad_inner, gate_up, transposed=False, out=out)
                result += grad_adapted
                grad_tokens.store(slot_range, result)

        lease.for_each(ranges, compute)
        grad_inputs = None if grad_tokens is None else grad_tokens.unpermute()
        grad_weights = row_weights.gradient if needs_tokens else None
        if needs_adapters or not ctx.needs_input_grad[1]:
            lease.end_call()
        return grad_inputs, grad_adapters, grad_weights, *[None] * (2 + len(permutation))
