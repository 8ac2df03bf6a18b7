"""`moesaic eval`: evaluation of a model on local tasks, by lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.api.engine import Engine
from moesaic.api.evaluation import (
    Evaluation,
    Metric,
    check_harness,
    evaluation_settings,
    run_evaluation,
)
from moesaic.api.progress import evaluation_progress
from moesaic.api.start import exit_on_interrupt, import_module
from moesaic.base.errors import ConfigError
from moesaic.cli import flags, screen
from moesaic.cli.flags import Explain, Json, Out, Sets
from moesaic.serve.config import EngineConfig, EvalConfig
from moesaic.serve.eval_scores import FORMULAS

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="Run, checkpoint or Hugging Face directory.", show_default=False
    ),
]
Tasks = Annotated[
    list[Path] | None,
    typer.Option(
        "--tasks", metavar="PATH", show_default=False,
        help="Directory of .yaml tasks and .jsonl questions, or one file; repeatable.",
    ),
]  # fmt: skip
Scores = Annotated[
    list[str] | None,
    typer.Option(
        "--score", metavar="NAME", show_default=False,
        help="Scoring function of multiple-choice tasks, repeatable: "
        + ", ".join(f"{name} ({formula})" for name, formula in FORMULAS.items())
        + ", or all.",
    ),
]  # fmt: skip


def eval(  # noqa: A001 - the name of the verb
    model: Model = None,
    tasks: Tasks = None,
    score: Scores = None,
    out: Out = None,
    sets: Sets = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Evaluate a model on local tasks of lm-eval, offline.

    Tasks are YAML files with their data, or JSONL files with question, choices and answer.
    """
    if explain is not None:
        flags.print_explanation(EvalConfig, explain, as_json)
        return 0
    path = flags.require(model, "MODEL", "eval")
    if not tasks:
        raise ConfigError("--tasks is missing: give a directory of tasks, a .yaml or a .jsonl file")
    config = flags.parse_settings(EvalConfig, sets)
    if out is not None:
        flags.check_new_file("--out", out, "results.json")
    check_harness()
    with exit_on_interrupt():
        import_module("lm_eval.evaluator")
        import_module("moesaic.serve.engine_thread")
        import_module("moesaic.serve.loading")
    loading = set(EngineConfig.model_fields)
    with Engine(path, **config.model_dump(include=loading)) as engine:
        for warning in engine.warnings:
            screen.print_warning(warning)
        with evaluation_progress(is_shown=not as_json) as on_progress:
            found = run_evaluation(
                engine, tasks, scores=score or (), on_progress=on_progress,
                **evaluation_settings(config),
            )  # fmt: skip
    for warning in found.warnings:
        screen.print_warning(warning)
    if out is not None:
        flags.write_new_file("--out", out, found.to_json())
    _print_metrics(found, out, as_json)
    return 0


def _print_metrics(found: Evaluation, out: Path | None, as_json: bool) -> None:
    if as_json:
        screen.print_json([one._asdict() for one in found.metrics])
        return
    titles = ("task", "metric", "", "value", "stderr", "documents", "shots")
    screen.print_table(titles, map(_row, found.metrics), left=3)
    if out is not None:
        screen.print_line(f"\nresults and answers: {out}")


def _row(one: Metric) -> tuple[str, ...]:
    better = {True: "higher is better", False: "lower is better", None: ""}
    stderr = "" if one.stderr is None else f"± {_number(one.stderr)}"
    return (
        one.task, one.metric, better[one.is_higher_better], _number(one.value), stderr,
        f"{one.documents:,}", str(one.shots),
    )  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
