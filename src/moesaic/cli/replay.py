"""`moesaic replay`: a balance policy applied to the expert loads that a run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.api.memory_replay import replay_memory
from moesaic.api.replay import ReplayConfig, replay_run
from moesaic.api.search_replay import replay_search
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes, format_seconds, plural
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Sets
from moesaic.facts.job import BalanceCosts

_MAX_ROWS = 12
"""Steps above which a table shows the first and the last three."""

Run = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Run directory.", show_default=False),
]


Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", show_default=False,
        help="Replay a memory budget instead of a balance policy, such as 2GB per rank.",
    ),
]  # fmt: skip
Residency = Annotated[
    str | None,
    typer.Option(
        "--residency", metavar="POLICY", show_default=False,
        help="For --memory: next-use (the default), lru, lfu or se-moe.",
    ),
]  # fmt: skip


Search = Annotated[
    bool,
    typer.Option(
        "--search", metavar="",
        help="Repeat the search for a layout of the run by every method, ten seconds each.",
    ),
]  # fmt: skip


def replay(
    run: Run = None,
    sets: Sets = None,
    search: Search = False,
    memory: Memory = None,
    residency: Residency = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Apply a balance policy, a memory budget or methods of search to what a run recorded.

    No rank starts and no device is used. A balance policy sees the recorded tokens of each rank and
    expert. Its cost model predicts the time of each layer with and without replicas. With --memory,
    the cache of training runs over a drive that moves nothing.
    """
    if explain is not None:
        flags.print_explanation(ReplayConfig, explain, as_json)
        return 0
    directory = flags.require(run, "RUN", "replay")
    if search:
        _replay_search(
            directory, {"--set": sets, "--memory": memory, "--residency": residency}, as_json
        )
        return 0
    if memory is not None:
        if sets:
            raise ConfigError(f"--set {sets[0]} is for balance policies: remove it, or --memory")
        _print_memory(replay_memory(directory, memory, residency or "next-use"), as_json)
        return 0
    if residency is not None:
        raise ConfigError(f"--residency {residency} needs --memory: add it, such as --memory 2GB")
    config = flags.parse_settings(ReplayConfig, sets)
    for warning in config.ineffective_settings():
        screen.print_warning(warning)
    facts = replay_run(directory, config, screen.err().print)
    if as_json:
        screen.print_json(facts)
    else:
        _print_facts(facts)
    return 0


def _replay_search(run: Path, others: dict[str, object], as_json: bool) -> None:
    """Print what each method of search chooses; any of the `others` flags is an error."""
    for flag, value in others.items():
        if value:
            raise ConfigError(f"--search cannot be combined with {flag}: remove one")
    found = replay_search(run, log=None if as_json else screen.err().print)
    if as_json:
        screen.print_json(found)
    else:
        _print_search(found)


def _print_search(facts: dict[str, Any]) -> None:
    """Print what each method of search chooses."""
    from moesaic.policy.plan.found import settings_text

    rows, least = list[tuple[str, ...]](), facts["methods"][0]["step_s"]
    for one in facts["methods"]:
        step_s = one["step_s"]
        rows.append((
            one["method"], "nothing fits" if step_s is None else format_seconds(step_s),
            "-" if step_s is None or least is None else f"{step_s / least - 1:+.1%}",
            f"{one['tried']:,}", format_seconds(one["seconds"]),
            settings_text(one["differs"]) or "the same",
        ))  # fmt: skip
    screen.print_table(
        ["method", "step", "loses", "simulated", "search took", "differs from the first"], rows
    )
    ranks = facts["ranks"]
    screen.print_line(
        f"{plural(ranks, 'rank')} on {facts['cluster']}, as {facts['run']} saw them; "
        "predicted, not measured"
    )


def _print_memory(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        screen.print_json(facts)
        return
    steps = facts["steps"]
    shown = steps if len(steps) <= _MAX_ROWS else [*steps[:3], *steps[-3:]]
    screen.print_table(
        ["step", "uses", "read from the drive", "read", "written"],
        [
            (str(one["step"]), f"{one['accesses']:,}", f"{one['reads']:,}",
             format_bytes(one["read_bytes"]), format_bytes(one["written_bytes"]))
            for one in shown
        ], left=0,
    )  # fmt: skip
    read, written = (sum(one[name] for one in steps) for name in ("read_bytes", "written_bytes"))
    screen.print_line(
        f"rank 0 with {facts['memory']} and {facts['residency']}: {facts['blocks_in_memory']:,} "
        f"blocks of {format_bytes(facts['block_bytes'])} in memory, "
        f"{facts['micro_batches_together']} micro-batches together"
    )
    screen.print_line(
        f"simulated, not measured: {format_bytes(read)} read and {format_bytes(written)} written "
        f"in {len(steps)} steps, without checkpoints and validation"
    )


def _print_facts(facts: dict[str, Any]) -> None:
    titles = (
        "layer", "micro-batches", "imbalance before", "after", "replicas", "unbalanced", "balanced",
        "speedup",
    )  # fmt: skip
    screen.print_table(titles, map(_cells, facts["layers"]), left=0)
    screen.print_line(f"costs: {BalanceCosts(**facts['costs']).describe()}")
    left_out, name = facts["steps_left_out"], facts["policy"]
    if left_out:
        screen.print_line(
            f"{plural(left_out, 'recorded step')} left out: only those in the layout "
            "of the last start are replayed"
        )
    if not facts["enabled"] and name != "none":
        screen.print_line(
            f"a job with {name} would make no replicas: balance.max_replicas = 0, too few routed "
            "tokens per rank and layer (balance.min_replica_tokens), or experts with adapters"
        )
    screen.print_line(
        f"predicted, not measured: with {name} the expert layers take "
        f"{1e3 * facts['balanced_s']:.4g} ms per micro-batch instead of "
        f"{1e3 * facts['unbalanced_s']:.4g} ms ({facts['speedup']:.3g}x)"
    )


def _cells(layer: dict[str, Any]) -> Sequence[str]:
    return (
        str(layer["layer"]), str(layer["micro_batches"]), f"{layer['imbalance_before']:.2f}x",
        f"{layer['imbalance_after']:.2f}x", f"{layer['replicas']:.3g}",
        f"{1e3 * layer['unbalanced_s']:.4g} ms", f"{1e3 * layer['balanced_s']:.4g} ms",
        f"{layer['speedup']:.3g}x",
    )  # fmt: skip
