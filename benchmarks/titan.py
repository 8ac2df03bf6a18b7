"""Theme `titan`: students distilled while their teacher learns, text under control."""

from __future__ import annotations

from benchmarks import titan_losses

PARTS = {**titan_losses.PARTS}
