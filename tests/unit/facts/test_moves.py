"""Expert moves of each rank, compared with the list of all moves."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from moesaic.facts.moves import ExpertMoves

RANKS = 4
MOVES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)), max_size=20
)


@given(MOVES)
def test_experts_arrive_in_order(
    moves: list[tuple[int, int, int]],
) -> None:
    experts, sources, targets = np.array(moves, np.int64).reshape(-1, 3).T
    by_rank = [
        ExpertMoves(experts, sources, targets).rank_moves(rank, RANKS) for rank in range(RANKS)
    ]
    for source, own in enumerate(by_rank):
        by_target = np.split(own.send_experts, np.cumsum(own.send_counts)[:-1])
        for target, sent in enumerate(by_target):
            other = by_rank[target]
            start = sum(other.receive_counts[:source])
            received = other.receive_experts[start : start + other.receive_counts[source]]
            expected = [expert for expert, *ranks in moves if ranks == [source, target]]
            assert sent.tolist() == received.tolist() == expected
