"""Flops as torch counts them, and of what was seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from moesaic.facts.workload.file import TracedAttention, TracedProduct
from moesaic.models.kernels import Heads, Seen


def _on_shapes(formula: Any, operands: slice) -> Any:
    return lambda *shapes, out_shape=None, **_: formula(*shapes[operands])


def _of_heads(formula: Any) -> Any:
    """`formula` of attention, told of keys and values that heads share as if each had its own.

    The flops are the same, and before 2.12 torch takes no others.
    """

    def count(*shapes: Any) -> int:
        *queries, keys, values = shapes
        own = [(*queries[0][:2], *one[2:]) for one in (keys, values)]
        flops: int = formula(*queries, *own)
        return flops

    return count


def _product_flops(left: tuple[int, int], right: tuple[int, int]) -> int:
    return 2 * left[0] * left[1] * right[1]


UNCOUNTED = {
    torch.ops.aten.addmm_: _on_shapes(_product_flops, slice(1, 3)),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _on_shapes(
        _of_heads(sdpa_flop_count), slice(3)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _on_shapes(
        _of_heads(sdpa_backward_flop_count), slice(4)
    ),
}
"""Torch counts these only where they are not in place, or run on a GPU: for `custom_mapping`."""


def flops(seen: Seen) -> int:
    """Of all products that were seen."""
    total = 0
    for (shape, kind), count in seen.products.items():
        known = TracedAttention if isinstance(shape, Heads) else TracedProduct
        one = known(**shape._asdict(), count=count, type=kind)
        products = one.products if isinstance(one, TracedAttention) else (one.product,)
        total += sum(product.flops for product in products)
    return total
