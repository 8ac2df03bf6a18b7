"""What `moesaic probe` can be told. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

Number = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]


class ProbeConfig(Section):
    """What to measure, for how long, and what it costs to use."""

    name: str | None = None
    """What the cluster is called; unset: as its first host."""
    seconds: float = Field(default=20.0, gt=0, le=3600)
    """About how long it takes, starting aside; slow devices take longer: nothing is timed once."""
    repeats: int = Field(default=2, ge=2, le=100)
    """Times that everything is measured; the figures are medians, the spread is between them."""
    device: str = "auto"
    """What ranks compute with: auto (a GPU where there is one), or as in `train.device`."""
    dtypes: list[Number] | None = Field(default=None, min_length=1)
    """Types of numbers to multiply; unset: those that the device is meant for."""
    largest: int | None = Field(default=None, ge=64, le=65536)
    """Side of the largest matrices; unset: 1024 on a CPU, 8192 on a GPU."""
    copy_bytes: int | None = Field(default=None, ge=1 << 14, le=1 << 34)
    """Size of the largest copy, which no cache should hold; unset: 128 MiB (CPU), 1 GiB (GPU)."""
    links: bool = True
    """Whether to measure messages between ranks."""
    message_bytes: int = Field(default=16 << 20, ge=1 << 14, le=1 << 30)
    """Size of the largest message."""
    disks: list[str] = Field(default_factory=lambda: ["."])
    """A directory on every disk to measure; [] for none."""
    disk_bytes: int = Field(default=128 << 20, ge=1 << 20, le=256 << 20)
    """Size of the file that a disk is measured with; it is gone afterwards."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of one host, for an hour, in any one currency."""
    gpu_price_per_hour: float = Field(default=0.0, ge=0)
    """Of one GPU, on top of its host's."""
