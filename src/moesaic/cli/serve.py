"""`moesaic serve`: an OpenAI-compatible server for a run, a checkpoint or a Hugging Face model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from moesaic.api.progress import LoadingProgress
from moesaic.api.serve import ServerFacts
from moesaic.api.serve import serve as start_server
from moesaic.api.serving_forecast import ServingForecast, forecast_server
from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes, format_seconds
from moesaic.cli import flags, screen
from moesaic.cli.flags import ClusterPath, DryRun, Explain, Json, Sets
from moesaic.serve.config import ServeConfig

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="Run, checkpoint or Hugging Face directory.", show_default=False
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", show_default=False,
        help="Memory of the process, such as 4GB; the same as --set memory=SIZE.",
    ),
]  # fmt: skip
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="KEY", show_default=False, help="Key that clients must send."
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        "--api-key-file", metavar="FILE", show_default=False,
        help="File with the key; other users cannot see it in the list of processes.",
    ),
]  # fmt: skip


def serve(  # noqa: PLR0913 - a parameter for each flag
    model: Model = None,
    memory: Memory = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    dry_run: DryRun = False,
    cluster: ClusterPath = None,
    sets: Sets = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Serve a model over HTTP, in the wire format of OpenAI. With --json the line that says where
    is JSON. With --dry-run, how memory would be divided; with --cluster also expected speeds."""
    if explain is not None:
        flags.print_explanation(ServeConfig, explain, as_json)
        return 0
    path = flags.require(model, "MODEL", "serve")
    given = {"memory": memory, "api_key": api_key, "api_key_file": api_key_file}
    own = [f"{key}={keys.toml(value)}" for key, value in given.items() if value is not None]
    config = flags.parse_settings(ServeConfig, [*(sets or ()), *own])
    if dry_run:
        facts = None if cluster is None else flags.load_cluster(cluster)
        _print_forecast(forecast_server(path, config, facts), as_json)
        return 0
    if cluster is not None:
        raise ConfigError("--cluster forecasts speeds: give --dry-run as well, or remove it")
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    logging.getLogger("moesaic").setLevel(config.log_level.upper())

    def print_ready(facts: ServerFacts) -> None:
        text = json.dumps(facts._asdict()) if as_json else _describe(facts)
        print(text, flush=True)

    with LoadingProgress("stderr") as loading:
        return start_server(path, config, print_ready, screen.print_warning, loading.move)


def _describe(facts: ServerFacts) -> str:
    memory = f"{facts.memory} of memory" if facts.memory else "as much memory as it needs"
    return (
        f"serving {facts.model} at {facts.url} ({memory}; up to {facts.max_running} texts run and "
        f"{facts.max_waiting} wait; context {facts.context:,}, cache {facts.cache_tokens:,} tokens)"
    )


def _print_forecast(found: ServingForecast, as_json: bool) -> None:
    sizes, budget = found.sizes, found.budget
    if as_json:
        speeds = [one._asdict() for one in found.speeds]
        tables = {"sizes": sizes._asdict(), "budget": budget._asdict(), "speeds": speeds}
        screen.print_json(tables)
        return
    parts = {
        "interpreter": sizes.interpreter_bytes, "dense weights": sizes.dense_bytes,
        "activations of a pass": sizes.pass_bytes,
        f"experts, {budget.num_slots:,} of {sizes.num_experts:,}":
            budget.num_slots * sizes.expert_bytes,
        f"key-value cache, {budget.cache_tokens:,} positions":
            budget.cache_tokens * sizes.position_bytes,
    }  # fmt: skip
    if budget.num_slots < sizes.num_experts:
        parts["buffers for reading"] = sizes.read_bytes
    parts["in all"] = sum(parts.values())
    screen.print_table(
        ("memory", "size"), [(name, format_bytes(size)) for name, size in parts.items()]
    )
    if found.speeds:
        print()
        screen.print_table(
            ("streams", "tokens/s", "pass", "bound by"),
            [
                (
                    str(one.streams), f"{one.tokens_per_s:.1f}", format_seconds(one.pass_s),
                    one.bottleneck,
                )
                for one in found.speeds
            ],
        )  # fmt: skip
