"""Settings of the memory budget: memory that a rank may use, and the drive for the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from moesaic.base.config import Section
from moesaic.base.units import parse_bytes

ResidencyName = Literal["next-use", "lru", "lfu", "se-moe"]
"""Policies that choose which expert state stays in memory."""


class MemoryConfig(Section):
    """Budget of each rank's memory. Expert state that does not fit stays on a drive."""

    host: str = "auto"
    """Memory of a rank for everything but the interpreter, such as "2GB" or "1500MiB". auto: 80% of
    the memory that is free at the start, divided among the ranks of the host."""
    ssd: str
    """Directory on a drive for expert state that is not in memory: 16 bytes per expert parameter.
    The files have no names, and their space is free when a run ends; it resumes from checkpoints.
    """
    residency: ResidencyName = "next-use"
    """Policy that chooses the state that leaves memory. next-use: the one that training needs last.
    The others, lru, lfu and se-moe (the published one), are for comparison."""
    period: int = Field(default=0, ge=0)
    """Steps between writes of all changed state to the drive. 0: state is written only when it
    leaves memory, which writes least."""

    @field_validator("host")
    @classmethod
    def _is_size(cls, value: str) -> str:
        if value != "auto":
            parse_bytes(value)
        return value

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the budget; None: as much as is free."""
        return None if self.host == "auto" else parse_bytes(self.host)
