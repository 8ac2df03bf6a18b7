"""Predictions and words for the result of a search."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError
from moesaic.base.keys import join_words, toml
from moesaic.base.units import about_bytes, about_seconds, format_used_bytes, plural, round_text
from moesaic.facts.cluster import Cluster, describe_step, place_ranks
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import (
    FoundPlan,
    PlanEstimate,
    RankNeed,
    RunnerUp,
    SearchFacts,
    SearchResult,
    Settings,
    Shortfall,
)
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.plan.choices import Choices, PlanFacts, RecordedLoads, with_balance_costs
from moesaic.policy.plan.estimates import Estimates, SimulatedEstimates
from moesaic.policy.plan.predict import DOES_NOT_FIT, PlannedJob, predict_plan
from moesaic.policy.plan.remedy import describe_remedy, remedy_text
from moesaic.policy.plan.search import search_plans

Search = Decision[SearchFacts, SearchResult]


class WatchedEstimates(SimulatedEstimates):
    """Predictions of the cost model that report what a search does."""

    on_step: Callable[[], None] | None = None
    """Function to call with every simulated step."""
    on_progress: Callable[[], None] | None = None
    """Function to call as the search goes on: with every bound, shape, and plan."""

    def note_progress(self) -> None:
        """Take note that the search goes on: with another bound, shape or plan."""
        if self.on_progress is not None:
            self.on_progress()

    def memory(self, job: Job, plan: Plan) -> RankNeed:
        """Return the memory of the tightest rank."""
        self.note_progress()
        return super().memory(job, plan)

    def fits(self, job: Job, plan: Plan, stages: Sequence[int] | None = None) -> bool:
        """Return whether the ranks of some pipeline ranks, or all ranks, have enough memory."""
        self.note_progress()
        return super().fits(job, plan, stages)

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        """Return the time of a step."""
        found = super().step(job, plan)
        if self.on_step is not None:
            self.on_step()
        return found

    @classmethod
    def watching(
        cls, facts: SearchFacts, on_step: Callable[[], None], on_progress: Callable[[], None]
    ) -> WatchedEstimates:
        """Return the predictions for `facts` that call `on_step` and `on_progress`."""
        loads = None if facts.loads is None else [np.asarray(one) for one in facts.loads]
        found = cls(facts.cluster, loads)
        found.on_step, found.on_progress = on_step, on_progress
        return found

    def on_cluster(self, cluster: Cluster) -> WatchedEstimates:
        """Return the predictions on another cluster."""
        found = WatchedEstimates(cluster, self._loads)
        found.on_step, found.on_progress = self.on_step, self.on_progress
        return found


def run_search(
    facts: SearchFacts, estimates: Estimates | None = None, log: list[Search] | None = None
) -> SearchResult:
    """Return the decision of a search, which is appended to `log`; raise if no plan is valid."""
    if estimates is None:
        estimates = SimulatedEstimates.from_facts(facts)
    policy = partial(search_plans, estimates=estimates)
    result = decide(policy, facts, [] if log is None else log)
    is_explained = result.shortfall is not None or not facts.explains_shortfall
    if result.best is None and not is_explained:
        raise ConfigError(result.conflict or "no layout is valid for this job")
    return result


def predict_found(
    facts: SearchFacts, result: SearchResult, tiers: Mapping[str, Any] | None = None
) -> PlannedJob:
    """Return the predictions of the plan that a search found."""
    found = result.best or result.shortfall
    assert found is not None
    planned = predict_one(facts, found.plan, tiers)
    figures = {**planned.figures, "search": describe_search(facts, result)}
    warnings = planned.warnings
    if result.shortfall is not None:
        figures |= {
            "fits": False, "bottleneck": shortfall_text(result, result.shortfall),
            "remedy": describe_remedy(result.shortfall.remedy),
        }  # fmt: skip
        warnings = [one for one in warnings if not one.startswith(DOES_NOT_FIT)]
        warnings = [f"{DOES_NOT_FIT}{figures['bottleneck']}", *warnings]
    if facts.left_out:
        warnings = [*warnings, left_out_text(facts)]
    return planned._replace(figures=figures, warnings=warnings, found=result)


def left_out_text(facts: SearchFacts) -> str:
    """Return which hosts a search left out, and why."""
    many, precision = len(facts.left_out) > 1, facts.job.train.precision
    return (
        f"{'hosts' if many else 'host'} {join_words(facts.left_out, 'and')} "
        f"{'are' if many else 'is'} left out: no matmul speed for train.precision = "
        f'"{precision}"; add [[hosts.devices.matmul]] with dtype = "{precision}", or set another '
        "train.precision"
    )


def predict_one(
    facts: SearchFacts, plan: Plan, tiers: Mapping[str, Any] | None = None
) -> PlannedJob:
    """Return the predictions of one plan of a search."""
    plan_facts = facts_of_plan(facts, plan)
    choices = Choices(with_balance_costs(plan, plan_facts))
    return predict_plan(choices, plan_facts, None if tiers is None else dict(tiers))


def facts_of_plan(facts: SearchFacts, plan: Plan) -> PlanFacts:
    """Return what the predicted cost of one plan of a search depends on."""
    places = place_ranks(facts.cluster, plan.ranks)
    loads = None
    if facts.loads is not None:
        loads = RecordedLoads(facts.loads_run or "", [np.asarray(one) for one in facts.loads])
    network = NetworkModel(facts.cluster, places)
    return PlanFacts(facts.job, facts.cluster, places, network, loads).under(plan)


def describe_search(facts: SearchFacts, result: SearchResult) -> dict[str, Any]:
    """Return a search as plain data: what was kept, tried and proven, and the runners-up."""
    found = result.best or result.shortfall
    assert found is not None
    return {
        "method": result.method, "pins": {key: found.settings.get(key) for key in facts.pins},
        "chosen": {key: value for key, value in found.settings.items() if key not in facts.pins},
        "tried": result.tried, "too_large": result.too_large, "is_proven": result.is_proven,
        "is_limited": result.is_limited, "work": result.work, "gap": result.gap,
        "bound_s": result.bound_s,
        "runners_up": [
            {
                "differs": differences(one.settings, found.settings),
                "step_s": one.estimate.step_s, "loses_s": one.loses_s, "kind": one.kind,
                "kind_loses_s": one.kind_loses_s,
                "memory": one.memory.model_dump(mode="json"),
            }
            for one in result.runners_up
        ],
        "shortfall": None if result.shortfall is None else _describe_shortfall(result.shortfall),
    }  # fmt: skip


def _describe_shortfall(shortfall: Shortfall) -> dict[str, Any]:
    return {
        "memory": shortfall.memory.model_dump(mode="json"),
        "short_bytes": shortfall.memory.short_bytes,
    }


def differences(settings: Settings, others: Settings) -> Settings:
    """Return the values of `settings` that differ from `others`, by key."""
    return {key: value for key, value in settings.items() if value != others.get(key)}


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as text, with keys of the layout by their short names."""
    return ", ".join(
        f"{key.removeprefix('layout.')} = {toml(value)}" for key, value in settings.items()
    )


