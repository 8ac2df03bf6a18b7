"""Decisions: an engine asks a pure policy through `decide`, which records facts and outcome.

The engine writes the recorded decisions as one event per step. `moesaic replay` asks other policies
about the same facts through the same function.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Facts = TypeVar("Facts")
Outcome = TypeVar("Outcome")


class Decision(NamedTuple, Generic[Facts, Outcome]):
    """One answer of a policy."""

    facts: Facts
    outcome: Outcome
    seconds: float
    """Seconds that the policy took."""


def decide(
    policy: Callable[[Facts], Outcome], facts: Facts, log: list[Decision[Facts, Outcome]]
) -> Outcome:
    """Return the decision of `policy` on `facts`, and append it to `log`."""
    began = time.perf_counter()
    outcome = policy(facts)
    log.append(Decision(facts, outcome, time.perf_counter() - began))
    return outcome
