"""Theme `titan`: students distilled while their teacher learns, text under control."""

from __future__ import annotations

from benchmarks import titan_eval, titan_gkd, titan_losses, titan_students

PARTS = {
    **titan_students.PARTS, **titan_gkd.PARTS, **titan_losses.PARTS, **titan_eval.PARTS,
}  # fmt: skip
