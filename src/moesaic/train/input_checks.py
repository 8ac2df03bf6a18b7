"""Checks of paths, vocabulary, packages and data that a job needs on this machine.

`check_inputs` is fast and comes before each start. `read_data` reads the data as the start does,
for a dry run.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.base import keys
from moesaic.base.config import list_mistakes, noted
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.job.data import UNPLANNED_KEYS
from moesaic.train.data.clicks_files import PATH_KEYS, job_files
from moesaic.train.data.sources import TextSource, find_sources, open_inputs
from moesaic.train.job_file import LoadedJob, TrainingJob
from moesaic.train.resumed_job import place_of_path

if TYPE_CHECKING:
    from moesaic.models.tokenizer import Tokenizer
    from moesaic.train.data.clicks import ClickData
    from moesaic.train.data.text_data import TextData

WHOLE_BYTES = 8 << 20
"""Largest data that a dry run reads as a whole."""
_PATHS = frozenset({"data.path", "data.validation_path", "data.tokenizer", "routing.replay"})
"""Keys whose value is a path, of those that are checked here."""


def check_inputs(loaded: LoadedJob[TrainingJob], run: Path | None = None) -> None:
    """Raise for a path, vocabulary or package that the job needs and this machine lacks.

    With a resumed `run` the error says from which directory its paths are relative.
    """
    if loaded.missing:
        words = [f"{key} ({UNPLANNED_KEYS[key]})" for key in loaded.missing]
        raise ConfigError(
            f"{loaded.origin}: training needs {keys.join_words(words, 'and')}, and only plans do "
            f"without: add {'it' if len(words) == 1 else 'them'} to the job"
        )
    mistakes = _mistakes(loaded.job)
    if run is not None:
        job = loaded.job.model_dump(mode="json")
        for key in _PATHS & mistakes.keys():
            mistakes[key] += place_of_path(run, job, key)
    if mistakes:
        raise ConfigError(list_mistakes(mistakes.items(), loaded.origin, loaded.sets, {}))


def _mistakes(job: TrainingJob) -> dict[str, str]:
    """Return what the job needs and this machine lacks, by key."""
    found = dict[str, str]()
    if isinstance(job, Job):
        _check_data(job, found)
    else:
        for key in PATH_KEYS:
            with noted(found, key):
                job_files(job.data, key)
    replay = job.routing.replay if isinstance(job, Job) else None
    if replay is not None and not Path(replay).expanduser().exists():
        found["routing.replay"] = (
            f"routing.replay = {keys.show(replay)} does not exist: "
            "give a file written by routing.record"
        )
    for extra in ("wandb", "mlflow"):
        value = getattr(job.log, extra)
        if value is not None and importlib.util.find_spec(extra) is None:
            found[f"log.{extra}"] = (
                f"log.{extra} = {keys.show(value)} needs the package {extra}: "
                f"pip install 'moesaic[{extra}]', or remove the key"
            )
    return found


def read_data(job: TrainingJob) -> tuple[ClickData | TextData | None, list[str]]:
    """Read and encode the data as the start of training does, or their first part if they are more
    than `WHOLE_BYTES`. Return them if they are whole, and lines about them.

    Nothing stays on the disk, so only length and digest of the data may be used.
    """
    from moesaic.dist.world import World

    with tempfile.TemporaryDirectory(prefix="moesaic-") as cache:
        if _data_bytes(job) > WHOLE_BYTES:
            parts = keys.join_words(list(_read_start(job, Path(cache))), "and")
            return None, [f"{parts} read; the rest, and what is held out, at the start of training"]
        lines, world = list[str](), World.solo()
        data: ClickData | TextData
        if isinstance(job, Job):
            from moesaic.train.data.text_data import TextData

            text = job.data.model_copy(update={"cache": cache})
            data = TextData.open(text, job.seed, world, lines.append, job.control)
        else:
            from moesaic.train.data.clicks import ClickData

            clicks = job.data.model_copy(update={"cache": cache})
            data = ClickData.open(clicks, job.seed, world, lines.append)
        held_out = "" if data.validation is None else f", {len(data.validation):,} to validate on"
        return data, [f"all read: {len(data.train):,} samples to train on{held_out}", *lines]


def _data_bytes(job: TrainingJob) -> int:
    """Return the bytes of all files of the data of `job`."""
    if isinstance(job, Job):
        files = [file for source in find_sources(job.data) for file in source.files]
    else:
        files = [file for key in PATH_KEYS for file in job_files(job.data, key)]
    return sum(file.stat().st_size for file in files)


def _read_start(job: TrainingJob, cache: Path) -> Iterator[str]:
    """Read the first part of the data, and yield a clause about each file or path."""
    if isinstance(job, Job):
        from moesaic.train.data.text_data import read_start

        return read_start(job.data, job.control, cache, WHOLE_BYTES)
    from moesaic.train.data import clicks

    return clicks.read_start(job.data)


def _check_data(job: Job, found: dict[str, str]) -> None:
    """Add to `found` if the text, its first record, the tokenizer or the chat template of `job` is
    missing or does not fit."""
    sources, tokenizer = open_inputs(job.data, found)
    for source in sources:
        if source.kind in ("jsonl", "parquet", "chat", "labelled"):
            from moesaic.train.data.text import check_first_record

            with noted(found, source.key):
                check_first_record(source)
    if not found and tokenizer is not None:
        _check_tokenizer(job, tokenizer, sources[0], found)


def _check_tokenizer(
    job: Job, tokenizer: Tokenizer, source: TextSource, found: dict[str, str]
) -> None:
    """Add to `found` if the tokenizer does not fit the prompts, the model or the conversations of
    `job`."""
    from moesaic.models.tokenizer import check_vocabulary

    if job.control is not None:
        from moesaic.train.data.control import open_control

        with noted(found, "control"):
            tokenizer, encoder = open_control(job.data, job.control, source)
            encoder.check_source(source)
    if not found:
        with noted(found, "model.vocab"):
            check_vocabulary(
                job.model.vocab, tokenizer, is_fixed=job.source is not None,
                has_control=job.control is not None,
            )  # fmt: skip
    if job.data.format == "chat":
        from moesaic.train.data.chat import ChatEncoder

        with noted(found, "data.tokenizer"):
            ChatEncoder(job.data, tokenizer)
