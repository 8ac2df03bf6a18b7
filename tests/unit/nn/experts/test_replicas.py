"""Sent expert slots are contiguous: a view where possible, else a copy."""

from __future__ import annotations

import pytest
import torch

from moesaic.nn.experts.replicas import _gather_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [[], [0], [2], [1, 2], [2, 1], [0, 2], [1, 1], [0, 1, 2, 3]])
def test_gather_slots(order: list[int], dtype: torch.dtype) -> None:
    arena = torch.randn(4, 6)
    gathered = _gather_slots(arena, order, dtype)
    assert gathered.dtype == dtype
    assert gathered.is_contiguous()
    assert torch.equal(gathered, arena[order].to(dtype))
    is_view = dtype == arena.dtype and order in ([0], [2], [1, 2], [0, 1, 2, 3])
    assert (
        gathered.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
    ) == is_view or (not order)
