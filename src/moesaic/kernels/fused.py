"""Fused elementwise and permutation kernels for the experts, as custom ops over Triton.

They compute the gradient of SwiGLU, sort and permute tokens into slot order, and unpermute. Custom
ops are opaque to torch's compiler and profiler. Call `is_supported` first: with the torch backend,
and for dtypes without kernels, torch's own operations do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels.device import KERNEL_DTYPES

MAX_SORT_SLOTS = 1024
"""Slots up to which `sort_by_slot` works."""
_OPS = torch.library.Library("moesaic", "FRAGMENT")
_OPS.define(
    "swiglu_backward(Tensor inner, Tensor grad, Tensor? weights, Tensor order, Tensor(a!)?"
    " grad_weights) -> (Tensor, Tensor)"
)
_OPS.define("permute(Tensor tokens, Tensor order, int top_k) -> Tensor")
_OPS.define("unpermute(Tensor rows, Tensor row_indices, Tensor? weights) -> Tensor")
_OPS.define("sort_by_slot(Tensor slots, int num_slots) -> (Tensor, Tensor, Tensor)")


def _triton_op(name: str) -> Callable[..., Any]:
    """Return the launcher `name` of `triton_gemm`, which is imported at the first call."""

    def launch(*args: Any) -> Any:
        from moesaic.kernels import triton_gemm

        return getattr(triton_gemm, name)(*args)

    return launch


def _fake_swiglu_backward(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inner), torch.empty_like(grad)


def _fake_permute(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    return tokens.new_empty((order.shape[0], tokens.shape[1]))


def _fake_unpermute(rows: Tensor, row_indices: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((row_indices.shape[0], rows.shape[1]))


def _fake_sort_by_slot(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    return slots.new_empty(num_slots), torch.empty_like(slots), torch.empty_like(slots)


for _name, _fake in (
    ("swiglu_backward", _fake_swiglu_backward),
    ("permute", _fake_permute),
    ("unpermute", _fake_unpermute),
    ("sort_by_slot", _fake_sort_by_slot),
):
    _OPS.impl(_name, _triton_op(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"moesaic::{_name}", _fake, lib=_OPS)


@cache
def triton_error() -> str | None:
    """Return why Triton does not work here, or None if it does."""
    try:
        from moesaic.kernels import triton_gemm

        triton_gemm.start_triton()
    except (ImportError, AttributeError, RuntimeError, OSError, CalledProcessError) as error:
        return str(error) or type(error).__name__
    return None


def is_supported(values: Tensor, backend: MatmulBackend) -> bool:
    """Return whether the Triton kernels support `values`, with `backend` for the expert matmuls."""
    return backend != "torch" and values.dtype in KERNEL_DTYPES


def swiglu_backward(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `inner`, and the activations times the weights of their rows.

    Args:
        inner: gate and up side by side, [rows, 2 * ffn].
        grad: gradient of the unweighted output, [rows, ffn].
        weights: weights of the token assignments, or None.
        order: index of each row in `weights`.
        grad_weights: receives the gradients of the weights at `order`."""
    grads: tuple[Tensor, Tensor] = torch.ops.moesaic.swiglu_backward.default(
        inner, grad, weights, order, grad_weights
    )
    return grads


def permute(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return tokens[order // top_k]: one row per token assignment in `order`."""
    rows: Tensor = torch.ops.moesaic.permute.default(tokens, order, top_k)
    return rows


def unpermute(rows: Tensor, row_indices: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum over k of weights[n, k] * rows[row_indices[n, k]], or of the rows if `weights`
    is None."""
    total: Tensor = torch.ops.moesaic.unpermute.default(rows, row_indices, weights)
    return total


def sort_by_slot(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts per slot, the assignment of each row, and the row of each assignment.

    Rows are sorted by slot, stably. Assignments with slot `num_slots` are not counted; their row is
    0."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.moesaic.sort_by_slot.default(slots, num_slots)
    return result
