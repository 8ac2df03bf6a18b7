"""Files of evaluation tasks: YAML of lm-eval, and questions as JSON lines. Imports no lm-eval."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")
QUESTIONS_SUFFIX = ".jsonl"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FIELDS = {"question", "prompt", "choices", "answer", "text"}

QuestionKind = Literal["choices", "answers", "texts"]


class QuestionFile(NamedTuple):
    """A file of JSON lines that is a task without YAML."""

    name: str
    """Name of the file without its suffix."""
    path: Path
    kind: QuestionKind
    """choices: `choices` and the right one; answers: texts to generate; texts: to predict."""
    rows: list[dict[str, Any]]
    """choices: prompt, choices, gold (its index); answers: prompt, answers; texts: text."""


class TaskFiles(NamedTuple):
    """Files of tasks that were found."""

    directories: list[Path]
    """Directories whose YAML files define tasks."""
    names: list[str]
    """Names of the tasks and groups to evaluate, from YAML."""
    sources: dict[str, Path]
    """YAML file of each task and group."""
    questions: list[QuestionFile]


def find_tasks(paths: Sequence[Path], task_keys: Collection[str]) -> TaskFiles:
    """Return the tasks in directories and files; raise ConfigError for a mistake in one.

    Args:
        paths: directories with YAML or JSONL files, or single files of either kind.
        task_keys: keys that a YAML file may have.
    """
    found = TaskFiles([], [], {}, [])
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"--tasks '{path}' does not exist: give a directory of tasks, a .yaml file or a "
                ".jsonl file"
            )
        _add_files(path, task_keys, found)
    names = [*found.sources, *(one.name for one in found.questions)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"--tasks: two files define the task '{name}': rename one of them, or give one"
            )
    if not names:
        shown = ", ".join(f"'{path}'" for path in paths)
        raise ConfigError(f"--tasks {shown}: there is no task: add a .yaml or a .jsonl file")
    return found


def _add_files(path: Path, task_keys: Collection[str], found: TaskFiles) -> None:
    yaml_files = sorted(_files(path, YAML_SUFFIXES))
    raw = {file: _read_yaml(file, task_keys) for file in yaml_files}
    used, members = _data_files(raw), set[str]()
    for file, config in raw.items():
        name = config.get("group") or config.get("task")
        if name is None:
            continue  # Part of other files, by `include`.
        if not isinstance(name, str):
            raise ConfigError(f"'{file}': task = {keys.show(name)} is no name: give a text")
        if config.get("group"):
            members |= _member_names(config.get("task"))
        if name in found.sources:
            raise ConfigError(
                f"'{file}' and '{found.sources[name]}' define the task '{name}': rename one of them"
            )
        found.sources[name] = file
        found.names.append(name)
    found.names[:] = [name for name in found.names if name not in members]
    if yaml_files:
        found.directories.append(path if path.is_dir() else path.parent)
    for file in sorted(_files(path, (QUESTIONS_SUFFIX,))):
        if file.resolve() not in used:
            found.questions.append(read_questions(file))


def _files(path: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.suffix in suffixes and file.is_file():
            yield file


def _read_yaml(path: Path, task_keys: Collection[str]) -> dict[str, Any]:
    """Return the keys of a task file, with functions as their names."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Loader that keeps `!function` as text."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    try:
        with path.open("rb") as file:
            raw = yaml.load(file, Loader=Loader)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror}): fix it") from None
    except yaml.YAMLError as error:
        shown = " ".join(str(error).split())
        raise ConfigError(f"'{path}' is not YAML ({shown}): fix it") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"'{path}' holds no keys: give a task of lm-eval, with task = NAME")
    for key in raw:
        if key not in task_keys:
            near = difflib.get_close_matches(str(key), task_keys, n=1)
            remedy = f"did you mean '{near[0]}'?" if near else "remove it"
            raise ConfigError(f"'{path}': unknown key '{key}': {remedy}")
    return raw


