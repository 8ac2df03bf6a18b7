"""Initial values: a source of state that is a function of seed and logical name alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.dist.state import PARAMETER, Piece
from moesaic.nn.randomness import normal


class InitialSource:
    """Norms are one, every other weight is normal with the model's deviation, moments are zero."""

    def __init__(self, seed: int, deviation: float) -> None:
        self._seed, self._deviation = seed, deviation

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write initial values into every piece."""
        for piece in pieces:
            if piece.kind != PARAMETER:
                piece.tensor.zero_()
            elif len(piece.shape) == 1:
                piece.tensor.fill_(1.0)
            else:
                piece.tensor.copy_(self._values(piece))

    def _values(self, piece: Piece) -> Tensor:
        trailing = math.prod(piece.shape[1:])
        whole_rows = piece.tensor.shape[1:] == torch.Size(piece.shape[1:])
        first, rows = (
            (piece.offset[0], piece.tensor.shape[0]) if whole_rows else (0, piece.shape[0])
        )
        purpose = f"initial {piece.name}"
        values = normal(self._seed, purpose, first * trailing, (first + rows) * trailing)
        values = values.view(rows, *piece.shape[1:]) * self._deviation
        if whole_rows:
            return values
        box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape, strict=True))
        return values[box]