def proof_text(result: SearchResult) -> str:
    """Return in words how good the plan of a search is."""
    if result.is_proven:
        return "proven: no layout is faster by prediction"
    text = "the limit of work ended the search" if result.is_limited else "not proven"
    if result.gap is None:
        text += ", and another layout may be faster"
    else:
        text += f", and a faster layout would save at most {result.gap:.0%} of a step"
    return f"{text}; pin keys to search fewer layouts" if result.is_limited else text


def runner_up_text(one: RunnerUp, best: FoundPlan) -> str:
    """Return what a runner-up changes, what it loses, and where."""
    lost = one.loses_s / best.estimate.step_s
    text = settings_text(differences(one.settings, best.settings)) or "another order of stages"
    return (
        f"{text}: +{lost:.0%} ({about_seconds(one.loses_s)}), most of it in {one.kind} "
        f"({about_seconds(one.kind_loses_s)})"
    )


def shortfall_text(result: SearchResult, shortfall: Shortfall) -> str:
    """Return how much memory is short, and the remedy."""
    need = shortfall.memory
    nearest = (
        "even the layout that comes nearest"
        if result.is_proven
        else "no layout was found that fits, though some were not tried: the nearest one"
    )
    return (
        f"memory: {nearest} needs {about_bytes(need.peak_bytes)}, and rank {need.rank} may use "
        f"{about_bytes(need.usable_bytes)} of its {need.device}; "
        f"{remedy_text(describe_remedy(shortfall.remedy))}"
    )


def pins_text(facts: SearchFacts, settings: Settings) -> str:
    """Return the keys that the job writes, or that it writes none."""
    pins = {key: settings[key] for key in facts.pins if key in settings}
    return f"kept as the job says: {settings_text(pins)}" if pins else "the job pins nothing"


def chosen_text(best: FoundPlan, pins: Collection[str]) -> str:
    """Return the settings that a search chose, without those that are off."""
    chosen = {
        key: value for key, value in best.settings.items()
        if key not in pins and not _is_plain(key, value, best.plan)
    }  # fmt: skip
    return settings_text(chosen) or "the plainest layout"


def _is_plain(key: str, value: Any, plan: Plan) -> bool:
    """Return whether a setting has no effect, or is off."""
    is_unused = (key == "layout.schedule" and plan.pp == 1) or (
        key == "layout.dispatch" and plan.ep == 1
    )
    return is_unused or (value is not True and value in (None, "even", "whole", 1, False))


def search_lines(facts: SearchFacts, result: SearchResult, planned: PlannedJob) -> Sequence[str]:
    """Return three lines about the layout that a search chose: how, what to expect, and why."""
    best = result.best
    assert best is not None
    figures, memory = planned.figures, best.memory
    runner = result.runners_up[0] if result.runners_up else None
    return [
        f"plan: chosen {chosen_text(best, facts.pins)}; {pins_text(facts, best.settings)}",
        f"plan: predicted step {describe_step(figures['step_s'], facts.cluster.calibration)}, "
        f"{round_text(figures['tokens_per_s'])} tokens/s, "
        f"{format_used_bytes(memory.peak_bytes, memory.usable_bytes)} per rank; "
        f"bottleneck {figures['bottleneck']}",
        f"plan: {plural(result.tried, 'layout')} simulated, "
        f"{proof_text(result)}; next "
        + (runner_up_text(runner, best) if runner else "none: no other layout fits"),
    ]
