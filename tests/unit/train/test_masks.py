"""Attention masks, against a check of every pair of positions."""

from __future__ import annotations

import pytest
import torch

from moesaic.train.objectives.lm import attention_mask

PLAIN = torch.zeros(3, 9, dtype=torch.int32)
PACKED = torch.tensor([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 100])
@pytest.mark.parametrize("documents", [PLAIN, PACKED], ids=["plain", "packed"])
def test_masks_equal_the_reference(documents: torch.Tensor, window: int | None) -> None:
    mask = attention_mask(documents, window)
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
    assert (
        attention_mask(PLAIN, None)
        is attention_mask(PLAIN, 9)
        is attention_mask(PLAIN, 100)
        is None
    )
    assert attention_mask(PLAIN[:0], None) is None


def test_a_window_alone_is_one_mask_for_all_rows() -> None:
    mask = attention_mask(PLAIN, 8)
    assert mask is not None
    assert mask.shape == (1, 1, 9, 9)
