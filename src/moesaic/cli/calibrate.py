"""`moesaic calibrate`: factors that correct predictions, fitted to runs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.api.calibration import fit_calibration
from moesaic.api.cluster import Cluster
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_seconds
from moesaic.cli import flags, screen
from moesaic.cli.flags import ClusterPath, Json, Out

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="Runs with plans for the cluster.", show_default=False),
]
_ERROR_MARGIN = 0.005
"""Growth of an error that still counts as no worse: half a percentage point."""


def calibrate(
    runs: Runs = None,
    cluster_path: ClusterPath = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Fit factors to runs that correct predictions for a cluster.

    With --out FILE they become the last table of a copy of the cluster's file, for later plans.
    Give all runs at once.
    """
    if not runs:
        raise ConfigError("RUN is missing: moesaic calibrate RUN... --cluster FILE")
    if cluster_path is None:
        raise ConfigError(
            "--cluster is missing: give the cluster file that the runs were planned for"
        )
    opened = Cluster.named(cluster_path)
    if out is not None:
        flags.check_new_file("--out", out, "cluster.toml")
        known = opened.facts.calibration
        if known is not None and known.source is None:
            raise ConfigError(
                f"--cluster '{cluster_path}' is calibrated already: give the file without its "
                "[calibration]"
            )
    with opened.named_in_errors():
        calibration, facts = fit_calibration(runs, opened.facts, str(cluster_path))
    if as_json:
        screen.print_json(facts)
    else:
        _print_facts(facts)
    if _is_worse(facts):
        error = facts["error"]
        raise ConfigError(
            f"the factors make predictions of held-out runs worse (median error "
            f"{error['held_out']:.1%}, {error['uncalibrated']:.1%} without them), so nothing is "
            "written: give more runs, or leave out runs that other work on the machine disturbed"
        )
    if out is not None:
        calibrated = f"{_text_of(cluster_path, opened)}\n\n[calibration]\n{calibration.to_toml()}"
        flags.write_new_file("--out", out, calibrated)
        if not as_json:
            screen.print_line(f"wrote {out}")
    return 0


def _text_of(name: str, cluster: Cluster) -> str:
    """Return the text of a cluster's file, or a preset as one, without a calibration."""
    if Path(name).exists():
        return Path(name).read_text(encoding="utf-8-sig").rstrip("\n")
    facts = cluster.facts.model_copy(update={"calibration": None})
    return facts.to_toml().rstrip("\n")


def _is_worse(facts: dict[str, Any]) -> bool:
    """Return whether the factors fail on runs that they were not fitted to."""
    error, held_out = facts["error"], facts["error"]["held_out"]
    return held_out is not None and bool(held_out > error["uncalibrated"] + _ERROR_MARGIN)


def _print_facts(facts: dict[str, Any]) -> None:
    calibration, error = facts["calibration"], facts["error"]
    factors = [
        f"{kind} {calibration[kind]:.2f}" for kind in ("matmul", "elementwise", "collectives")
    ]
    screen.print_line(f"factors: {', '.join(factors)}\n")
    runs = [
        (
            run["run"],
            format_seconds(run["measured_s"]),
            format_seconds(run["predicted_s"]),
            f"{run['uncalibrated']:+.0%}",
            format_seconds(run["calibrated_s"]),
            f"{run['calibrated']:+.0%}",
            "-" if run["held_out"] is None else f"{run['held_out']:+.0%}",
        )
        for run in facts["runs"]
    ]
    titles = ("run", "measured", "predicted", "error", "calibrated", "error", "held out")
    screen.print_table(titles, runs)
    text = f"error {error['uncalibrated']:.1%} without factors, {error['calibrated']:.1%} with them"
    if error["held_out"] is None:
        text += ", of the same run, which tests nothing; give several runs"
    else:
        text += f", {error['held_out']:.1%} of held-out runs (medians)"
    screen.print_line(f"\n{text}")
