"""Job loading: from a TOML file, `--set` items and a plan to a checked job. Imports no torch.

`load_job` chooses the class of the job by its `kind`. For a language model it resolves
`[model] preset` and `[model] from`, and puts the job under a plan.
`train.input_checks` checks the paths that it names. All of this happens before anything is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

from moesaic.base import keys
from moesaic.base.config import (
    S,
    apply_sets,
    error_origin,
    noted,
    parse,
    parse_toml,
    read_text,
    sets_key,
    tables_to_toml,
)
from moesaic.base.decisions import Decision
from moesaic.base.errors import ConfigError
from moesaic.facts.job import ClicksConfig, CtrJob, DataConfig, Job, LayoutConfig
from moesaic.facts.job.credibility import fill_labels
from moesaic.facts.job.data import fill_for_plan, missing_keys
from moesaic.facts.job.distill import logits_warnings
from moesaic.facts.job.job import fill_preset
from moesaic.facts.plan import (
    Plan,
    check_plan,
    job_under_plan,
    load_plan,
    prediction_digest,
)
from moesaic.facts.workload.parameters import size_warnings
from moesaic.models.hf.config import ADAPTER_NAME, CONFIG_NAME, read_config, to_huggingface
from moesaic.models.tokenizer import TOKENIZER_FILE, UNSUPPORTED_FILES, find_tokenizer
from moesaic.train.data.clicks_files import PATH_KEYS, job_files
from moesaic.train.data.sources import open_inputs
from moesaic.train.resumed_job import (
    RESOLVED_JOB,
    RunSource,
    job_name,
    resolved_job,
    run_of,
    run_source,
)

ALLOWED_WITH_FROM = frozenset({"max_positions", "init_std", "vocab"})
"""Keys of [model] that may stand beside `from`, because the weights mean the same with any value,
or with more embeddings."""

J = TypeVar("J", covariant=True)
TrainingJob: TypeAlias = Job | CtrJob
"""Jobs that `moesaic train` takes, one class for each `kind`."""


@dataclass(frozen=True)
class LoadedJob(Generic[J]):
    """Job of any kind with the text that it came from."""

    job: J
    text: str
    """Original file, followed by each item of `--set` as a comment."""
    notes: list[str]
    """Warnings about its origin, such as unknown keys of a config.json."""
    plan: Plan | None = None
    """Plan that rules the job; None if the job defines its own layout."""
    plan_origin: str = ""
    """Prefix of error messages about the plan."""
    layout_keys: frozenset[str] | None = None
    """Keys of [layout] that the job sets itself; None without a plan."""
    origin: str = "the job"
    """Prefix of error messages: the path of its file."""
    sets: tuple[str, ...] = ()
    """Items of `--set`."""
    has_open_micro_batches: bool = False
    """True if `train.micro_batches` is "auto", so that a search or a plan chooses it."""
    decisions: tuple[Decision[Any, Any], ...] = ()
    """Decisions that led to the plan."""
    missing: tuple[str, ...] = ()
    """Keys that the file lacks: plans assume them, training refuses the job."""

    @property
    def warnings(self: LoadedJob[TrainingJob]) -> list[str]:
        """Warnings for the user: `notes`, and settings that have no effect under the plan."""
        return [*self.notes, *self.job.ineffective_settings(self.layout_keys)]


def load_job(
    source: Path | Mapping[str, Any] | None,
    sets: Sequence[str] = (),
    run: Path | None = None,
    plan: Path | Mapping[str, Any] | None = None,
    *,
    needs_data: bool = False,
) -> LoadedJob[TrainingJob]:
    """Return the job in the file `source`, or of the tables `source`, and the items of `sets`.

    Args:
        source: path of a job file, or its tables; None: the file that `run` was started with.
        sets: items of the form `a.b=value`, which change keys.
        run: resumed run or its checkpoint, whose own items of `sets` stay. The run supplies the
            model if the model's directory is gone.
        plan: path of a plan, or its content; it overrides the layout.
        needs_data: list missing keys of [data], and train.steps, among the mistakes; plans assume
            them.
    """
    text, raw, origin = _read_source(source, run)
    began = None if run is None else RunSource.read(run)
    if began is not None:
        sets = began.merged_sets(raw, sets)
    with blame_sets(origin, sets):
        raw, has_open_micro_batches = _fill_micro_batches(apply_sets(raw, sets))
        missing = missing_keys(raw)
        job, notes = _resolve(raw, origin, sets, run, needs_data=needs_data)
    if sets:
        items = "\n".join(f"# --set {item}".replace("\n", "\n# ") for item in sets)
        text = f"{text.rstrip()}\n\n{items}\n"
    loaded = LoadedJob(
        job, text, notes, origin=origin, sets=tuple(sets),
        has_open_micro_batches=has_open_micro_batches, missing=missing,
    )  # fmt: skip
    return loaded if plan is None else apply_plan(loaded, plan)


def _read_source(
    source: Path | Mapping[str, Any] | None, run: Path | None
) -> tuple[str, dict[str, Any], str]:
    """Return text and tables of a job, and the prefix of messages about it."""
    if isinstance(source, Path):
        if (source / RESOLVED_JOB).is_file():
            raise ConfigError(
                f"'{source}' is a run and no job file: to continue it, moesaic train --out "
                f"{shlex.quote(str(source))} --resume"
            )
        text = read_text(source)
        return text, parse_toml(text, str(source)), str(source)
    if source is not None:
        return tables_to_toml(source), dict(source), LoadedJob.origin
    if run is None:
        raise ConfigError(
            "a resume needs the directory of its run: give --out DIR (out=DIR in Python)"
        )
    began = run_source(run)
    return began.text, dict(began.tables), job_name(run)


def _fill_micro_batches(raw: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return `raw` with one micro-batch in place of "auto", and whether it said so."""
    train = raw.get("train")
    is_open = isinstance(train, dict) and train.get("micro_batches") == "auto"
    is_open = is_open and raw.get("kind", "lm") == "lm"
    return ({**raw, "train": {**raw["train"], "micro_batches": 1}} if is_open else raw), is_open


