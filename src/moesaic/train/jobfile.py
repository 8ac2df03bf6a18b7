"""Loading a job: from a TOML file, `--set` items and a plan to a checked `Job`. No torch.

`load_job` resolves what a file may leave to others (`[model] preset`, `[model] from`) and parses,
`obey` puts a job under a plan, `check_inputs` looks at the paths that it names. All of it comes
before anything is written.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.base import keys
from moesaic.base.config import apply_sets, covers, parse, parse_toml, read_text
from moesaic.base.errors import ConfigError, UserError
from moesaic.facts.job import Job, LayoutConfig
from moesaic.facts.job.job import fill_preset
from moesaic.facts.plan import Plan, basis, check, load_plan, ruled
from moesaic.models.hf.config import ADAPTER_NAME, CONFIG_NAME, read_config, to_huggingface
from moesaic.models.tokenizer import OTHER_FORMS, TOKENIZER_FILE, tokenizer_in

INERT = frozenset({"max_positions", "init_std"})
"""Keys of [model] that may stand beside `from`: they change nothing of what the weights mean."""


@dataclass(frozen=True)
class LoadedJob:
    """A job, and the text that it came from."""

    job: Job
    text: str
    """The file as it was, then each item of `--set` as a comment."""
    told: list[str]
    """What a person should know of where it came from, as unknown keys of a config.json."""
    plan: Plan | None = None
    """What rules the job, if it was given; else the job itself says how it is laid out."""
    plan_origin: str = ""
    """What opens a complaint about the plan."""
    given: frozenset[str] | None = None
    """Keys of [layout] that it says itself, where a plan says more."""

    @property
    def warnings(self) -> list[str]:
        """What a person should know: besides, settings without effect, under the plan if there is
        one."""
        return [*self.told, *self.job.idle(self.given)]


def load_job(path: Path, sets: Sequence[str] = (), run: Path | None = None) -> LoadedJob:
    """The job that the file at `path` and the items of `sets` (`a.b=value`) mean. A `run` that it
    goes on with knows the model, should the directory that it came from be gone."""
    text, origin = read_text(path), str(path)
    raw = apply_sets(parse_toml(text, origin), sets)
    if "source" in raw:
        raise ConfigError(f"{origin}: 'source' is not a key of a job: write from = DIR in [model]")
    told: list[str] = []
    raw = fill_tokenizer(raw, origin, told, run)
    raw = fill_preset(fill_from(raw, origin, told, run), origin)
    job = parse(Job, raw, origin, sets)
    if job.finetune is not None and job.source is None:
        raise ConfigError(
            f"{origin}: [finetune] without model.from: there are no weights to go on from; give a "
            "Hugging Face model directory (model.from = DIR), or remove [finetune]"
        )
    told += _export_warnings(job)
    if sets:
        items = "\n".join(f"# --set {item}".replace("\n", "\n# ") for item in sets)
        text = f"{text.rstrip()}\n\n{items}\n"
    return LoadedJob(job, text, told)


def obey(loaded: LoadedJob, path: Path, sets: Sequence[str] = ()) -> LoadedJob:
    """`loaded` under the plan in the file at `path`, which goes before layout and recompute.

    What an item of `sets` says otherwise is refused: it could only be a mistake.
    """
    plan, origin = load_plan(path), f"--plan '{path}'"
    if plan.grouped_mm == "auto":  # The plan leaves it to the job.
        plan = plan.model_copy(update={"grouped_mm": loaded.job.kernels.grouped_mm})
    check(plan, loaded.job, origin)
    job, told = ruled(loaded.job, plan), loaded.told
    said_of = None if plan.predictions is None else plan.predictions.basis
    if said_of not in (None, basis(job, plan)):
        told = [
            *told,
            f"{origin}: its predictions are of another job, or of the plan as it was before it was "
            "edited, and are left out: plan anew to have some",
        ]
        plan = plan.model_copy(update={"predictions": None})
    told = [*told, *_overruled(loaded.job, job, sets, origin)]
    space = "\n" if sets else "\n\n"
    text = f"{loaded.text.rstrip()}{space}# --plan {path}\n"
    given = loaded.job.layout.asked
    return replace(
        loaded, job=job, text=text, told=told, plan=plan, plan_origin=origin, given=given
    )


def _overruled(before: Job, now: Job, sets: Sequence[str], origin: str) -> list[str]:
    """What a plan decides otherwise than the job says, in a sentence; an item of `sets` is refused
    that says so."""
    said, others = apply_sets({}, sets), list[str]()
    decided = [("layout", name) for name in LayoutConfig.model_fields]
    for table, name in (*decided, ("kernels", "grouped_mm"), ("train", "recompute")):
        asked, own = getattr(before, table), getattr(now, table)
        wanted, has = getattr(asked, name), getattr(own, name)
        if wanted in (has, "auto") or name not in asked.model_fields_set:
            continue
        if name in said.get(table, {}):
            said_so = [item for item in sets if covers(item, f"{table}.{name}")]
            raise ConfigError(
                f"--set {said_so[-1]} beside {origin}, which has {name} = {keys.show(has)}: "
                "leave one of them out"
            )
        others.append(f"{table}.{name} = {keys.show(has)}, not {keys.show(wanted)}")
    return [f"{origin} decides otherwise than the job: {'; '.join(others)}"] * bool(others)


def fill_from(
    raw: dict[str, Any], origin: str, warnings: list[str], run: Path | None = None
) -> dict[str, Any]:
    """`raw` with `[model] from = DIR` replaced by the model that DIR holds, or `run` began with."""
    model = raw.get("model")
    if not isinstance(model, dict) or "from" not in model:
        return raw
    directory, rest = model["from"], {key: model[key] for key in model if key != "from"}
    shown = f"{origin}: model.from = {keys.show(directory)}"
    if not isinstance(directory, str):
        raise ConfigError(f"{shown} is not a string: give a Hugging Face model directory")
    path = Path(directory).expanduser()
    source = str(path.resolve())
    if (path / CONFIG_NAME).is_file():
        config, told = read_config(path)
        found: dict[str, Any] | None = config.model_dump(by_alias=True)
    else:
        found = _begun_with(source, run)
        reason = f"holds no {CONFIG_NAME}" if path.is_dir() else "is no directory"
        told = [f"{shown} {reason} any more: the model is what '{run}' says that it was"]
    if found is None:
        raise ConfigError(f"{shown} {reason}{_instead(path)}")
    warnings += told
    fixed = [key for key in rest if key not in INERT]
    if fixed:
        beside = keys.listed(sorted(INERT), "and")
        raise ConfigError(
            f"{shown} and model.{fixed[0]} = {keys.show(rest[fixed[0]])}: the directory says what "
            f"the model is, remove one of the two (beside it there may be {beside})"
        )
    return {**raw, "model": {**found, **rest}, "source": source}


def _instead(path: Path) -> str:
    """What to do where `path` is no Hugging Face directory."""
    if (path / ADAPTER_NAME).is_file():
        return (
            ", as it is an adapter, which holds no model of its own: give the merged model, for a "
            "run of moesaic that of `moesaic convert RUN --out DIR`"
        )
    if any((path / name).exists() for name in ("job.json", "checkpoints", "COMMIT")):
        return (
            ", as it is a run or a checkpoint: write its model out (moesaic convert "
            f"{shlex.quote(str(path))} --out DIR), and give DIR"
        )
    return ": give a Hugging Face model directory"


def fill_tokenizer(
    raw: dict[str, Any], origin: str, warnings: list[str], run: Path | None = None
) -> dict[str, Any]:
    """`raw` with the tokenizer that lies in the DIR of `[model] from = DIR`, where it names none; a
    `run` that it goes on with knows which one it began with."""
    model, data = raw.get("model"), raw.get("data")
    directory = model.get("from") if isinstance(model, dict) else None
    if not isinstance(directory, str) or not isinstance(data, dict):
        return raw
    path = Path(directory).expanduser()
    own = tokenizer_in(path)
    chosen = data.get("tokenizer")
    if "tokenizer" not in data:
        chosen = _tokenizer_begun_with(str(path.resolve()), run) or own or "bytes"
    unread = [name for name in OTHER_FORMS if own is None and (path / name).is_file()]
    if chosen == "bytes" and (unread or own not in (None, "bytes")):
        remedy = "remove data.tokenizer to learn with that one"
        if unread:
            remedy = (
                f"save that ({unread[0]}) as {TOKENIZER_FILE}, which is read here (transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
            )
        warnings.append(
            f"{origin}: model.from = {keys.show(directory)} has a tokenizer, and data.tokenizer = "
            '"bytes" is another: its ids mean other text than the model has learnt, and an export '
            f"will have it in place of the model's own; {remedy}"
        )
    return {**raw, "data": {**data, "tokenizer": chosen}}


def _tokenizer_begun_with(source: str, run: Path | None) -> str | None:
    """The tokenizer of a run that began with what `source` held; if it is gone, the run's copy."""
    job = _job_of(source, run)
    if run is None or job is None:
        return None
    name, copy = str(job["data"]["tokenizer"]), run / "tokenizer"
    gone = name != "bytes" and not Path(name).expanduser().exists()
    return str(copy) if gone and tokenizer_in(copy) is not None else name


