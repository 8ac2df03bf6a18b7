"""Theme `tables`: embedding tables of recommenders against peers and limits."""

from __future__ import annotations

from benchmarks import tables_data, tables_dlrm, tables_files, tables_speed, tables_tiers

PARTS = {
    **tables_speed.PARTS, **tables_tiers.PARTS, **tables_dlrm.PARTS, **tables_data.PARTS,
    **tables_files.PARTS,
}  # fmt: skip
