"""Which of what may multiply experts' rows had best do so, by what each of them takes."""

from __future__ import annotations

from collections.abc import Mapping

from moesaic.facts.job.train import Products

_ORDER: tuple[Products, ...] = ("triton", "torch")
"""Kernels of our own leave the host the more alone."""
_WORTH = 1.03
"""By what one has to be faster than those before it: repeats differ by as much."""


def fastest(seconds: Mapping[Products, float]) -> Products:
    """The one that takes the least, or hardly more and comes first; never eight bits, by which a
    run learns something else."""
    least = min(seconds[one] for one in _ORDER if one in seconds)
    return next(one for one in _ORDER if seconds.get(one, float("inf")) <= _WORTH * least)
