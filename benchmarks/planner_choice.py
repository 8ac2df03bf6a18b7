"""Parts `choice` and `peaks` of the theme `planner`: predictions of layouts against measurement.

Six jobs run on two ranks under every layout that the search may choose. The cluster is probed and
calibrated before a job is measured: by the steps of a seventh job, and by the probe amid the job
before it. Another probe, amid the job's own steps, predicts the seconds of its layouts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks.facts import PROBE_S, STEP_BARS, peak_bytes, probed
from benchmarks.planner_layouts import (
    RANKS,
    Layout,
    Seconds,
    Timed,
    best_of,
    find,
    index_of,
    layouts,
    over_rounds,
    split,
    timed,
)
from moesaic.base.config import parse
from moesaic.facts.cluster import Calibration, Cluster, device_models
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.workload import memory
from moesaic.policy.cost.calibrate import (
    KINDS,
    UNCALIBRATED,
    Factors,
    Observation,
    fit_factors,
    observe_step,
)
from moesaic.testing.ranks import RankPool

ROUNDS = 14
CALIBRATION_ROUNDS = 6
PEAK_STEPS = 3
NARROW = {
    "vocab": 2048, "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 4, "head_dim": 64,
}  # fmt: skip
DENSE = {"family": "llama", "experts": 0, "top_k": 0}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "v_head_dim": 64}
Shape = tuple[dict[str, Any], int, int, int]
"""Changes of the model, samples of a batch, tokens of a sample, micro-batches."""
JOBS: dict[str, Shape] = {
    "small experts": (
        {"family": "olmoe", "ffn": 128, "experts": 32, "top_k": 4}, 8, 128, 4,
    ),
    "large experts": (
        {"family": "mixtral", "ffn": 768, "experts": 8, "top_k": 2}, 8, 64, 4,
    ),
    "wide vocabulary": (
        {"family": "mixtral", "layers": 2, "vocab": 16384, "ffn": 384, "experts": 4, "top_k": 2},
        8, 64, 4,
    ),
    "long samples": (
        {"family": "qwen3_moe", "layers": 2, "ffn": 256, "experts": 8, "top_k": 2}, 4, 512, 2,
    ),
    "dense": (
        {**DENSE, "hidden": 384, "heads": 6, "kv_heads": 6, "ffn": 1024}, 8, 64, 4,
    ),
    "shared experts": (
        {"family": "deepseek_v3", "layers": 3, "dense_layers": 1, "dense_ffn": 704,
         "shared_experts": 1, "ffn": 128, "experts": 16, "top_k": 4, "latent": LATENT}, 8, 128, 4,
    ),
}  # fmt: skip
"""Jobs whose layouts are judged."""
CALIBRATION: Shape = (
    {"family": "olmoe", "layers": 3, "vocab": 4096, "hidden": 320, "heads": 5, "kv_heads": 5,
     "ffn": 256, "experts": 16, "top_k": 2}, 8, 96, 4,
)  # fmt: skip
"""Job whose steps calibrate the cluster."""
CHOICE_BARS = {"median": "<= 1.05", "worst": "<= 1.15", "rule": "<= 1.05"}


def job_of(shape: Shape) -> Job:
    """Return a job whose layout has at most twelve values on two ranks.

    Predictions assume even routing, and untrained routers are uneven.
    """
    model, batch, sequence, micro_batches = shape
    even = {"router": "balanced", "balance_loss": 0.0} if model["experts"] else {}
    raw = {
        "model": {**NARROW, **model}, "routing": even, "balance": {"policy": "none"},
        "data": {"path": "unused", "sequence": sequence}, "schedule": {"kind": "constant"},
        "train": {
            "steps": 1_000_000, "batch": batch, "micro_batches": micro_batches, "clip": 1.0,
            "device": "cpu", "recompute": False,
        },
        "layout": {
            "schedule": "1f1b", "embedding": "whole", "chunks": 1, "overlap_local": False,
        },
        "checkpoint": {"asynchronous": False},
    }  # fmt: skip
    return parse(Job, raw, "benchmark")


class Judged(NamedTuple):
    """A job whose layouts were timed."""

    name: str
    among: list[Layout]
    timed: Timed
    chosen: int
    """Layout of the search."""
    rule: int
    """Layout of the rule of thumb."""
    steps: list[Observation]
    """Measured steps with their predictions by the probe amid them."""


def choice(rounds: int) -> Iterator[measure.Row]:
    """Measure what choices lose and how far predictions are off."""
    found, factors = judge(list(JOBS.items()), CALIBRATION, min(rounds, ROUNDS))
    yield from choice_rows(found)
    yield order_row(found, factors)
    yield from error_rows(found, factors)


def judge(
    jobs: Sequence[tuple[str, Shape]], calibration: Shape, rounds: int
) -> tuple[list[Judged], Factors]:
    """Return all jobs, timed, and the factors that the calibration job's steps fit."""
    factors, cluster, found = UNCALIBRATED, probed(PROBE_S), list[Judged]()
    with closing(RankPool()) as pool:
        for name, shape in [("", calibration), *jobs]:
            job = job_of(shape)
            here = calibrated(cluster, factors)
            among = layouts(job, here)
            chosen = index_of(find(job, here)[0].plan, among)
            rule = index_of(find(job, here, "rule-of-thumb")[0].plan, among)
            own = timed(pool, among, rounds if name else min(rounds, CALIBRATION_ROUNDS))
            cluster = own.cluster
            steps = observed(among, own)
            if name:
                found.append(Judged(name, among, own, chosen, rule, steps))
            else:
                factors = fit_factors(steps)
    return found, factors


