"""Experts that leave, in one piece: as they lie where they do, copied where they do not."""

from __future__ import annotations

import pytest
import torch

from moesaic.nn.guests import _gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [[], [0], [2], [1, 2], [2, 1], [0, 2], [1, 1], [0, 1, 2, 3]])
def test_slots_that_leave(order: list[int], dtype: torch.dtype) -> None:
    arena = torch.randn(4, 6)
    found = _gathered(arena, order, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found, arena[order].to(dtype))
    lies_so = dtype == arena.dtype and order in ([0], [2], [1, 2], [0, 1, 2, 3])
    assert (
        found.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
    ) == lies_so or (not order)
