"""Methods of search, compared on the facts from which a run chose its layout."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from moesaic.base.config import parse
from moesaic.base.errors import StoreError
from moesaic.base.events import find_run_log, read_events
from moesaic.facts.plan.search import SearchFacts, SearchMethod

_FORMER_LIMIT = "limit_s"
"""Key of facts that older versions recorded; a replay has a limit of its own."""


def replay_search(
    run: Path, max_work: int = 10_000, log: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return what each method of search chooses from the facts that `run` recorded, as plain data.

    Args:
        run: directory of a run that searched for its layout.
        max_work: work of each method, at most, as in `SearchFacts`.
        log: receives the name of each method before it runs.
    """
    from moesaic.policy.plan.found import Search, differences, run_search

    facts, plan = _recorded_search(run)
    results, baseline = list[dict[str, Any]](), None
    for method in get_args(SearchMethod):
        if method == "milp" and importlib.util.find_spec("scipy") is None:
            continue
        if log is not None:
            log(f"searching: {method}")
        decisions = list[Search]()
        changes = {"method": method, "max_work": max_work}
        result = run_search(facts.model_copy(update=changes), log=decisions)
        baseline = result.best if baseline is None else baseline
        best = result.best
        results.append({
            "method": method, "step_s": None if best is None else best.estimate.step_s,
            "tried": result.tried, "seconds": decisions[0].seconds,
            "is_proven": result.is_proven, "gap": result.gap,
            "differs": {} if best is None or baseline is None
            else differences(best.settings, baseline.settings),
        })  # fmt: skip
    return {
        "run": str(run), "cluster": facts.cluster.name, "ranks": facts.ranks, "pins": facts.pins,
        "simulated": True, "chosen": plan, "methods": results,
    }  # fmt: skip


def _recorded_search(run: Path) -> tuple[SearchFacts, dict[str, Any]]:
    """Return the facts of the newest search of a run, and the settings that it chose."""
    found: dict[str, Any] | None = None
    for event in read_events(find_run_log(run)):
        for one in event.get("decisions", ()) if event["event"] == "run_start" else ():
            if "pins" in one.get("facts", {}):
                found = one
    if found is None:
        raise StoreError(
            f"'{run}' has not searched for its layout: replay a run that was started with "
            'plan = "auto"'
        )
    origin = f"the search in '{run}'"
    best = found["outcome"].get("best") or {}
    facts = {key: one for key, one in found["facts"].items() if key != _FORMER_LIMIT}
    return parse(SearchFacts, facts, origin), dict(best.get("settings", {}))
