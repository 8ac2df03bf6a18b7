"""Policies against one another: what the rows of layers come to, against taking them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from benchmarks import balance, balance_policies
from benchmarks.balance_policies import POLICIES, Layer
from benchmarks.measure import Row

SHAPE = (512, 512)
FEW = [
    Layer(4, 64, "one expert has 80%", 200, 512, SHAPE), Layer(8, 64, "Zipf 1.2", 10, 512, SHAPE),
]  # fmt: skip


def test_rows_are_what_layers_come_to() -> None:
    rows = {row.name.split(": ")[1]: row for row in balance_policies.compared(FEW)}
    assert all(row.simulated for row in rows.values())
    seconds = [dict(zip(POLICIES, balance_policies.seconds_of(one, n), strict=True))
               for n, one in enumerate(FEW)]  # fmt: skip
    for name in POLICIES:
        ratios = [each[name] / min(each.values()) for each in seconds]
        assert rows[f"{name} over the best, mean"].value == pytest.approx(np.mean(ratios))
        near = sum(ratio <= 1.01 for ratio in ratios) / len(FEW)
        assert rows[f"{name} within 1% of the best"].value == near
    assert rows["none over the best, mean"].value > 1.1


def test_loads_are_as_they_are_called() -> None:
    assert len(set(balance_policies.layers())) == 1152
    share = {}
    for load in balance_policies.LOADS:
        counts = Layer(8, 64, load, 1, 4096, SHAPE).counts(0)
        assert (counts.sum(axis=1) == 2 * 4096).all()
        share[load] = counts.sum(axis=0).max() / counts.sum()
    zipf = {power: 1 / (1 / np.arange(1, 65) ** power).sum() for power in (0.6, 1.2)}
    expected = [1 / 64, zipf[0.6], zipf[1.2], 0.8]
    assert list(share.values()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("take", [balance.simulated_rows, lambda: balance.PARTS["policies"](1)])
def test_they_are_taken_once_with_all_and_alone(
    take: Callable[[], Iterator[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance_policies, "layers", lambda: FEW)
    monkeypatch.setattr(balance.balance_simulated, "rows", lambda: iter(()))
    assert len(list(take())) == 2 * len(POLICIES)