def calibrated(cluster: Cluster, factors: Factors) -> Cluster:
    """Return a cluster with factors, as `moesaic calibrate` writes them."""
    values = dict(zip(KINDS, factors.tolist(), strict=True))
    models = sorted(set(device_models(cluster, RANKS)))
    return cluster.model_copy(update={"calibration": Calibration(runs=1, devices=models, **values)})


def observed(among: Sequence[Layout], own: Timed) -> list[Observation]:
    """Return the median step of each layout with its prediction."""
    medians = np.median(own.seconds, axis=1).tolist()
    return [
        observe_step(one.name, seconds, one.job, one.plan, own.cluster)
        for one, seconds in zip(among, medians, strict=True)
    ]


def choice_rows(found: Sequence[Judged]) -> Iterator[measure.Row]:
    """Yield what choices lose to the best layout and to the rule of thumb."""
    to_best, to_rule, details = list[Seconds](), list[Seconds](), list[measure.Row]()
    for one in found:
        picked, judged = split(one.timed.seconds)
        best = best_of(picked)
        to_best.append(judged[one.chosen] / judged[best])
        to_rule.append(judged[one.chosen] / judged[one.rule])
        details.append(
            measure.row(
                f"step of the chosen layout over the best measured: {one.name}",
                float(np.median(to_best[-1])), "ratio", bar="",
                against=f"best of {len(one.among)}: {one.among[best].name}; chosen: "
                f"{one.among[one.chosen].name}, {np.median(judged[one.chosen]):.3f} s; rule of "
                f"thumb: {one.among[one.rule].name}, {np.median(judged[one.rule]):.3f} s; "
                f"{noise(one.timed)}",
                interval=measure.bootstrap(to_best[-1]), repeats=len(to_best[-1]),
            )
        )  # fmt: skip
    words, judged_rounds = f"{len(found)} jobs, {RANKS} ranks", details[0].repeats
    against = "the best of all layouts on half of the rounds, judged on the others; calibrated by "
    against += "another job before"
    for name, bar in (("median", CHOICE_BARS["median"]), ("worst", CHOICE_BARS["worst"])):
        value, interval = over_rounds(to_best, REDUCE[name])
        yield measure.row(
            f"step of the chosen layout over the best measured, {name} of {words}", value, "ratio",
            bar=bar, against=against, interval=interval, repeats=judged_rounds,
        )  # fmt: skip
    value, interval = over_rounds(to_rule, REDUCE["worst"])
    yield measure.row(
        f"step of the chosen layout over the rule of thumb's, worst of {words}", value, "ratio",
        bar=CHOICE_BARS["rule"], against="`--method rule-of-thumb`, the same rounds",
        interval=interval, repeats=judged_rounds,
    )  # fmt: skip
    yield from details


def _median(values: Seconds) -> Seconds:
    middle: Seconds = np.median(values, axis=0)
    return middle


def _worst(values: Seconds) -> Seconds:
    worst: Seconds = values.max(axis=0)
    return worst


REDUCE = {"median": _median, "worst": _worst}


def noise(own: Timed) -> str:
    """Return how steady the machine was."""
    disturbed = f", {own.disturbed} rounds disturbed" * (own.disturbed > 0)
    return f"the machine's speed moved by {own.unsteady - 1:.0%}{disturbed}"


