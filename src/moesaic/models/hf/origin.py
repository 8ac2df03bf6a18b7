"""Model origins: a Hugging Face directory, a checkpoint or a run, behind one interface.

An origin has the model's config, its weights one tensor at a time, and its tokenizer and
generation files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, DataError, StoreError, WeightsError
from moesaic.dist.checkpoint import Checkpoint, list_committed, newest_intact
from moesaic.dist.checkpoint.manifest import COMMIT, MANIFEST
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.distill import student_prefix
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.workload import expert_name, parameters
from moesaic.facts.workload.parameters import A, B, adapter_prefix, adapters
from moesaic.models.chat import ChatTemplate
from moesaic.models.hf.config import CONFIG_NAME, describe_path, read_config
from moesaic.models.hf.packed import read_expert_hashes
from moesaic.models.hf.reader import DTYPES, HFSource
from moesaic.models.hf.shards import Progress, StoredTensors
from moesaic.models.hf.special_tokens import (
    EOS_KEY,
    GENERATION_CONFIG_NAME,
    TOKEN_ID_KEYS,
    special_token_ids,
    token_ids,
    update_special_tokens,
)
from moesaic.models.hf.writer import find_companions
from moesaic.models.tokenizer import FileTokenizer, read_json_object
from moesaic.store.expert_files import StoredBytes, StoredExpert, StoredMatrix

JOB_NAME = "job.json"
"""Job of a run, in its directory."""
TOKENIZER = "tokenizer"
"""Directory in a run or a bare checkpoint for the tokenizer and generation files."""
_EXPECTED = "a Hugging Face model directory, a checkpoint or a run directory"


@dataclass(frozen=True)
class Origin:
    """A model on disk."""

    path: Path
    """Directory of the weights."""
    model: ModelConfig
    tensors: StoredTensors
    companions: list[Path]
    """Tokenizer and generation files."""
    facts: dict[str, Any]
    """Metadata for a checkpoint of this model."""
    warnings: list[str] = field(default_factory=list)
    """Warnings for the user."""
    finetune: FinetuneConfig | None = None
    """Fine-tuning settings, if the checkpoint may hold adapters."""
    special_token_ids: dict[str, Any] = field(default_factory=dict)
    """Special token ids of the tokenizer that a run trained with. A generation_config.json from
    elsewhere may name others."""

    def end_ids(self) -> list[int]:
        """Return the end token ids as transformers chooses them.

        The generation settings decide; config.json does if that file is absent or names none."""
        for path in self.companions:
            if path.name == GENERATION_CONFIG_NAME:
                settings = update_special_tokens(
                    read_json_object(path), self.special_token_ids, f"'{path}'"
                )
                if ends := token_ids(settings.get(EOS_KEY), EOS_KEY, f"'{path}'"):
                    return ends
        return token_ids(self.model.extras.get(EOS_KEY), EOS_KEY, f"'{self.path}'")

    def stored_experts(self) -> dict[int, list[StoredExpert]]:
        """Return where the experts of each layer are stored."""
        model, hashes = self.model, read_expert_hashes(self.path)
        size = model.hidden * model.ffn
        return {
            layer: [
                self._stored_expert(layer, expert, size, hashes) for expert in range(model.experts)
            ]
            for layer in model.expert_layers
        }

    def _stored_expert(
        self, layer: int, expert: int, size: int, hashes: Mapping[str, str]
    ) -> StoredExpert:
        """Return where one expert is stored, whose matrices have `size` elements each."""
        matrices = tuple(
            replace(one, position=one.position + index * size)
            for index, matrix in enumerate(("gate", "up", "down"))
            for one in self.tensors.locate(expert_name(layer, expert, matrix))
        )
        name = expert_name(layer, expert, "").rstrip(".")
        return StoredExpert(name, matrices, hashes.get(name))

    def fill(self, shards: Sequence[TensorShard], progress: Progress | None = None) -> None:
        """Write parameters into `shards` of any layout and dtype, as a state source does.

        `progress` gets the bytes done and in total after every shard."""
        done, total = 0, sum(shard.num_bytes for shard in shards)
        for shard in shards:
            whole = self.tensors.read(shard.name)
            box = zip(shard.offset, shard.size, strict=True)
            with shard.borrow(writes=True) as tensor:
                tensor.copy_(whole[tuple(slice(o, o + n) for o, n in box)])
            done += shard.num_bytes
            if progress is not None:
                progress(done, total)


def open_origin(path: Path, reads_once: bool = False, student: str | None = None) -> Origin:
    """Return the model at `path`, in any of its forms.

    Args:
        path: a Hugging Face directory, a checkpoint or a run.
        reads_once: bypass the page cache, because nothing is read a second time.
        student: student of a run, instead of its teacher."""
    if (path / CONFIG_NAME).is_file():
        if student is not None:
            raise ConfigError(
                f"student = {keys.show(student)}: '{path}' is a Hugging Face model directory, "
                "which holds one model: give a run with students, or leave out the student"
            )
        return _from_huggingface(path, reads_once)
    checkpoint, skipped = find_checkpoint(path, reads_once)
    origin = _from_checkpoint(checkpoint, student)
    origin.warnings[:0] = skipped
    return origin


def find_checkpoint(
    path: Path, reads_once: bool = False, expected: str = _EXPECTED
) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint at `path`, or the newest intact one of a run, with warnings about
    damaged ones that were passed over.

    Args:
        path: a checkpoint, a run, or a directory of checkpoints.
        reads_once: bypass the page cache, because nothing is read a second time.
        expected: what `path` may be, for the error if it is nothing of that."""
    if (path / COMMIT).exists() or (path / MANIFEST).exists():
        return Checkpoint.open(path, reads_once=reads_once), []
    for directory in (path / "checkpoints", path):
        if directory.is_dir() and any(directory.glob("step-*")):
            skipped: list[str] = []
            checkpoint = newest_intact(directory, skipped.append)
            if checkpoint is None:
                reasons = "; ".join(skipped) or (
                    "its checkpoints are not named like step-00001000: give the path of one"
                )
                raise StoreError(
                    f"'{directory}' holds no intact checkpoint: restore one from a copy ({reasons})"
                )
            used = f"what follows is of step {checkpoint.step}, '{checkpoint.path}'"
            return checkpoint, [*skipped, used] if skipped else []
    if (path / JOB_NAME).is_file():
        raise ConfigError(
            f"run '{path}' has no checkpoint yet: its job writes one after checkpoint.every steps, "
            "or at the end; start it again if it does not run any more"
        )
    raise ConfigError(f"'{path}' {describe_path(path)}: give {expected}")