def _data_files(raw: dict[Path, dict[str, Any]]) -> set[Path]:
    """Return the data files that YAML tasks name; they are no tasks of their own."""
    named = set[Path]()
    for file, config in raw.items():
        settings = config.get("dataset_kwargs")
        given = settings.get("data_files") if isinstance(settings, dict) else None
        for value in given.values() if isinstance(given, dict) else [given]:
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str):
                    named.add(locate_data(one, file).resolve())
    return named


def _member_names(members: object) -> set[str]:
    """Return the tasks that a group lists."""
    items = members if isinstance(members, list) else [members]
    names = (item.get("task") if isinstance(item, dict) else item for item in items)
    return {name for name in names if isinstance(name, str)}


def locate_data(name: str, task_file: Path) -> Path:
    """Return a data file of a task: beside its YAML file, else in the current directory."""
    beside = task_file.parent / name
    return beside if beside.exists() else Path(name)


def read_questions(path: Path) -> QuestionFile:
    """Return the questions in JSON lines.

    Each line has `question` or `prompt` with `answer`, and perhaps `choices`; or `text` alone. A
    `question` gets "Question:" and "Answer:" around it, a `prompt` is used as it is.
    """
    kinds, rows = set[QuestionKind](), list[dict[str, Any]]()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                kind, row = _read_question(f"'{path}' line {number}", line)
                kinds.add(kind)
                rows.append(row)
                if len(kinds) > 1:
                    raise ConfigError(
                        f"'{path}' line {number}: it has other fields than the lines before it: "
                        "give each line the same fields, or split the file"
                    )
    if not rows:
        raise ConfigError(f"'{path}' has no line: add questions, or remove the file")
    return QuestionFile(path.stem, path, kinds.pop(), rows)


def _read_question(origin: str, line: bytes) -> tuple[QuestionKind, dict[str, Any]]:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: it is not JSON ({error}): fix it") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: it is no JSON object: give one with question and answer")
    if isinstance(raw.get("text"), str) and not raw.keys() & {"question", "prompt"}:
        return "texts", {"text": raw["text"]}
    prompt = _read_prompt(origin, raw)
    if "choices" in raw:
        choices = raw["choices"]
        if not isinstance(choices, list) or not _are_texts(choices):
            raise ConfigError(
                f"{origin}: choices = {keys.show(choices)}: give a list of texts, none empty"
            )
        return "choices", {
            "prompt": prompt, "choices": choices, "gold": _find_choice(origin, raw, choices),
        }  # fmt: skip
    answers = raw.get("answer")
    answers = answers if isinstance(answers, list) else [answers]
    if not _are_texts(answers):
        raise ConfigError(
            f"{origin}: answer = {keys.show(raw.get('answer'))}: give a text, a list of texts that "
            "count, or choices beside it"
        )
    return "answers", {"prompt": prompt, "answers": answers}


def _are_texts(values: Sequence[object]) -> bool:
    return len(values) > 0 and all(value and isinstance(value, str) for value in values)


def _read_prompt(origin: str, raw: dict[str, Any]) -> str:
    given = [key for key in ("question", "prompt") if key in raw]
    if len(given) != 1:
        near = [key for key in raw if difflib.get_close_matches(key, _FIELDS, n=1)]
        hint = f" (it has {', '.join(map(repr, near or raw))})"
        raise ConfigError(
            f"{origin}: give one of question, prompt and text{hint if raw else ''}: rename the "
            "field, or write a YAML task"
        )
    text = raw[given[0]]
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{origin}: {given[0]} = {keys.show(text)} is no text: give one")
    return f"Question: {text}\nAnswer:" if given == ["question"] else text


def _find_choice(origin: str, raw: dict[str, Any], choices: list[str]) -> int:
    """Return the index of the right choice: `answer` is the index, the text or the letter of it."""
    answer = raw.get("answer")
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    index = answer
    if isinstance(answer, str) and len(answer) == 1:
        index = _LETTERS.find(answer.upper())
    if type(index) is not int or not 0 <= index < len(choices):
        raise ConfigError(
            f"{origin}: answer = {keys.show(answer)} is none of the {len(choices)} choices: give "
            "the text of one, its index from 0, or its letter"
        )
    return index