def is_searched(loaded: LoadedJob[TrainingJob], ranks: int) -> bool:
    """Return whether training searches for the layout of the job on `ranks` ranks."""
    job = loaded.job
    if not isinstance(job, Job) or loaded.plan is not None:
        return False
    has_choice = ranks > 1 or loaded.has_open_micro_batches
    by_default = job.plan is None and "layout" not in job.model_fields_set and has_choice
    is_wanted = job.plan == "auto" or by_default
    if loaded.has_open_micro_batches and not is_wanted:
        raise ConfigError(
            f'{loaded.origin}: train.micro_batches = "auto" needs a search: set plan = "auto", or '
            "give a number"
        )
    return is_wanted


def language_model(loaded: LoadedJob[TrainingJob], refusal: str) -> LoadedJob[Job]:
    """Return `loaded` if it is of a language model; else raise with `refusal` after the kind."""
    if not isinstance(loaded.job, Job):
        raise ConfigError(f'{loaded.origin}: kind = "{loaded.job.kind}" {refusal}')
    return cast("LoadedJob[Job]", loaded)


def _resolve(
    raw: dict[str, Any], origin: str, sets: Sequence[str], run: Path | None, *, needs_data: bool
) -> tuple[TrainingJob, list[str]]:
    """Return the job of these tables with its warnings."""
    kind = keys.check_choice(f"{origin}: kind", raw.get("kind", "lm"), ["lm", "ctr"])
    checks_data = needs_data and run is None  # A resume says first where its paths start.
    if kind == "ctr":
        return _parse_job(CtrJob, raw, origin, sets, {}, checks_data=checks_data), []
    notes, found = list[str](), dict[str, str]()
    if "source" in raw:
        found["source"] = "'source' is not a key of a job: write from = DIR in [model]"
    raw = fill_tokenizer(raw, origin, notes, run)
    with noted(found, "model.from", origin):
        raw = fill_pretrained(raw, origin, notes, run)
    raw = _fill_students(raw, origin, notes, run, found)
    filled = fill_labels(fill_preset(raw))
    filled = filled if needs_data else fill_for_plan(filled)
    job = _parse_job(Job, filled, origin, sets, found, checks_data=checks_data)
    missing = missing_keys(raw)
    if "data.sequence" in missing:
        notes.append(
            f"{origin} has no data.sequence: {job.data.sequence} tokens a sample are assumed; for "
            "another length: --set data.sequence=N"
        )
    if "train.steps" in missing:
        notes.append(
            f"{origin} has no train.steps: {job.train.steps:,} are assumed for the whole run; for "
            "another number: --set train.steps=N"
        )
    if job.finetune is not None and job.source is None:
        raise ConfigError(
            f"{origin}: [finetune] without model.from has no weights to start from: give a Hugging "
            "Face model directory (model.from = DIR), or remove [finetune]"
        )
    warnings = [*_export_warnings(job), *size_warnings(job), *logits_warnings(job.student)]
    return job, [*notes, *warnings]