def order_row(found: Sequence[Judged], factors: Factors) -> measure.Row:
    """Return Kendall's tau of predicted and measured steps, within each job."""
    signs = [agreements(one, factors) for one in found]
    draw = np.random.default_rng(0)
    draws = [
        np.mean(np.concatenate([signs[at] for at in draw.integers(len(signs), size=len(signs))]))
        for _ in range(500)
    ]
    together = np.concatenate(signs)
    value = float(together.mean())
    low, high = np.percentile(draws, (2.5, 97.5))
    possible = sum(len(one.among) * (len(one.among) - 1) // 2 for one in found)
    return measure.row(
        f"Kendall's tau of predicted and measured steps, {len(found)} jobs", value, "tau",
        bar=">= 0.8", against=f"{len(together)} pairs of layouts of one job that differ by more "
        f"than their interval, of {possible}; the interval draws whole jobs",
        interval=(min(float(low), value), max(float(high), value)),
        repeats=found[0].timed.seconds.shape[1],
    )  # fmt: skip


def agreements(one: Judged, factors: Factors) -> Seconds:
    """Return 1 for pairs that are predicted in the measured order, else -1, of those that differ
    by more than their interval."""
    predicted = [step.predict_s(factors) for step in one.steps]
    signs = []
    for a, b in combinations(range(len(one.among)), 2):
        ratios = one.timed.seconds[a] / one.timed.seconds[b]
        low, high = measure.bootstrap(ratios, resamples=2000)
        if low > 1 or high < 1:
            signs.append(float(np.sign(predicted[a] - predicted[b]) * (1 if low > 1 else -1)))
    return np.array(signs)


def error_rows(found: Sequence[Judged], factors: Factors) -> Iterator[measure.Row]:
    """Yield the median error of predicted steps, the worst, and those of each job."""
    for words, bars, by in (
        ("", STEP_BARS, factors), (", not calibrated", dict[str, str](), UNCALIBRATED),
    ):  # fmt: skip
        series = [ratios for one in found for ratios in measured_over_predicted(one, by)]
        for name in ("median", "worst"):
            value, interval = over_rounds(series, errors_by(name))
            yield measure.row(
                f"error of a layout's predicted step{words}, {name} of all plans", value, "share",
                bar=bars.get(name, ""), against=f"{len(series)} plans, measured, a probe amid them"
                + ("" if words else "; factors of another job: " + named(factors)),
                interval=interval, repeats=len(series[0]),
            )  # fmt: skip
    for one in found:
        series = measured_over_predicted(one, factors)
        errors = [1 / float(np.median(ratios)) - 1 for ratios in series]
        at = max(range(len(errors)), key=lambda index: abs(errors[index]))
        value, interval = over_rounds(series, errors_by("worst"))
        yield measure.row(
            f"error of a layout's predicted step, worst: {one.name}", value, "share", bar="",
            against=f"{one.among[at].name}, {errors[at]:+.1%}; median of {len(errors)}: "
            f"{statistics.median(map(abs, errors)):.1%}; {noise(one.timed)}",
            interval=interval, repeats=len(series[0]),
        )  # fmt: skip


def named(factors: Factors) -> str:
    """Return factors by kind."""
    return ", ".join(f"{kind} {one:.2f}" for kind, one in zip(KINDS, factors, strict=True))


def measured_over_predicted(one: Judged, factors: Factors) -> list[Seconds]:
    """Return measured over predicted seconds of each layout, by round."""
    return [
        seconds / step.predict_s(factors)
        for seconds, step in zip(one.timed.seconds, one.steps, strict=True)
    ]


def errors_by(name: str) -> Any:
    """Return the median or worst error of medians of measured over predicted."""
    return lambda medians: REDUCE[name](np.abs(1 / medians - 1))


def peaks(rounds: int) -> Iterator[measure.Row]:
    """Compare predicted peak memory of every layout with what torch allocates, rank by rank."""
    del rounds
    yield from peak_rows(list(JOBS.items()))


def peak_rows(jobs: Sequence[tuple[str, Shape]]) -> Iterator[measure.Row]:
    """Yield the largest error over all plans, and that of each job."""
    details, plans = list[measure.Row](), 0
    for name, shape in jobs:
        job = job_of(shape)
        among = layouts(job, any_cluster())
        with closing(RankPool()) as pool:
            errors = {one.name: peak_error(pool, one) for one in among}
        worst = max(errors, key=lambda key: errors[key])
        plans += len(errors)
        details.append(
            measure.row(
                f"error of predicted peak memory: {name}", errors[worst], "share", bar="",
                against=f"torch's own count; worst of {len(errors)} layouts: {worst}",
                repeats=PEAK_STEPS,
            )
        )  # fmt: skip
    claim = measure.worst(
        "error of predicted peak memory, largest of all plans", details, "<= 0.02"
    )
    yield replace(claim, against=f"{plans} plans; {claim.against}")
    yield from details


def peak_error(pool: RankPool, one: Layout) -> float:
    """Return the error of the predicted peak of a layout, on the rank with the largest."""
    found = pool.run(RANKS, peak_bytes, one.job, one.plan, PEAK_STEPS, timeout_s=300.0)
    errors = []
    for rank, taken in enumerate(found):
        needs = memory(one.job, one.plan, rank).peak_bytes
        errors.append(abs(statistics.median(needs / peak for peak in taken) - 1.0))
    return max(errors)


def any_cluster() -> Cluster:
    """Return a host by its data sheet: memory does not depend on speeds."""
    hosts = [{"name": "here", "preset": "cpu"}]
    return resolve_cluster({"name": "any", "hosts": hosts}, "benchmark")


PARTS = {"choice": choice, "peaks": peaks}
