"""`moesaic bench layer`: speed of an expert layer on this machine against its roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.api.layer_speed import measure_layer
from moesaic.api.progress import probe_progress
from moesaic.api.start import exit_on_interrupt
from moesaic.base import keys
from moesaic.base.config import SET_FLAG, apply_sets, parse
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes, format_quantity, format_seconds
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Sets
from moesaic.facts.job.bench import BenchConfig
from moesaic.facts.job.job import fill_preset
from moesaic.facts.job.model import PRESETS
from moesaic.train.job_file import blame_sets, fill_pretrained

if TYPE_CHECKING:
    from moesaic.models.expert_benchmark import (
        DeviceLimit,
        MeasuredSpeed,
        SkippedBatch,
    )

WHAT = "layer"
_TITLES = (
    "", "tokens", "per expert", "forward", "tokens/s", "of the limit", "with backward",
    "of the limit", "limit",
)  # fmt: skip
_MAX_EFFICIENCY = 1.005
"""Efficiency above which rounding is no explanation."""
What = Annotated[
    str | None,
    typer.Argument(
        metavar="layer", help="Subject of the benchmark: one expert layer.", show_default=False
    ),
]


def bench(
    what: What = None, sets: Sets = None, as_json: Json = False, explain: Explain = None
) -> int:
    """Time an expert layer against the limit of this machine: dense matmuls or memory bandwidth.

    Batches of several sizes go through one layer, forward and backward, with its router and shared
    experts. All experts get equally many tokens. --set model.preset=NAME chooses the layer.
    """
    if explain is not None:
        flags.print_explanation(BenchConfig, explain, as_json)
        return 0
    if what != WHAT:
        problem = "the subject is missing" if what is None else f"'{what}' cannot be measured"
        raise ConfigError(f"{problem}: use moesaic bench layer (see moesaic bench --help)")
    config = _settings(sets or ())
    num_phases = 1 + len(config.dtypes) * len(config.tokens)
    with probe_progress(is_shown=True, total=num_phases) as start, exit_on_interrupt():
        measured = measure_layer(config, start)  # It leaves nothing behind.
    speeds = measured.speeds
    result: dict[str, Any] = {
        "device": measured.device, "backends": measured.backends,
        "experts": _describe_experts(config),
        "limits": [asdict(one) for one in measured.limits],
        "speeds": [asdict(one) for one in speeds],
        "left_out": [asdict(one) for one in measured.skipped],
    }  # fmt: skip
    if as_json:
        screen.print_json(result)
    else:
        _print_result(result, measured.limits, speeds)
        for line in _describe_skipped(measured.skipped, measured.free_bytes):
            screen.print_line(line)
    for warning in _warnings(speeds):
        screen.print_warning(warning)
    return 0


def _settings(sets: Sequence[str]) -> BenchConfig:
    if not any(item.startswith("model.") for item in sets):
        raise ConfigError(
            f"model is missing: add --set model.preset=NAME ({keys.join_words(list(PRESETS))}), or "
            "--set model.from=DIR"
        )
    warnings: list[str] = []
    with blame_sets(SET_FLAG, sets):
        raw = fill_pretrained(fill_preset(apply_sets({}, sets)), SET_FLAG, warnings)
    raw.pop("source", None)
    for warning in warnings:
        screen.print_warning(warning)
    return parse(BenchConfig, raw, SET_FLAG, sets)


def _describe_skipped(skipped: Sequence[SkippedBatch], free_bytes: int) -> Iterator[str]:
    """Yield the batches that were skipped, with remedies."""
    too_slow = [batch for batch in skipped if batch.reason == "time"]
    if too_slow:
        longest = format_seconds(max(batch.needed for batch in too_slow))
        yield (
            f"\nskipped: {_name_batches(too_slow)}: a batch takes {longest} or more; raise seconds "
            "(--set seconds=...), or use fewer tokens (--set tokens=...)"
        )
    too_large = [batch for batch in skipped if batch.reason == "memory"]
    if too_large:
        needed = format_bytes(max(batch.needed for batch in too_large))
        free = format_bytes(max(free_bytes, 0))
        yield (
            f"\nskipped: {_name_batches(too_large)}: a batch needs up to {needed} in addition to "
            f"the experts, but {free} are free; use fewer tokens (--set tokens=...)"
        )


def _name_batches(batches: Sequence[SkippedBatch]) -> str:
    tokens: dict[str, list[str]] = {}
    for batch in batches:
        tokens.setdefault(batch.roofline.dtype, []).append(f"{batch.roofline.tokens:,}")
    return "; ".join(f"{dtype} with {', '.join(sizes)} tokens" for dtype, sizes in tokens.items())


def _warnings(speeds: Sequence[MeasuredSpeed]) -> Iterator[str]:
    """Yield a warning about efficiencies above 100%."""
    above = [speed for speed in speeds if _max_efficiency(speed) > _MAX_EFFICIENCY]
    if above:
        batches = "; ".join(
            f"{speed.roofline.dtype} with {speed.roofline.tokens:,}" for speed in above
        )
        yield (
            f"up to {max(map(_max_efficiency, above)):.0%} of the limit (tokens: {batches}): the "
            "machine was busy while its limit was measured, or weights of few experts stayed in a "
            "cache; measure again when it is idle"
        )


def _max_efficiency(speed: MeasuredSpeed) -> float:
    return max(speed.forward_efficiency, speed.step_efficiency)


def _describe_experts(config: BenchConfig) -> str:
    model = config.model
    shared = f" and {model.shared_experts} shared" if model.shared_experts else ""
    sizes = f"{model.hidden:,} x {model.ffn:,}"
    return f"{model.experts} experts{shared} of {sizes}, {model.top_k} per token"


def _print_result(
    result: Mapping[str, Any], limits: Sequence[DeviceLimit], speeds: Sequence[MeasuredSpeed]
) -> None:
    screen.print_line(f"{result['experts']}; {result['device']}")
    for dtype, backend in result["backends"].items():
        screen.print_line(f"experts in {dtype}: {backend}")
    rates = ", ".join(
        f"{limit.dtype} {format_quantity(limit.flops_per_s, 'FLOP/s')}" for limit in limits
    )
    bandwidth = format_quantity(limits[0].bytes_per_s, "B/s")
    screen.print_line(f"limits: matmul {rates}; memory {bandwidth}\n")
    screen.print_table(_TITLES, map(_cells, speeds))


def _cells(speed: MeasuredSpeed) -> tuple[str, ...]:
    roofline = speed.roofline
    return (
        roofline.dtype, f"{roofline.tokens:,}", f"{roofline.tokens_per_expert:g}",
        format_seconds(speed.forward_s), f"{roofline.tokens / speed.forward_s:,.0f}",
        f"{speed.forward_efficiency:.0%}", format_seconds(speed.step_s),
        f"{speed.step_efficiency:.0%}", roofline.bottleneck,
    )  # fmt: skip
