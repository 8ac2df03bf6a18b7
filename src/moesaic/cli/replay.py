"""`moesaic replay`: a balance policy applied to the expert loads that a run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.api.replay import ReplayConfig, replay_run
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Sets
from moesaic.facts.job import BalanceCosts

Run = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Run directory.", show_default=False),
]


def replay(
    run: Run = None, sets: Sets = None, as_json: Json = False, explain: Explain = None
) -> int:
    """Apply a balance policy to the expert loads that a run recorded.

    No rank starts and no device is used. The policy sees the recorded tokens of each rank and
    expert. Its cost model predicts the time of each layer with and without replicas.
    """
    if explain is not None:
        flags.print_explanation(ReplayConfig, explain, as_json)
        return 0
    directory = flags.require(run, "RUN", "replay")
    config = flags.parse_settings(ReplayConfig, sets)
    for warning in config.ineffective_settings():
        screen.print_warning(warning)
    facts = replay_run(directory, config, screen.err().print)
    if as_json:
        screen.print_json(facts)
    else:
        _print_facts(facts)
    return 0


def _print_facts(facts: dict[str, Any]) -> None:
    titles = (
        "layer", "micro-batches", "imbalance before", "after", "replicas", "unbalanced", "balanced",
        "speedup",
    )  # fmt: skip
    screen.print_table(titles, map(_cells, facts["layers"]), left=0)
    screen.print_line(f"costs: {BalanceCosts(**facts['costs']).describe()}")
    name = facts["policy"]
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
