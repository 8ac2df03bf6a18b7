"""Settings of `moesaic probe`. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]


class ProbeConfig(Section):
    """Hardware to measure, duration, and prices."""

    name: str | None = None
    """Name of the cluster; unset: the name of its first host."""
    seconds: float = Field(default=20.0, gt=0, le=3600)
    """Approximate duration in seconds without startup. Slow devices take longer, because every
    measurement is repeated."""
    repeats: int = Field(default=2, ge=2, le=100)
    """Number of repeats. Figures are medians over them, and their spread is reported."""
    device: str = "auto"
    """Device of the ranks: auto (a GPU if there is one), or as in `train.device`."""
    dtypes: list[DType] | None = Field(default=None, min_length=1)
    """Dtypes to measure; unset: those that the device multiplies well."""
    largest_side: int | None = Field(default=None, ge=64, le=65536)
    """Side of the largest matrices; unset: 1024 on a CPU, 8192 on a GPU."""
    copy_bytes: int | None = Field(default=None, ge=1 << 14, le=1 << 34)
    """Bytes of the largest copy, which should exceed every cache; unset: 128 MiB (CPU), 1 GiB
    (GPU)."""
    links: bool = True
    """Measure messages and collectives between ranks."""
    message_bytes: int = Field(default=16 << 20, ge=1 << 14, le=1 << 30)
    """Bytes of the largest message."""
    disks: list[str] = Field(default_factory=lambda: ["."])
    """One directory on each disk to measure; [] for none."""
    disk_bytes: int = Field(default=128 << 20, ge=1 << 20, le=256 << 20)
    """Bytes of the test file on each disk; it is deleted afterwards."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of a host per hour, in any currency."""
    gpu_price_per_hour: float = Field(default=0.0, ge=0)
    """Price of a GPU per hour, in addition to its host."""
