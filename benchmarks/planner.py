"""Theme `planner`: plans of jobs on clusters, their predicted prices and the search for them."""

from __future__ import annotations

from benchmarks import planner_prices

PARTS = {**planner_prices.PARTS}