def _from_huggingface(path: Path, reads_once: bool) -> Origin:
    model, warnings = read_config(path)
    source = HFSource(path, model, reads_once)
    facts = {"model": model.model_dump(mode="json"), "source": str(path)}
    return Origin(path, model, source, find_companions(path), facts, [*warnings, *source.notes])


def _from_checkpoint(checkpoint: Checkpoint, student: str | None) -> Origin:
    path, facts = checkpoint.path, checkpoint.facts
    prefix = "" if student is None else student_prefix(student)
    facts = _facts_of_one(facts, student, path)
    job = facts.get("job") or {}
    model, warnings = _model_of(facts, path), []
    router = (job.get("routing") or {}).get("router", "top-k") if model.experts else "top-k"
    if router == "gshard":  # The gshard router always renormalises.
        model = model.model_copy(update={"renormalise": True})
    elif router == "balanced":
        warnings.append(
            f"'{path}' was trained with routing.router = \"balanced\", which config.json "
            "cannot express: readers of the export route by the router's scores"
        )
    companions: list[Path] = []
    special: dict[str, Any] = {}
    for directory in (path / TOKENIZER, path.parent.parent / TOKENIZER):
        if not companions and (companions := find_companions(directory)):
            special = _learnt_token_ids(directory, job)
            model = _with_special_tokens(model, special, trained=bool(job), origin=f"'{path}'")
    generation = Path(job.get("source") or path) / GENERATION_CONFIG_NAME
    if generation.is_file() and GENERATION_CONFIG_NAME not in {c.name for c in companions}:
        companions.append(generation)
    finetune = None
    if job.get("finetune") is not None:
        finetune = parse(FinetuneConfig, job["finetune"], f"checkpoint '{path}'")
        facts = {**facts, "job": {**job, "finetune": None}}  # Adapters are merged as they are read.
    tensors = CheckpointTensors(checkpoint, model, finetune, prefix)
    special = special if job else {}
    return Origin(path, model, tensors, companions, facts, warnings, finetune, special)


