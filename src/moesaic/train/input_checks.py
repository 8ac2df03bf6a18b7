"""Checks of paths, vocabulary and packages that a job needs on this machine, before it starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from moesaic.base import keys
from moesaic.base.errors import ConfigError, DataError, UserError
from moesaic.facts.job import CtrJob, DataConfig, Job
from moesaic.train.data.sources import COMPRESSED, TextSource
from moesaic.train.job_file import LoadedJob, TrainingJob, blame_sets


def check_inputs(loaded: LoadedJob[TrainingJob]) -> None:
    """Raise for a path, vocabulary or package that the job needs and this machine lacks."""
    if loaded.missing_data:
        raise ConfigError(
            f"{loaded.origin}: {' and '.join(f'data.{key}' for key in loaded.missing_data)} "
            f"{'is' if len(loaded.missing_data) == 1 else 'are'} missing: add [data] with path "
            "(the training text) and sequence (tokens per sample)"
        )
    with blame_sets(loaded.origin, loaded.sets):
        _check_inputs(loaded.job, loaded.origin)


def _check_inputs(job: TrainingJob, origin: str) -> None:
    try:
        if isinstance(job, Job):
            _check_data(job)
        else:
            _check_clicks(job)
    except UserError as error:
        raise ConfigError(f"{origin}: {error}") from None
    replay = job.routing.replay if isinstance(job, Job) else None
    if replay is not None and not Path(replay).expanduser().exists():
        raise ConfigError(
            f"{origin}: routing.replay = {keys.show(replay)} does not exist: "
            "give a file written by routing.record"
        )
    for extra in ("wandb", "mlflow"):
        value = getattr(job.log, extra)
        if value is not None and importlib.util.find_spec(extra) is None:
            raise ConfigError(
                f"{origin}: log.{extra} = {keys.show(value)} needs the package {extra}: "
                f"pip install 'moesaic[{extra}]', or remove the key"
            )


def _check_clicks(job: CtrJob) -> None:
    """Raise if files of samples are missing."""
    from moesaic.train.data.clicks_files import find_files

    for key in ("path", "validation_path"):
        path = getattr(job.data, key)
        if path is not None:
            find_files(f"data.{key}", path, is_parquet=job.data.is_parquet)


def _check_size(source: TextSource, data: DataConfig) -> None:
    """Raise if plain text is surely too short for one sample, or for its validation share.

    A token takes at least a byte, and each file ends with one more.
    """
    if any(file.suffix.lower() in COMPRESSED for file in source.files):
        return
    most, needed = sum(file.stat().st_size + 1 for file in source.files), data.sequence + 1
    share = data.validation_share if len(source.files) == 1 else 0.0
    label = f"{source.key} = '{source.path}'"
    takes = f"but one sample takes data.sequence + 1 = {needed}"
    if most * (1 - share) < needed:
        raise DataError(
            f"{label} has at most {round(most * (1 - share))} tokens to train on, {takes}: give "
            "more text, or shorten data.sequence"
        )
    if 0 < most * share < needed - 1:
        raise DataError(
            f"data.validation_share = {share} of {label} has at most {round(most * share)} tokens, "
            f"{takes}: raise it, or name data.validation_path"
        )


def _check_data(job: Job) -> None:
    """Raise if the text, its first record, the tokenizer or the chat template of `job` is missing
    or does not fit."""
    from moesaic.models.tokenizer import check_vocabulary, open_tokenizer
    from moesaic.train.data.sources import find_sources

    sources = find_sources(job.data)
    for source in sources:
        if source.kind in ("jsonl", "parquet", "chat", "labelled"):
            from moesaic.train.data.text import check_first_record

            check_first_record(source)
        elif source.kind == "text":
            _check_size(source, job.data)
    has_control = job.control is not None
    if job.control is not None:
        from moesaic.train.data.control import open_control

        tokenizer, encoder = open_control(job.data, job.control, sources[0])
        encoder.check_source(sources[0])
    else:
        tokenizer = open_tokenizer(job.data.tokenizer, job.data.end_token)
    check_vocabulary(
        job.model.vocab, tokenizer, is_fixed=job.source is not None, has_control=has_control
    )
    if job.data.format == "chat":
        from moesaic.train.data.chat import ChatEncoder

        ChatEncoder(job.data, tokenizer)
