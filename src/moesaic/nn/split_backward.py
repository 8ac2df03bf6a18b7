"""Helpers of custom autograd functions: split backward, and a guard against double backward.

Split backward (zero-bubble pipelines) requests input gradients first and weight gradients later.
"""

from __future__ import annotations

from typing import Any

import torch


def needs_grad(ctx: Any, position: int) -> bool:
    """Return whether this backward needs the gradient of an input tensor.

    `ctx.needs_input_grad` does not reflect `inputs` of `autograd.grad`; the engine does.
    """
    node = ctx.next_functions[position][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # Raised for a leaf that `autograd.grad` is to return.
        return True


def forbid_double_backward() -> None:
    """Raise if backward is to be differentiated: the kernels' threads do not record a graph."""
    if torch.is_grad_enabled():
        raise NotImplementedError("experts have no second derivative: leave out create_graph")
