"""`moesaic bench layer`: what an expert layer reaches on this machine, against its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from moesaic.models.speed import ExpertLayer, LeftOut, Limit, Speed

WHAT = "layer"
_OF_LIMITS = 0.2
"""Of the time, for what the layer is held against, before and after."""
_MOST_S = 3600.0
_TITLES = (
    "", "tokens", "an expert", "forward", "tokens/s", "of the limit", "with backward",
    "of the limit", "limit",
)  # fmt: skip
_WIDTHS = (4, 9, 9, 13, 11, 12, 13, 12, 8)
_POINTS = 0.015
_MORE = 1.3
"""Times the time there was, at least, where it was too little."""
_ABOVE = 1.005
"""A share of the limit that no rounding makes."""
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
        from moesaic.dist.products import check
        from moesaic.models.speed import ExpertLayer
    device = devices.resolve(config.device, key="device")
    check(config.grouped_mm, device, key="grouped_mm")
    devices.activate(device)
    layer = ExpertLayer(config.model, device, config.grouped_mm)
    found: dict[str, Any] = {
        "device": devices.describe(device), "engines": layer.engines(config.dtypes),
        "experts": _experts(config),
    }  # fmt: skip
    tell = _nobody if as_json else _at_once
    tell(_opening(found))
    limits, speeds, left_out = _measured(layer, config, tell)
    found |= {
        "limits": [asdict(one) for one in limits], "speeds": [asdict(one) for one in speeds],
        "left_out": [asdict(one) for one in left_out],
    }  # fmt: skip
    if out is not None:
        flags.write_new("--out", out, screen.dumps(found) + "\n")
    if as_json:
        screen.as_json(found)
    for warning in _doubts(speeds):
        screen.warn(warning)
    return 0


def _at_once(text: str) -> None:
    """Print it now, whoever reads."""
    screen.say(text)
    screen.flush()


def _nobody(text: str) -> None:
    """Print nothing."""


def _settings(model: str | None, sets: Sequence[str]) -> BenchConfig:
    raw: dict[str, Any] = {}
    if model is not None:
        raw["model"] = {"preset": _preset(model)}
    elif not any(item.startswith("model.") for item in sets):
        raise UserError(
            f"--model is missing: give a preset ({keys.listed(list(PRESETS))}), and what is to be "
            "otherwise beside it (--set model.hidden=1024)"
        )
    warnings: list[str] = []
    asked = apply_sets({}, sets).get("model")
    if model is not None and isinstance(asked, dict):
        other = asked.get("preset", raw["model"]["preset"])
        if other != raw["model"]["preset"]:
            raise UserError(
                f"--model {model} beside --set model.preset={other}: leave one of them out"
            )
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
    layer: ExpertLayer, config: BenchConfig, tell: Callable[[str], None]
) -> tuple[list[Limit], list[Speed], list[LeftOut]]:
    """What the device does at best, each batch's speed, and batches that are left out; each is told
    as it comes."""
    from moesaic.models.speed import Speed, better, enough_s, measured

    found: list[Speed | LeftOut] = []
    needs_s = 0.0
    for_limit_s, for_dtype_s = _shares(config)
    with watched(shown=True, total=2 + len(config.dtypes) * len(config.tokens)) as watch:
        watch("what the device does at best")
        limits = layer.limits(config.dtypes, for_limit_s)
        tell(_at_best(limits) + "\n\n" + _cells(_TITLES))
        for limit in limits:

            def began(tokens: int, dtype: str = limit.dtype) -> None:
                watch(f"{dtype}, {tokens:,} tokens")

            of_dtype: list[Speed | LeftOut] = []
            for one in measured(layer, limit, config.tokens, for_dtype_s, began):
                of_dtype.append(one)
                if isinstance(one, Speed):
                    tell(_row(one))
            needs_s = max(needs_s, enough_s(of_dtype))
            found += of_dtype
        watch("what the device does at best, once more")
        limits = better(limits, layer.limits(config.dtypes, for_limit_s))
    before = [one for one in found if isinstance(one, Speed)]
    speeds = layer.against(limits, before)
    left_out = [one for one in found if not isinstance(one, Speed)]
    if any(map(_differ, before, speeds)):
        tell("\ntaken once more, it is higher; " + _at_best(limits) + "\n")
        tell("\n".join([_cells(_TITLES), *map(_row, speeds)]))
    if left_out:
        whole_s = needs_s * len(config.dtypes) / (1 - _OF_LIMITS)
        tell(_missing(left_out, max(whole_s, _MORE * config.seconds), layer.room_bytes))
    return limits, speeds, left_out


def _differ(one: Speed, two: Speed) -> bool:
    """Whether these shares of the limit differ so that a person would care."""
    return max(one.share - two.share, one.step_share - two.step_share) > _POINTS


def _shares(config: BenchConfig) -> tuple[float, float]:
    """Seconds for each limit, each of the two times that it is taken, and for each type of number's
    batches."""
    whole_s, types = config.seconds, len(config.dtypes)
    return _OF_LIMITS * whole_s / (2 * (types + 1)), (1 - _OF_LIMITS) * whole_s / types


def _missing(left_out: Sequence[LeftOut], whole_s: float, room_bytes: int) -> str:
    """What was not measured, and what would help."""
    said = ""
    late = [one for one in left_out if one.why == "time"]
    if late:
        enough = _rounded_up(whole_s)
        remedy = f"--set seconds={enough:,.0f}".replace(",", "")
        if enough > _MOST_S:
            remedy = (
                f"fewer tokens than {min(one.least.tokens for one in late):,} (--set tokens=...)"
            )
        longest = max(one.needs for one in late)
        said += f"\nleft out: {_named(late)}: one takes up to {outlook.time(longest)}; to have " + (
            f"them, {remedy}" if enough <= _MOST_S else f"all, take {remedy}"
        )
    large = [one for one in left_out if one.why == "memory"]
    if large:
        most = max(one.needs for one in large)
        said += (
            f"\nleft out: {_named(large)}: one takes up to {screen.size(most)} beside the experts, "
            f"and there are {screen.size(max(room_bytes, 0))}; take fewer tokens (--set tokens=...)"
        )
    return said


def _named(left_out: Sequence[LeftOut]) -> str:
    sizes: dict[str, list[str]] = {}
    for one in left_out:
        sizes.setdefault(one.least.dtype, []).append(f"{one.least.tokens:,}")
    return "; ".join(f"{dtype} with {', '.join(some)} tokens" for dtype, some in sizes.items())


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** max(0, math.floor(math.log10(max(value, 1.0))) - 1)
    return math.ceil(value / unit) * unit


def _doubts(speeds: Sequence[Speed]) -> list[str]:
    """What cannot be, or not for long: more than what the device does at best."""
    found = []
    for binds, means in (
        ("products", "which cannot be"),
        ("memory", "which may be where weights of few experts stay in a cache; where they do not"),
    ):
        above = [one for one in speeds if one.least.binds == binds and _most(one) > _ABOVE]
        if above:
            named = "; ".join(f"{one.least.dtype} with {one.least.tokens:,}" for one in above)
            found.append(
                f"up to {max(map(_most, above)):.0%} of the limit by {binds} (tokens: {named}), "
                f"{means}: the machine was busy while its limit was measured; measure anew when it "
                "is idle"
            )
    return found


def _most(one: Speed) -> float:
    """Of the limit, forward or with backward."""
    return max(one.share, one.step_share)


def _experts(config: BenchConfig) -> str:
    model = config.model
    shared = f" and {model.shared} shared" if model.shared else ""
    sizes = f"{model.hidden:,} x {model.ffn:,}"
    return f"{model.experts} experts{shared} of {sizes}, {model.top_k} a token"


def _opening(found: dict[str, Any]) -> str:
    lines = [f"{found['experts']}; {found['device']}"]
    lines += [f"experts in {dtype} by {engine}" for dtype, engine in found["engines"].items()]
    return "\n".join(lines)


def _at_best(limits: Sequence[Limit]) -> str:
    products = ", ".join(f"{one.dtype} {screen.quantity(one.flops, 'FLOP/s')}" for one in limits)
    read = screen.quantity(limits[0].bytes, "B/s")
    return f"at best: products {products}; weights are read at {read}"


def _row(one: Speed) -> str:
    least = one.least
    cells = (
        least.dtype, f"{least.tokens:,}", f"{least.each:g}", outlook.time(one.forward_s),
        f"{least.tokens / one.forward_s:,.0f}", f"{one.share:.0%}",
        outlook.time(one.step_s), f"{one.step_share:.0%}", least.binds,
    )  # fmt: skip
    return _cells(cells)


def _cells(cells: Sequence[str]) -> str:
    """A line of a table that is printed line by line."""
    first, *middle, last = cells
    left, *widths, _ = _WIDTHS
    right = "  ".join(f"{cell:>{width}}" for cell, width in zip(middle, widths, strict=True))
    return f"{first:<{left}}  {right}  {last}"
