"""Moves: which box of which tensor goes from which rank to which; `dist.transfer` obeys them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A box of one tensor of the state, and the rank that holds or wants it."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int

    @property
    def place(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The box, whoever holds it."""
        return self.key, self.offset, self.size


@dataclass(frozen=True)
class Move:
    """Copy the common part of a held and a wanted box."""

    have: Box
    want: Box