def _begun_with(source: str, run: Path | None) -> dict[str, Any] | None:
    """The model of a run that began with what `source` held."""
    job = _job_of(source, run)
    return None if job is None else dict(job["model"])


def _job_of(source: str, run: Path | None) -> dict[str, Any] | None:
    """The job of a run that began with what `source` held."""
    if run is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            job: dict[str, Any] = json.loads((run / "job.json").read_text(encoding="utf-8"))
            if job["source"] == source and {*job["model"], *job["data"]} >= {"vocab", "tokenizer"}:
                return job
    return None


def _export_warnings(job: Job) -> list[str]:
    model = job.model
    if job.routing.router == "gshard":  # It renormalises, whatever the model says.
        model = model.model_copy(update={"renormalise": True})
    try:
        to_huggingface(model, "float32")
    except ConfigError as error:
        return [f"this model cannot be exported to a Hugging Face directory: {error}"]
    return []


def refuse_run(out: Path) -> None:
    """Raise if a new run cannot have the directory `out`, as something is there already."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out '{out}' is a file: give a directory for the run")
    if (out / "job.json").exists() or (out / "checkpoints").exists():
        raise UserError(
            f"--out '{out}' already holds a run: add --resume to go on with it, or give another "
            "directory"
        )


def check_inputs(job: Job, origin: str) -> None:
    """Raise for a path, a vocabulary or a package that `job` needs and this machine has not."""
    _check_text(job.data.path, "data.path", origin)
    if job.data.validation_path is not None:
        _check_text(job.data.validation_path, "data.validation_path", origin)
    _check_tokenizer(job, origin)
    replay = job.routing.replay
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


def _check_text(value: str, key: str, origin: str) -> None:
    path = str(Path(value).expanduser()) if value else ""
    if Path(path).exists() and path:
        return
    if glob.has_magic(path):
        if glob.glob(path, recursive=True):
            return
        problem = "matches no file"
    else:
        problem = "does not exist"
    raise ConfigError(
        f"{origin}: {key} = {keys.show(value)} {problem}: give a file, a directory or a glob, "
        f"relative to {Path.cwd()}"
    )


def _check_tokenizer(job: Job, origin: str) -> None:
    from moesaic.models.tokenizer import check_vocabulary, open_tokenizer

    try:
        tokenizer = open_tokenizer(job.data.tokenizer, job.data.end_token)
        check_vocabulary(job.model.vocab, tokenizer, fixed=job.source is not None)
    except UserError as error:
        raise ConfigError(f"{origin}: {error}") from None
