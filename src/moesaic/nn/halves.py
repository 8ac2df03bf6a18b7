"""Backward of our own operations: in halves where that is asked, and without a graph of its own."""

from __future__ import annotations

from typing import Any

import torch


def asked_for(ctx: Any, position: int) -> bool:
    """Whether this backward needs the gradient of an input tensor; torch tells only its own
    functions."""
    node = ctx.next_functions[position][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # It does not say so of a leaf that `autograd.grad` is to return.
        return True


def refuse_second_order() -> None:
    """Stop a backward that is to have a graph of its own: in threads that would get lost."""
    if torch.is_grad_enabled():
        raise NotImplementedError("experts have no second derivative: leave out create_graph")
