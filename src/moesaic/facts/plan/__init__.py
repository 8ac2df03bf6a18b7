"""The plan: which rank holds which part of the model, and the predicted time and memory.

It is one JSON file: `moesaic plan` writes it, users may edit it, training obeys it, every run keeps
it.
"""

from moesaic.facts.plan.checks import (
    check_places,
    check_plan,
    embedding_shard_error,
    load_plan,
    placement_mismatch,
    prediction_digest,
)
from moesaic.facts.plan.layout import (
    complete_plan,
    describe_plan,
    dispatch_summary,
    fewest_ranks,
    idle_ranks_warning,
    job_under_plan,
    plan_from_job,
    plan_from_layout,
    student_plan,
)
from moesaic.facts.plan.pipeline_order import (
    Action,
    pipeline_actions,
)
from moesaic.facts.plan.plan import (
    Plan,
    RankPlace,
    block_names,
    stage_blocks,
)
from moesaic.facts.plan.predictions import (
    PhaseSeconds,
    Predictions,
    RankTimeline,
    round_digits,
)

__all__ = [
    "Action",
    "PhaseSeconds",
    "Plan",
    "Predictions",
    "RankPlace",
    "RankTimeline",
    "block_names",
    "check_places",
    "check_plan",
    "complete_plan",
    "describe_plan",
    "dispatch_summary",
    "embedding_shard_error",
    "fewest_ranks",
    "idle_ranks_warning",
    "job_under_plan",
    "load_plan",
    "pipeline_actions",
    "placement_mismatch",
    "plan_from_job",
    "plan_from_layout",
    "prediction_digest",
    "round_digits",
    "stage_blocks",
    "student_plan",
]
