"""Theme `tables`: embedding tables of recommenders against peers and limits."""

from __future__ import annotations

from benchmarks import tables_speed, tables_tiers

PARTS = {**tables_speed.PARTS, **tables_tiers.PARTS}
