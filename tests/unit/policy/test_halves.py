"""When early copies leave: as many as fit between two layers, against counting them."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from moesaic.facts.balance import Setting
from moesaic.policy.balance.halves import leave_ahead

EACH_S = 0.25
SETTING = Setting(
    homes=np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]), ranks=3, rows_per_s=1.0, row_bytes=1.0,
    bytes_per_s=8.0, expert_bytes=1.0, gradient_bytes=1.0, latency_s=EACH_S - 1 / 8,
)  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.floats(0, 3))
def test_as_many_as_fit_wait(seed: int, beside_s: float) -> None:
    rng = np.random.default_rng(seed)
    copied = rng.random((9, 3)) < rng.random()
    copied[np.arange(9), SETTING.homes] = False
    copies = np.argwhere(copied)
    ahead = leave_ahead(copies, SETTING._replace(beside_s=beside_s))
    fits = int(beside_s / EACH_S)
    for column in (SETTING.homes[copies[:, 0]], copies[:, 1]):
        assert max(Counter(column[~ahead].tolist()).values(), default=0) <= fits
    for expert, rank in copies[ahead].tolist():  # Nobody leaves sooner who need not.
        late = copies[~ahead]
        home = SETTING.homes[expert]
        same = Counter(SETTING.homes[late[:, 0]].tolist())[home], Counter(late[:, 1].tolist())[rank]
        assert max(same) == fits


def test_nothing_leaves_ahead_where_nothing_is_hidden() -> None:
    copies = np.array([[0, 1], [3, 0]])
    assert leave_ahead(copies, SETTING).all()
    assert not leave_ahead(copies, SETTING._replace(hides=False)).any()
    assert not leave_ahead(copies[:0], SETTING).any()
