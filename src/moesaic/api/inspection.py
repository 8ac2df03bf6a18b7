"""Contents and integrity of runs, checkpoints and model directories, and samples of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.job import CtrJob, ModelConfig
from moesaic.facts.job.credibility import LABELS
from moesaic.facts.workload import count_parameters

TABLE_MANIFEST = "table.json"
"""File of an exported table."""


def inspect_path(
    path: Path,
    *,
    verify: bool = False,
    samples: int | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return what `path` contains as plain data; `damaged` lists damage.

    Args:
        path: a run, a checkpoint, a Hugging Face directory, or a job file for its samples.
        verify: read every file of a checkpoint and check its hash.
        samples: samples of a job; 2 by default.
        log: receives messages about tokenising.
    """
    is_job = path.suffix == ".toml"
    if samples is not None and not is_job:
        raise ConfigError(f"--samples needs a job file, and '{path}' is none: remove --samples")
    is_model = (path / "config.json").is_file() and not (path / TABLE_MANIFEST).is_file()
    if verify and (is_job or is_model):
        raise ConfigError(
            f"--verify needs a run or checkpoint, and '{path}' is none: remove --verify"
        )
    return _inspect_job(path, samples or 2, log) if is_job else _inspect_directory(path, verify)


def _inspect_directory(path: Path, verify: bool) -> dict[str, Any]:
    """Return the contents of `path` as plain data; `damaged` lists damage."""
    if (path / TABLE_MANIFEST).is_file():
        return _inspect_export(path, verify)
    if (path / "HEAD.json").is_file():
        return _inspect_table_directory(path, verify)
    if (path / "config.json").is_file():
        return _inspect_huggingface(path)
    if (path / "manifest.json").is_file() or (path / "COMMIT").is_file():
        return _inspect_checkpoint(path, verify)
    if (path / "job.json").is_file() or (path / "checkpoints").is_dir():
        return _inspect_run(path, verify)
    from moesaic.models.hf.config import describe_path

    hint = "; for a plan, workload or cluster use `moesaic plan`" if path.is_file() else ""
    raise ConfigError(
        f"'{path}' {describe_path(path)}: "
        f"give a run, a checkpoint, a Hugging Face model directory or a saved table{hint}"
    )


def _inspect_huggingface(path: Path) -> dict[str, Any]:
    from moesaic.models.hf.config import read_config
    from moesaic.models.hf.reader import HFSource, scan_weights

    model, warnings = read_config(path)
    source = HFSource(path, model)
    stored = scan_weights(path)
    files = sorted({tensor.file for tensor in stored.values()})
    return {
        "kind": "Hugging Face model", "path": str(path), **_describe_model(model),
        "tensors": len(stored), "dtypes": sorted({tensor.dtype for tensor in stored.values()}),
        "files": {file.name: file.stat().st_size for file in files},
        "tokenizer": (path / "tokenizer.json").is_file(),
        "warnings": [*warnings, *source.notes],
    }  # fmt: skip


def _inspect_export(path: Path, verify: bool) -> dict[str, Any]:
    """Return the contents of an exported recommender."""
    from moesaic.api.recommender import describe_rows
    from moesaic.models.recommender_files import open_recommender

    origin = open_recommender(path)
    if verify:
        origin.rows.verify()
        origin.load_network()
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    return {
        "kind": "exported recommender", "path": str(path), "step": origin.step,
        **_describe_recommender(origin.job), "files": files, "verified": verify,
        "table": describe_rows(origin.rows),
    }  # fmt: skip


def _inspect_table_directory(path: Path, verify: bool) -> dict[str, Any]:
    """Return the contents of a directory that `Table.save` wrote."""
    from moesaic.api.recommender import describe_rows
    from moesaic.api.table import open_saved_rows

    rows = open_saved_rows(path)
    if verify:
        rows.verify()
    return {
        "kind": "table", "path": str(path), "verified": verify, "table": describe_rows(rows),
    }  # fmt: skip


def _describe_recommender(job: CtrJob) -> dict[str, Any]:
    return {
        "family": job.model.family, "slots": job.data.num_slots, "dense": job.data.num_dense,
        "parameters_total": job.num_network_parameters,
    }  # fmt: skip


def _inspect_checkpoint(path: Path, verify: bool) -> dict[str, Any]:
    from moesaic.dist.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    checkpoint.verify() if verify else checkpoint.check_sizes()
    facts, tensors = checkpoint.facts, checkpoint.tensors
    return {
        "kind": "checkpoint", "path": str(path), "step": checkpoint.step,
        **_describe_trained(facts, path),
        "counters": checkpoint.counters, "tensors": len(tensors),
        "tensor_kinds": sorted({key.partition("/")[0] for key in tensors}),
        "dtypes": sorted({record.dtype for record in tensors.values()}),
        "bytes": checkpoint.num_bytes, "plan": facts.get("plan"), "verified": verify,
    }  # fmt: skip