def _parse_job(
    kind: type[S], raw: Mapping[str, Any], origin: str, sets: Sequence[str],
    found: Mapping[str, str], *, checks_data: bool,
) -> S:  # fmt: skip
    """Return the job of these tables. With `checks_data` an error about it also names what the
    machine lacks of a [data] without mistakes."""
    with suppress(ConfigError):
        return parse(kind, raw, origin, sets, found)
    mistakes, data = dict(found), raw.get("data")
    with suppress(ConfigError):  # Mistakes of the table itself are named below.
        if checks_data and isinstance(data, Mapping) and kind is CtrJob:
            clicks = parse(ClicksConfig, data, origin)
            for key in PATH_KEYS:
                with noted(mistakes, key):
                    job_files(clicks, key)
        elif checks_data and isinstance(data, Mapping):
            open_inputs(parse(DataConfig, data, origin), mistakes)
    return parse(kind, raw, origin, sets, mistakes)


def _fill_students(
    raw: dict[str, Any],
    origin: str,
    notes: list[str],
    run: Path | None,
    found: dict[str, str],
) -> dict[str, Any]:
    """Return `raw` with `model.from = DIR` of each `[[student]]` replaced, as in `[model]`.

    Mistakes go to `found`, by key."""
    students = raw.get("student")
    if not isinstance(students, list):
        return raw
    filled = list[Any]()
    for index, student in enumerate(students):
        where = f"student[{index}]"
        if isinstance(student, dict):
            if "source" in student:
                found[f"{where}.source"] = (
                    f"{where}.source is not a key of a job: write model.from = DIR"
                )
            with noted(found, f"{where}.model.from", origin):
                student = fill_pretrained(student, f"{origin}: {where}", notes, run)
        filled.append(student)
    return {**raw, "student": filled}


@contextmanager
def blame_sets(origin: str, sets: Sequence[str]) -> Iterator[None]:
    """Let an error about `origin` name the items of `--set` that set its keys."""
    try:
        yield
    except ConfigError as error:
        sentence = str(error).removeprefix(f"{origin}: ")
        named = sentence.split(maxsplit=1)[0].rstrip(":")
        items = [item for item in sets if item.partition("=")[0].strip() == named]
        if sentence == str(error) or "\n" in sentence:  # Several mistakes have names already.
            raise
        if items and sentence.startswith(f"{items[-1].replace('=', ' = ', 1)} "):  # Once is enough.
            raise ConfigError(sentence) from None
        where = items[-1] if items else error_origin(origin, sets, sentence)
        raise ConfigError(f"{where}: {sentence}") from None


