"""Attention of single queries over ranges of a pool, against softmax in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.kernels.cpu_attention import attend_ranges, is_supported

RANGES = np.array([(3, 4), (10, 47), (4, 10), (47, 60)])


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensors(kv_heads: int, group: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of four requests, and a pool of keys and values."""
    pool = (torch.randn(60, kv_heads, width, dtype=torch.bfloat16) for _ in range(2))
    return (torch.randn(4, kv_heads, group, width, dtype=torch.bfloat16), *pool)  # type: ignore[return-value]


def reference(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    queries, keys, values = (x.double() for x in (queries, keys, values))
    results = []
    for query, (start, stop) in zip(queries, RANGES, strict=True):
        scores = torch.einsum("hgw,phw->hgp", query, keys[start:stop]) * scale
        results.append(torch.einsum("hgp,phw->hgw", scores.softmax(-1), values[start:stop]))
    return torch.stack(results)


@pytest.mark.parametrize(("kv_heads", "group", "width"), [(4, 1, 64), (2, 3, 33), (1, 8, 5)])
def test_each_request_equals_softmax(
    num_threads: int, kv_heads: int, group: int, width: int
) -> None:
    queries, keys, values = tensors(kv_heads, group, width)
    assert is_supported(queries, keys, values)
    expected = reference(queries, keys, values, 0.3)
    for x in (keys, values):
        x[:3] = torch.nan  # No request has these positions.
    found = attend_ranges(queries, keys, values, RANGES, 0.3)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 3e-3 * expected.norm()
    for index in range(4):  # Other requests change nothing.
        one = slice(index, index + 1)
        alone = attend_ranges(queries[one], keys, values, RANGES[one], 0.3)
        assert torch.equal(alone, found[one])


def test_large_scores_do_not_overflow() -> None:
    queries, keys, values = tensors(2, 2, 16)
    expected = reference(100 * queries, 100 * keys, values, 1.0)
    found = attend_ranges(100 * queries, 100 * keys, values, RANGES, 1.0)
    assert (found - expected).norm() <= 3e-3 * expected.norm()


def test_nan_stays_in_its_request_and_head() -> None:
    queries, keys, values = tensors(2, 2, 16)
    keys[5, 1, 7] = torch.nan
    found = attend_ranges(queries, keys, values, RANGES, 1.0)
    is_damaged = found.isnan().any(-1).any(-1)
    assert is_damaged.nonzero().tolist() == [[2, 1]]


def test_other_tensors_are_refused() -> None:
    queries, keys, values = tensors(2, 2, 16)
    assert not is_supported(queries.float(), keys.float(), values.float())
    assert not is_supported(queries, keys, values.float())
    assert not is_supported(queries.repeat(1, 1, 5, 1), keys, values)
    assert not is_supported(queries, keys[:, :, ::2], values[:, :, ::2])
