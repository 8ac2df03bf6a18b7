"""`moesaic bench layer`: what an expert layer reaches on this machine, against its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from moesaic.base import keys
from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import UserError
from moesaic.cli import flags, outlook, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.progress import watched
from moesaic.cli.start import at_once
from moesaic.facts.job.bench import BenchConfig
from moesaic.facts.job.job import fill_preset
from moesaic.facts.job.model import PRESETS
from moesaic.train.jobfile import fill_from

if TYPE_CHECKING:
    from moesaic.models.speed import ExpertLayer, Least, Limit, Speed

WHAT = "layer"
_OF_LIMITS = 0.2
"""Of the time, for what the layer is held against."""
What = Annotated[
    str | None,
    typer.Argument(metavar="layer", help="What to measure: one expert layer.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", show_default=False,
        help="Short for --set model.preset=NAME; the beginning of a name will do.",
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
    """Measure an expert layer on this machine, against what its products and bytes take at best.

    Batches of several sizes go through one layer of a model, forward and backward, with its router
    and shared experts; every expert gets equally many tokens. --out FILE receives it as JSON.
    """
    if explain is not None:
        flags.explain(BenchConfig, explain, as_json)
        return 0
    if what != WHAT:
        said = "what to measure is missing" if what is None else f"'{what}' is nothing to measure"
        raise UserError(f"{said}: moesaic bench layer (see moesaic bench --help)")
    config = _settings(model, sets or ())
    if out is not None:
        flags.check_new("--out", out, "layer.json")
    if dry_run:
        if as_json:
            screen.as_json(config.model_dump(mode="json", by_alias=True))
        else:
            screen.say(config.to_toml().rstrip())
        return 0
    with at_once():
        from moesaic.dist import device as devices
        from moesaic.models.speed import ExpertLayer
    device = devices.resolve(config.device, key="device")
    devices.activate(device)
    layer = ExpertLayer(config.model, device)
    limits, speeds, left_out = _measured(layer, config)
    found = {
        "device": devices.describe(device), "engines": layer.engines(config.dtypes),
        "experts": _experts(config), "limits": [asdict(one) for one in limits],
        "speeds": [asdict(one) for one in speeds],
        "left_out": [asdict(one) for one in left_out],
    }  # fmt: skip
    if out is not None:
        flags.write_new("--out", out, screen.dumps(found) + "\n")
    if as_json:
        screen.as_json(found)
    else:
        _tell(found, limits, speeds)
        if left_out:
            screen.say(_missing(left_out))
    return 0


def _settings(model: str | None, sets: Sequence[str]) -> BenchConfig:
    raw: dict[str, Any] = {}
    if model is not None:
        raw["model"] = {"preset": _preset(model)}
    elif not any(item.startswith("model.") for item in sets):
        raise UserError(
            f"--model is missing: give a preset ({keys.listed(list(PRESETS))}) or sizes of your "
            "own (--set model.hidden=1024 ...)"
        )
    warnings: list[str] = []
    changed = fill_from(fill_preset(apply_sets(raw, sets), "--set"), "--set", warnings)
    changed.pop("source", None)
    for warning in warnings:
        screen.warn(warning)
    return parse(BenchConfig, changed, "--set", sets)


def _preset(name: str) -> str:
    """The preset that `name` is, or is the beginning of."""
    found = [preset for preset in PRESETS if preset.startswith(name)]
    if name in PRESETS:
        return name
    if not found:
        known = keys.listed(list(PRESETS))
        raise UserError(f"--model {name} is not known: give {known}, or a beginning of one")
    if len(found) > 1:
        raise UserError(f"--model {name} may be {keys.listed(found)}: give more of its name")
    return found[0]


def _measured(
    layer: ExpertLayer, config: BenchConfig
) -> tuple[list[Limit], list[Speed], list[Least]]:
    """What the device does at best, each batch's speed, and batches that there is no time for."""
    speeds: list[Speed] = []
    left_out: list[Least] = []
    with watched(shown=True, total=1 + len(config.dtypes) * len(config.tokens)) as watch:
        watch("what the device does at best")
        for_limits_s, each_s = _shares(config)
        limits = layer.limits(config.dtypes, for_limits_s)
        for limit, tokens in product(limits, config.tokens):
            watch(f"{limit.dtype}, {tokens:,} tokens")
            least = layer.least(limit, tokens)
            if least.forward_s + least.step_s > each_s:
                left_out.append(least)
            else:
                speeds.append(layer.speed(least, each_s))
    return limits, speeds, left_out


def _shares(config: BenchConfig) -> tuple[float, float]:
    """Seconds for each limit, and for each batch."""
    whole_s, num_limits = config.seconds, len(config.dtypes) + 1
    batches = len(config.dtypes) * len(config.tokens)
    return _OF_LIMITS * whole_s / num_limits, (1 - _OF_LIMITS) * whole_s / batches


def _missing(left_out: Sequence[Least]) -> str:
    """What was not measured, and what would help."""
    sizes: dict[str, list[str]] = {}
    for one in left_out:
        sizes.setdefault(one.dtype, []).append(f"{one.tokens:,}")
    said = "; ".join(f"{dtype} with {', '.join(some)} tokens" for dtype, some in sizes.items())
    longest = max(one.forward_s + one.step_s for one in left_out)
    return (
        f"\nleft out: {said}: up to {outlook.time(longest)} at best; to have them, give it more "
        "time (--set seconds=N)"
    )


def _experts(config: BenchConfig) -> str:
    model = config.model
    shared = f" and {model.shared} shared" if model.shared else ""
    sizes = f"{model.hidden:,} x {model.ffn:,}"
    return f"{model.experts} experts{shared} of {sizes}, {model.top_k} a token"


def _tell(found: dict[str, Any], limits: Sequence[Limit], speeds: Sequence[Speed]) -> None:
    screen.say(f"{found['experts']}; {found['device']}")
    for dtype, engine in found["engines"].items():
        screen.say(f"experts in {dtype} by {engine}")
    products = ", ".join(f"{one.dtype} {screen.quantity(one.flops, 'FLOP/s')}" for one in limits)
    read = screen.quantity(limits[0].bytes, "B/s")
    screen.say(f"at best: products {products}; weights are read at {read}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (
        "", "tokens", "an expert", "forward", "tokens/s", "of the limit", "with backward",
        "of the limit", "limit",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title in ("", "limit") else "right")
    for one in speeds:
        table.add_row(
            one.least.dtype, f"{one.least.tokens:,}", f"{one.least.each:g}",
            outlook.time(one.forward_s), f"{one.least.tokens / one.forward_s:,.0f}",
            f"{one.least.forward_s / one.forward_s:.0%}", outlook.time(one.step_s),
            f"{one.least.step_s / one.step_s:.0%}", one.least.binds,
        )  # fmt: skip
    screen.show(table)
