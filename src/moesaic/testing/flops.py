"""Formulas that complete torch's flop counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count


def _on_shapes(formula: Any, operands: slice) -> Any:
    return lambda *shapes, out_shape=None, **_: formula(*shapes[operands])


def _expand_heads(formula: Any) -> Any:
    """Return attention's `formula`, called as if each head had its own keys and values.

    The flops are the same, and torch before 2.12 rejects shared ones.
    """

    def count(*shapes: Any) -> int:
        *queries, keys, values = shapes
        own = [(*queries[0][:2], *one[2:]) for one in (keys, values)]
        flops: int = formula(*queries, *own)
        return flops

    return count


def _matmul_flops(left: tuple[int, int], right: tuple[int, int]) -> int:
    return 2 * left[0] * left[1] * right[1]


CUSTOM_FLOPS = {
    torch.ops.aten.addmm_: _on_shapes(_matmul_flops, slice(1, 3)),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _on_shapes(
        _expand_heads(sdpa_flop_count), slice(3)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _on_shapes(
        _expand_heads(sdpa_backward_flop_count), slice(4)
    ),
}
"""Formulas for `custom_mapping` of operations that torch counts only out of place or on a GPU."""
