"""Tasks of lm-eval from local files, without a network. Importing this module imports lm-eval."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import datasets
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import acc_all, mean
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.config.group import GroupConfig
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from moesaic.base import keys
from moesaic.base.errors import ConfigError, MoesaicError
from moesaic.serve.eval_files import QuestionFile, find_tasks, locate_data
from moesaic.serve.eval_scores import Choice, ScoreName, combine, score_texts

TASK_KEYS = frozenset(
    {field.name for kind in (TaskConfig, GroupConfig) for field in fields(kind)}
    | {"include", "group", "task_list"}
)
"""Keys of a task file."""
MAX_ANSWER_TOKENS = 64
"""New tokens of an answer to a question of a JSONL file."""

_READERS: dict[str, Callable[..., datasets.Dataset]] = {
    "json": datasets.Dataset.from_json, "csv": datasets.Dataset.from_csv,
    "parquet": datasets.Dataset.from_parquet, "text": datasets.Dataset.from_text,
}  # fmt: skip
_ROWS, _FILE = "rows", "task_file"
"""Keys of `metadata`: rows of a JSONL task, and the path of a YAML task."""
_SHAPES: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "prompt", "doc_to_choice": "choices",
        "doc_to_target": "gold", "fewshot_split": "test",
    },
    "answers": {
        "output_type": "generate_until", "doc_to_text": "prompt", "doc_to_target": "answers",
        "fewshot_split": "test",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": MAX_ANSWER_TOKENS},
        "metric_list": [
            {
                "metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
                "ignore_case": True, "ignore_punctuation": True,
            }
        ],
        "filter_list": [
            {
                "name": "none",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
    },
    "texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "num_fewshot": 0,
    },
}  # fmt: skip
"""Keys of a JSONL task, by its kind of questions."""


class LocalTask(ConfigurableTask):
    """Task whose data are local files, with scoring functions for its choices."""

    scores: ClassVar[tuple[ScoreName, ...]] = ()
    """Scoring functions besides lm-eval's own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: one for key, one in config.items() if key != "class"})

    @property
    def has_scores(self) -> bool:
        """True if the task has choices and scoring functions for them."""
        return bool(self.scores) and self.OUTPUT_TYPE == "multiple_choice"

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **settings: Any) -> None:
        """Read the data of the task."""
        config = self.config
        self.dataset: Mapping[str, Any]
        metadata: dict[str, Any] = config.metadata or {}
        if _ROWS in metadata:
            self.dataset = {"test": datasets.Dataset.from_list(metadata.pop(_ROWS))}
        elif config.custom_dataset is not None:
            super().download(dataset_kwargs, **settings)
        else:
            file = Path(metadata[_FILE])
            self.dataset = _read_splits(config.dataset_path, dataset_kwargs or {}, file)
        for key in ("test_split", "validation_split", "training_split", "fewshot_split"):
            split = getattr(config, key)
            if split is not None and split not in self.dataset:
                raise ConfigError(
                    f"{key} = {keys.show(split)} is no split of the data: use one of "
                    f"{', '.join(self.dataset)}"
                )
        if config.test_split is None and config.validation_split is None:
            raise ConfigError(f"test_split is missing: set it to one of {', '.join(self.dataset)}")
        self._check_choices()

    def _check_choices(self) -> None:
        """Raise ConfigError unless a multiple-choice task names its choices and their answer."""
        config = self.config
        if config.output_type != "multiple_choice":
            return
        if config.doc_to_choice is None:
            raise ConfigError("doc_to_choice is missing: name the field or list of the choices")
        target = config.doc_to_target
        fields = list(self.dataset[config.test_split or config.validation_split].features)
        is_name = isinstance(target, str) and "{" not in target and not target.isdecimal()
        if is_name and target not in fields:
            raise ConfigError(
                f"doc_to_target = {keys.show(target)} is no field of the data: use one of "
                f"{', '.join(fields)}"
            )

    def build_all_requests(self, **settings: Any) -> None:
        """Build the requests of all documents, without lm-eval's own bar."""
        with redirect_stderr(io.StringIO()):
            super().build_all_requests(**settings)

    def construct_requests(
        self, doc: dict[str, Any], ctx: str | list[str], **settings: Any
    ) -> list[Instance] | Instance:
        """Return the requests of a document: lm-eval's, and those of the scoring functions."""
        requests: list[Instance] | Instance = super().construct_requests(doc, ctx, **settings)
        if not self.has_scores:
            return requests
        assert isinstance(requests, list), "a task with choices has several requests"
        texts = [
            pair
            for choice in self._choices(doc, ctx)
            for name in self.scores
            for pair in score_texts(name, choice)
        ]
        start = len(requests)
        return requests + [
            Instance(
                request_type="loglikelihood", doc=doc, arguments=pair, idx=start + index,
                metadata=settings["metadata"],
            )
            for index, pair in enumerate(texts)
        ]  # fmt: skip

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Return the metrics of a document from its answers."""
        if not self.has_scores:
            own: dict[str, Any] = super().process_results(doc, results)
            return own
        choices: list[str] = self.doc_to_choice(doc)
        texts = [len(score_texts(name, Choice("", "", ""))) for name in self.scores]
        num_own = len(results) - len(choices) * sum(texts)
        metrics: dict[str, Any] = super().process_results(doc, results[:num_own])
        logprobs = iter([logprob for logprob, _ in results[num_own:]])
        by_score: dict[ScoreName, list[float]] = {name: [] for name in self.scores}
        for _ in choices:
            for name, number in zip(self.scores, texts, strict=True):
                by_score[name].append(combine(name, [next(logprobs) for _ in range(number)]))
        gold = self._right_choices(doc, choices)
        for name, found in by_score.items():
            metrics[score_metric(name)] = float(found.index(max(found)) in gold)
        return metrics

    def aggregation(self) -> dict[str, Any]:
        """Return the aggregation of each metric.

        lm-eval starts processes for the standard errors of some aggregations. Under another name
        they have none, and `standard_error` computes them.
        """
        own = super().aggregation()
        plain = {name: one if one in (mean, acc_all) else partial(one) for name, one in own.items()}
        return plain | {score_metric(name): mean for name in self.scores}

    def higher_is_better(self) -> dict[str, Any]:
        """Return whether higher values of each metric are better."""
        own: dict[str, Any] = super().higher_is_better()
        return own | {score_metric(name): True for name in self.scores}

    def _choices(self, doc: dict[str, Any], context: str | list[str]) -> list[Choice]:
        """Return the texts of each choice of a document."""
        choices, delimiter = self.doc_to_choice(doc), self.config.target_delimiter
        if isinstance(context, list):  # Each choice is a question of its own.
            answer = f"{delimiter}{self.doc_to_target(doc)}"
            return [
                _split(one, question, answer)
                for one, question in zip(context, choices, strict=True)
            ]
        question = self.doc_to_text(doc)
        return [_split(context, question, f"{delimiter}{choice}") for choice in choices]

    def _right_choices(self, doc: dict[str, Any], choices: list[str]) -> set[int]:
        target = self.doc_to_text(doc) if self.multiple_input else self.doc_to_target(doc)
        targets = target if isinstance(target, list) else [target]
        return {
            choices.index(one) if isinstance(one, str) and one in choices else one
            for one in targets
        }


def score_metric(name: ScoreName) -> str:
    """Return the metric of a scoring function: the share of documents that it gets right."""
    return f"acc_{name}"


def _split(context: str, question: str, answer: str) -> Choice:
    """Return a choice, with what stands before the question apart from it."""
    at = context.rfind(question)
    assert at >= 0, "the context holds the question"
    return Choice(context[:at], context[at:], answer)


def _read_splits(
    path: str | None, settings: Mapping[str, Any], task_file: Path
) -> Mapping[str, datasets.Dataset]:
    """Return the splits of local data by name; files without a name are the split `train`."""
    if path in _READERS:
        files = settings.get("data_files")
        if not files:
            raise ConfigError(
                "dataset_kwargs.data_files is missing: name the task's files, such as "
                "{test: questions.jsonl}"
            )
        by_split = files if isinstance(files, dict) else {"train": files}
        others = {key: one for key, one in settings.items() if key != "data_files"}
        return {
            split: _read_files(path, given, others, task_file) for split, given in by_split.items()
        }
    directory = locate_data(path or "", task_file)
    if path and directory.is_dir():
        stored = datasets.load_from_disk(str(directory))
        return stored if isinstance(stored, datasets.DatasetDict) else {"train": stored}
    raise ConfigError(
        f"dataset_path = {keys.show(path)} is not on this machine: use {', '.join(_READERS)} with "
        "dataset_kwargs.data_files, or a directory that datasets wrote with save_to_disk"
    )


def _read_files(
    kind: str, given: object, settings: Mapping[str, Any], task_file: Path
) -> datasets.Dataset:
    names = given if isinstance(given, list) else [given]
    files = [locate_data(str(name), task_file) for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"dataset_kwargs.data_files: '{file}' does not exist: paths are relative to the "
                "task's file, or to the current directory"
            )
    with TemporaryDirectory() as cache, redirect_stderr(io.StringIO()):
        return _READERS[kind](
            [str(file) for file in files], cache_dir=cache, keep_in_memory=True, **settings
        )


def load_tasks(paths: Sequence[Path], scores: Iterable[ScoreName]) -> dict[str, Any]:
    """Return the tasks and groups of files, as lm-eval's `evaluate` takes them."""
    found = find_tasks(paths, TASK_KEYS)

    class ScoredTask(LocalTask):
        """Task with the scoring functions of this evaluation."""

    ScoredTask.scores = tuple(scores)
    tasks: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    manager = TaskManager(include_path=found.directories, include_defaults=False)
    for name, file in found.sources.items():
        _guard(file, partial(_set_class, manager.task_index[name], ScoredTask))
    for name in found.names:
        loaded = _guard(found.sources[name], partial(manager.load, [name]))
        for key, task in loaded["tasks"].items():
            if not isinstance(task, LocalTask):
                raise ConfigError(
                    f"'{found.sources[name]}': the group defines the task '{key}' itself: give "
                    "that task a file of its own, and name it in the group"
                )
        tasks |= loaded["tasks"]
        groups |= loaded["groups"]
    for one in found.questions:
        tasks[one.name] = _guard(one.path, partial(_question_task, one, ScoredTask))
    if ScoredTask.scores and not any(task.has_scores for task in tasks.values()):
        raise ConfigError(
            f"--score {ScoredTask.scores[0]} needs a multiple-choice task, and "
            f"{', '.join(tasks)} has no choices: remove --score"
        )
    return {"tasks": tasks, "groups": groups}


def _set_class(entry: Any, kind: type[LocalTask]) -> None:
    """Replace an entry of lm-eval's index by its keys and the class of its task."""
    if "group" not in entry.cfg:
        config = load_yaml(entry.yaml_path)
        metadata = {**(config.get("metadata") or {}), _FILE: str(entry.yaml_path)}
        entry.cfg, entry.yaml_path = {**config, "metadata": metadata, "class": kind}, None


def _question_task(file: QuestionFile, kind: type[LocalTask]) -> LocalTask:
    config = {
        "task": file.name, "test_split": "test", "metadata": {"version": 1, _ROWS: file.rows},
        **deepcopy(_SHAPES[file.kind]),
    }  # fmt: skip
    return kind(config)


def _guard(path: Path, load: Callable[[], Any]) -> Any:
    """Return the result of `load`; name the file in its errors."""
    try:
        return load()
    except MoesaicError as error:
        raise ConfigError(f"'{path}': {error}") from None
    except Exception as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"'{path}': the task cannot be built ({shown}): check doc_to_text, doc_to_target, "
            "doc_to_choice and the fields of its data"
        ) from error
