"""A rank's share of moves, against looking at each of them."""

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
def test_all_for_one_rank_arrives_in_its_order(
    moves: list[tuple[int, int, int]],
) -> None:
    experts, sources, targets = np.array(moves, np.int64).reshape(-1, 3).T
    shares = [ExpertMoves(experts, sources, targets).share(rank, RANKS) for rank in range(RANKS)]
    for one, share in enumerate(shares):
        leaves = np.split(share.leaves, np.cumsum(share.send)[:-1])
        for other, sent in enumerate(leaves):
            begins = sum(shares[other].receive[:one])
            landed = shares[other].comes[begins : begins + shares[other].receive[one]]
            between = [expert for expert, *way in moves if way == [one, other]]
            assert sent.tolist() == landed.tolist() == between
