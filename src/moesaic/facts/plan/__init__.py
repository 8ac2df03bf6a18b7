"""The plan: which rank holds which part of the model, and the predicted time and memory.

It is one JSON file: `moesaic plan` writes it, users may edit it, training obeys it, every run keeps
it.
"""

from moesaic.facts.plan.checks import (
    check_places,
    check_plan,
    job_under_plan,
    load_plan,
    placement_mismatch,
    prediction_digest,
)
from moesaic.facts.plan.layout import (
    block_names,
    complete_plan,
    describe_plan,
    dispatch_summary,
    embedding_shard_error,
    idle_ranks,
    idle_ranks_warning,
    plan_from_job,
    plan_from_layout,
    stage_blocks,
)
from moesaic.facts.plan.pipeline_order import Action, pipeline_actions
from moesaic.facts.plan.plan import Plan, RankPlace, Tiers
from moesaic.facts.plan.predictions import (
    ALL_BLOCKS,
    MEDIAN_WINDOW,
    WARMUP_STEPS,
    Measurements,
    Predictions,
    RankSpan,
    RankTimeline,
    measure,
    round_digits,
)

__all__ = [
    "ALL_BLOCKS",
    "MEDIAN_WINDOW",
    "WARMUP_STEPS",
    "Action",
    "Measurements",
    "Plan",
    "Predictions",
    "RankPlace",
    "RankSpan",
    "RankTimeline",
    "Tiers",
    "block_names",
    "check_places",
    "check_plan",
    "complete_plan",
    "describe_plan",
    "dispatch_summary",
    "embedding_shard_error",
    "idle_ranks",
    "idle_ranks_warning",
    "job_under_plan",
    "load_plan",
    "measure",
    "pipeline_actions",
    "placement_mismatch",
    "plan_from_job",
    "plan_from_layout",
    "prediction_digest",
    "round_digits",
    "stage_blocks",
]
