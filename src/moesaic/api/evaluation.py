"""Evaluation of a model on local tasks by lm-eval, with the inference engine as its model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.serve.config import EvalConfig
from moesaic.serve.eval_scores import SCORE_NAMES, ScoreName

if TYPE_CHECKING:
    from moesaic.serve.harness import ScoringEngine

_RESAMPLES = 200
"""Resamples of the documents for the standard error of a metric that is no mean."""
_SEED = 1234
"""Seed of examples and resamples; that of lm-eval."""


class Metric(NamedTuple):
    """Result of one metric on a task or a group of tasks."""

    task: str
    metric: str
    """Name of the metric, and of its filter after a comma if the task has several."""
    value: float
    stderr: float | None
    """Standard error of `value`; None for a single document."""
    is_higher_better: bool | None
    documents: int
    """Documents of the task."""
    shots: int
    """Examples in front of each question."""


class Evaluation(NamedTuple):
    """Results of an evaluation."""

    metrics: list[Metric]
    samples: dict[str, list[dict[str, Any]]]
    """Documents of each task, with requests, answers and metrics, as lm-eval logs them."""
    warnings: list[str]
    """Sentences for the user."""

    def to_json(self) -> str:
        """Return everything as JSON."""
        content = {
            "metrics": [one._asdict() for one in self.metrics], "warnings": self.warnings,
            "samples": self.samples,
        }  # fmt: skip
        return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"


def check_harness() -> None:
    """Raise ConfigError if lm-eval is missing."""
    if find_spec("lm_eval") is None:
        raise ConfigError("an evaluation needs lm-eval: pip install 'moesaic[eval]'")


def run_evaluation(
    engine: ScoringEngine,
    tasks: Sequence[str | Path],
    *,
    scores: Sequence[str] = (),
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda kind, done, total: None,
) -> Evaluation:
    """Return the results of a model on local tasks.

    Args:
        engine: engine of the model.
        tasks: directories with task files, or single .yaml and .jsonl files.
        scores: scoring functions of multiple-choice tasks, besides lm-eval's own; "all": all five.
        shots: examples in front of each question; None: as the task says.
        limit: documents per task, the first ones; None: all.
        chat: send each question as a user message.
        on_progress: function of the kind of requests, how many are answered, and their number.
    """
    check_harness()
    names = _score_names(scores)
    if chat and names:
        raise ConfigError(
            f"chat = true and --score {names[0]}: scoring functions rank plain texts; remove one"
        )
    from lm_eval.evaluator import evaluate

    from moesaic.serve.eval_tasks import load_tasks
    from moesaic.serve.harness import HarnessModel

    loaded = load_tasks([Path(one) for one in tasks], names)
    for task in loaded["tasks"].values():
        _set_shots(task, shots)
    model = HarnessModel(engine, on_progress, is_chat=chat)
    raw = evaluate(
        model, loaded, limit=limit, bootstrap_iters=1, log_samples=True, apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )  # fmt: skip
    metrics = [one for name in raw["results"] for one in _metrics(name, raw, loaded["tasks"])]
    warnings = []
    if model.num_truncated:
        warnings.append(
            f"{model.num_truncated} texts are longer than the model's {model.max_length} positions "
            "and lost their first tokens: use fewer shots or shorter questions"
        )
    return Evaluation(metrics, raw["samples"], warnings)


def _score_names(given: Sequence[str]) -> list[ScoreName]:
    if "all" in given:
        return list(SCORE_NAMES)
    for name in given:
        if name not in SCORE_NAMES:
            raise ConfigError(
                f"--score {keys.show(name)} is not known: use {', '.join(SCORE_NAMES)} or all"
            )
    return [name for name in SCORE_NAMES if name in given]


def _set_shots(task: Any, shots: int | None) -> None:
    """Set the number of examples, unless the task insists on none."""
    own = task.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=_SEED)
    shots = task.get_config("num_fewshot")
    if not shots:
        return
    excludes_own = task.fewshot_cfg.split == task.config.test_split
    available = len(list(task.sampler.fewshot_docs())) - excludes_own
    if shots > available:
        raise ConfigError(
            f"shots = {shots}, but task {task.config.task} has {available} other documents for "
            "examples: lower it"
        )


def _metrics(name: str, raw: Mapping[str, Any], tasks: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a task or group from lm-eval's results."""
    found, own = list[Metric](), raw["results"][name]
    values = {key: value for key, value in own.items() if "," in key}
    is_several = len({key.partition(",")[2] for key in values}) > 1
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        if metric.endswith("_stderr"):
            continue
        stderr = values.get(f"{metric}_stderr,{filter_name}")
        if not isinstance(stderr, float) and name in tasks:
            samples = raw["samples"][name]
            items = [
                one[metric] for one in samples if one["filter"] == filter_name and metric in one
            ]
            stderr = standard_error(tasks[name].aggregation()[metric], items)
        found.append(
            Metric(
                own.get("alias", name), key if is_several else metric, float(value),
                stderr if isinstance(stderr, float) and math.isfinite(stderr) else None,
                raw["higher_is_better"].get(name, {}).get(metric), own["sample_len"],
                raw["n-shot"].get(name, 0),
            )
        )  # fmt: skip
    return found


def standard_error(
    aggregate: Callable[[Sequence[Any]], float], items: Sequence[Any]
) -> float | None:
    """Return the standard deviation of an aggregation over resamples of the documents."""
    import numpy as np

    if len(items) < 2:
        return None
    draws = np.random.default_rng(_SEED).integers(len(items), size=(_RESAMPLES, len(items)))
    values = [float(aggregate([items[index] for index in row])) for row in draws]
    return float(np.std(values, ddof=1))


def evaluation_settings(config: EvalConfig) -> dict[str, Any]:
    """Return the settings of `run_evaluation` in a configuration."""
    return {"shots": config.shots, "limit": config.limit, "chat": config.chat}