def apply_plan(loaded: LoadedJob[TrainingJob], source: Path | Mapping[str, Any]) -> LoadedJob[Job]:
    """Put a language model under the plan in the file `source`, or of the content `source`.

    The plan overrides layout and recompute. Raise if an item of `--set` contradicts it.
    """
    loaded = language_model(
        loaded, "takes no plan: plans are for language models yet, remove the plan"
    )
    if isinstance(source, Path):
        plan, origin = load_plan(source), f"plan '{source}'"
    else:
        origin = "the plan"
        plan = parse(Plan, source, origin)
    if loaded.has_open_micro_batches and plan.micro_batches is not None:
        loaded = _with_micro_batches(loaded, plan.micro_batches, origin)
    if plan.grouped_mm == "auto":  # The plan leaves it to the job.
        plan = plan.model_copy(update={"grouped_mm": loaded.job.kernels.grouped_mm})
    check_plan(plan, loaded.job, origin)
    job, notes = job_under_plan(loaded.job, plan), loaded.notes
    predicted_for = None if plan.predictions is None else plan.predictions.digest
    if predicted_for not in (None, prediction_digest(job, plan)):
        notes = [
            *notes,
            f"{origin}: its predictions are for another job or by another version, or the plan "
            "was edited since; they are ignored, run moesaic plan again for new ones",
        ]
        plan = plan.model_copy(update={"predictions": None})
    notes = [*notes, *_plan_overrides(loaded.job, plan, loaded.sets, origin)]
    space = "\n" if loaded.sets else "\n\n"
    named = f"--plan {source}" if isinstance(source, Path) else f"under {origin} in plan.json"
    return replace(
        loaded,
        job=job,
        text=f"{loaded.text.rstrip()}{space}# {named}\n",
        notes=notes,
        plan=plan,
        plan_origin=origin,
        layout_keys=loaded.job.layout.non_default_fields,
    )


def _with_micro_batches(loaded: LoadedJob[Job], number: int, origin: str) -> LoadedJob[Job]:
    """Return `loaded` with the micro-batches of a plan, where the job leaves them open."""
    job = loaded.job
    if job.train.batch % number:
        raise ConfigError(
            f"{origin}: micro_batches = {number} does not divide train.batch = {job.train.batch}: "
            "plan this job anew (moesaic plan --search)"
        )
    train = job.train.model_copy(update={"micro_batches": number})
    return replace(loaded, job=job.model_copy(update={"train": train}))


def _plan_overrides(job: Job, plan: Plan, sets: Sequence[str], origin: str) -> list[str]:
    """Return a warning about job settings that the plan overrides; raise if an item of `sets` is
    among them."""
    from_sets, overridden = apply_sets({}, sets), list[str]()
    settings = [("layout", name) for name in LayoutConfig.model_fields]
    for table, name in (*settings, ("kernels", "grouped_mm"), ("train", "recompute")):
        own, planned = getattr(job, table), getattr(plan, name)
        requested = plan.dp if getattr(own, name) == "all" else getattr(own, name)
        if requested in (planned, "auto", None) or name not in own.model_fields_set:
            continue
        if name in from_sets.get(table, {}):
            items = [item for item in sets if sets_key(item, f"{table}.{name}")]
            raise ConfigError(
                f"{items[-1]} beside {origin}, which has {name} = {keys.show(planned)}: "
                "leave one of them out"
            )
        overridden.append(f"{table}.{name} = {keys.show(planned)}, not {keys.show(requested)}")
    return [f"{origin} overrides the job: {'; '.join(overridden)}"] * bool(overridden)


def fill_pretrained(
    raw: dict[str, Any], origin: str, warnings: list[str], run: Path | None = None
) -> dict[str, Any]:
    """Return `raw` with `[model] from = DIR` replaced by the model in DIR, or else by the model of
    `run`."""
    model = raw.get("model")
    if not isinstance(model, dict) or "from" not in model:
        return raw
    directory, rest = model["from"], {key: model[key] for key in model if key != "from"}
    label = f"{origin}: model.from = {keys.show(directory)}"
    if not isinstance(directory, str):
        raise ConfigError(f"{label} is not a string: give a Hugging Face model directory")
    path = Path(directory).expanduser()
    source = str(path.resolve())
    if (path / CONFIG_NAME).is_file():
        config, notes = read_config(path)
        config_model: dict[str, Any] | None = config.model_dump(by_alias=True)
    else:
        config_model = _initial_model(source, run)
        reason = f"holds no {CONFIG_NAME}" if path.is_dir() else "is no directory"
        notes = [f"{label} {reason} any more: taking the model from '{run}'"]
    if config_model is None:
        raise ConfigError(f"{label} {reason}{_source_hint(path)}")
    warnings += notes
    conflicting = [key for key in rest if key not in ALLOWED_WITH_FROM]
    if conflicting:
        allowed = keys.join_words(sorted(ALLOWED_WITH_FROM), "and")
        raise ConfigError(
            f"{label} and model.{conflicting[0]} = {keys.show(rest[conflicting[0]])}: the "
            f"directory defines the model, remove one of the two (only {allowed} may stand "
            "beside it)"
        )
    vocab, stored = rest.get("vocab"), config_model["vocab"]
    if isinstance(vocab, int) and vocab < stored:
        raise ConfigError(
            f"{label} and model.vocab = {vocab}: the directory has {stored} embeddings, and all "
            "are kept; give a larger number, or remove model.vocab"
        )
    return {**raw, "model": {**config_model, **rest, "labels": 0}, "source": source}


