"""Results of plan searches as text: verdict, runners-up, reasons, comparisons, parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moesaic.base.keys import toml
from moesaic.base.units import about_seconds, format_bytes, format_used_bytes, plural, round_text
from moesaic.cli import prediction, screen

if TYPE_CHECKING:
    from moesaic.api.plan_search import PartChoice
    from moesaic.policy.plan.predict import PlannedJob

_MAX_EVENTS = 12
"""Rows of a block's events, at most."""
_EQUAL_PRICE = 0.05
"""Relative difference of prices that no prediction can tell apart."""
_MIN_SHOWN_DIFFERENCE = 0.005
"""Share of a figure up to which a difference is not shown."""


def print_verdict(planned: PlannedJob) -> None:
    """Print whether the plan fits, how good it is, and what the job pins."""
    from moesaic.policy.plan.found import chosen_text, proof_text, settings_text

    figures, result = planned.figures, planned.found
    assert result is not None
    prediction.print_verdict(figures)
    if figures["fits"]:
        too_large = f", {result.too_large:,} too large" * bool(result.too_large)
        screen.print_line(
            f"search: {plural(result.tried, 'layout')} simulated{too_large}; "
            f"{proof_text(result)} ({result.method})"
        )
    elif not result.is_proven:
        why = "the limit of work ended it" if result.is_limited else "not all layouts were tried"
        screen.print_line(f"search: {why}, so another layout may fit ({result.method})")
    pins = figures["search"]["pins"]
    if result.best is not None:
        screen.print_line(f"chosen: {chosen_text(result.best, pins)}")
    kept = settings_text(pins) if pins else "nothing"
    screen.print_line(f"pinned by the job: {kept}")
    screen.print_line("")


def print_runners_up(figures: Mapping[str, Any]) -> None:
    """Print what the next best layouts change, what they lose, and in which kind of work."""
    from moesaic.policy.plan.found import settings_text

    others, step_s = figures["search"]["runners_up"], figures["step_s"]
    if not others:
        return
    screen.print_line("")
    screen.print_table(
        ["runner-up", "step", "loses", "most of it in", "memory per rank"],
        [
            (
                settings_text(one["differs"]) or "another order of stages",
                about_seconds(one["step_s"]),
                f"{one['loses_s'] / step_s:+.1%}",
                f"{one['kind']} {about_seconds(one['kind_loses_s'])}",
                format_bytes(one["memory"]["peak_bytes"]),
            )
            for one in others
        ],
    )


def print_searched_job(planned: PlannedJob, written: Mapping[str, str], ranks: str | None) -> None:
    """Print a searched plan: the verdict, its predictions, and runners-up."""
    print_verdict(planned)
    prediction.print_planned_job(planned, written, ranks)
    print_runners_up(planned.figures)


def print_why(facts: Mapping[str, Any]) -> None:
    """Print where a block is and how its seconds come about."""
    from moesaic.policy.plan.found import settings_text

    share = facts["seconds"] / facts["step_s"]
    screen.print_line(
        f"{facts['block']} on rank {facts['rank']}: {facts['place']}; {facts['parameters']:,} "
        f"parameters there, {format_bytes(facts['saved_bytes'])} saved for backward in a "
        f"micro-batch\n{about_seconds(facts['seconds'])} of a step of "
        f"{about_seconds(facts['step_s'])} ({share:.1%}); predicted, not measured\n"
    )
    rows = sorted(facts["events"], key=lambda one: -(one["busy_s"] + one["waiting_s"]))
    screen.print_table(
        ["event", "phase", "runs", "waits", "overlapped"],
        [
            (
                one["name"], one["phase"], about_seconds(one["busy_s"]),
                about_seconds(one["waiting_s"]) if one["waiting_s"] else "-",
                about_seconds(one["overlapped_s"]) if one["overlapped_s"] else "-",
            )
            for one in rows[:_MAX_EVENTS]
        ],
        left=2,
    )  # fmt: skip
    for one in facts["others"]:
        change = one["seconds"] - facts["seconds"]
        screen.print_line(
            f"with {settings_text(one['differs'])}: {about_seconds(one['seconds'])} in this block "
            f"({_signed(change)}), and the step loses {about_seconds(one['loses_s'])}"
        )


