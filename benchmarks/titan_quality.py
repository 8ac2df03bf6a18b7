"""Theme `titan-quality`: distilled students, steered text and credible text, by quality alone."""

from __future__ import annotations

from benchmarks import titan_quality_control, titan_quality_credibility, titan_quality_distill

PARTS = {
    **titan_quality_distill.PARTS, **titan_quality_control.PARTS,
    **titan_quality_credibility.PARTS,
}  # fmt: skip