def _source_hint(path: Path) -> str:
    """Return the remedy for a `path` that is no Hugging Face directory."""
    if (path / ADAPTER_NAME).is_file():
        return (
            ", as it is an adapter, which holds no model of its own: give the merged model (for a "
            "run of moesaic: moesaic convert RUN --out DIR)"
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
    """Return `raw` with the tokenizer of `[model] from = DIR` if it names none. A resumed `run`
    keeps the one it began with."""
    model, data = raw.get("model"), raw.get("data")
    directory = model.get("from") if isinstance(model, dict) else None
    if not isinstance(directory, str) or not isinstance(data, dict):
        return raw
    path = Path(directory).expanduser()
    local = find_tokenizer(path)
    chosen = data.get("tokenizer")
    if "tokenizer" not in data:
        chosen = _initial_tokenizer(str(path.resolve()), run) or local or "bytes"
    unsupported = [name for name in UNSUPPORTED_FILES if local is None and (path / name).is_file()]
    if chosen == "bytes" and (unsupported or local not in (None, "bytes")):
        remedy = "remove data.tokenizer to train with the model's"
        if unsupported:
            remedy = (
                f"save that ({unsupported[0]}) as {TOKENIZER_FILE}, which is read here "
                "(transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
            )
        warnings.append(
            f"{origin}: model.from = {keys.show(directory)} has a tokenizer, and data.tokenizer = "
            '"bytes" is another: its ids mean other text than those the model was trained on, and '
            f"an export would replace the model's own tokenizer by it; {remedy}"
        )
    return {**raw, "data": {**data, "tokenizer": chosen}}


def _initial_tokenizer(source: str, run: Path | None) -> str | None:
    """Return the tokenizer of a run that began with `source`; the run's copy if the original is
    gone."""
    job = _initial_job(source, run)
    if run is None or job is None:
        return None
    name, copy = str(job["data"]["tokenizer"]), run_of(run) / "tokenizer"
    is_gone = name != "bytes" and not Path(name).expanduser().exists()
    return str(copy) if is_gone and find_tokenizer(copy) is not None else name


def _initial_model(source: str, run: Path | None) -> dict[str, Any] | None:
    job = _initial_job(source, run)
    if job is None:
        return None
    return next(dict(one["model"]) for one in _with_students(job) if one["source"] == source)


def _with_students(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tables of a job with a model and its source: the job and its students."""
    return [job, *job.get("student", ())]


def _initial_job(source: str, run: Path | None) -> Mapping[str, Any] | None:
    """Return the job of a run that began with `source`."""
    if run is not None:
        with suppress(TypeError, KeyError):
            job = resolved_job(run)
            is_source = any(one["source"] == source for one in _with_students(job))
            if is_source and {*job["model"], *job["data"]} >= {"vocab", "tokenizer"}:
                return job
    return None


def _export_warnings(job: Job) -> list[str]:
    found = list[str]()
    models = {"this model": job.model}
    models |= {f'student "{one.name}"': one.model for one in job.student}
    for name, model in models.items():
        if job.routing.router == "gshard" and model.experts:  # It renormalises for any model.
            model = model.model_copy(update={"renormalise": True})
        try:
            to_huggingface(model, "float32")
        except ConfigError as error:
            found.append(f"{name} cannot be exported to a Hugging Face directory: {error}")
    return found
