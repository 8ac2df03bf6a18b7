"""What runs have shown of a cluster's figures: factors that predictions multiply its times by."""

from __future__ import annotations

from pydantic import Field

from moesaic.base.config import Section

LEAST, MOST = 0.25, 4.0
"""A factor beyond these would say that something other than a figure is wrong."""


class Calibration(Section):
    """How much longer things took in runs than the cluster's figures say."""

    runs: int = Field(ge=1)
    """Runs that this was learnt from."""
    devices: list[str] = Field(min_length=1)
    """Models of the devices that they ran on; any other computes as its figures say."""
    products: float = Field(ge=LEAST, le=MOST)
    """Times of matrix products and attention are multiplied by this."""
    passes: float = Field(ge=LEAST, le=MOST)
    """Times of passes over memory, and of exponentials and the like."""
    messages: float = Field(ge=LEAST, le=MOST)
    """Times of messages between ranks."""