def print_comparison(names: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Print which of two plans fits and is faster, by how much and where, and both side by side."""
    screen.print_line(f"{_describe_comparison(names, facts)}\n")
    rows = [(f"  {key}", *(toml(value) for value in pair)) for key, pair in _short(facts)]
    kinds = facts["seconds_by_kind"]
    seconds = [
        ("  step", facts["step_s"]),
        *((f"    {kind}", pair) for kind, pair in kinds.items()),
    ]
    table: list[Sequence[str]] = [("settings",), *rows] if rows else []
    if any(facts["fits"]):
        table.append(("seconds",))
    table += [
        (name, *(_or_dash(one, about_seconds) for one in pair), _difference(*pair))
        for name, pair in seconds
        if any(pair)
    ]
    table.append(("figures",))
    sizes = zip(facts["peak_bytes"], facts["usable_memory_bytes"], facts["fits"], strict=True)
    peaks = [
        format_used_bytes(peak, usable) + " (too much)" * (not fits) for peak, usable, fits in sizes
    ]
    table.append(("  memory per rank", *peaks))
    prices = facts["price_per_million_tokens"]
    for name, pair in (
        ("  tokens per second", facts["tokens_per_s"]), ("  price per million tokens", prices),
    ):  # fmt: skip
        if any(pair):
            table.append((name, *(_or_dash(one, round_text) for one in pair)))
    screen.print_table(["", *names, "difference"], table)


def _describe_comparison(names: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Return which of two plans fits, and which is faster, by how much and where."""
    unfit = [name for name, fits in zip(names, facts["fits"], strict=True) if not fits]
    if unfit:
        rest = [f"{name} fits" for name in names if name not in unfit] or [_nearer(names, facts)]
        return f"DOES NOT FIT: {' and '.join(unfit)}; {rest[0]}"
    differences = {kind: pair[1] - pair[0] for kind, pair in facts["seconds_by_kind"].items()}
    ratio = facts["speedup"]
    faster, slower = (names[1], names[0]) if ratio >= 1 else (names[0], names[1])
    sign = -1 if ratio >= 1 else 1
    kind = max(differences, key=lambda name: sign * differences[name])
    if abs(ratio - 1) < _MIN_SHOWN_DIFFERENCE:
        return "both fit and are equally fast; predicted, not measured"
    return (
        f"both fit: {faster} is {max(ratio, 1 / ratio):.3g} times as fast as {slower}, mostly by "
        f"{kind}; predicted, not measured"
    )


def _nearer(names: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Return which of two plans that do not fit comes nearer, and its remedy. One with a remedy
    that fits comes before one without."""
    from moesaic.policy.plan.remedy import remedy_text

    sizes = zip(facts["peak_bytes"], facts["usable_memory_bytes"], strict=True)
    remedies = facts["remedy"]
    ranked = [
        (not (remedy and remedy["fits"]), peak / usable)
        for remedy, (peak, usable) in zip(remedies, sizes, strict=True)
    ]
    at = ranked.index(min(ranked))
    return f"nearer is {names[at]}; {remedy_text(remedies[at])}"


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _short(facts: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """Return the settings that fit into a table."""
    return [
        (key, pair) for key, pair in facts["settings"].items()
        if all(len(toml(one)) <= 60 for one in pair)
    ]  # fmt: skip


def print_part(choice: PartChoice, floor: float | None) -> None:
    """Print the parts of a cluster that were searched, then the plan for the chosen one."""
    own = choice.planned.figures
    rows = []
    for part in choice.parts:
        price, million = part["price_per_hour"], part["price_per_million_tokens"]
        rows.append((
            _part_text(part["ranks"], part["hosts"]),
            "unknown" if price is None else f"{price:,.2f}",
            _speed_text(part),
            _proof_text(part),
            "-" if million is None else round_text(million),
        ))  # fmt: skip
    goal = (
        "the cheapest part per hour on which it fits; for the least price per token ask --min-cost"
        if floor is None
        else "the least price per token of the parts below"
        + f" with {floor:,.0f} tokens/s or more" * bool(floor)
        + _ties_text(choice, floor)
    )
    hosts = list(dict.fromkeys(place["host"] for place in own["plan"]["places"]))
    chosen = _part_text(own["plan"]["ranks"], hosts)
    if choice.is_reached:
        screen.print_line(f"take {chosen}: {goal}")
    elif floor is None or not own["fits"]:
        screen.print_line(f"no part of the cluster fits the job; {chosen} comes nearest")
    else:
        screen.print_line(
            f"no part reaches {floor:,.0f} tokens/s; the most is "
            f"{round_text(own['tokens_per_s'])} with {chosen}"
        )
    names = ["part", "price per hour", "tokens/s", "fastest", "price per million tokens"]
    screen.print_table(names, rows)
    screen.print_line(
        "parts: powers of two of the hosts of each kind, and of the devices of one host"
        + ", cheapest first, up to the one that fits" * (floor is None)
    )
    screen.print_line("")


def _ties_text(choice: PartChoice, floor: float) -> str:
    """Return how many other parts reach the floor at nearly the same price per token."""
    least = choice.planned.figures["price_per_million_tokens"]
    if least is None:
        return ""
    prices = [
        part["price_per_million_tokens"]
        for part in choice.parts
        if part["fits"] and part["tokens_per_s"] >= floor
    ]
    ties = sum(price <= (1 + _EQUAL_PRICE) * least for price in prices) - 1
    return f"; {ties} more {'are' if ties > 1 else 'is'} within 5% of it" if ties > 0 else ""


def print_largest_in_memory(figures: Mapping[str, Any]) -> None:
    """Print the largest model of a job's shape that fits into memory."""
    from moesaic.policy.plan.found import settings_text

    key, size, memory = figures["key"], figures["size"], figures["memory"]
    where = f"{figures['ranks']} ranks on {figures['cluster']}"
    if not size:
        screen.print_line(f"no model of this shape fits into the memory of {where}")
        return
    settings = {name: one for name, one in figures["settings"].items() if one is not None}
    screen.print_line(
        f"largest model of this shape in memory: {key} = {size:,} (the job has "
        f"{figures['own']:,}), {figures['parameters']:,} parameters, on {where}"
    )
    screen.print_line(
        f"  it needs {format_used_bytes(memory['peak_bytes'], memory['usable_bytes'])} per rank "
        f"with {settings_text(settings)}"
    )
    if figures["next_size"] is not None:
        screen.print_line(
            f"  {key} = {figures['next_size']:,} fits in no layout; computed, not measured"
        )


def _speed_text(part: Mapping[str, Any]) -> str:
    """Return the speed of a part, or why it has none."""
    if part["fits"]:
        return round_text(part["tokens_per_s"])
    return "does not fit" if part["is_proven"] else "no fitting layout found within its work"


def _proof_text(part: Mapping[str, Any]) -> str:
    """Return whether the speed of a part is proven to be the most."""
    if not part["fits"]:
        return "-"
    gap = part["gap"]
    return (
        "proven" if part["is_proven"] else f"at most {gap:.0%} less time" if gap else "not proven"
    )


def _part_text(ranks: int, hosts: Sequence[str]) -> str:
    names = ", ".join(hosts) if len(hosts) <= 4 else f"{hosts[0]}, ..., {hosts[-1]}"
    many = f"{len(hosts)} hosts ({names})"
    return f"{plural(ranks, 'rank')} on {hosts[0] if len(hosts) == 1 else many}"


def _difference(first_s: float | None, second_s: float | None) -> str:
    """Return how much the second takes more, or that nothing differs in the digits shown."""
    if first_s is None or second_s is None:
        return ""
    if abs(second_s - first_s) < _MIN_SHOWN_DIFFERENCE * max(first_s, second_s):
        return "same"
    return _signed(second_s - first_s)


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{about_seconds(abs(seconds))}"
