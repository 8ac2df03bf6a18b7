"""Calibration of a cluster: factors from measured runs that correct predicted times."""

from __future__ import annotations

from pydantic import Field

from moesaic.base.config import Section

MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
"""Range of a factor; beyond it, something other than a measured figure is wrong."""


class Calibration(Section):
    """Ratios of times measured in runs to times predicted from the cluster's figures."""

    runs: int = Field(ge=1)
    """Number of runs that the factors come from."""
    devices: list[str] = Field(min_length=1)
    """Models of the devices of these runs; other devices are not corrected."""
    matmul: float = Field(ge=MIN_FACTOR, le=MAX_FACTOR)
    """Factor on times of matmuls and attention."""
    elementwise: float = Field(ge=MIN_FACTOR, le=MAX_FACTOR)
    """Factor on times of elementwise kernels."""
    collectives: float = Field(ge=MIN_FACTOR, le=MAX_FACTOR)
    """Factor on times of collectives."""
