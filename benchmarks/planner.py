"""Theme `planner`: chosen layouts against measured ones, predictions, and the search itself."""

from __future__ import annotations

from benchmarks import planner_choice, planner_cuts, planner_published, planner_search

PARTS = {
    **planner_choice.PARTS, **planner_cuts.PARTS, **planner_search.PARTS,
    **planner_published.PARTS,
}  # fmt: skip