def _facts_of_one(facts: dict[str, Any], student: str | None, path: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint as if it held one model: that of `student`, or the
    teacher."""
    job = facts.get("job") or {}
    students = {one["name"]: one for one in job.get("student") or ()}
    changes: dict[str, Any] = {"student": [], "distill": {}}
    if student is not None:
        if student not in students and (earlier := _find_student(student, path)) is not None:
            raise ConfigError(
                f"student = {keys.show(student)} is not in '{path}', because the run goes on "
                f"without it: give the last checkpoint that holds it, '{earlier}'"
            )
        if not students:
            raise ConfigError(
                f"student = {keys.show(student)}: '{path}' is of a run without students: leave out "
                "the student"
            )
        keys.check_choice("student", student, list(students))
        changes |= {key: students[student][key] for key in ("model", "source")}
    return {**facts, "job": {**job, **changes}} if students else facts


def _find_student(student: str, path: Path) -> Path | None:
    """Return the newest checkpoint beside the one at `path` that holds `student`, or None."""
    for directory in list_committed(path.parent):
        with suppress(StoreError):
            job = Checkpoint.open(directory).facts.get("job") or {}
            if any(one["name"] == student for one in job.get("student") or ()):
                return directory
    return None


def _model_of(facts: Mapping[str, Any], path: Path) -> ModelConfig:
    """Return the model config of a checkpoint: its job's, or its own."""
    job = facts.get("job") or facts
    raw = job.get("model")
    if job.get("kind") == "ctr":
        raise ConfigError(f"'{path}' is a recommender, not a language model: use moesaic predict")
    if not isinstance(raw, dict):
        raise ConfigError(f"checkpoint '{path}' names no model: give another checkpoint")
    return parse(ModelConfig, raw, f"checkpoint '{path}'")


def _learnt_token_ids(directory: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special token ids of the tokenizer in `directory`.

    A run on conversations also learned to stop at the end-of-turn token, so that is an end token
    too."""
    special = special_token_ids(directory)
    if (job.get("data") or {}).get("format") == "chat":
        with suppress(DataError):  # The files may have changed since the run.
            tokenizer = FileTokenizer(str(directory))
            turn_end = ChatTemplate(directory, has_clock=False).end_of_turn_id(tokenizer)
            if turn_end not in (None, tokenizer.end_id):
                special[EOS_KEY] = [tokenizer.end_id, turn_end]
    return special


def _with_special_tokens(
    model: ModelConfig, special: Mapping[str, Any], *, trained: bool, origin: str
) -> ModelConfig:
    """Return `model` with the special tokens `special`.

    A model that names none gets all of them. Otherwise they replace other ids only if the model was
    `trained` with them."""
    if not any(key in model.extras for key in TOKEN_ID_KEYS):
        extras = {**model.extras, **special}
    elif trained:
        extras = update_special_tokens(model.extras, special, origin)
    else:
        return model
    return model.model_copy(update={"extras": extras})


class CheckpointTensors:
    """Parameters of a checkpoint of any layout, with adapters merged into their matrices."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelConfig,
        finetune: FinetuneConfig | None = None,
        prefix: str = "",
    ) -> None:
        """Read the parameters of `model`, whose names in the checkpoint start with `prefix`."""
        self._checkpoint, self._prefix = checkpoint, f"{PARAMETER}/{prefix}"
        self._records = checkpoint.tensors
        self._scale = 0.0 if finetune is None else finetune.scale
        everything = (*parameters(model), *adapters(model, finetune))
        self._shapes = {p.name: p.shape for p in everything}
        for name, shape in self._shapes.items():
            record = self._records.get(f"{self._prefix}{name}")
            if record is None or record.shape != shape or record.dtype not in DTYPES:
                found = f"{record.dtype} {list(record.shape)}" if record else "nothing"
                raise WeightsError(
                    f"checkpoint '{checkpoint.path}' should hold '{name}' of shape {list(shape)} "
                    f"and holds {found}: its weights and its job must belong to one model"
                )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one parameter."""
        return DTYPES[self._records[f"{self._prefix}{name}"].dtype]

    def read(self, name: str) -> Tensor:
        """Return one whole parameter; adapters are merged in fp64."""
        stem = adapter_prefix(name)
        if f"{stem}{A}" not in self._shapes:
            view = self._checkpoint.view_tensor(f"{self._prefix}{name}")
            return self._stored(name) if view is None else view
        tensor = self._stored(name)
        a, b = (self._stored(f"{stem}{end}").double() for end in (A, B))
        return torch.addmm(tensor.double(), b, a, alpha=self._scale).to(tensor.dtype)

    def locate(self, name: str) -> list[StoredMatrix]:
        """Return where the shards of one expert's matrix are stored."""
        if f"{name}{A}" in self._shapes:
            raise ConfigError(
                f"'{self._checkpoint.path}' holds adapters of experts, which cannot be read in "
                "place: write the merged model with `moesaic convert`, and give that"
            )
        dtype, width = self._records[f"{self._prefix}{name}"].dtype, self._shapes[name][1]
        found = []
        for record, file, start in self._checkpoint.locate(f"{self._prefix}{name}"):
            (first_row, first_column), (rows, columns) = record.offset, record.size
            values = StoredBytes(record.entry, file, start, dtype, (rows, columns))
            found.append(StoredMatrix(values, first_row * width + first_column, width))
        return found

    def _stored(self, name: str) -> Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=self.dtype(name))
        kind, _, stored = f"{self._prefix}{name}".partition("/")
        self._checkpoint.fill(
            [TensorShard.of_tensor(kind, stored, shape, (0,) * len(shape), tensor, (0,))]
        )
        return tensor
