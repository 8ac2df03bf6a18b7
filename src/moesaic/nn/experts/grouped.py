"""Gated network of many experts over rows sorted by slot, straight from the parameter arena.

A second arena may hold the slots of replicas.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.clock import timed
from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels import fused
from moesaic.kernels.cpu_gemm import prefers_transposed
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.lease import Lease
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
        replicas: Tensor | None,
        weights_NK: Tensor | None,
        ffn: int,
        lease: Lease,
        *permutation: Tensor | None,
    ) -> Tensor:
        """Compute in the dtype of `tokens`; `permutation` is an unpacked `Permutation`.

        `lease` has the experts of `arena`, and the gradients of `arena` and `replicas` go to it.
        """
        perm = Permutation.from_tensors(permutation)
        gate_up, down = lease.matrices(replicas, ffn, tokens.shape[1])
        ranges = lease.split_forward(tokens, perm, ffn, down)
        inners, results = RangeResults(ranges, tokens, 2 * ffn), TokenResults(ranges, tokens, perm)
        token_rows = PermutedRows(tokens, perm, lease.backend)

        def compute(index: int) -> None:
            slot_range = ranges[index]
            if slot_range.backend == "torch":
                inner = inners.matmul(slot_range, token_rows[slot_range], gate_up, transposed=True)
                results.matmul(slot_range, swiglu(inner), down, transposed=True)
            else:
                activated = inners.swiglu(slot_range, token_rows[slot_range], gate_up)
                results.matmul(slot_range, activated, down, transposed=True)

        lease.for_each(
            ranges,
            compute,
            partial(lease.finish_forward, replicas_have_rows=replicas_have_rows(ranges)),
        )
        ctx.save_for_backward(tokens, replicas, weights_NK, inners.tensor, *permutation)
        ctx.ffn, ctx.lease, ctx.state = ffn, lease, None
        return results.unpermute(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of tokens and weights, and of the arena.

        Split backward requests one group, then the other. The first pass keeps the gradients
        between the matmuls for the second.
        """
        forbid_double_backward()
        with timed(ctx.lease.clock, BACKWARD):
            return GatedExperts._backward(ctx, grads)

    @staticmethod
    def _backward(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        tokens, replicas, weights_NK, inners, *permutation = ctx.saved_tensors
        ffn, lease, perm = ctx.ffn, ctx.lease, Permutation.from_tensors(permutation)
        needs_tokens, needs_arena = needs_grad(ctx, 0), needs_grad(ctx, 1)
        needs_tokens |= weights_NK is not None and needs_grad(ctx, 2 + (replicas is not None))
        state, ctx.state = matching_state(ctx.state, grads[0]), None
        arena_grad = lease.start_backward(replicas, ffn, tokens.shape[1]) if needs_arena else None
        gate_up, down = lease.matrices(replicas, ffn, tokens.shape[1])
        if state is None:
            ranges = lease.split(tokens, perm, ffn)
            row_weights = RowWeights(
                weights_NK, perm, fused=fused.is_supported(inners, lease.backend)
            )
            state = initial_state(grads[0], ranges, row_weights)
        ranges, grad_inners, row_weights = state.ranges, state.grad_inners, state.row_weights
        token_rows, grad_rows = (
            PermutedRows(tokens, perm, lease.backend),
            PermutedRows(grads[0], perm, lease.backend),
        )
        grad_tokens = TokenResults(ranges, tokens, perm) if needs_tokens else None
        keep_state = ctx.needs_input_grad[1] and not needs_arena

        def compute(index: int) -> None:
            slot_range, grad_inner = ranges[index], grad_inners[index]
            inner = inners[slot_range.rows]
            grad, needs_scale = grad_rows[slot_range], True
            if grad_inner is None:
                grad_inner, activated, needs_scale = inner_backward(
                    slot_range, grad, inner, down, row_weights
                )
            else:
                activated = swiglu(inner, lease.backend)
            if arena_grad is not None:
                if needs_scale:
                    row_weights.scale(slot_range, activated)
                arena_grad.add_down(slot_range, grad, activated)
                del grad, activated
                arena_grad.add_gate_up(slot_range, grad_inner, token_rows[slot_range])
            if grad_tokens is not None:
                grad_tokens.matmul(slot_range, grad_inner, gate_up, transposed=False)
            grad_inners[index] = grad_inner if keep_state else None

        lease.for_each(
            ranges, compute, arena_grad and arena_grad.send_replica_gradients, replicas_first=True
        )
        if keep_state:
            ctx.state = state._replace(grad=grads[0], version=grads[0]._version)
        grad_inputs = None if grad_tokens is None else grad_tokens.unpermute()
        grad_arena = None if arena_grad is None else arena_grad.finish_backward()
        grad_weights = row_weights.gradient() if needs_tokens else None
        if not keep_state:
            lease.end_call()
        return grad_inputs, grad_arena, None, grad_weights, *[None] * (2 + len(permutation))


def gated_experts(
    tokens: Tensor,
    arena: Tensor,
    replicas: Tensor | None,
    weights_NK: Tensor | None,
    ffn: int,
    lease: Lease,
    *permutation: Tensor | None,
) -> Tensor:
    """Compute as `GatedExperts` without backward: no intermediate result is kept.

    On processors that gain by it, intermediate results are transposed.
    """
    del arena
    perm = Permutation.from_tensors(permutation)
    gate_up, down = lease.matrices(replicas, ffn, tokens.shape[1])
    ranges = lease.split_forward(tokens, perm, ffn, down)
    results, token_rows = (
        TokenResults(ranges, tokens, perm),
        PermutedRows(tokens, perm, lease.backend),
    )

    def compute(index: int) -> None:
        slot_range = ranges[index]
        rows = token_rows[slot_range]
        if slot_range.backend == "torch" and prefers_transposed(
            rows, down[slot_range.arena], slot_range.kernel_counts
        ):
            results.store(
                slot_range, slot_range.mlp(rows, gate_up, down, results.output_view(slot_range))
            )
        elif slot_range.backend == "torch":
            inner = slot_range.matmul(rows, gate_up, transposed=True)
            del rows
            results.matmul(slot_range, swiglu(inner), down, transposed=True)
        else:
            activated = slot_range.swiglu(rows, gate_up, None)
            del rows
            results.matmul(slot_range, activated, down, transposed=True)

    lease.for_each(
        ranges,
        compute,
        partial(lease.finish_forward, replicas_have_rows=replicas_have_rows(ranges)),
    )
    return results.unpermute(weights_NK)


class SplitBackwardState(NamedTuple):
    """Intermediate results that the first pass of a split backward leaves for the second."""

    grad: Tensor
    version: int
    ranges: list[SlotRange]
    grad_inners: list[Tensor | None]
    """Gradients between the matmuls, by range."""
    row_weights: RowWeights


def matching_state(state: SplitBackwardState | None, grad: Tensor) -> SplitBackwardState | None:
    """Return `state` if it belongs to a backward that starts with `grad`, else None."""
    if state is None or not state.grad.is_set_to(grad) or state.version != grad._version:
        return None
    return state


def initial_state(
    grad: Tensor, ranges: list[SlotRange], row_weights: RowWeights
) -> SplitBackwardState:
    """Return the state of a backward that has computed no range yet."""
    return SplitBackwardState(grad, grad._version, ranges, [None] * len(ranges), row_weights)


def swiglu(inner: Tensor, backend: MatmulBackend = "torch") -> Tensor:
    """Return silu(gate) * up, given gate and up side by side."""
    if fused.is_supported(inner, backend):
        return fused.swiglu(inner)
    gate, up = inner.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


class Activation(NamedTuple):
    """Intermediate results of `swiglu` that backward needs."""

    silu: Tensor
    """silu(gate)."""
    activated: Tensor
    """silu(gate) * up."""


def swiglu_parts(inner: Tensor) -> Activation:
    """Compute `swiglu`, and keep silu(gate)."""
    gate, up = inner.chunk(2, dim=1)
    silu = F.silu(gate)
    return Activation(silu, silu * up)


def swiglu_backward(
    slot_range: SlotRange,
    inner: Tensor,
    activation: Activation,
    grad: Tensor,
    row_weights: RowWeights,
) -> Tensor:
    """Return the gradient of gate and up, side by side as in `inner`.

    `grad` is the gradient of silu(gate) * up without row weights, and is overwritten. The gradients
    of the weights go to `row_weights`.
    """
    gate, up = inner.chunk(2, dim=1)
    row_weights.backward(slot_range, grad, activation.activated)
    grad_inner = torch.empty_like(inner)
    grad_gate, grad_up = grad_inner.chunk(2, dim=1)
    torch.mul(grad, activation.silu, out=grad_up)
    torch.ops.aten.silu_backward(grad.mul_(up), gate, grad_input=grad_gate)
    return grad_inner


def inner_backward(
    slot_range: SlotRange, grad: Tensor, inner: Tensor, down: Matrices, row_weights: RowWeights
) -> tuple[Tensor, Tensor, bool]:
    """Return the gradient of gate and up, silu(gate) * up, and whether the latter lacks row
    weights.

    `grad` is the gradient of the range's results.
    """
    grad_activated = slot_range.matmul(grad, down, transposed=False)
    if fused.is_supported(inner, slot_range.backend):
        return *row_weights.fused_backward(slot_range, inner, grad_activated), False
    activation = swiglu_parts(inner)
    return (
        swiglu_backward(slot_range, inner, activation, grad_activated, row_weights),
        activation.activated,
        True,
    )


class RowWeights:
    """Row weights (if any) and their gradients, in the backward pass between the matmuls."""

    def __init__(
        self, weights_NK: Tensor | None, permutation: Permutation, *, fused: bool = False
    ) -> None:
        """Prepare gradients; `fused` selects `fused_backward` over `backward` and `scale`."""
        self._weights_NK, self._order_R = weights_NK, permutation.order_R
        if weights_NK is not None:
            self._grad_NK = torch.zeros_like(weights_NK) if fused else None
            self._weights_R = None if fused else weights_NK.view(-1)[permutation.order_R]
            self._grads_R = None if fused else torch.empty_like(self._weights_by_row())

    def _weights_by_row(self) -> Tensor:
        assert self._weights_NK is not None
        if self._weights_R is None:
            return self._weights_NK.view(-1)[self._order_R]
        return self._weights_R

    def fused_backward(
        self, slot_range: SlotRange, inner: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of gate and up, and the weighted silu(gate) * up, in one kernel."""
        order, weights, grads = self._order_R[slot_range.rows], None, None
        if self._weights_NK is not None:
            assert self._grad_NK is not None
            weights, grads = self._weights_NK.view(-1), self._grad_NK.view(-1)
        return fused.swiglu_backward(inner, grad, weights, order, grads)

    def backward(self, slot_range: SlotRange, grad: Tensor, inner: Tensor) -> None:
        """Compute the gradients of the range's weights, and multiply `grad` by the weights.

        `grad` is the gradient of `inner` without weights.
        """
        if self._weights_NK is not None:
            assert self._grads_R is not None
            torch.sum(grad * inner, dim=1, out=self._grads_R[slot_range.rows])
            self.scale(slot_range, grad)

    def scale(self, slot_range: SlotRange, rows: Tensor) -> None:
        """Multiply the range's rows by their weights, in place."""
        if self._weights_NK is not None:
            rows.mul_(self._weights_by_row()[slot_range.rows, None])

    def scaled(self, slot_range: SlotRange, rows: Tensor) -> Tensor:
        """Return the range's rows times their weights, or the rows themselves without weights."""
        return (
            rows
            if self._weights_NK is None
            else rows * self._weights_by_row()[slot_range.rows, None]
        )

    def gradient(self) -> Tensor | None:
        """Return the gradient of all weights, [N, K]; None without weights."""
        if self._weights_NK is None:
            return None
        if self._grad_NK is not None:
            return self._grad_NK
        assert self._grads_R is not None
        grad = torch.zeros_like(self._weights_NK)
        grad.view(-1)[self._order_R] = self._grads_R
        return grad
