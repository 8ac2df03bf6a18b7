"""Timing of early replicas: as many as fit between two layers, checked by counting."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from moesaic.facts.balance import BalanceProblem
from moesaic.policy.balance.replica_prefetch import prefetch_mask

EACH_S = 0.25
PROBLEM = BalanceProblem(
    owners=np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]), num_ranks=3,
    expert_tokens_per_s=1.0, token_bytes=1.0,
    bytes_per_s=8.0, expert_bytes=1.0, gradient_bytes=1.0, latency_s=EACH_S - 1 / 8,
)  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.floats(0, 3))
def test_replicas_that_fit_under_dense_layers_are_not_sent_earlier(
    seed: int, overlapped_s: float
) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.random((9, 3)) < rng.random()
    chosen[np.arange(9), PROBLEM.owners] = False
    replicas = np.argwhere(chosen)
    early = prefetch_mask(replicas, PROBLEM._replace(dense_compute_s=overlapped_s))
    fits = int(overlapped_s / EACH_S)
    for column in (PROBLEM.owners[replicas[:, 0]], replicas[:, 1]):
        assert max(Counter(column[~early].tolist()).values(), default=0) <= fits
    for expert, rank in replicas[early].tolist():  # No replica is sent early without need.
        late = replicas[~early]
        owner = PROBLEM.owners[expert]
        same = (
            Counter(PROBLEM.owners[late[:, 0]].tolist())[owner],
            Counter(late[:, 1].tolist())[rank],
        )
        assert max(same) == fits


def test_without_overlap_no_replica_is_sent_earlier() -> None:
    replicas = np.array([[0, 1], [3, 0]])
    assert prefetch_mask(replicas, PROBLEM).all()
    assert not prefetch_mask(replicas, PROBLEM._replace(overlaps=False)).any()
    assert not prefetch_mask(replicas[:0], PROBLEM).any()
