"""What each query of a sample sees, against asking pair by pair."""

from __future__ import annotations

import pytest
import torch

from moesaic.train.objectives.lm import visible

PLAIN = torch.zeros(3, 9, dtype=torch.int32)
PACKED = torch.tensor([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 100])
@pytest.mark.parametrize("documents", [PLAIN, PACKED], ids=["plain", "packed"])
def test_masks_equal_a_slow_twin(documents: torch.Tensor, window: int | None) -> None:
    mask = visible(documents, window)
    expected = [
        [
            [
                key <= query and row[key] == row[query] and (window is None or query - key < window)
                for key in range(9)
            ]
            for query in range(9)
        ]
        for row in documents.tolist()
    ]
    if mask is None:  # Plain causal attention.
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    assert mask.dtype == torch.bool
    assert mask.expand(3, 1, 9, 9)[:, 0].tolist() == expected


def test_no_mask_is_made_where_causality_is_enough() -> None:
    assert visible(PLAIN, None) is visible(PLAIN, 9) is visible(PLAIN, 100) is None
    assert visible(PLAIN[:0], None) is None


def test_a_window_alone_is_one_mask_for_all_rows() -> None:
    mask = visible(PLAIN, 8)
    assert mask is not None
    assert mask.shape == (1, 1, 9, 9)
