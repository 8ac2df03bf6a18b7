"""The plan: which rank holds which part of the model, and what is to be expected of it.

One JSON file that `moesaic plan` writes, people edit, training obeys and every run keeps.
"""

from moesaic.facts.plan.checks import basis, check, check_places, load_plan, misplaced, ruled
from moesaic.facts.plan.layout import (
    block_names,
    columns_fault,
    completed,
    idle_ranks,
    idle_words,
    in_words,
    lay_out,
    planned,
    stages,
    travel_words,
)
from moesaic.facts.plan.order import Action, order
from moesaic.facts.plan.plan import Plan, RankPlace, Tiers
from moesaic.facts.plan.predictions import (
    ALL,
    FIRST,
    WINDOW,
    Measured,
    Predictions,
    RankSpan,
    RankTimeline,
    measure,
    short,
)

__all__ = [
    "ALL",
    "FIRST",
    "WINDOW",
    "Action",
    "Measured",
    "Plan",
    "Predictions",
    "RankPlace",
    "RankSpan",
    "RankTimeline",
    "Tiers",
    "basis",
    "block_names",
    "check",
    "check_places",
    "columns_fault",
    "completed",
    "idle_ranks",
    "idle_words",
    "in_words",
    "lay_out",
    "load_plan",
    "measure",
    "misplaced",
    "order",
    "planned",
    "ruled",
    "short",
    "stages",
    "travel_words",
]
