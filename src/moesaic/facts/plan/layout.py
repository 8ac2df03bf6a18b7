"""From what a job says of its layout to a plan."""

from __future__ import annotations

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job, LayoutConfig, ModelConfig
from moesaic.facts.plan.plan import MOST_RANKS, Plan


def lay_out(layout: LayoutConfig, model: ModelConfig, ranks: int) -> Plan:
    """The plan that `layout` means on `ranks` ranks; anything else is as the job says."""
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"a plan has {MOST_RANKS} ranks at most, not {ranks}: ask for fewer (--nproc)"
        )
    part = ranks // layout.pp
    replicas = part // layout.tp
    shard = max(replicas, 1) if layout.shard == "all" else layout.shard
    for key, value, what, many in (
        ("layout.pp", layout.pp, "the number of ranks", ranks),
        ("layout.tp", layout.tp, "the ranks of a part of the pipeline", part),
        ("layout.ep", layout.ep, "the ranks of a part of the pipeline", part),
        ("layout.shard", shard, "the replicas", replicas),
    ):
        if many % value:
            of = "the number of ranks" if many == ranks else what
            raise ConfigError(
                f"{key} = {value} does not divide {of} ({many}): "
                f"choose a divisor of {many}, or start another number of ranks (--nproc)"
            )
    if layout.ep > 1 and model.experts % layout.ep:
        raise ConfigError(
            f"layout.ep = {layout.ep} does not divide model.experts = {model.experts}: "
            "choose a divisor of the number of experts"
        )
    return Plan(
        ranks=ranks, ep=layout.ep, shard=shard, tp=layout.tp, pp=layout.pp, experts=model.experts
    )


def planned(job: Job, ranks: int) -> Plan:
    """The plan that `job` itself means on `ranks` ranks, with nothing left to the job."""
    plan = lay_out(job.layout, job.model, ranks)
    return plan.model_copy(
        update={
            "stages": [block_names(job.model)], "recompute": job.train.recompute,
            "micro_batches": job.train.micro_batches,
        }
    )  # fmt: skip


def block_names(model: ModelConfig) -> list[str]:
    """The named blocks of `model`, in order."""
    return ["embed", *(f"layers.{index}" for index in range(model.layers)), "head"]
