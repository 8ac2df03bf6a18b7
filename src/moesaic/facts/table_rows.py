"""Rows of an embedding table as policies see them, and the decisions on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MemoryRows(NamedTuple):
    """Rows in memory that no pass needs, and the room that the next pass lacks."""

    idle_days: NDArray[np.int32]
    """Days since the last sample with the key, [rows]."""
    last_pass: NDArray[np.int32]
    """Number of the last pass that used the row, [rows]."""
    shows: NDArray[np.float32]
    """Samples with the key, decayed by day, [rows]."""
    scores: NDArray[np.float32]
    """Score of the row, decayed by day, [rows]."""
    num_needed: int
    """Rows that must leave memory at least."""
    demote_days: int
    """Idle days after which a row leaves memory; 0: only for lack of memory."""
    base_score: float
    """Score of a hot row at least."""
    num_hot: int
    """Hot rows that memory keeps at most."""


class PassNeeds(NamedTuple):
    """Memory for rows, and the rows that coming steps use."""

    memory_rows: int
    """Rows that fit in memory."""
    step_rows: tuple[int, ...]
    """Distinct rows of the first step, of the first two, and so on."""
    pass_steps: int
    """Steps of a pass that the job asks for; 0: auto."""


class PassLength(NamedTuple):
    """Length of a pass."""

    steps: int
    """Steps of the pass; 0: memory does not hold the rows of it and of the next one."""
    needed_rows: int
    """Rows that memory holds at least for two passes of this length, or of the shortest one."""
