"""Initial values: a source of state that is a function of seed and logical name alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moesaic.dist.state import PARAMETER, Piece
from moesaic.facts.workload.finetune import A, B
from moesaic.nn.randomness import normal

_ELEMENTS = 1 << 22


class InitialSource:
    """Norms are one, biases and moments zero, all else is normal with the model's deviation.

    Adapters start as nothing: B is zero, and A normal with the root of one over its inputs.
    """

    def __init__(self, seed: int, deviation: float) -> None:
        self._seed, self._deviation = seed, deviation

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write initial values into every piece."""
        for piece in pieces:
            if piece.kind != PARAMETER or piece.name.endswith((".bias", B)):
                piece.tensor.zero_()
            elif len(piece.shape) == 1:
                piece.tensor.fill_(1.0)
            elif piece.name.endswith(A):
                self._draw(piece, piece.shape[1] ** -0.5)
            else:
                self._draw(piece, self._deviation)

    def _draw(self, piece: Piece, deviation: float) -> None:
        """A few rows at a time: the numbers are made in fp64, whatever they end in."""
        row = math.prod(piece.shape[1:])
        rows_at_once = max(1, _ELEMENTS // row)
        box = [slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True)]
        first = box[0].start
        for rows in piece.tensor.split(rows_at_once):
            last = first + len(rows)
            values = normal(self._seed, f"initial {piece.name}", first * row, last * row)
            values = values.view(-1, *piece.shape[1:]).mul_(deviation)
            rows.copy_(values[(slice(None), *box[1:])])
            first = last
