"""Largest model of a job's shape that some layout fits into the memory of a cluster's devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from moesaic.facts.job import Job
from moesaic.facts.job.model import MAX_EXPERTS
from moesaic.facts.plan.search import SearchFacts, SearchResult
from moesaic.facts.workload import count_parameters

_MAX_LAYERS = 4096
"""Layers of a dense model, at most."""


def largest_in_memory(
    facts: SearchFacts, search: Callable[[SearchFacts], SearchResult]
) -> dict[str, Any]:
    """Return the largest model as plain data: more experts per layer, or more layers of a dense
    model, with all else as in the job.

    `search` gets facts that ask for any plan that fits.
    """
    job, key = facts.job, "experts" if facts.job.model.experts else "layers"
    step = _step(facts) if key == "experts" else 1
    least = -(-max(job.model.top_k, 1) // step) if key == "experts" else 1
    most = (MAX_EXPERTS - 1) // step if key == "experts" else _MAX_LAYERS
    results = dict[int, SearchResult]()

    def fits(number: int) -> bool:
        if number not in results:
            model = _resized(job, key, number * step)
            asked = {"job": model, "max_tried": 1, "num_runners_up": 0, "explains_shortfall": False}
            results[number] = search(facts.model_copy(update=asked))
        return results[number].best is not None

    low, high = _bracket(fits, least, most, getattr(job.model, key) // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    size = low * step if low >= least else 0
    found = results[low].best if size else None
    return {
        "cluster": facts.cluster.name, "ranks": facts.ranks, "key": f"model.{key}", "size": size,
        "own": getattr(job.model, key),
        "parameters": count_parameters(_resized(job, key, size).model).total if size else 0,
        "settings": None if found is None else found.settings,
        "memory": None if found is None else found.memory.model_dump(mode="json"),
        "next_size": high * step if high in results else None,
    }  # fmt: skip


def _bracket(fits: Callable[[int], bool], least: int, most: int, first: int) -> tuple[int, int]:
    """Return a number that fits (or one below `least`), and a larger one that does not."""
    low, number = least - 1, min(max(first, least), most)
    while fits(number):
        if number == most:
            return most, most + 1
        low, number = number, min(2 * number, most)
    high = number
    while low < least and high > least:
        number = max(high // 2, least)
        if fits(number):
            return number, high
        high = number
    return low, high


def _step(facts: SearchFacts) -> int:
    """Return what the number of experts is a multiple of: router groups, and a share per rank."""
    layout = facts.job.layout
    share = layout.ep if "layout.ep" in facts.pins else facts.ranks & -facts.ranks
    return math.lcm(share, facts.job.model.expert_groups)


def _resized(job: Job, key: str, size: int) -> Job:
    """Return `job` with another number of experts or layers."""
    return job.model_copy(update={"model": job.model.model_copy(update={key: size})})
