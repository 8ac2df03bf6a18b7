"""`moesaic bench layer`: speed of an expert layer on this machine against its roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.base import keys
from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import UserError
from moesaic.base.units import format_bytes, format_quantity, format_seconds
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.progress import probe_progress
from moesaic.cli.start import exit_on_interrupt
from moesaic.facts.job.bench import BenchConfig
from moesaic.facts.job.job import fill_preset
from moesaic.facts.job.model import PRESETS
from moesaic.train.job_file import fill_pretrained

if TYPE_CHECKING:
    from moesaic.models.expert_benchmark import (
        DeviceLimit,
        ExpertLayerBenchmark,
        MeasuredSpeed,
        SkippedBatch,
    )

WHAT = "layer"
_LIMITS_FRACTION = 0.2
"""Fraction of the time for the limits."""
_TITLES = (
    "", "tokens", "per expert", "forward", "tokens/s", "of the limit", "with backward",
    "of the limit", "limit",
)  # fmt: skip
_WIDTHS = (4, 9, 10, 13, 11, 12, 13, 12, 8)
_MAX_EFFICIENCY = 1.005
"""Efficiency above which rounding is no explanation."""
What = Annotated[
    str | None,
    typer.Argument(
        metavar="layer", help="Subject of the benchmark: one expert layer.", show_default=False
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", show_default=False,
        help="Short for --set model.preset=NAME; a unique beginning is enough.",
    ),
]  # fmt: skip


def bench(
    what: What = None,
    model: Model = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Time an expert layer against the limit of this machine: dense matmuls or memory bandwidth.

    Batches of several sizes go through one layer, forward and backward, with its router and shared
    experts. All experts get equally many tokens. --out FILE writes the result as JSON.
    """
    if explain is not None:
        flags.print_explanation(BenchConfig, explain, as_json)
        return 0
    if what != WHAT:
        problem = "the subject is missing" if what is None else f"'{what}' cannot be measured"
        raise UserError(f"{problem}: use moesaic bench layer (see moesaic bench --help)")
    config = _settings(model, sets or ())
    if out is not None:
        flags.check_new_file("--out", out, "layer.json")
    if dry_run:
        if as_json:
            screen.print_json(config.model_dump(mode="json", by_alias=True))
        else:
            screen.print_line(config.to_toml().rstrip())
        return 0
    with exit_on_interrupt():
        from moesaic.kernels import device as devices
        from moesaic.kernels.grouped_mm import check_backend
        from moesaic.models.expert_benchmark import ExpertLayerBenchmark
    device = devices.resolve(config.device, key="device")
    check_backend(config.grouped_mm, device, key="grouped_mm")
    devices.activate(device)
    layer = ExpertLayerBenchmark(config.model, device, config.grouped_mm)
    result: dict[str, Any] = {
        "device": devices.describe(device), "backends": layer.grouped_mm_backends(config.dtypes),
        "experts": _describe_experts(config),
    }  # fmt: skip
    log = _ignore if as_json else _print_now
    log(_heading(result))
    limits, speeds, skipped = _measure(layer, config, log)
    result |= {
        "limits": [asdict(one) for one in limits], "speeds": [asdict(one) for one in speeds],
        "left_out": [asdict(one) for one in skipped],
    }  # fmt: skip
    if out is not None:
        flags.write_new_file("--out", out, screen.dumps(result) + "\n")
    if as_json:
        screen.print_json(result)
    for warning in _warnings(speeds):
        screen.print_warning(warning)
    return 0


def _print_now(text: str) -> None:
    screen.print_line(text)
    screen.flush()


def _ignore(text: str) -> None:
    pass


def _settings(model: str | None, sets: Sequence[str]) -> BenchConfig:
    raw: dict[str, Any] = {}
    if model is not None:
        raw["model"] = {"preset": _preset(model)}
    elif not any(item.startswith("model.") for item in sets):
        raise UserError(
            f"--model is missing: give a preset ({keys.join_words(list(PRESETS))}), and change its "
            "keys with --set (--set model.hidden=1024)"
        )
    warnings: list[str] = []
    model_sets = apply_sets({}, sets).get("model")
    if model is not None and isinstance(model_sets, dict):
        other = model_sets.get("preset", raw["model"]["preset"])
        if other != raw["model"]["preset"]:
            raise UserError(
                f"--model {model} beside --set model.preset={other}: remove one of them"
            )
    settings = fill_pretrained(fill_preset(apply_sets(raw, sets), "--set"), "--set", warnings)
    settings.pop("source", None)
    for warning in warnings:
        screen.print_warning(warning)
    return parse(BenchConfig, settings, "--set", sets)


def _preset(name: str) -> str:
    """Return the preset with this name or unique beginning."""
    matches = [preset for preset in PRESETS if preset.startswith(name)]
    if name in PRESETS:
        return name
    if not matches:
        known = keys.join_words(list(PRESETS))
        raise UserError(f"--model {name} is not known: give {known}, or the beginning of one")
    if len(matches) > 1:
        raise UserError(f"--model {name} may be {keys.join_words(matches)}: give more of the name")
    return matches[0]


