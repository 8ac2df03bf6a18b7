"""Gated network of many experts over rows sorted by slot, straight from the parameter arena.

A second arena may hold the slots of replicas, or adapters, which leave the experts frozen.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.clock import timed
from moesaic.kernels import fused
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.lease import Lease
from moesaic.nn.experts.lora import AdapterShape, LoraPairs
from moesaic.nn.experts.tiles import (
    Matrices,
    PermutedRows,
    RangeResults,
    SlotRange,
    TokenResults,
    replicas_have_rows,
)
from moesaic.nn.split_backward import forbid_double_backward, needs_grad

FORWARD, BACKWARD = "experts forward", "experts backward"
"""Names of the clock's entries for expert computation."""


class GatedExperts(torch.autograd.Function):
    """Sum of down(silu(gate(x)) * up(x)) over each token's rows.

    - Gate and up are one matmul.
    - On the CPU, ranges of slots keep intermediate results in the cache. Slots with very few rows
      are computed all at once.
    - Rows are gathered from tokens, and from their gradients, on use. Only the output of gate and
      up is saved.
    - Row weights apply between the matmuls, and their gradient is computed there.
    - The gradient of the arena is written once; slots without rows get zeros.
    - Replicas come last in forward, when they have arrived. They come first in backward, so that
      their gradients travel while the own experts' are computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        arena: Tensor,
        weights_NK: Tensor | None,
        lease: Lease,
        adapters: AdapterShape | None,
        *permutation: Tensor | None,
    ) -> Tensor:
        """Compute in the dtype of `tokens`; `permutation` is an unpacked `Permutation`.

        `lease` has the experts; the gradients of their `arena` and of replicas go to it. With
        `adapters`, `arena` is theirs.
        """
        perm = Permutation.from_tensors(permutation)
        lora = None if adapters is None else adapters.pairs(arena)
        results, inners = gated_experts(tokens, weights_NK, lease, perm, lora, keep_inners=True)
        saved = None if adapters is None else arena
        ctx.save_for_backward(tokens, weights_NK, inners, saved, *permutation)
        ctx.lease, ctx.adapters, ctx.state = lease, adapters, None
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of tokens and weights, and of the arena.

        Split backward requests one group, then the other. The first pass keeps the gradients
        between the matmuls for the second.
        """
        forbid_double_backward()
        with timed(ctx.lease.clock, BACKWARD):
            return GatedExperts._backward(ctx, grads[0])

    @staticmethod
    def _backward(ctx: Any, grad_results: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights_NK, inners, adapters, *permutation = ctx.saved_tensors
        lease, perm = ctx.lease, Permutation.from_tensors(permutation)
        needs_tokens = needs_grad(ctx, 0) or (weights_NK is not None and needs_grad(ctx, 2))
        needs_arena = needs_grad(ctx, 1)
        state = SplitBackwardState.resume(ctx, grad_results) or SplitBackwardState(
            grad_results, lease.split(tokens, perm), RowWeights(weights_NK, perm)
        )
        ranges, grad_inners, row_weights = state.ranges, state.grad_inners, state.row_weights
        grad_adapters = torch.zeros_like(adapters) if needs_arena and adapters is not None else None
        lora = None if adapters is None else ctx.adapters.pairs(adapters, grad_adapters)
        trains_experts = needs_arena and lora is None
        if trains_experts:
            lease.start_backward()
        gate_up, down = lease.matrices()
        token_rows, grad_rows = (
            PermutedRows(rows, perm, lease.backend) for rows in (tokens, grad_results)
        )
        grad_tokens = TokenResults(ranges, tokens, perm) if needs_tokens else None
        keep_state = ctx.needs_input_grad[1] and not needs_arena

        def compute(index: int) -> None:
            slot_range, grad_inner = ranges[index], grad_inners[index]
            inner, grad = inners[slot_range.rows], grad_rows[slot_range]
            if grad_inner is None:
                grad_inner, activated, is_weighted = inner_backward(
                    slot_range, grad, inner, down, row_weights, lora
                )
            else:
                activated, is_weighted = swiglu(inner), False
            if trains_experts:
                if not is_weighted:
                    row_weights.scale(slot_range, activated)
                lease.add_down(slot_range, grad, activated)
                del grad, activated
                lease.add_gate_up(slot_range, grad_inner, token_rows[slot_range])
            else:
                del grad, activated
            added = lora and lora.inner_backward(slot_range, token_rows[slot_range], grad_inner)
            if grad_tokens is not None:
                grad_tokens.matmul(slot_range, grad_inner, gate_up, transposed=False, add=added)
            grad_inners[index] = grad_inner if keep_state and lora is None else None

        lease.for_each(
            ranges,
            compute,
            lease.send_replica_gradients if trains_experts else None,
            replicas_first=True,
        )
        grad_arena = lease.finish_backward() if trains_experts else grad_adapters
        if keep_state:
            ctx.state = state
        else:
            lease.end_call()
        return (
            None if grad_tokens is None else grad_tokens.unpermute(),
            grad_arena,
            row_weights.gradient if needs_tokens else None,
            *[None] * (2 + len(permutation)),
        )


def gated_experts(
    tokens: Tensor,
    weights_NK: Tensor | None,
    lease: Lease,
    permutation: Permutation,
    lora: LoraPairs | None = None,
    *,
    keep_inners: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the results of `GatedExperts`, and the output of gate and up if `keep_inners`."""
    gate_up, down = lease.matrices()
    ranges = lease.split(tokens, permutation, is_forward=lora is None)
    inners = RangeResults(ranges, tokens, 2 * lease.ffn, keep=keep_inners)
    results = TokenResults(ranges, tokens, permutation)
    token_rows = PermutedRows(tokens, permutation, lease.backend)

    def compute(index: int) -> None:
        slot_range = ranges[index]
        rows = token_rows[slot_range]
        if lora is None and slot_range.backend != "torch":
            activated = inners.swiglu(slot_range, rows, gate_up)
        else:
            inner = inners.matmul(slot_range, rows, gate_up, transposed=True)
            if lora is not None:
                lora.add_inner(slot_range, rows, inner)
            activated = swiglu(inner)
            del inner
        del rows
        adapted = None if lora is None else lora.down.product(slot_range, activated)
        results.matmul(slot_range, activated, down, transposed=True, add=adapted)

    between = partial(lease.finish_forward, replicas_have_rows=replicas_have_rows(ranges))
    lease.for_each(ranges, compute, between)
    return results.unpermute(weights_NK), inners.tensor if keep_inners else None


class SplitBackwardState:
    """Intermediate results that the first pass of a split backward leaves for the second."""

    def __init__(self, grad: Tensor, ranges: list[SlotRange], row_weights: RowWeights) -> None:
        self._grad, self._version = grad, grad._version
        self.ranges, self.row_weights = ranges, row_weights
        self.grad_inners: list[Tensor | None] = [None] * len(ranges)
        """Gradients between the matmuls, by range."""

    @staticmethod
    def resume(ctx: Any, grad: Tensor) -> SplitBackwardState | None:
        """Take the state from `ctx`; return it if its first pass had the same values of `grad`."""
        state: SplitBackwardState | None
        state, ctx.state = ctx.state, None
        if state is None or not state._grad.is_set_to(grad) or state._version != grad._version:
            return None
        return state


def swiglu(inner: Tensor) -> Tensor:
    """Return silu(gate) * up, given gate and up side by side."""
    gate, up = inner.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def swiglu_parts(inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) and silu(gate) * up."""
    gate, up = inner.chunk(2, dim=1)
    silu = F.silu(gate)
    return silu, silu * up


def swiglu_backward(inner: Tensor, silu: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of gate and up, side by side as in `inner`.

    `grad` is the gradient of silu(gate) * up, and is overwritten.
    """
    gate, up = inner.chunk(2, dim=1)
    grad_inner = torch.empty_like(inner)
    grad_gate, grad_up = grad_inner.chunk(2, dim=1)
    torch.mul(grad, silu, out=grad_up)
    torch.ops.aten.silu_backward(grad.mul_(up), gate, grad_input=grad_gate)
    return grad_inner


def inner_backward(
    slot_range: SlotRange,
    grad: Tensor,
    inner: Tensor,
    down: Matrices,
    row_weights: RowWeights,
    lora: LoraPairs | None,
) -> tuple[Tensor, Tensor, bool]:
    """Return the gradient of gate and up, silu(gate) * up, and whether row weights are in it.

    `grad` is the gradient of the range's results.
    """
    grad_activated = slot_range.matmul(grad, down, transposed=False)
    if lora is None and fused.is_supported(inner, slot_range.backend):
        return *row_weights.fused_backward(slot_range, inner, grad_activated), True
    silu, activated = swiglu_parts(inner)
    if lora is not None:
        weighted = row_weights.scaled(slot_range, activated)
        grad_activated += lora.down.backward(slot_range, weighted, grad)
    row_weights.backward(slot_range, grad_activated, activated)
    return swiglu_backward(inner, silu, grad_activated), activated, False


class RowWeights:
    """Row weights (if any) and their gradient, in the backward pass between the matmuls."""

    gradient: Tensor | None
    """Gradient of the weights, [N, K]; None without weights."""

    def __init__(self, weights_NK: Tensor | None, permutation: Permutation) -> None:
        self._weights_NK, self._order_R = weights_NK, permutation.order_R
        self.gradient = None if weights_NK is None else torch.zeros_like(weights_NK)

    @cached_property
    def _weights_R(self) -> Tensor | None:
        return None if self._weights_NK is None else self._weights_NK.view(-1)[self._order_R]

    def fused_backward(
        self, slot_range: SlotRange, inner: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of gate and up, and the weighted silu(gate) * up, in one kernel."""
        order = self._order_R[slot_range.rows]
        weights, grads = (
            None if values is None else values.view(-1)
            for values in (self._weights_NK, self.gradient)
        )
        return fused.swiglu_backward(inner, grad, weights, order, grads)

    def backward(self, slot_range: SlotRange, grad: Tensor, inner: Tensor) -> None:
        """Compute the gradients of the range's weights, and multiply `grad` by the weights.

        `grad` is the gradient of `inner` without weights.
        """
        if self.gradient is not None:
            grad_weights = torch.sum(grad * inner, dim=1)
            self.gradient.view(-1)[self._order_R[slot_range.rows]] = grad_weights
            self.scale(slot_range, grad)

    def scale(self, slot_range: SlotRange, rows: Tensor) -> None:
        """Multiply the range's rows by their weights, in place."""
        if self._weights_R is not None:
            rows.mul_(self._weights_R[slot_range.rows, None])

    def scaled(self, slot_range: SlotRange, rows: Tensor) -> Tensor:
        """Return the range's rows times their weights, or the rows themselves without weights."""
        weights_R = self._weights_R
        return rows if weights_R is None else rows * weights_R[slot_range.rows, None]