def _describe_trained(facts: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return sizes of the model of a checkpoint with these facts."""
    job = facts.get("job") or facts
    if job.get("kind") == "ctr":
        return _describe_recommender(parse(CtrJob, job, f"checkpoint '{path}'"))
    raw = job.get("model")
    if not isinstance(raw, dict):
        return {}
    students = _describe_students(job, f"checkpoint '{path}'")
    model = _describe_model(parse(ModelConfig, raw, f"checkpoint '{path}'"))
    return {**model, **({"students": students} if students else {})}


def _describe_students(job: Mapping[str, Any], origin: str) -> list[dict[str, Any]]:
    """Return name, teacher and number of parameters of each student of a job's content."""
    return [
        {
            "name": one["name"], "teacher": one["teacher"],
            "parameters": count_parameters(parse(ModelConfig, one["model"], origin)).total,
        }
        for one in job.get("student") or ()
    ]  # fmt: skip


def _inspect_job(path: Path, num_samples: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the first samples of a job; tokenise its text, or read its clicks, if that was not
    done."""
    from moesaic.train.input_checks import check_inputs
    from moesaic.train.job_file import load_job

    loaded = load_job(path, needs_data=True)
    check_inputs(loaded)
    show = _clicks_of if isinstance(loaded.job, CtrJob) else _texts_of
    facts = show(loaded.job, num_samples, log)
    return {"kind": "job", "path": str(path), **facts, "warnings": loaded.warnings}


def _clicks_of(job: Any, num_samples: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the first samples of a recommender's job, with the keys of each slot."""
    from moesaic.dist.world import World
    from moesaic.train.data.clicks import ClickData

    data = ClickData.open(job.data, job.seed, World.solo(), log)
    batch = data.train.load(range(num_samples), shuffled=False)
    starts = batch.offsets[:-1].reshape(-1, num_samples).tolist()
    ends = batch.offsets[1:].reshape(-1, num_samples).tolist()
    names = job.data.slots or list(map(str, range(job.data.num_slots)))
    rows = [
        {
            "label": int(batch.labels[row]), "weight": float(batch.weights[row]),
            "day": int(batch.days[row]),
            "user": None if batch.users is None else int(batch.users[row]),
            "dense": batch.dense[row].tolist(),
            "keys": {
                name: batch.keys[start[row] : end[row]].tolist()
                for name, start, end in zip(names, starts, ends, strict=True)
            },
        }
        for row in range(num_samples)
    ]  # fmt: skip
    return {
        "slots": job.data.num_slots, "dense": job.data.num_dense, "days": data.train.num_days,
        "num_samples": len(data.train), "clicks": rows,
    }  # fmt: skip


def _texts_of(job: Any, num_samples: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the first samples of a language model's job, by document."""
    from moesaic.dist.world import World
    from moesaic.train.data.batch import split_documents
    from moesaic.train.data.text_data import TextData

    data = TextData.open(job.data, job.seed, World.solo(), log, job.control)
    batch = data.train.batch(range(num_samples))
    rows = []
    for row in range(num_samples):
        labels = _labels_of(batch, row)
        pairs = zip(split_documents(batch, row), labels, strict=True)
        shown = [(pair, label) for pair, label in pairs if any(pair[1]) or label]
        with_targets = [pair for pair, _ in shown]
        documents = [
            [
                {
                    "in_loss": in_loss,
                    "text": data.tokenizer.decode([t for _, t in span], with_special_tokens=True),
                }
                for in_loss, span in groupby(zip(mask, tokens, strict=True), itemgetter(0))
            ]
            for tokens, mask in with_targets
        ]
        targets = sum(sum(mask) for _, mask in with_targets)
        rows.append({"targets": targets, "documents": documents})
        if job.data.format == "labelled":
            rows[-1]["labels"] = [label for _, label in shown]
    return {
        "sequence": job.data.sequence, "num_samples": len(data.train), "samples": rows,
    }  # fmt: skip


def _labels_of(batch: Any, row: int) -> list[str | None]:
    """Return the label of each document of one sample in words; None for no label."""
    documents = batch.documents[row]
    names: list[str | None] = [None] * (int(documents.max()) + 1)
    if hasattr(batch, "labels"):
        for column in (batch.labels[row] >= 0).nonzero()[:, 0].tolist():
            names[int(documents[column])] = LABELS[int(batch.labels[row, column])]
    return names


def _inspect_run(path: Path, verify: bool) -> dict[str, Any]:
    from moesaic.dist.checkpoint import list_committed
    from moesaic.report import RunStats, summary

    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    head: dict[str, Any] = {}
    stats = None
    try:
        stats = RunStats.read(path)
        head = summary(stats)
    except StoreError as error:
        damaged.append(str(error))
    for directory in list_committed(path / "checkpoints"):
        try:
            facts = _inspect_checkpoint(directory, verify)
        except StoreError as error:
            damaged.append(str(error))
            continue
        rows.append({key: facts[key] for key in ("step", "path", "bytes", "verified")})
    names = (
        "status", "step", "planned_steps", "loss", "validation_loss", "ranks", "device",
        "parameters_total", "parameters_active",
    )  # fmt: skip
    table = _inspect_table(path, head, damaged) if rows and head.get("table") else None
    losses = head.get("students") or {}
    students = [
        {**one, **{name: losses.get(one["name"], {}).get(name)
                   for name in ("loss", "validation_loss")}}
        for one in (_describe_students(stats.job, f"run '{path}'") if stats else ())
    ]  # fmt: skip
    return {
        "kind": "run", "path": str(path), **{name: head.get(name) for name in names},
        "students": students, "checkpoints": rows, "table": table, "damaged": damaged,
    }  # fmt: skip


def _inspect_table(
    path: Path, head: Mapping[str, Any], damaged: list[str]
) -> dict[str, Any] | None:
    """Return the rows of a run's newest intact checkpoint, and its last pass over a drive."""
    from moesaic.api.recommender import describe_rows
    from moesaic.models.recommender_files import open_recommender

    try:
        return {**describe_rows(open_recommender(path).rows), "passes": head["table"]["passes"]}
    except StoreError as error:
        damaged.append(str(error))
        return None


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    counts = count_parameters(model)
    return {
        "family": model.family, "layers": model.layers, "hidden": model.hidden,
        "experts": model.experts, "top_k": model.top_k, "vocab": model.vocab,
        "parameters_total": counts.total, "parameters_active": counts.active,
    }  # fmt: skip