def _measure(
    layer: ExpertLayerBenchmark, config: BenchConfig, log: Callable[[str], None]
) -> tuple[list[DeviceLimit], list[MeasuredSpeed], list[SkippedBatch]]:
    """Return limits, speeds and skipped batches; log each speed as soon as it is measured."""
    from moesaic.models.expert_benchmark import MeasuredSpeed, measure_speeds

    speeds: list[MeasuredSpeed] = []
    skipped: list[SkippedBatch] = []
    limits_s = _LIMITS_FRACTION * config.seconds
    dtype_budget_s = (config.seconds - limits_s) / len(config.dtypes)
    total = 1 + len(config.dtypes) * len(config.tokens)
    with probe_progress(is_shown=True, total=total) as start_progress:
        start_progress("the limit")
        limits = layer.measure_limits(config.dtypes, limits_s / (len(config.dtypes) + 1))
        log(_describe_limits(limits) + "\n\n" + _cells(_TITLES))
        for limit in limits:

            def on_start(tokens: int, dtype: str = limit.dtype) -> None:
                start_progress(f"{dtype}, {tokens:,} tokens")

            for batch in measure_speeds(layer, limit, config.tokens, dtype_budget_s, on_start):
                if isinstance(batch, MeasuredSpeed):
                    speeds.append(batch)
                    log(_row(batch))
                else:
                    skipped.append(batch)
    if skipped:
        log(_describe_skipped(skipped, layer.free_bytes))
    return limits, speeds, skipped


def _describe_skipped(skipped: Sequence[SkippedBatch], free_bytes: int) -> str:
    """Return the batches that were skipped, with remedies."""
    text = ""
    too_slow = [batch for batch in skipped if batch.reason == "time"]
    if too_slow:
        longest = format_seconds(max(batch.needed for batch in too_slow))
        text += (
            f"\nskipped: {_name_batches(too_slow)}: a batch takes {longest} or more; raise seconds "
            "(--set seconds=...), or use fewer tokens (--set tokens=...)"
        )
    too_large = [batch for batch in skipped if batch.reason == "memory"]
    if too_large:
        needed = format_bytes(max(batch.needed for batch in too_large))
        free = format_bytes(max(free_bytes, 0))
        text += (
            f"\nskipped: {_name_batches(too_large)}: a batch needs up to {needed} in addition to "
            f"the experts, but {free} are free; use fewer tokens (--set tokens=...)"
        )
    return text


def _name_batches(batches: Sequence[SkippedBatch]) -> str:
    tokens: dict[str, list[str]] = {}
    for batch in batches:
        tokens.setdefault(batch.roofline.dtype, []).append(f"{batch.roofline.tokens:,}")
    return "; ".join(f"{dtype} with {', '.join(sizes)} tokens" for dtype, sizes in tokens.items())


def _warnings(speeds: Sequence[MeasuredSpeed]) -> list[str]:
    """Return warnings about efficiencies above 100%."""
    warnings = []
    for bottleneck, explanation in (
        ("matmul", ""),
        ("memory", "weights of few experts may have stayed in a cache, or "),
    ):
        above = [
            speed
            for speed in speeds
            if speed.roofline.bottleneck == bottleneck and _max_efficiency(speed) > _MAX_EFFICIENCY
        ]
        if above:
            batches = "; ".join(
                f"{speed.roofline.dtype} with {speed.roofline.tokens:,}" for speed in above
            )
            warnings.append(
                f"up to {max(map(_max_efficiency, above)):.0%} of the {bottleneck} limit (tokens: "
                f"{batches}): {explanation}the machine was busy while its limit was measured; "
                "measure again when it is idle"
            )
    return warnings


def _max_efficiency(speed: MeasuredSpeed) -> float:
    return max(speed.forward_efficiency, speed.step_efficiency)


def _describe_experts(config: BenchConfig) -> str:
    model = config.model
    shared = f" and {model.shared_experts} shared" if model.shared_experts else ""
    sizes = f"{model.hidden:,} x {model.ffn:,}"
    return f"{model.experts} experts{shared} of {sizes}, {model.top_k} per token"


def _heading(result: dict[str, Any]) -> str:
    lines = [f"{result['experts']}; {result['device']}"]
    lines += [f"experts in {dtype}: {backend}" for dtype, backend in result["backends"].items()]
    return "\n".join(lines)


def _describe_limits(limits: Sequence[DeviceLimit]) -> str:
    rates = ", ".join(
        f"{limit.dtype} {format_quantity(limit.flops_per_s, 'FLOP/s')}" for limit in limits
    )
    bandwidth = format_quantity(limits[0].bytes_per_s, "B/s")
    return f"limits: matmul {rates}; memory {bandwidth}"


def _row(speed: MeasuredSpeed) -> str:
    roofline = speed.roofline
    cells = (
        roofline.dtype, f"{roofline.tokens:,}", f"{roofline.tokens_per_expert:g}",
        format_seconds(speed.forward_s), f"{roofline.tokens / speed.forward_s:,.0f}",
        f"{speed.forward_efficiency:.0%}", format_seconds(speed.step_s),
        f"{speed.step_efficiency:.0%}", roofline.bottleneck,
    )  # fmt: skip
    return _cells(cells)


def _cells(cells: Sequence[str]) -> str:
    """Return a line of the table, which is printed line by line."""
    first, *middle, last = cells
    left, *widths, _ = _WIDTHS
    right = "  ".join(f"{cell:>{width}}" for cell, width in zip(middle, widths, strict=True))
    return f"{first:<{left}}  {right}  {last}"
